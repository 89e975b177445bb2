"""`RLIntegratedServer`: two coroutines over one model, in a process of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_parallm.config.training import LoRAConfig
from mlx_parallm.training.storage.checkpoints import adapter_files
from mlx_parallm.training.trainable_model import TrainableModel
from tests.support.servers import free_port
from tests.tiny import tiny
from tests.unit.test_adapters import written

SCRIPT = """
import asyncio, json, sys
import httpx
from mlx_parallm import LoRAConfig, RLConfig, RLIntegratedServer
sys.path.insert(0, sys.argv[3])
from tests.e2e.test_train_command import Letters

async def main():
    folder, port = sys.argv[1], int(sys.argv[2])
    server = RLIntegratedServer(
        base_model=folder,
        lora_config=LoRAConfig(rank=4, alpha=8),
        rl_config=RLConfig(algorithm="grpo", learning_rate=1e-3, batch_size=8, max_kl=100.0),
        ssd=False,
        checkpoint_dir=sys.argv[4],
        lora_path=(f"other={sys.argv[5]}",),
    )
    serving = asyncio.create_task(server.run_inference(port=port))
    training = asyncio.create_task(
        server.run_training_loop(Letters(), steps=5, group_size=4, answer_tokens=6, eval_problems=4)
    )
    versions = set()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        while not training.done():
            try:
                answer = await client.post("/generate", json={"prompt": "hello", "max_tokens": 4, "step_id": 1})
                versions.add(answer.json()["policy_version"])
            except httpx.ConnectError:
                await asyncio.sleep(0.05)
        news = await training
        status = (await client.get("/v1/training/status")).json()
        models = [one["id"] for one in (await client.get("/v1/models")).json()["data"]]
    await server.stop()
    code = await serving
    facts = {"updates": status["updates"], "versions": sorted(versions), "models": models}
    print(json.dumps({"steps": len(news), "code": code, **facts}))

asyncio.run(main())
"""


REQUESTS = """
import asyncio, json, sys
import httpx
from mlx_parallm import LoRAConfig, RLConfig, RLIntegratedServer

async def main():
    folder, port = sys.argv[1], int(sys.argv[2])
    server = RLIntegratedServer(
        base_model=folder,
        lora_config=LoRAConfig(rank=4, alpha=8),
        rl_config=RLConfig(learning_rate=1e-3, batch_size=4, max_kl=100.0),
        ssd=False,
        checkpoint_dir=sys.argv[3],
        lora_path=(f"policy={sys.argv[4]}",),
    )
    serving = asyncio.create_task(server.run_inference(port=port))
    training = asyncio.create_task(server.run_training_loop())
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        while True:
            try:
                await client.get("/health")
                break
            except httpx.ConnectError:
                await asyncio.sleep(0.05)
        begin = (await client.get("/v1/training/status")).json()
        for step in range(2):
            for place in range(4):
                name = f"{step}-{place}"
                body = {"prompt": "hello", "max_tokens": 4, "temperature": 1.0, "request_id": name}
                await client.post("/v1/completions", json=body)
                reward = {"request_id": name, "reward": float(place)}
                assert (await client.post("/v1/training/feedback", json=reward)).status_code == 200
            for _ in range(200):
                status = (await client.get("/v1/training/status")).json()
                if status["updates"] > step:
                    break
                await asyncio.sleep(0.05)
    await server.stop()
    reports = await training
    await serving
    print(json.dumps({"steps": len(reports), "updates": status["updates"], "begin": begin["policy_version"]}))

asyncio.run(main())
"""


@pytest.mark.slow
def test_without_a_task_it_learns_from_what_it_is_sent(tiny_folder: Path, tmp_path: Path) -> None:
    """And begins with the adapter that --lora-path has under the trained name."""
    tree = TrainableModel(tiny("llama"), LoRAConfig(rank=4, alpha=8))
    adapter = tmp_path / "start"
    adapter.mkdir()
    for name, data in adapter_files(tree.adapter(), 2.0, 4, "tiny").items():
        (adapter / name).write_bytes(data)
    arguments = [
        sys.executable,
        "-c",
        REQUESTS,
        str(tiny_folder),
        str(free_port()),
        str(tmp_path / "kept"),
        str(adapter),
    ]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.strip().splitlines()[-1]) == {"steps": 2, "updates": 2, "begin": 1}


def test_serving_and_training_over_one_model(tiny_folder: Path, tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    other = written(tmp_path, "few")
    arguments = [sys.executable, "-c", SCRIPT, str(tiny_folder), str(free_port()), root, str(tmp_path), str(other)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["steps"] == 6
    assert 1 <= found["updates"] <= 5
    assert found["versions"]
    assert found["code"] == 0
    assert {"policy", "other"} <= set(found["models"]), "options of the server are the class's too"
