"""`serve_replicas(config)`: the process behind `--replicas` and `--share-model`: the front, and Ray with the replicas.

The address is taken first and served when all replicas are ready. The first SIGTERM or SIGINT stops admission (503) and
waits for running requests, then ends replicas and Ray; a second ends the process there and then.
"""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import aiohttp
import uvicorn

from mlx_parallm.cluster.replicas.deployment import RayCluster, join
from mlx_parallm.cluster.replicas.front import Front
from mlx_parallm.cluster.replicas.front_routes import FrontRoutes
from mlx_parallm.cluster.replicas.joining import JoinRoute, RayAddress, ray_token
from mlx_parallm.cluster.replicas.links import new_secret
from mlx_parallm.cluster.replicas.members import Members
from mlx_parallm.cluster.replicas.scaling import Scaling
from mlx_parallm.config import ServeConfig
from mlx_parallm.errors import ModelLoadError
from mlx_parallm.platforms import raise_open_files
from mlx_parallm.progress import say
from mlx_parallm.server.auth.access import check_access
from mlx_parallm.server.http import logs
from mlx_parallm.server.http.http_protocol import uvicorn_config
from mlx_parallm.server.http.server_process import LAST_BYTES_SECONDS, StopSignals
from mlx_parallm.server.http.sockets import listen

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0


def serve_replicas(config: ServeConfig) -> int:
    """Serves until a signal; returns the exit code."""
    logs.set_up(config.http)
    if config.cluster.connect_to is not None:
        return join(config)
    check_access(config)
    raise_open_files()
    config.named_adapters()  # wrong ones are errors before any load
    listener = listen(config.http.host, config.http.port)
    cluster = RayCluster(config)
    say(f"  starting Ray and {config.cluster.replicas} replicas ...")
    cluster.open()
    logs.set_up(config.http)  # Ray has a way of its own
    try:
        server = FrontServer(config, listener, cluster)
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            return runner.run(server.run_in_loop())
    finally:
        cluster.stop()


class InnerServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class FrontServer(InnerServer):
    def __init__(self, config: ServeConfig, listener: socket.socket, cluster: RayCluster) -> None:
        self._settings = config
        self._listener = listener
        self._cluster = cluster
        self._secret = new_secret()
        self._shutdown: asyncio.Task[None] | None = None
        self._signals = StopSignals()
        self._members = Members(self._secret, config.cluster.replicas, self._session)
        self._front = Front(self._members, config, self._secret)
        if cluster.shared:
            found = RayAddress.here(cluster.address, ray_token())
            self._front.join_route = JoinRoute(config, self._front.access, found)
        paths = (config.http.tls_cert, config.http.tls_key)
        cert, key = (None if path is None else str(Path(path).expanduser()) for path in paths)
        super().__init__(
            uvicorn_config(
                self._front,
                lifespan="off",
                timeout_graceful_shutdown=LAST_BYTES_SECONDS,
                ssl_certfile=cert,
                ssl_keyfile=key,
            )
        )

    def _session(self) -> aiohttp.ClientSession:
        assert self._front.session is not None
        return self._front.session

    async def run_in_loop(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        await self._front.open()
        failed: list[str] = []
        routes = FrontRoutes(self._members, self._secret, failed.append)
        inner_listener = socket.create_server((self._cluster.host, 0))
        inner = InnerServer(uvicorn_config(routes, lifespan="off", timeout_graceful_shutdown=LAST_BYTES_SECONDS))
        inner_task = asyncio.ensure_future(inner.serve(sockets=[inner_listener]))
        url = f"http://{self._cluster.host}:{inner_listener.getsockname()[1]}"
        watch = asyncio.ensure_future(self._watch(url))
        try:
            if await self._all_ready(failed):
                self._say_ready(routes.lines)
                await self.serve(sockets=[self._listener])
            return 0
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch
            await asyncio.to_thread(self._cluster.stop)
            inner.should_exit = True
            await inner_task
            await self._front.close()

    async def _all_ready(self, failed: list[str]) -> bool:
        """False: a signal came before."""
        ready = asyncio.ensure_future(self._members.wait_for(self._members.expected))
        try:
            while not ready.done():
                await asyncio.wait({ready}, timeout=0.2)
                if failed:
                    raise ModelLoadError(failed[0])
                if self._shutdown is not None:
                    return False
        finally:
            ready.cancel()
        return True

    def _say_ready(self, lines: list[str]) -> None:
        host, port = self._listener.getsockname()[:2]
        scheme = "http" if self._settings.http.tls_cert is None else "https"
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        kept = [line for line in lines if not line.startswith("  URL")]
        kept.append(f"  {'replicas':<10} {self._members.expected}, each with an engine of its own")
        if self._cluster.shared:
            kept.append(f"  {'to join':<10} {self._join_command(scheme, port)}")
        say("\n".join([*kept, f"  {'URL':<10} {url}  (described at {url}/docs)"]))

    def _join_command(self, scheme: str, port: int) -> str:
        """Returns what to type on another machine. Ray's token is shown only where the front tells it to nobody."""
        route = self._front.join_route
        if not isinstance(route, JoinRoute) or route.is_open:
            return f"RAY_AUTH_TOKEN={ray_token()} mlx_parallm_serve --connect-to {self._cluster.address}"
        address = f"{self._cluster.address.rpartition(':')[0]}:{port}"
        key = " --admin-key KEY" if self._front.access.ring.guards("admin") else ""
        return f"mlx_parallm_serve --connect-to {'https://' if scheme == 'https' else ''}{address}{key}"

    async def _watch(self, url: str) -> None:
        """Starts replicas, and others as machines come and go; parts with those that say nothing."""
        settings = self._settings.cluster
        scaling = Scaling(
            settings.replicas, settings.most, self._settings.batch.max_batch_size, settings.scale_down_seconds
        )
        await asyncio.to_thread(self._cluster.deploy, self._members.expected, url, self._secret)
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self._members.remove_silent()
            before = self._members.expected
            if not self._members.ready:
                continue
            if self._cluster.shared:
                wanted = await asyncio.to_thread(self._cluster.places) or before
            else:
                wanted = scaling.wanted(self._front.in_flight, before, time.monotonic())
            if wanted != before:
                log.info("%d replicas serve from now on, after %d", wanted, before)
                self._members.expected = wanted
                await asyncio.to_thread(self._cluster.deploy, wanted, url, self._secret)

    def _on_signal(self, number: int) -> None:
        if self._signals.ends_at_once():
            log.warning("a second signal: ending at once")
            os._exit(128 + number)
        if self._shutdown is not None:
            return
        patience = self._settings.http.drain_timeout_seconds
        log.info("%s: no new requests; running ones have %gs", signal.Signals(number).name, patience)
        self._front.draining = True
        self._shutdown = asyncio.ensure_future(self._drain(patience))

    async def _drain(self, patience: float) -> None:
        try:
            if self._front.in_flight:
                await asyncio.wait_for(self._front.idle.wait(), patience)
        except TimeoutError:
            log.warning("requests that still ran after %gs are cut off", patience)
        self.should_exit = True
