"""Starts one model over several real processes, as `mlx.launch` does: a rank and a file of hosts for each."""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.servers import ServerProcess, free_port


class RankGroup:
    """`server` is rank 0, `followers` the others."""

    def __init__(
        self, model: str | None, ranks: int, flags: Sequence[str] = (), fork: bool = True, threads: int | None = None
    ) -> None:
        """`threads`: of each rank's matrix products; None: as many as it takes."""
        limits = {} if threads is None else {"MKL_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
        self._hosts = tempfile.NamedTemporaryFile("w", suffix=".json")  # noqa: SIM115  (closed by `stop`)
        json.dump([[f"127.0.0.1:{free_port()}"] for _ in range(ranks)], self._hosts)
        self._hosts.flush()
        port = free_port()
        path = ["--model-path", model] if model else []
        command = [sys.executable, "-m", "mlx_parallm", "serve", "--port", str(port), "--log-level", "INFO"]
        self._servers = [
            ServerProcess(
                [*command, *path, *flags],
                port,
                "default",
                {"MLX_RANK": str(rank), "MLX_HOSTFILE": self._hosts.name, **limits},
                fork=fork,
            )
            for rank in range(ranks)
        ]

    @property
    def server(self) -> ServerProcess:
        return self._servers[0]

    @property
    def followers(self) -> list[ServerProcess]:
        return self._servers[1:]

    def log(self) -> str:
        return "\n".join(f"rank {rank}:\n{server.tail()}" for rank, server in enumerate(self._servers))

    def exit_codes(self, patience: float = 30.0) -> list[int | None]:
        """Of all ranks, once they have ended; None for one that has not by then."""
        deadline = time.monotonic() + patience
        for server in self._servers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.process.wait(max(0.1, deadline - time.monotonic()))
        return [server.process.poll() for server in self._servers]

    def stop(self) -> None:
        """Rank 0 ends in order, and the others with it; whoever does not is killed."""
        self.server.stop()
        for server in self.followers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.process.wait(10)
            server.process.kill()
        for server in self._servers:
            server.output.close()
            server.scratch.cleanup()
        self._hosts.close()


@contextlib.contextmanager
def running_group(
    model: Path | None, ranks: int, flags: Sequence[str] = (), patience: float = 120
) -> Iterator[RankGroup]:
    group = RankGroup(None if model is None else str(model), ranks, flags)
    try:
        try:
            group.server.wait_ready(patience)
        except Exception as error:
            raise RuntimeError(f"the group did not start:\n{group.log()}") from error
        yield group
    finally:
        group.stop()
