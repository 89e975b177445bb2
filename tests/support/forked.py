"""Commands of ours as processes that are forked from one that has the libraries imported already.

`python -m mlx_parallm …` spends three of its first four seconds on imports, most of them transformers'. A forked
process runs the same command line with its own environment, output, exit code and signals, and starts at once. MLX
has no threads before its first use, so that a fork of what has only been imported is whole.
"""

import contextlib
import multiprocessing
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO

from mlx_parallm.models import kinds
from mlx_parallm.server import api

PYTHON = (sys.executable, "-m", "mlx_parallm")  # how the commands begin that can be forked
IMPORTED = (
    *("mlx_parallm.cli.main", "mlx_parallm.serve", "mlx_parallm.runtime.startup", "mlx_parallm.engine.start"),
    *("mlx_parallm.server.http.app", "mlx_parallm.integrated", "mlx_parallm.training.rl.task_loop"),
    "mlx_lm.models.llama",
    *(
        found.name
        for package in (api, kinds)
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    ),
)
CONTEXT = multiprocessing.get_context("forkserver")


class ForkedProcess:
    """A running command; what tests need of `subprocess.Popen`."""

    def __init__(
        self,
        command: Sequence[str],
        stdout: str = os.devnull,
        stderr: str = os.devnull,
        env: Mapping[str, str] | None = None,
    ) -> None:
        CONTEXT.set_forkserver_preload(list(IMPORTED))
        arguments = tuple(command[len(PYTHON) :])
        environment = dict(os.environ if env is None else env)
        self._process = CONTEXT.Process(target=_command, args=(arguments, stdout, stderr, environment, os.getcwd()))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("mlx_parallm", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def can_fork(command: Sequence[str]) -> bool:
    """Coverage measures commands that are started, and no forks: with it, tests start theirs."""
    return tuple(command[: len(PYTHON)]) == PYTHON and "COVERAGE_PROCESS_CONFIG" not in os.environ


def run(
    command: Sequence[str], timeout: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with `capture_output` and `text`, and nothing on standard input."""
    if not can_fork(command):
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, env=env, check=False
        )
    with tempfile.NamedTemporaryFile() as stdout, tempfile.NamedTemporaryFile() as stderr:
        process = ForkedProcess(command, stdout.name, stderr.name, env)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess(list(command), code, _text(stdout), _text(stderr))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _command(arguments: Sequence[str], stdout: str, stderr: str, environment: Mapping[str, str], folder: str) -> None:
    """In the new process."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in ((1, stdout), (2, stderr)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.argv = [PYTHON[-1], *arguments]
    from mlx_parallm.cli.main import main

    code = main(list(arguments))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    sys.exit(code)
