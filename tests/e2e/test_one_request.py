"""What one request may do to others, on a server with keys and running streams: next to nothing."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_parallm.server.auth.key_files import changing
from mlx_parallm.server.auth.keys import KeyLimits, Role, entry_of, new_key
from tests.support.hostile import HOSTILE, ROLLOUT, TEXT
from tests.support.servers import ServerProcess, ours, running
from tests.support.watch import Watch


class Keys:
    """A server whose keys come and go; `server` trains."""

    def __init__(self, server: ServerProcess, secrets: dict[str, str], clients: contextlib.ExitStack) -> None:
        self.server = server
        self._secrets = secrets
        self._clients = clients

    def headers(self, name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._secrets[name]}"}

    def client(self, name: str) -> httpx.Client:
        return self._clients.enter_context(
            httpx.Client(base_url=self.server.url, headers=self.headers(name), timeout=60)
        )


@pytest.fixture(scope="module")
def keys(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keys]:
    folder = tmp_path_factory.mktemp("one-request")
    wanted: dict[str, tuple[Role, dict[str, Any]]] = {
        "root": ("admin", {}),
        "ada": ("user", {}),
        "bob": ("trainer", {}),
        "limited": ("trainer", {"limits": KeyLimits(tokens_per_minute=500)}),
        "bound": ("trainer", {"adapters": ["other"]}),
    }
    secrets: dict[str, str] = {}
    with changing(folder / "keys.json") as document:
        for name, (role, bounds) in wanted.items():
            secrets[name], key = new_key(name, role, **bounds)
            document[name] = entry_of(key)
    flags = ["--keys-file", str(folder / "keys.json"), "--enable-rl-training", "--lora-rank", "4"]
    flags += ["--checkpoint-dir", str(folder / "checkpoints"), "--responses-dir", str(folder / "responses")]
    flags += ["--request-timeout-seconds", "30", "--update-frequency", "0", "--max-queue-size", "64"]
    with running(ours(str(tiny_folder), flags)) as server, contextlib.ExitStack() as clients:
        yield Keys(server, secrets, clients)


def refused(keys: Keys) -> tuple[Watch, dict[str, float]]:
    """All of them, one after another, and how long each took to be refused."""
    bodies = {name: json.dumps(body | {"model": "default"}).encode() for name, (_, body, _) in HOSTILE.items()}
    client, taken = keys.client("bob"), {}
    with Watch(keys.server, keys.headers("ada")) as watch:
        for name, (path, _, status) in HOSTILE.items():
            begun = time.monotonic()
            answer = client.post(path, content=bodies[name], headers={"Content-Type": "application/json"})
            taken[name] = time.monotonic() - begun
            assert answer.status_code == status, (name, answer.text[:300])
    return watch, taken


def test_hostile_requests_are_refused_and_streams_go_on(keys: Keys) -> None:
    watch, _ = refused(keys)
    assert not watch.errors
    assert watch.gaps
    assert watch.memory_growth < 500 << 20


@pytest.mark.slow  # its times are those of a machine with nothing beside it
def test_hostile_requests_hold_nobody_up(keys: Keys) -> None:
    watch, taken = refused(keys)
    assert max(taken.values()) < 2, taken
    assert max(watch.health) < 0.5
    assert max(watch.gaps) < watch.normal_gap + 0.5


def free_rows(keys: Keys) -> int:
    return int(httpx.get(keys.server.url + "/debug/metrics", headers=keys.headers("root")).json()["slots_free"])


def test_a_rollout_ends_with_its_client(keys: Keys) -> None:
    client = keys.client("bob")
    body = {"prompts": [[5, 6, 7]] * 200, "n": 8, "max_tokens": 1500}
    with pytest.raises(httpx.ReadTimeout):
        client.post(ROLLOUT, json=body, timeout=1.5)
    for _ in range(100):
        if free_rows(keys) == 32:
            break
        time.sleep(0.02)
    else:
        raise AssertionError("its rows run on")
    assert client.post(ROLLOUT, json={"prompts": [[5]], "max_tokens": 2}).status_code == 200


def test_a_rollouts_tokens_count_in_the_limit(keys: Keys) -> None:
    client = keys.client("limited")
    assert client.post(ROLLOUT, json={"prompts": [[5, 6]] * 8, "n": 4, "max_tokens": 64}).status_code == 429
    bodies = [{"prompts": [[5, 6]], "n": 4, "max_tokens": 40, "seed": seed} for seed in range(12)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda body: client.post(ROLLOUT, json=body), bodies))
    assert {answer.status_code for answer in answers} == {200, 429}
    samples = [s for a in answers if a.status_code == 200 for g in a.json()["groups"] for s in g["samples"]]
    assert 0 < sum(len(sample["completion_ids"]) + 1 for sample in samples) <= 500


def test_a_key_rolls_out_and_collects_for_its_own_adapters_alone(keys: Keys) -> None:
    bound, free = keys.client("bound"), keys.client("bob")
    for model in ("default", "policy"):
        answer = bound.post(ROLLOUT, json={"model": model, "prompts": [[5]], "max_tokens": 2})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert free.post(ROLLOUT, json={"model": model, "prompts": [[5]], "max_tokens": 2}).status_code == 200
    body = {"prompt": [5, 6], "max_tokens": 2, "collect_trajectory": True}
    assert bound.post(TEXT, json=body).status_code == 404
    assert free.post(TEXT, json=body).status_code == 200


def test_a_request_beside_rollouts_has_its_turn_at_once(keys: Keys) -> None:
    """All 32 places are taken by rollouts of a thousand tokens each."""
    body = {"prompts": [[5, 6, 7]] * 64, "n": 8, "max_tokens": 1000, "stop_token_ids": []}
    request = keys.client("bob").build_request("POST", ROLLOUT, json=body)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    ada = keys.client("ada")
    with socket.create_connection((request.url.host, request.url.port)) as rollouts:
        rollouts.sendall(f"POST {ROLLOUT} HTTP/1.1\r\n{head}\r\n".encode() + request.read())
        while free_rows(keys) > 0:
            time.sleep(0.01)
        waits = []
        for _ in range(5):
            begun = time.monotonic()
            assert ada.post(TEXT, json={"prompt": [9, 9], "max_tokens": 1}).status_code == 200
            waits.append(time.monotonic() - begun)
        rollouts.setblocking(False)
        with pytest.raises(BlockingIOError):  # nothing has come yet: they still run
            rollouts.recv(1)
    assert max(waits) < 5
