"""`parallm pull` against a hub that cuts connections, stalls, and damages what it sends."""

import hashlib
import os
import pty
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_parallm.cli.download import RemoteFile, download
from tests.support.embedding_folders import write_model
from tests.support.servers import ServerProcess, free_port, ours, running
from tests.support.stub_hub import MODEL, running_hub

SIZE = 3 << 20
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    (folder / "config.json").write_text("{}")
    (folder / WEIGHTS).write_bytes(random.Random(0).randbytes(SIZE))
    (folder / "pytorch_model.bin").write_bytes(b"not wanted")
    return folder


@pytest.fixture(scope="module")
def hub(source: Path) -> Iterator[str]:
    with running_hub(source) as url:
        yield url


@pytest.fixture(autouse=True)
def no_trouble(hub: str) -> None:
    trouble(hub)


def trouble(hub: str, **what: Any) -> None:
    assert httpx.post(f"{hub}/trouble", json=what).status_code == 200


def asked(hub: str, header: str = "range") -> list[str]:
    """The ranges of the weights that were asked for, in their order; empty for the whole."""
    found = httpx.get(f"{hub}/trouble").json()
    return [one[header] for one in found if one["method"] == "GET" and one["path"].endswith(WEIGHTS)]


def command(hub: str, home: Path, *arguments: str) -> tuple[list[str], dict[str, str]]:
    environment = os.environ | {"HF_ENDPOINT": hub, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "COLUMNS": "200"}
    return [sys.executable, "-m", "mlx_parallm", "pull", *arguments], environment


def pull(hub: str, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    line, environment = command(hub, home, *(arguments or (MODEL,)))
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=60)


def partials(folder: Path) -> list[Path]:
    return list(folder.rglob("*.partial"))


def test_into_the_hubs_cache(hub: str, source: Path, tmp_path: Path) -> None:
    ended = pull(hub, tmp_path)
    assert ended.returncode == 0, ended.stderr
    folder, serve = ended.stdout.splitlines()
    assert serve == f"serve it with: mlx_parallm_serve --model-path {MODEL}"
    assert sorted(path.name for path in Path(folder).iterdir()) == ["config.json", WEIGHTS]
    assert (Path(folder) / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()
    assert f"{WEIGHTS}: 0% of 3.1 MB" in ended.stderr
    assert f"{WEIGHTS}: 100% of 3.1 MB" in ended.stderr
    assert asked(hub) == [""]
    assert asked(hub, "accept-encoding") == ["identity"], "compressed bytes would be written as they come"
    assert pull(hub, tmp_path).stdout == ended.stdout
    assert asked(hub) == [""], "what is there was fetched again"
    assert partials(tmp_path) == []


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_cut_connection(hub: str, source: Path, tmp_path: Path, how: str) -> None:
    trouble(hub, cut_after=1 << 20, times=2, how=how)
    ended = pull(hub, tmp_path / "home", MODEL, "--to", str(tmp_path / "here"))
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "here" / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()
    whole, *rest = asked(hub)
    assert whole == ""
    begins = [int(one.removeprefix("bytes=").removesuffix("-")) for one in rest]
    assert begins == sorted(begins)
    assert len(begins) == 2
    assert begins[0] > 0
    if how == "close":  # a reset throws away what the receiver has not read yet
        assert begins == [1 << 20, 2 << 20]


def test_a_process_that_was_killed(hub: str, source: Path, tmp_path: Path) -> None:
    trouble(hub, cut_after=1 << 20, times=1, how="stall")
    line, environment = command(hub, tmp_path, MODEL)
    process = subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not any(one.stat().st_size for one in partials(tmp_path)):
        assert time.monotonic() < deadline, "nothing arrives"
        time.sleep(0.05)
    busy = pull(hub, tmp_path)
    assert busy.returncode == 1
    assert f"another process downloads {WEIGHTS}" in busy.stderr
    process.kill()
    process.wait()
    (partial,) = partials(tmp_path)
    here = partial.stat().st_size
    assert 0 < here < SIZE
    trouble(hub)
    ended = pull(hub, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert asked(hub) == [f"bytes={here}-"]
    assert (Path(ended.stdout.splitlines()[0]) / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()
    assert partials(tmp_path) == []


@pytest.mark.slow
def test_a_hub_that_does_not_come_back(hub: str, tmp_path: Path) -> None:
    trouble(hub, cut_after=0, times=100)
    ended = pull(hub, tmp_path)
    assert ended.returncode == 1
    (error,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert "run the command again to go on from there" in error
    assert "Traceback" not in ended.stderr
    trouble(hub)
    assert pull(hub, tmp_path).returncode == 0


def test_damage_is_refused(hub: str, source: Path, tmp_path: Path) -> None:
    trouble(hub, damage=True)
    ended = pull(hub, tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith(f"error: {WEIGHTS} was damaged on the way")
    assert ended.stdout == ""
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size >= SIZE] == []
    trouble(hub)
    folder = Path(pull(hub, tmp_path).stdout.splitlines()[0])
    assert (folder / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()
    blob = (folder / WEIGHTS).resolve()
    blob.write_bytes(b"x" + blob.read_bytes()[1:])  # a disk that forgets
    assert pull(hub, tmp_path).returncode == 0
    assert (folder / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()


def test_a_damaged_file_behind_a_link_goes_too(hub: str, source: Path, tmp_path: Path) -> None:
    """As earlier releases of the hub's library made them; else it would take its place for ever."""
    wanted = (source / WEIGHTS).read_bytes()
    (tmp_path / "blob").write_bytes(b"x" + wanted[1:])
    (tmp_path / WEIGHTS).symlink_to(tmp_path / "blob")
    url, sha256 = f"{hub}/{MODEL}/resolve/main/{WEIGHTS}", hashlib.sha256(wanted).hexdigest()
    download([RemoteFile(WEIGHTS, url, SIZE, sha256, tmp_path / WEIGHTS)], {})
    assert [path.name for path in tmp_path.iterdir()] == [WEIGHTS]
    assert (tmp_path / WEIGHTS).read_bytes() == wanted


@pytest.mark.slow
def test_a_hub_without_ranges(hub: str, source: Path, tmp_path: Path) -> None:
    trouble(hub, cut_after=1 << 20, times=1, ranges=False)
    ended = pull(hub, tmp_path / "home", MODEL, "--to", str(tmp_path / "here"))
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "here" / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()


@pytest.mark.slow
def test_a_bar_on_a_terminal(hub: str, tmp_path: Path) -> None:
    line, environment = command(hub, tmp_path, MODEL)
    ours_end, its_end = pty.openpty()
    process = subprocess.Popen(line, env=environment | {"TERM": "xterm"}, stdout=subprocess.PIPE, stderr=its_end)
    os.close(its_end)
    shown = b""
    while True:
        try:
            piece = os.read(ours_end, 4096)
        except OSError:  # the other end is closed
            break
        shown += piece
    os.close(ours_end)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"serve it with" in out
    assert "━".encode() in shown
    assert b"3.1/3.1 MB" in shown


def test_what_the_hub_does_not_have(hub: str, tmp_path: Path) -> None:
    ended = pull(hub, tmp_path, "owner/nothing")
    assert ended.returncode == 1
    assert ended.stderr == "error: the hub has no model 'owner/nothing', or it asks for a token (HF_TOKEN)\n"
    ended = pull("http://127.0.0.1:1", tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"error: {MODEL} can't be downloaded: ")
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_what_was_pulled_is_served(tiny_folder: Path, tmp_path: Path) -> None:
    with running_hub(tiny_folder) as hub:
        ended = pull(hub, tmp_path / "home", MODEL, "--to", str(tmp_path / "here"))
    assert ended.returncode == 0, ended.stderr
    with running(ours(ended.stdout.splitlines()[0])) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "hello", "max_tokens": 2}, timeout=60)
    assert answer.status_code == 200


@pytest.mark.slow
def test_models_of_the_hub_are_served_by_their_names(tiny_folder: Path, tmp_path: Path) -> None:
    """Of any kind; a download that takes long holds up no other model."""
    folder, port = write_model(tmp_path / "bert", "cls"), free_port()
    line = [sys.executable, "-m", "mlx_parallm", "serve", "--port", str(port), "--model-path", f"embedder={MODEL}"]
    with running_hub(folder) as hub:
        environment = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        with running(ServerProcess(line, port, "embedder", environment)) as server:
            entry = httpx.get(f"{server.url}/v1/models/embedder").json()
            assert (entry["kind"], entry["root"]) == ("embedding", MODEL)
            summary = httpx.get(f"{server.url}/metrics", headers={"Accept": "application/json"}).json()
            assert summary["current_policy_version"] == 0, "there is no model that has a policy"
            body = {"model": "embedder", "input": "the cat"}
            assert httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60).status_code == 200
            shutil.rmtree(tmp_path / "home")
            trouble(hub, cut_after=1, times=1, how="stall")
            load = {"model": "late", "path": MODEL, "wait": False}
            assert httpx.post(f"{server.url}/v1/models/load", json=load, timeout=60).status_code == 200
            local = {"model": "tiny", "path": str(tiny_folder)}
            assert httpx.post(f"{server.url}/v1/models/load", json=local, timeout=60).json()["status"] == "ready"
            assert httpx.get(f"{server.url}/v1/models/late").json()["status"] == "loading"
            trouble(hub)
            unknown = {"model": "none", "path": "owner/nothing"}
            refused = httpx.post(f"{server.url}/v1/models/load", json=unknown, timeout=60)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "model_failed")
            answer = httpx.post(f"{server.url}/v1/embeddings", json=body | {"model": "late"}, timeout=60)
            assert answer.status_code == 200, answer.text
            prompt = {"model": "late", "prompt": "a"}
            refused = httpx.post(f"{server.url}/v1/completions", json=prompt, timeout=60)
            assert (refused.status_code, "generates no text" in refused.text) == (400, True), refused.text
