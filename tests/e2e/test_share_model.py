"""Several machines, as users type it: the HTTP address of the first server and its key are all that others need.

Here all of them are this machine. Needs the extra `cluster`.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.test_train_command import command, finish
from tests.support.replicas import wait_ready
from tests.support.servers import ServerProcess, free_port, ours, running

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

PROMPT = {"model": "default", "prompt": "the king and the", "max_tokens": 8, "temperature": 0}
ADMIN = {"Authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def first(tiny_folder: Path) -> Iterator[ServerProcess]:
    flags = ["--mode", "inference", "--share-model", "--no-ssd", "--api-key", "user", "--admin-key", "admin"]
    with running(ours(str(tiny_folder), flags, fork=False)) as server:
        yield server


def join(address: str, *flags: str) -> "subprocess.Popen[str]":
    serve = [sys.executable, "-c", "from mlx_parallm.cli.main import serve_main; raise SystemExit(serve_main())"]
    found = [*serve, "--mode", "inference", "--connect-to", address, *flags]
    return subprocess.Popen(found, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(first: ServerProcess, ready: int, patience: float = 90) -> None:
    deadline = time.monotonic() + patience
    while replicas(first) != {"ready": ready, "expected": ready}:
        assert time.monotonic() < deadline, replicas(first)
        time.sleep(0.3)


def replicas(first: ServerProcess) -> dict[str, int]:
    found: dict[str, int] = httpx.get(f"{first.url}/health", timeout=30).json()["replicas"]
    return found


def answer(first: ServerProcess, **more: Any) -> str:
    found = httpx.post(f"{first.url}/v1/completions", json=PROMPT | more, headers=ADMIN, timeout=60)
    assert found.status_code == 200, found.text
    text: str = found.json()["choices"][0]["text"]
    return text


def test_a_machine_joins_by_the_http_address_and_leaves(
    first: ServerProcess, tiny_folder: Path, tmp_path: Path
) -> None:
    alone = answer(first)
    address = first.url.removeprefix("http://")
    second = join(address, "--admin-key", "admin")
    try:
        wait_ready(first.url, 2)
        assert {answer(first, seed=number) for number in range(8)} == {alone}
        learner = command(tiny_folder, tmp_path / "out", free_port(), "--steps", "1")
        shown = finish([*learner, "--connect-to", address, "--admin-key", "admin"])
        assert "draws the rollouts" in shown
        served = httpx.get(f"{first.url}/v1/adapters", headers=ADMIN).json()["data"]
        assert "policy" in {one["name"] for one in served}
        second.send_signal(signal.SIGTERM)
        second.communicate(timeout=30)
        assert second.returncode == 0
    finally:
        if second.poll() is None:
            second.kill()
            second.communicate()
    wait_for(first, ready=1)
    assert answer(first) == alone


def test_who_is_told(first: ServerProcess) -> None:
    for headers, status in (({}, 401), ({"Authorization": "Bearer user"}, 403), (ADMIN, 200)):
        assert httpx.get(f"{first.url}/debug/cluster", headers=headers).status_code == status
    foreign = httpx.get(f"{first.url}/debug/cluster", headers=ADMIN | {"Origin": "https://elsewhere.example"})
    assert foreign.status_code == 403
    told = httpx.get(f"{first.url}/debug/cluster", headers=ADMIN).json()
    assert told["token"] not in first.log()  # no secret is printed where a key opens it


@pytest.mark.parametrize(
    ("flags", "words"),
    [((), "needs the key of that server"), (("--admin-key", "user"), "needs an admin key")],
)
def test_a_join_without_the_key_is_refused(first: ServerProcess, flags: tuple[str, ...], words: str) -> None:
    refused = join(first.url.removeprefix("http://"), *flags)
    output = refused.communicate(timeout=60)[0]
    assert refused.returncode == 2
    assert words in output


def test_a_join_where_nobody_shares(tiny_folder: Path) -> None:
    refused = join(f"127.0.0.1:{free_port()}")
    assert "no server answers there" in refused.communicate(timeout=60)[0]
    with running(ours(str(tiny_folder), ["--no-ssd"])) as server:
        refused = join(server.url.removeprefix("http://"))
        assert "start it with --share-model" in refused.communicate(timeout=60)[0]
