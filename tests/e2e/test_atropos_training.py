"""The server learns from a real Atropos API, which it has an environment for, and outlives a killed one."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import pytest

from mlx_parallm.training.integrations.atropos.process import AtroposProcess, EnvironmentConfig
from tests.support import forked
from tests.support.servers import ServerProcess, free_port, ours, running

ENVIRONMENT = Path(__file__).with_name("atropos_env.py")


@contextlib.contextmanager
def api(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """`run-api`, until the end of the block at the latest."""
    command = [sys.executable, "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def learner(folder: Path, out: Path, *flags: str) -> ServerProcess:
    return ours(
        str(folder),
        [
            *("--enable-rl-training", "--learning-rate", "1e-3", "--lora-rank", "4", "--train-batch-size", "16"),
            *("--update-frequency", "0", "--max-kl", "100", "--microbatch-tokens", "512"),
            *("--checkpoint-dir", str(out), *flags),
        ],
    )


class Watch:
    """What the server says of its training: one status for each update, as far as they were seen."""

    def __init__(self, server: ServerProcess, log: Path) -> None:
        self.server = server
        self.log = log
        self.seen: dict[int, dict[str, Any]] = {}

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.server.url}/v1/training/status", timeout=30).json()
        self.seen.setdefault(found["updates"], found)
        return found

    def until(self, true: Callable[[dict[str, Any]], bool], patience: float = 120) -> dict[str, Any]:
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if true(status := self.status()):
                return status
            time.sleep(0.02)
        said = self.log.read_text()[-3000:] if self.log.exists() else ""
        raise AssertionError(f"{status}\n{self.server.tail()}\n{said}")

    def rewards(self) -> list[float]:
        return [status["reward_mean"] for updates, status in sorted(self.seen.items()) if updates]

    def gaps(self) -> list[float]:
        return [seen["metrics"]["max_logprob_gap"] for seen in self.seen.values() if seen["metrics"]]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # atroposlib's own are not ours
def test_it_learns_from_an_environment_and_outlives_the_api(tiny_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("atroposlib", reason="pip install atroposlib")
    port = free_port()
    flags = ("--atropos-url", f"http://127.0.0.1:{port}", "--environment", str(ENVIRONMENT))
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(api(port))
        server = stack.enter_context(running(learner(tiny_folder, tmp_path, *flags)))
        watch = Watch(server, tmp_path / "environment.log")
        status = watch.until(lambda status: status["updates"] >= 24)
        rewards = watch.rewards()
        assert fmean(rewards[-5:]) > fmean(rewards[:5]) + 0.05
        # The ledger knows all of them. Some batches were drawn before an update and used after it, but not all.
        assert status["trajectories_off_policy"] == 0
        assert status["trajectories_collected"] == 16 * status["atropos"]["batches"]
        assert min(watch.gaps()) < 1e-3
        assert status["environment"]["starts"] == 1

        # An API that is started again knows nobody. The environment ends of that, and is started again.
        environment = status["environment"]["pid"]
        first.send_signal(signal.SIGKILL)
        first.wait()
        killed_at = watch.status()["updates"]
        stack.enter_context(api(port))
        status = watch.until(lambda status: status["updates"] >= killed_at + 6)
        assert status["atropos"]["reconnects"] >= 1
        assert status["environment"]["starts"] >= 2
        assert status["environment"]["pid"] != environment
        assert not alive(environment)
        assert status["trajectories_off_policy"] == 0
        assert fmean(watch.rewards()[-5:]) > fmean(rewards[:5]) + 0.05

        last = status["environment"]["pid"]
        assert server.stop() == 0
        assert not alive(last)


# Without Atropos: any program can stand in for an environment.

STAND_IN = """
import json, os, sys, time
from pathlib import Path
with Path(__file__).with_suffix(".starts").open("a") as file:
    file.write(json.dumps([os.getpid(), *sys.argv]) + "\\n")
codes = Path(__file__).with_suffix(".codes")
left = codes.read_text().split() if codes.exists() else []
if left:
    codes.write_text(" ".join(left[1:]))
    sys.exit(int(left[0]))
time.sleep(600)
"""


class Fine(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    """Of what answers as the server and as the API."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Fine)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    return tmp_path / "stand_in.py"


def starts(stand_in: Path, count: int) -> list[list[Any]]:
    """What each of the first `count` was called with, when they are there."""
    for _ in range(1000):
        file = stand_in.with_suffix(".starts")
        lines = file.read_text().splitlines() if file.exists() else []
        if len(lines) >= count:
            return [json.loads(line) for line in lines]
        time.sleep(0.02)
    raise AssertionError(f"{len(lines)} starts, not {count}")


def wait_until_gone(pid: int) -> None:
    for _ in range(500):
        if not alive(pid):
            return
        time.sleep(0.02)
    raise AssertionError(f"{pid} is still there")


def test_an_environment_that_fails_is_started_again_until_it_is_closed(
    url: str, stand_in: Path, tmp_path: Path
) -> None:
    stand_in.with_suffix(".codes").write_text("3")
    config = EnvironmentConfig(f"{stand_in} --env.group_size 4", url, url, tmp_path / "logs" / "log", api_key="secret")
    environment = AtroposProcess(config, lambda folder: Path(folder, "tokenizer.json").write_text("{}"))
    environment.start()
    try:
        first, second = starts(stand_in, 2)
        assert first[1:] == second[1:]
        pid, program, command, *flags = second
        assert (program, command) == (str(stand_in), "serve")
        given = dict(flag.split("=", 1) for flag in flags if "=" in flag)
        assert given["--env.rollout_server_url"] == url
        assert given["--openai.base_url"] == f"{url}/v1"
        assert given["--openai.api_key"] == "secret"
        assert given["--env.tokenizer_name"] == given["--openai.tokenizer_name"]
        assert Path(given["--env.tokenizer_name"], "tokenizer.json").exists()
        assert flags[-3:-1] == ["--env.group_size", "4"]
        shown = subprocess.run(["ps", "-ww", "-o", "args=", "-p", str(pid)], capture_output=True, text=True).stdout
        assert "--openai.base_url" in shown
        assert "secret" not in shown
        assert (environment.pid, environment.starts) == (pid, 2)
    finally:
        environment.close()
    assert not alive(pid)
    assert not Path(given["--env.tokenizer_name"]).exists()


def test_an_environment_that_is_done_stays_so(url: str, stand_in: Path, tmp_path: Path) -> None:
    stand_in.with_suffix(".codes").write_text("0 0")
    environment = AtroposProcess(EnvironmentConfig(str(stand_in), url, url, tmp_path / "log"), lambda folder: None)
    environment.start()
    environment._thread.join(30)
    environment.close()
    assert len(starts(stand_in, 1)) == 1


def test_an_environment_does_not_outlive_a_server_that_is_killed(url: str, stand_in: Path, tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; "
        "from mlx_parallm.training.integrations.atropos.process import AtroposProcess, EnvironmentConfig; "
        "config = EnvironmentConfig(sys.argv[1], sys.argv[2], sys.argv[2], Path(sys.argv[3])); "
        "AtroposProcess(config, lambda folder: None).start(); time.sleep(600)"
    )
    server = subprocess.Popen([sys.executable, "-c", program, str(stand_in), url, str(tmp_path / "log")])
    try:
        pid = starts(stand_in, 1)[0][0]
        assert alive(pid)
    finally:
        server.kill()
        server.wait()
    wait_until_gone(pid)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--enable-rl-training", "--environment", str(ENVIRONMENT)), "--atropos-url"),
        (("--atropos-url", "http://127.0.0.1:1", "--environment", str(ENVIRONMENT)), "--enable-rl-training"),
        (("--enable-rl-training", "--atropos-url", "http://127.0.0.1:1", "--environment", "no.py"), "no file no.py"),
    ],
)
def test_what_an_environment_needs_is_said_at_once(
    tiny_folder: Path, tmp_path: Path, flags: tuple[str, ...], said: str
) -> None:
    arguments = [*(sys.executable, "-m", "mlx_parallm", "serve", "--model-path", str(tiny_folder), "--no-ssd"), *flags]
    arguments += ["--port", str(free_port()), "--checkpoint-dir", str(tmp_path)]
    done = forked.run(arguments, 60)
    assert done.returncode != 0
    assert said in done.stderr + done.stdout
