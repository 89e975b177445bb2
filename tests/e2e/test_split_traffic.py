"""Several adapters share the traffic: answers name their arm, rewards count, and the better one gets all of it."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.servers import ServerProcess, ours, running
from tests.unit.test_adapters import written

BODY: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("arms")
    return {name: written(base, name) for name in ("few", "all")}


def flags(folders: dict[str, Path], folder: Path) -> list[str]:
    found = ["--audit-log", str(folder / "audit.jsonl")]
    for name, path in folders.items():
        found += ["--lora-path", f"{name}={path}"]
    return found


def reward(client: httpx.Client, good: str) -> str:
    """One answer, with a reward by the arm that gave it."""
    answer = client.post("/v1/completions", json=BODY)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    arm = str(choice["lora_adapter"])
    assert answer.headers["X-Parallm-Adapter"].partition("@")[0] == arm
    sent = {"request_id": answer.json()["id"], "reward": 1.0 if arm == good else 0.0}
    for _ in range(2):  # sent again, it says no more of the arm
        assert client.post("/v1/training/feedback", json=sent).status_code == 200
    return arm


def switch(server: ServerProcess, *arguments: str) -> str:
    command = [sys.executable, "-m", "mlx_parallm", "adapters", "--url", server.url, "switch", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def serves(client: httpx.Client) -> dict[str, float]:
    return dict(client.get("/server_info").json()["models"][0]["serves"])


@pytest.mark.slow
def test_the_better_arm_gets_all_requests_and_keeps_them_over_a_restart(
    tiny_folder: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    def begun() -> ServerProcess:
        environment = {"XDG_DATA_HOME": str(tmp_path / "data")}
        return ours(str(tiny_folder), flags(folders, tmp_path), environment=environment)

    with running(begun()) as server:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            assert "few (0.5), all (0.5)" in switch(server, "few=0.5", "all=0.5", "--auto", "--min-rewards", "6")
            arms = Counter(reward(client, "all") for _ in range(10))
            assert arms == {"few": 5, "all": 5}
            assert serves(client) == {"few": 0.5, "all": 0.5}
            found = client.get("/metrics").text
            assert 'mlx_parallm_adapter_rewards_total{adapter="all",model="tiny-llama",version="1"} 5.0' in found
            assert 'mlx_parallm_adapter_reward_mean{adapter="all",model="tiny-llama",version="1"} 1.0' in found
            assert 'mlx_parallm_adapter_answers_total{adapter="few",model="tiny-llama",version="1"} 5.0' in found
            listed = {one["name"]: one for one in client.get("/v1/adapters").json()["data"]}
            assert (listed["all"]["rewards"], listed["all"]["reward_mean"]) == (5, 1.0)
            assert listed["few"]["latency_mean"] > 0
            for _ in range(2):
                reward(client, "all")
            assert serves(client) == {"all": 1.0}
            plain = client.post("/v1/completions", json=BODY)
            assert "lora_adapter" not in plain.json()["choices"][0]
            assert plain.headers["X-Parallm-Adapter"] == "all@1"
        server.process.kill()
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    [decided] = [line for line in lines if line.get("event") == "split_decided"]
    assert (decided["winner"], decided["arms"]["few"]["rewards"], decided["confidence"]) == ("all", 6, 0.95)
    with running(begun()) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        assert serves(client) == {"all": 1.0}
        answer = client.post("/v1/completions", json=BODY).json()  # clients still send rewards
        assert client.post("/v1/training/feedback", json={"request_id": answer["id"], "reward": 1}).status_code == 200
        switch(server, "base")
    with running(begun()) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        assert serves(client) == {"base": 1.0}
        for body in ({"version": "all", "auto": True}, {"split": {"all": 1.0}, "auto": True}):
            assert client.post("/model/switch-lora", json=body).status_code == 400
        assert client.post("/v1/training/feedback", json={"request_id": "x", "reward": 1}).status_code == 400
