"""The servers that the benchmarks measure: ours, and `mlx_lm.server` with the same BLAS."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from mlx_parallm.bench.load_test import first_model
from mlx_parallm.errors import ParallmError
from mlx_parallm.http_client import Endpoint

sys.path.append(
    str(Path(__file__).parents[1])
)  # scripts are started by path; what they share with tests is beside them
from tests.support import servers
from tests.support.servers import ServerProcess, free_port, running

__all__ = ["ServerProcess", "blas_environment", "free_port", "mlx_lm", "ours", "running", "script", "server_at"]


def script(main: Callable[[], int]) -> NoReturn:
    """Runs a benchmark. SIGTERM unwinds the stack as Ctrl-C does, so that no server is left behind."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        sys.exit(main())
    except ParallmError as error:
        sys.exit(str(error))


def ours(
    model: str | None, flags: Sequence[str] = (), port: int | None = None, tree: Path | None = None
) -> ServerProcess:
    """A process that is started as a user would. `tree`: from another checkout than this one."""
    environment = None
    if tree is not None:  # the safe path keeps the current folder from coming first
        environment = {"PYTHONPATH": os.pathsep.join((str(tree.resolve()), *python_path())), "PYTHONSAFEPATH": "1"}
    return servers.ours(model, flags, port, fork=False, environment=environment)


def python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def mlx_lm(model: str, flags: Sequence[str] = (), port: int | None = None) -> ServerProcess:
    port = port or free_port()
    command = [
        sys.executable,
        "-m",
        "mlx_lm",
        "server",
        "--model",
        model,
        "--port",
        str(port),
        "--log-level",
        "WARNING",
    ]
    return ServerProcess([*command, *flags], port, "default_model", blas_environment())


def blas_environment() -> dict[str, str]:
    """What gives another MLX program the BLAS that we load; nothing where MLX keeps its own."""
    answer = subprocess.run([sys.executable, "-m", "mlx_parallm.blas"], capture_output=True, text=True)
    return {"LD_PRELOAD": answer.stdout.strip()} if answer.returncode == 0 else {}


@contextlib.contextmanager
def server_at(
    url: str | None, model: str | None, flags: Sequence[str] = ()
) -> Iterator[tuple[str, str, ServerProcess | None]]:
    """URL and model name of the server at `url`, or of one of ours that is started for the while."""
    if url is not None:
        yield url, asyncio.run(first_model(Endpoint.parse(url))), None
        return
    with running(ours(model, flags)) as server:
        yield server.url, server.model, server
