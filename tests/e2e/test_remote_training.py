"""A learner in a process of its own, and a server that draws its rollouts: they learn as one process does."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file

from mlx_parallm.lora.adapter_files import read_folder
from tests.e2e.test_train_command import command, finish, last
from tests.support import forked
from tests.support.servers import ServerProcess, free_port, ours, running


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[ServerProcess]:
    with running(ours(str(tiny_folder), ["--no-ssd", "--max-lora-rank", "4"])) as process:
        yield process


def learner(folder: Path, out: Path, server: ServerProcess, *flags: str) -> list[str]:
    return [*command(folder, out, free_port(), *flags), "--connect-to", server.url.removeprefix("http://")]


def log(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "policy" / "log.jsonl").read_text().splitlines()]


def served(server: ServerProcess) -> dict[int, str]:
    listed = httpx.get(f"{server.url}/v1/adapters").json()["data"]
    return {one["version"]: one["digest"] for one in listed if one["name"] == "policy"}


@pytest.mark.slow
def test_it_learns_as_one_process_does(tiny_folder: Path, tmp_path: Path, server: ServerProcess) -> None:
    finish(command(tiny_folder, tmp_path / "one", free_port(), "--steps", "4"))
    shown = finish(learner(tiny_folder, tmp_path / "two", server, "--steps", "4", "--max-staleness", "0"))
    assert "samples the rollouts" in shown
    one, two = log(tmp_path / "one"), log(tmp_path / "two")
    assert [line["reward"] for line in one] == [line["reward"] for line in two]
    assert [line["held_out"] for line in one] == [line["held_out"] for line in two]
    alone, apart = (load_file(last(tmp_path / name) / "trainer.safetensors") for name in ("one", "two"))
    for name, array in alone.items():  # rows that join a batch at other moments are rounded otherwise
        np.testing.assert_allclose(array, apart[name], rtol=1e-3, atol=1e-6, err_msg=name)
    assert max(served(server)) == two[-1]["policy_version"]
    answer = httpx.post(
        f"{server.url}/generate", json={"prompt": "hello", "max_tokens": 4, "lora_adapter": "policy", "step_id": 1}
    ).json()
    assert answer["policy_version"] == two[-1]["policy_version"]


def test_what_is_served_is_what_was_learnt(tiny_folder: Path, tmp_path: Path, server: ServerProcess) -> None:
    finish(learner(tiny_folder, tmp_path / "out", server, "--steps", "2", "--peft-export", str(tmp_path / "peft")))
    read_folder(tmp_path / "peft", 1 << 20)
    loaded = httpx.post(f"{server.url}/v1/adapters/load", json={"name": "exported", "path": str(tmp_path / "peft")})
    assert loaded.status_code == 200, loaded.text
    listed = httpx.get(f"{server.url}/v1/adapters").json()["data"]
    [exported] = [one["digest"] for one in listed if one["name"] == "exported"]
    assert exported == served(server)[max(served(server))]


def test_a_learner_that_was_killed_goes_on_while_the_server_serves(
    tiny_folder: Path, tmp_path: Path, server: ServerProcess
) -> None:
    process = forked.ForkedProcess(learner(tiny_folder, tmp_path, server, "--steps", "2000"))
    deadline = time.monotonic() + 60
    known = max(served(server), default=0)
    while max(served(server), default=0) < known + 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    before = max(served(server))
    assert before >= known + 3
    answer = httpx.post(f"{server.url}/generate", json={"prompt": "hello", "max_tokens": 4, "step_id": 1})
    assert answer.status_code == 200
    done = last(tmp_path).name
    finish(learner(tiny_folder, tmp_path, server, "--steps", str(log(tmp_path)[-1]["step"] + 2)))
    assert max(served(server)) > before, "a number was given out twice"
    assert last(tmp_path).name != done


@pytest.mark.slow
def test_a_server_that_restarts_is_waited_for(tiny_folder: Path, tmp_path: Path) -> None:
    port = free_port()
    with running(ours(str(tiny_folder), ["--no-ssd"], port=port)) as first:
        process = forked.ForkedProcess(learner(tiny_folder, tmp_path, first, "--steps", "2000"))
        deadline = time.monotonic() + 60
        while len(served(first)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        first.process.kill()
    try:
        time.sleep(1.5)
        assert process.poll() is None
        with running(ours(str(tiny_folder), ["--no-ssd"], port=port)) as second:
            deadline = time.monotonic() + 60
            while len(served(second)) < 2 and time.monotonic() < deadline:
                time.sleep(0.05)
            assert len(served(second)) >= 2
    finally:
        process.terminate()
        assert process.wait(60) == 0


def test_wrong_settings_are_said_at_once(tiny_folder: Path, tmp_path: Path) -> None:
    flags = ("--connect-to", "127.0.0.1:9", "--keep-serving")
    done = forked.run(command(tiny_folder, tmp_path, free_port(), *flags), 60)
    assert done.returncode != 0
    assert "--connect-to is for --mode rl" in done.stderr + done.stdout
