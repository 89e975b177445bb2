"""Models of five kinds under mixed load, in memory that does not hold them all: nobody notices but by time."""

import json
import random
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.classifiers import with_labels, write_classifier
from tests.support.networks import mlp_policy
from tests.support.servers import ServerProcess, free_port, running
from tests.tiny import save_tiny, tiny

SERVE = (sys.executable, "-m", "mlx_parallm", "serve")
LIMIT = 400 << 20
HEADS = json.loads((Path(__file__).parents[1] / "golden" / "heads.json").read_text())["families"]
Ask = Callable[[httpx.Client], Any]


def write_models(folder: Path) -> None:
    for seed, name in enumerate(("chat", "other-chat")):
        (folder / name).mkdir()
        save_tiny(tiny("llama", seed=seed, intermediate_size=1 << 16), folder / name)  # 100 MB each
    mlp_policy(folder / "policy", width=4096)  # 67 MB
    network = mlp_policy(folder / "network", width=4096, seed=1) / "network.json"
    network.write_text(
        json.dumps({key: value for key, value in json.loads(network.read_text()).items() if key != "policy"})
    )
    config, shapes = with_labels(HEADS["bert"]["config"], HEADS["bert"]["shapes"], ("no", "yes"))
    write_classifier(folder / "classifier", config, shapes)


def requests() -> dict[str, Ask]:
    """A question to each model, with an answer that is always the same."""

    def post(path: str, body: dict[str, Any], read: Callable[[Any], Any]) -> Ask:
        def ask(client: httpx.Client) -> Any:
            answer = client.post(path, json=body)
            assert answer.status_code == 200, f"{path} {body.get('model')}: {answer.status_code} {answer.text}"
            return read(answer.json())

        return ask

    greedy = {"prompt": "hello there", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    acts = {"observations": [[0.1, -0.2, 0.3, 0.0]] * 3, "deterministic": True}
    return {
        "chat": post("/v1/completions", {"model": "chat", **greedy}, lambda found: found["choices"][0]["text"]),
        "other-chat": post(
            "/v1/completions", {"model": "other-chat", **greedy}, lambda found: found["choices"][0]["text"]
        ),
        "vectors": post(
            "/v1/embeddings",
            {"model": "vectors", "input": ["a text", "another one"]},
            lambda found: [number for item in found["data"] for number in item["embedding"]],
        ),
        "classifier": post(
            "/v1/classifications",
            {"model": "classifier", "input": ["is it", "not here"]},
            lambda found: [item["label"] for item in found["data"]],
        ),
        "policy": post("/v1/rl/act", {"model_id": "policy", **acts}, lambda found: found["actions"]),
        "network": post(
            "/v1/predict",
            {"model_id": "network", "inputs": {"observation": acts["observations"]}},
            lambda found: [number for row in found["outputs"]["head"] for number in row],
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [30, 600])
def test_five_kinds_in_too_little_memory(tmp_path: Path, seconds: int) -> None:
    write_models(tmp_path)
    port = free_port()
    flags = ["--model-dir", str(tmp_path), "--model-path", "vectors=all-MiniLM-L6-v2", "--memory-limit", str(LIMIT)]
    server = ServerProcess([*SERVE, "--port", str(port), *flags], port, "chat", fork=True)
    with running(server), httpx.Client(base_url=server.url, timeout=300) as client:
        asks = requests()
        alone = {name: ask(client) for name, ask in asks.items()}
        for name in ("vectors", "network"):
            alone[name] = pytest.approx(alone[name], abs=1e-3 if name == "network" else 1e-4)
        deadline, counted = time.monotonic() + seconds, dict.fromkeys(asks, 0)
        held: list[int] = []

        def work(number: int) -> None:
            chance = random.Random(number)
            while time.monotonic() < deadline:
                name = chance.choice(list(asks))
                for _ in range(chance.randint(1, 20)):
                    assert asks[name](client) == alone[name]
                    counted[name] += 1

        def watch() -> None:
            while time.monotonic() < deadline:
                held.append(client.get("/debug/metrics").json()["active_memory"])
                time.sleep(0.2)

        with ThreadPoolExecutor(9) as pool:
            for done in [pool.submit(watch), *(pool.submit(work, number) for number in range(8))]:
                done.result()
        loads = re.findall(r'model_loads_total\{kind="(\w+)",model="([\w-]+)"\} (\d+)', client.get("/metrics").text)
        print(counted, loads, f"{max(held) >> 20} MiB at most of {LIMIT >> 20}, {server.memory() >> 20} MiB resident")  # noqa: T201
        assert all(counted.values())
        assert sum(int(float(count)) for _, _, count in loads) > len(asks), "the memory held them all"
        assert max(held) <= LIMIT
