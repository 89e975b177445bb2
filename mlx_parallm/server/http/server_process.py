"""The HTTP server's process: a socket, an event loop, and a shutdown in order. `serve` and `integrated` run it.

The first SIGTERM or SIGINT stops admission (503) and waits for running requests; another, more than a second later,
ends the process there and then. SIGHUP has the keys file read and the audit log opened anew, where there is one.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from mlx_parallm.config import ServeConfig
from mlx_parallm.errors import ParallmError, UnavailableError
from mlx_parallm.progress import say
from mlx_parallm.runtime.client import RuntimeClient
from mlx_parallm.server.banner import ready_lines
from mlx_parallm.server.http.app import create_app
from mlx_parallm.server.http.http_protocol import uvicorn_config
from mlx_parallm.server.http.state import Dispatcher, ServerState

log = logging.getLogger(__name__)

Companion = Callable[[], int | None]

# The engine thread builds its graphs in Python: it must not wait 5 ms for another thread to give way.
SWITCH_INTERVAL = 0.0005
SAME_SIGNAL_SECONDS = 1.0  # within which several signals are one
LAST_BYTES_SECONDS = 5  # for responses to be written out once the engines have stopped


class StopSignals:
    """Tells a second signal, which ends the process at once, from the same one that came twice: a process group's comes
    from the terminal, the shell and the supervisor alike."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: float | None = None

    def ends_at_once(self) -> bool:
        """Returns whether a signal that has come ends the process at once; to be called for each that comes."""
        now = self._clock()
        if self._first is None:
            self._first = now
        return now - self._first > SAME_SIGNAL_SECONDS


class HttpServer(uvicorn.Server):
    """uvicorn with our signals, and the engines that stop with it."""

    def __init__(
        self,
        runtime: RuntimeClient,
        config: ServeConfig,
        dispatcher: Dispatcher,
        listener: socket.socket,
        companion: Companion | None = None,
        linger: float = 0.0,
    ) -> None:
        """`linger`: seconds for which /health says why an engine has failed, before the process ends."""
        self._linger = linger
        self._runtime = runtime
        self._companion = companion
        self._work: asyncio.Task[None] | None = None
        self._settings = config
        self._listener = listener
        self._state = ServerState()
        self._exit_code = 0
        self._shutdown: asyncio.Task[None] | None = None
        self._signals = StopSignals()
        self._app = create_app(runtime, config, dispatcher, self._state)
        cert, key = (None if path is None else str(Path(path).expanduser()) for path in self._certificate)
        super().__init__(
            uvicorn_config(self._app, timeout_graceful_shutdown=LAST_BYTES_SECONDS, ssl_certfile=cert, ssl_keyfile=key)
        )

    @property
    def _certificate(self) -> tuple[str | None, str | None]:
        return self._settings.http.tls_cert, self._settings.http.tls_key

    def run_until_stopped(self) -> int:
        with asyncio.Runner(loop_factory=self.config.get_loop_factory()) as runner:
            return runner.run(self.run_in_loop())

    async def stop(self) -> None:
        """The same as a signal, from the event loop."""
        self._end()
        assert self._shutdown is not None
        await self._shutdown

    async def run_in_loop(self) -> int:
        """Serves in the running event loop; returns the exit code."""
        sys.setswitchinterval(SWITCH_INTERVAL)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        if self._settings.http.keys_file is not None or self._settings.http.audit_log is not None:
            loop.add_signal_handler(signal.SIGHUP, self._app.state.access.reload)

        def on_failure(reason: str) -> None:  # on the engine thread
            loop.call_soon_threadsafe(self._on_failure, reason)

        self._runtime.pool.on_failure = on_failure
        await self.serve(sockets=[self._listener])
        return self._exit_code

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # uvicorn's own handlers would end the process before the engines are drained

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = self._listener.getsockname()[:2]
        scheme = "http" if self._certificate == (None, None) else "https"
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        say("\n".join(ready_lines(self._runtime, self._settings, url)))
        if self._companion is not None:
            self._work = asyncio.ensure_future(self._accompany(self._companion))

    async def _accompany(self, companion: Companion) -> None:
        """Runs what works beside the server; its end, or its failure, ends the server."""
        try:
            code = await asyncio.to_thread(companion)
            if code is not None:
                self._exit_code = code
                self._end()
        except UnavailableError:
            log.info("training ends with the server")
        except ParallmError as error:
            log.critical("training can't go on: %s", error.message)
            self._exit_code = 1
            self._end()
        except Exception:
            log.exception("training has failed")
            self._exit_code = 1
            self._end()

    def _end(self) -> None:
        if self._shutdown is None:
            self._on_signal(signal.SIGTERM)

    def _on_signal(self, number: int) -> None:
        if self._signals.ends_at_once():
            log.warning("a second signal: ending at once")
            os._exit(128 + number)
        if self._shutdown is not None:
            return
        log.info("%s: no new requests; running ones have %gs", signal.Signals(number).name, self._patience)
        self._state.draining = True
        self._shutdown = asyncio.ensure_future(self._drain())

    @property
    def _patience(self) -> float:
        return self._settings.http.drain_timeout_seconds

    async def _drain(self) -> None:
        if self._work is not None and not self._work.done():  # a loop ends its step, and keeps what it has learnt
            self._runtime.training.stop_loops()
            await asyncio.wait([self._work], timeout=self._patience)
        models = [model for model in self._runtime.models.values() if model.failure is None]
        waits = [model.drain for model in models] + [self._runtime.pool.drain]  # the pool's: those that predict too
        drained = await asyncio.gather(*(asyncio.to_thread(wait, self._patience) for wait in waits))
        if not all(drained):
            log.warning("requests that still ran after %gs are cut off", self._patience)
        await asyncio.to_thread(self._runtime.training.close)
        await asyncio.to_thread(self._runtime.pool.stop)
        if self._work is not None:
            await asyncio.wait([self._work], timeout=LAST_BYTES_SECONDS)
        self.should_exit = True

    def _on_failure(self, reason: str) -> None:
        if not self._settings.http.exit_on_engine_failure:
            log.critical("the engine has failed for good; /health answers 503 from now on: %s", reason)
        else:
            log.critical("the engine has failed for good, and the server ends with status 1: %s", reason)
            self._exit_code = 1
            asyncio.get_running_loop().call_later(self._linger, self._exit_now)

    def _exit_now(self) -> None:
        self.should_exit = True
