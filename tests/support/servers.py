"""Starts and stops real server processes, for tests and benchmarks.

They run as `python -m …`, so that a checkout on PYTHONPATH is enough; those of tests are forked from a process that
has its imports done. A server's output goes to a file that is shown when it fails to start.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from mlx_parallm.errors import UnavailableError
from mlx_parallm.http_client import Endpoint, WireError, send, tls_context
from tests.support import forked, log_check


class ServerProcess:
    """A server on a port of its own. `model` is the name to ask it for. `fork`: see `forked.py`. `ca`: it serves https,
    with a certificate that this file vouches for."""

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        model: str,
        environment: dict[str, str] | None = None,
        fork: bool = False,
        ca: Path | None = None,
    ) -> None:
        self.scratch = tempfile.TemporaryDirectory(prefix="parallm-", ignore_cleanup_errors=True)
        self.command = command
        self.url = f"{'http' if ca is None else 'https'}://127.0.0.1:{port}"
        self.tls = None if ca is None else tls_context(str(ca))
        self.model = model
        self.output: IO[bytes] = tempfile.NamedTemporaryFile()  # noqa: SIM115  (closed by `running`)
        # An SSD cache of its own: no server meets what another has left, unless a flag says so.
        env = os.environ | {"PARALLM_SSD_CACHE_DIR": f"{self.scratch.name}/kv"} | (environment or {})
        self.process: subprocess.Popen[bytes] | forked.ForkedProcess
        if fork and forked.can_fork(command):
            self.process = forked.ForkedProcess(command, self.output.name, self.output.name, env)
        else:
            self.process = subprocess.Popen(command, stdout=self.output, stderr=subprocess.STDOUT, env=env)

    def wait_ready(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise UnavailableError(f"the server ended with {self.process.returncode}:\n{self.tail()}")
            if self._healthy():
                return
            time.sleep(0.05)
        raise UnavailableError(f"the server did not answer within {patience:g} s:\n{self.tail()}")

    def _healthy(self) -> bool:
        try:
            answer = asyncio.run(send(Endpoint.parse(self.url, tls=self.tls), "/health", limit=5))
        except WireError:
            return False
        return answer.status == 200

    def tail(self) -> str:
        self.output.seek(0)
        return self.output.read()[-4000:].decode(errors="replace")

    def log(self) -> str:
        """All that it has written so far."""
        self.output.seek(0)
        return self.output.read().decode(errors="replace")

    def memory(self) -> int:
        """Bytes of memory that the process holds."""
        if Path("/proc/self/status").exists():
            lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
            return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
        answer = subprocess.run(["ps", "-o", "rss=", "-p", str(self.process.pid)], capture_output=True, check=True)
        return 1024 * int(answer.stdout)

    def stop(self) -> int:
        """Asks it to end, and ends it if it does not; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(server: ServerProcess, patience: float = 300) -> Iterator[ServerProcess]:
    try:
        server.wait_ready(patience)
        yield server
    finally:
        server.stop()
        if log_check.active is not None:
            log_check.active.keep(server.command, server.log())
        server.output.close()
        server.scratch.cleanup()


def ours(
    model: str | None,
    flags: Sequence[str] = (),
    port: int | None = None,
    fork: bool = True,
    ca: Path | None = None,
    environment: dict[str, str] | None = None,
) -> ServerProcess:
    port = port or free_port()
    path = ["--model-path", model] if model else []
    command = [
        sys.executable,
        "-m",
        "mlx_parallm",
        "serve",
        "--port",
        str(port),
        "--log-level",
        "WARNING" if log_check.active is None else "DEBUG",
        *path,
        *flags,
    ]
    return ServerProcess(command, port, "default", environment, fork=fork, ca=ca)
