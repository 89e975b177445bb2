"""The SSD tier under real faults: processes killed while they write, a full disk, folders that go or can't be written.

Whatever happens to the files, every answer is the one that a server without any cache gives.
"""

import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.servers import ServerProcess, free_port, ours, running

TEXTS = [f"{number} " + "the sea and the sand in the sun " * 30 for number in range(8)]  # some 500 tokens each
FLAGS = ["--num-blocks", "64"]  # two of the texts: the others must come from the SSD


def ask(server: ServerProcess, text: str, limit: float = 60) -> tuple[str, int]:
    """The answer, and how many prompt tokens were cached."""
    body: dict[str, Any] = {"prompt": text, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=limit)
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def ssd(server: ServerProcess) -> dict[str, int]:
    metrics: dict[str, int] = httpx.get(f"{server.url}/debug/metrics").json()["ssd"]
    return metrics


def settled(server: ServerProcess) -> dict[str, int]:
    """The counters once nothing more is written."""
    before: dict[str, int] = {}
    while before != (before := ssd(server)):
        time.sleep(0.4)
    return before


@pytest.fixture(scope="module")
def answers(tiny_folder: Path) -> list[str]:
    """What a server without a cache says."""
    with running(ours(str(tiny_folder), ["--num-blocks", "0"])) as server:
        return [ask(server, text)[0] for text in TEXTS]


@contextmanager
def cached(tiny_folder: Path, folder: Path, *more: str) -> Iterator[ServerProcess]:
    with running(ours(str(tiny_folder), [*FLAGS, "--ssd-cache-dir", str(folder), *more])) as server:
        yield server


@pytest.mark.slow
def test_a_working_set_larger_than_memory_comes_from_the_ssd(
    tiny_folder: Path, answers: list[str], tmp_path: Path
) -> None:
    with cached(tiny_folder, tmp_path) as server:
        assert [ask(server, text)[0] for text in TEXTS] == answers
        assert settled(server)["writes"] > 8 * 25
        again = [ask(server, text) for text in TEXTS]
        assert [answer for answer, _ in again] == answers
        assert all(count > 400 for _, count in again)
        assert ssd(server)["reads"] > 100
    with cached(tiny_folder, tmp_path) as server:
        assert ask(server, TEXTS[3])[1] > 400
        metrics = httpx.get(f"{server.url}/metrics").text
        assert 'mlx_parallm_ssd_cache_reads_total{model="tiny-llama"}' in metrics
        assert httpx.post(f"{server.url}/flush_cache").json()["success"]
        assert not list(tmp_path.rglob("*.safetensors"))
        assert ask(server, TEXTS[3]) == (answers[3], 0)
    with cached(tiny_folder, tmp_path / "unused", "--no-ssd") as server:
        assert ask(server, TEXTS[0])[0] == answers[0]
        assert ssd(server)["writes"] == 0
    assert not (tmp_path / "unused").exists()


def kill_while_it_writes(tiny_folder: Path, answers: list[str], folder: Path, times: int) -> None:
    draw = random.Random(0)
    for _ in range(times):
        with cached(tiny_folder, folder) as server:
            threading.Timer(draw.uniform(0.05, 1.5), server.process.kill).start()
            try:
                for number in draw.choices(range(8), k=1000):
                    assert ask(server, TEXTS[number])[0] == answers[number]
            except httpx.TransportError:
                assert server.process.wait(10) == -signal.SIGKILL
    with cached(tiny_folder, folder) as server:
        assert [ask(server, text)[0] for text in TEXTS] == answers
        assert ssd(server)["damaged"] == 0  # a file is whole from the moment it has its name


def test_killed_while_it_writes(tiny_folder: Path, answers: list[str], tmp_path: Path) -> None:
    kill_while_it_writes(tiny_folder, answers, tmp_path, 3)


@pytest.mark.slow
def test_killed_twenty_times_while_it_writes(tiny_folder: Path, answers: list[str], tmp_path: Path) -> None:
    kill_while_it_writes(tiny_folder, answers, tmp_path, 20)


def test_damaged_files_are_misses(tiny_folder: Path, answers: list[str], tmp_path: Path) -> None:
    with cached(tiny_folder, tmp_path) as server:
        for text in TEXTS:
            ask(server, text)
        settled(server)
    draw = random.Random(1)
    files = sorted(tmp_path.rglob("*.safetensors"))
    for number, file in enumerate(draw.sample(files, 60)):
        data = bytearray(file.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes([data, data[: len(data) // 2], b"", b"foreign" * 50][number % 4])
    with cached(tiny_folder, tmp_path) as server:
        assert [ask(server, text)[0] for text in TEXTS] == answers
        assert ssd(server)["damaged"] >= 8  # one a text ends the reading of it
        assert [ask(server, text)[0] for text in TEXTS] == answers


@pytest.mark.slow
def test_the_folder_deleted_while_it_runs(tiny_folder: Path, answers: list[str], tmp_path: Path) -> None:
    with cached(tiny_folder, tmp_path / "kv") as server:
        for _ in range(3):
            assert [ask(server, text)[0] for text in TEXTS] == answers
            settled(server)
            shutil.rmtree(tmp_path / "kv")
        assert [ask(server, text)[0] for text in TEXTS] == answers
        assert settled(server)["errors"] == 0
        assert list((tmp_path / "kv").rglob("*.safetensors"))


def private_mounts() -> bool:
    try:
        return subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]).returncode == 0
    except OSError:
        return False


@contextmanager
def mounted(tiny_folder: Path, folder: Path, mount: str) -> Iterator[ServerProcess]:
    """A server that sees `folder` through a mount of its own."""
    folder.mkdir(exist_ok=True)
    port = free_port()
    serve = [sys.executable, "-m", "mlx_parallm", "serve", "--port", str(port), "--log-level", "WARNING", *FLAGS]
    serve += ["--model-path", str(tiny_folder), "--ssd-cache-dir", f"{folder}/kv"]
    script = f'{mount.format(folder)} && exec "$@"'
    with running(ServerProcess(["unshare", "-rm", "sh", "-c", script, "sh", *serve], port, "default")) as server:
        yield server


@pytest.mark.skipif(not private_mounts(), reason="mounts of one's own are not allowed here")
def test_a_full_disk(tiny_folder: Path, answers: list[str], tmp_path: Path) -> None:
    with mounted(tiny_folder, tmp_path / "small", "mount -t tmpfs -o size=200k none {}") as server:
        for _ in range(2):
            assert [ask(server, text)[0] for text in TEXTS] == answers
        metrics = settled(server)
        assert metrics["writes"] > 0
        assert metrics["errors"] > 0
        assert metrics["damaged"] == 0
        assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.skipif(not private_mounts(), reason="mounts of one's own are not allowed here")
@pytest.mark.slow
def test_a_folder_that_can_only_be_read(tiny_folder: Path, answers: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "fixed"
    with cached(tiny_folder, folder / "kv") as server:
        for text in TEXTS[:4]:
            ask(server, text)
        settled(server)
    with mounted(tiny_folder, folder, "mount --bind {0} {0} && mount -o remount,bind,ro {0}") as server:
        found = [ask(server, text) for text in TEXTS]
        assert [answer for answer, _ in found] == answers
        assert all(count > 400 for _, count in found[:4])
        metrics = settled(server)
        assert metrics["writes"] == 0
        assert metrics["errors"] > 0
