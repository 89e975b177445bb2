"""An Atropos environment as a process beside the server, which `--environment` starts. The manager owns it. No MLX."""

import contextlib
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from mlx_parallm.config import ServeConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.http_client import Endpoint

log = logging.getLogger(__name__)

FIRST_WAIT = 1.0  # seconds until an environment that has failed is started again; twice as many each time …
LONGEST_WAIT = 30.0  # … and never more
LOOK_SECONDS = 0.2  # how often an environment is looked after

# What an environment's interpreter runs. Its input stays open as long as the server lives, however that ends, and the
# first line of it has the flags that other users of the machine must not read.
CHILD = """
import json, os, runpy, signal, sys, threading
sys.argv = sys.argv[1:] + json.loads(sys.stdin.readline())
def follow():
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=follow, daemon=True).start()
if sys.argv[0].endswith(".py"):
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True, slots=True)
class EnvironmentConfig:
    """What to start, and where it finds the API and this server."""

    command: str  # FILE.py or a module's name; flags of its own may follow, and come last
    api_url: str
    server_url: str
    log: Path  # its output goes there
    api_key: str | None = None
    model: str = "default"
    grace_seconds: float = 5.0  # from being asked to end to being ended

    @classmethod
    def of(cls, config: ServeConfig) -> "EnvironmentConfig | None":
        """Returns the config of the environment to start, where the server's config names one."""
        if config.training.environment is None or config.training.built_in_scorer or not config.trains:
            return None
        if config.training.atropos_url is None:
            raise ConfigError(
                "--environment needs --enable-rl-training and the --atropos-url that it sends its groups to"
            )
        if config.http.port == 0:
            raise ConfigError(
                "--environment needs a fixed --port: the environment is started with the server's address, and "
                "--port 0 lets the system choose one later"
            )
        host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(config.http.host, config.http.host)
        return cls(
            command=config.training.environment,
            api_url=Endpoint.parse(config.training.atropos_url).url,
            server_url=f"http://{f'[{host}]' if ':' in host else host}:{config.http.port}",
            log=Path(config.checkpoints.checkpoint_dir).expanduser() / "environment.log",
            api_key=config.http.api_key,
        )

    def __post_init__(self) -> None:
        program = self.program[0]
        if program.endswith(".py") and not Path(program).is_file():
            raise ConfigError(f"environment: there is no file {program}")

    @property
    def program(self) -> list[str]:
        """The file or module, and its own flags."""
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise ConfigError(f"environment: {self.command!r} can't be read: {error}") from None
        if not words:
            raise ConfigError("environment: the command is empty")
        return [str(Path(words[0]).expanduser()) if words[0].endswith(".py") else words[0], *words[1:]]

    def arguments(self, tokenizer: str) -> list[str]:
        """Returns the command line as `BaseEnv.cli` reads it."""
        program, *own = self.program
        return [
            program,
            "serve",
            f"--env.rollout_server_url={self.api_url}",
            f"--env.tokenizer_name={tokenizer}",
            f"--openai.base_url={self.server_url}/v1",
            f"--openai.model_name={self.model}",
            f"--openai.tokenizer_name={tokenizer}",
            "--openai.server_type=vllm",
            *own,
        ]


class AtroposProcess:
    """An environment as a process of its own, which is there while the server and the API are.

    A thread starts it once both answer, ends it on `close`, and starts it again where it fails: an API that was started
    anew does not know it any more, and that ends it. One that ends with 0 has done the steps that it is for.
    `save_tokenizer` writes the model's tokenizer into a folder, from which the environment reads it.
    """

    def __init__(self, config: EnvironmentConfig, save_tokenizer: Callable[[str], object]) -> None:
        self.config = config
        self.starts = 0
        self.pid: int | None = None  # while it runs
        self._save_tokenizer = save_tokenizer
        self._stop = threading.Event()
        self._scratch = tempfile.TemporaryDirectory(prefix="parallm-env-", ignore_cleanup_errors=True)
        self._thread = threading.Thread(target=self._run, name="environment", daemon=True)

    def start(self) -> None:
        self._save_tokenizer(self._scratch.name)
        self._thread.start()

    def close(self) -> None:
        """Ends the process, if there is one; nothing starts it again."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2 * self.config.grace_seconds + 10)
        self._scratch.cleanup()

    def _run(self) -> None:
        delay = FIRST_WAIT
        while self._wait_until_ready():
            began = time.monotonic()
            code = self._live()
            if code is None:
                return
            if code == 0:
                log.info("the environment %s has finished its steps", self.config.command)
                return
            delay = FIRST_WAIT if time.monotonic() - began > LONGEST_WAIT else delay
            name = self.config.command
            output = self.config.log
            log.warning("the environment %s has ended with %d, see %s; again in %.0f s", name, code, output, delay)
            self._stop.wait(delay)
            delay = min(LONGEST_WAIT, 2 * delay)

    def _wait_until_ready(self) -> bool:
        """Waits until the server and the API answer; False: it is not to start any more."""
        for url in (f"{self.config.server_url}/health", f"{self.config.api_url}/status"):
            while not self._stop.is_set() and not _answers(url):
                self._stop.wait(LOOK_SECONDS)
        return not self._stop.is_set()

    def _live(self) -> int | None:
        """Runs the environment from its start to its end; returns its exit code, or None where it was to end."""
        config = self.config
        try:
            process = self._started()
        except OSError as error:
            log.error("the environment %s can't be started: %s", config.command, error)
            return -1
        self.starts = self.starts + 1
        self.pid = process.pid
        log.info("the environment %s runs as %d, with its output in %s", config.command, process.pid, config.log)
        try:
            while not self._stop.wait(LOOK_SECONDS):
                if (code := process.poll()) is not None:
                    return code
            return None
        finally:
            self._end(process)
            self.pid = None

    def _started(self) -> subprocess.Popen[bytes]:
        """Starts the environment in a session of its own, so that Ctrl-C is ours alone to hear."""
        config = self.config
        config.log.parent.mkdir(parents=True, exist_ok=True)
        with open(config.log, "ab", opener=_private) as output:
            process = subprocess.Popen(
                [sys.executable, "-c", CHILD, *config.arguments(self._scratch.name)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended already
            process.stdin.write(json.dumps([f"--openai.api_key={config.api_key or 'none'}"]).encode() + b"\n")
            process.stdin.flush()
        return process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Asks it and what it has started to end, and ends them if they do not."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is not None:
                break
            with contextlib.suppress(OSError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self.config.grace_seconds)
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0).status_code == 200
    except (httpx.HTTPError, OSError):
        return False


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
