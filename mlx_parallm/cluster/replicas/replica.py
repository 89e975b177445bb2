"""One replica: an engine and the whole HTTP application in this process, on a port of its own that the front speaks to.

`deployment.EngineReplica` starts one in a process of Ray's. It comes up as any server does, gets from the front the
state that the others have, and serves when it has it. What it is asked for goes the usual way through the application;
the secret of the links is asked for before that.
"""

import asyncio
import gc
import logging
import os
import socket
import sys
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_parallm.cluster.replicas.affinity import CAPACITY
from mlx_parallm.cluster.replicas.changes import Change, decode
from mlx_parallm.cluster.replicas.links import (
    OWN_PATHS,
    PREFIX_HEADER,
    REPORT_SECONDS,
    knows_secret,
    login_secret,
    pack_hashes,
    read_error,
    secret_headers,
    unpack_hashes,
    write_error,
)
from mlx_parallm.cluster.replicas.local_state import LocalState
from mlx_parallm.cluster.replicas.replicated import ReplicatedRuntime
from mlx_parallm.config import ServeConfig
from mlx_parallm.errors import ParallmError, PermissionDeniedError, UnavailableError
from mlx_parallm.models.memory import memory_limit
from mlx_parallm.platforms import raise_open_files
from mlx_parallm.runtime.startup import Runtime, start
from mlx_parallm.server.banner import ready_lines
from mlx_parallm.server.http import logs
from mlx_parallm.server.http.app import create_app
from mlx_parallm.server.http.http_errors import error_response
from mlx_parallm.server.http.http_protocol import uvicorn_config
from mlx_parallm.server.http.server_process import SWITCH_INTERVAL
from mlx_parallm.server.http.state import Dispatcher, ServerState

log = logging.getLogger(__name__)

ANSWERED_SECONDS = 30.0  # for the front to answer what is not a change


class FrontLink:
    """What a replica says to the front. On any thread but the event loop's."""

    def __init__(self, url: str, secret: str, name: str) -> None:
        self.name = name
        self._client = httpx.Client(base_url=url, headers=secret_headers(secret), timeout=ANSWERED_SECONDS)

    def propose(self, change: Change) -> Change:
        try:
            response = self._client.post("/propose", content=change.encode(), timeout=None)
        except httpx.HTTPError as error:
            raise UnavailableError(f"the change could not be handed to the front: {error}") from error
        if response.status_code != 200:
            raise read_error(response.content)
        return next(decode(response.content))

    def join(self, fields: dict[str, object]) -> tuple[list[Change], int] | None:
        """Returns what has to be made before it serves, and the position that it then has; None: it has to start
        anew."""
        response = self._client.post("/join", json={"name": self.name, **fields}, timeout=600)
        if response.status_code == 409:
            return None
        response.raise_for_status()
        return list(decode(response.content)), int(response.headers["x-parallm-position"])

    def say(self, what: str, **fields: object) -> dict[str, Any]:
        response = self._client.post(f"/{what}", json={"name": self.name, **fields})
        response.raise_for_status()
        found: dict[str, Any] = response.json()
        return found


class HeldPrompts:
    """The hashes of prompts that this replica has answered, the longest unused first, and forgotten first."""

    def __init__(self) -> None:
        self._hashes: OrderedDict[int, None] = OrderedDict()
        self._new: list[int] = []

    def add(self, hashes: list[int]) -> None:
        for hash_ in reversed(hashes):
            self._hashes[hash_] = None
            self._hashes.move_to_end(hash_)
        while len(self._hashes) > CAPACITY:
            self._hashes.popitem(last=False)
        self._new = [*self._new, *reversed(hashes)][-CAPACITY:]

    def all(self) -> list[int]:
        self._new = []
        return list(self._hashes)

    def new(self) -> list[int]:
        found = self._new
        self._new = []
        return found

    def clear(self) -> None:
        self._hashes.clear()
        self._new = []


class Gate:
    """The application behind the secret, beside the front's own routes."""

    def __init__(self, app: ASGIApp, secret: str, replica: "Replica") -> None:
        self.app = app
        self._secret = secret
        self._replica = replica
        self.in_flight = 0
        # Not the loop's own, which may be full of calls that wait for this very change.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="changes")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if not knows_secret(scope["headers"], self._secret):
            error = PermissionDeniedError("this port is for the server's own front: ask that")
            await error_response(error)(scope, receive, send)
            return
        if scope["path"].startswith(OWN_PATHS):
            await self._own(scope, receive, send)
            return
        for name, value in scope["headers"]:
            if name == PREFIX_HEADER:
                self._replica.held.add(unpack_hashes(value.decode()))
        self.in_flight += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.in_flight -= 1

    async def _own(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`check` and `apply`."""
        headers = dict(scope["headers"])
        body = bytearray()
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        what = scope["path"].removeprefix(OWN_PATHS)
        position = int(headers.get(b"x-parallm-position", b"0"))
        work = partial(self._replica.handle, what, bytes(body), position)
        status, content = await asyncio.get_running_loop().run_in_executor(self._threads, work)
        start: Any = {"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]}
        await send(start)
        await send({"type": "http.response.body", "body": content})


class Replica:
    def __init__(self, config: ServeConfig, front: FrontLink, secret: str, host: str, sharing: int) -> None:
        """`sharing`: replicas that share this machine's memory."""
        self.held = HeldPrompts()
        self.failure: str | None = None
        self._config = config
        self._front = front
        self._secret = secret
        self._host = host
        self._sharing = sharing
        self._position = 0
        self._checked: Change | None = None
        self._draining = ServerState()
        self._stopping = threading.Event()
        self._runtime: Runtime | None = None
        self._server: uvicorn.Server | None = None
        self._gate: Gate | None = None
        self._url = ""

    @property
    def in_flight(self) -> int:
        return 0 if self._gate is None else self._gate.in_flight

    def start(self) -> None:
        """Returns when it serves. What is wrong with the config ends all replicas: the front is told."""
        try:
            self._start()
        except ParallmError as error:
            self._front.say("failed", message=error.message, fatal=True)
            raise
        threading.Thread(target=self._report, name="report", daemon=True).start()

    def _start(self) -> None:
        config = self._config
        logs.set_up(config.http, helper=True)
        raise_open_files()
        if self._sharing > 1:
            config = config.but(memory_limit=memory_limit(config) // self._sharing)
        dispatcher = Dispatcher()
        self._runtime = runtime = start(config, dispatcher)
        runtime.pool.on_failure = self._on_failure
        seen = ReplicatedRuntime(runtime, self._front.propose)
        app = create_app(seen, config, dispatcher, self._draining, login_secret(self._secret))
        self._gate = Gate(app, self._secret, self)
        self._listen(self._gate)
        gc.collect()
        gc.freeze()
        sys.setswitchinterval(SWITCH_INTERVAL)
        self._join()

    def _listen(self, app: ASGIApp) -> None:
        listener = socket.create_server((self._host, 0))
        self._url = f"http://{self._host}:{listener.getsockname()[1]}"
        settings = uvicorn_config(app, timeout_keep_alive=3600)
        self._server = server = uvicorn.Server(settings)

        def serve() -> None:
            with asyncio.Runner(loop_factory=settings.get_loop_factory()) as runner:
                runner.run(server.serve(sockets=[listener]))

        threading.Thread(target=serve, name="http", daemon=True).start()
        while not server.started:
            time.sleep(0.01)

    def _join(self) -> None:
        assert self._runtime is not None
        state = LocalState(self._runtime)
        lines = ready_lines(self._runtime, self._config, "")
        fields: dict[str, object] = {"url": self._url, "pid": os.getpid(), "node": socket.gethostname()}
        for _ in range(20):
            found = self._front.join({**fields, "position": self._position, "lines": lines})
            if found is None:
                break
            changes, position = found
            for change in changes:
                state.apply(change, starting=True)
            self._position = position
            if self._front.say("ready", position=position, hashes=pack_hashes(self.held.all()))["ready"]:
                return
        self._start_anew("it lacks changes that the other replicas have made")

    def handle(self, what: str, body: bytes, position: int) -> tuple[int, bytes]:
        """The front asks to check or to make a change."""
        assert self._runtime is not None
        state = LocalState(self._runtime)
        try:
            for change in decode(body):
                if what == "check":
                    state.check(change)
                    self._checked = change
                elif what == "apply":
                    state.apply(self._with_data(change))
                    self._position = position
                    if change.kind == "flush_cache":
                        self.held.clear()
        except ParallmError as error:
            return 400, write_error(error)
        except Exception as error:
            log.exception("a change can't be made")
            return 500, write_error(ParallmError(f"{type(error).__name__}: {error}"))
        return 200, b""

    def _with_data(self, change: Change) -> Change:
        """Weights came when they were checked."""
        checked = self._checked
        self._checked = None
        if change.kind != "publish" or change.data:
            return change
        keys = [None if one is None else (one.model, one.name, one.number) for one in (checked, change)]
        if checked is None or keys[0] != keys[1]:
            raise UnavailableError("the weights were not checked here")
        return checked

    def check_health(self) -> None:
        if self.failure is not None:
            raise UnavailableError(self.failure)
        if self._server is not None and self._server.should_exit:
            raise UnavailableError("its HTTP server has ended")

    def stop(self) -> None:
        """Takes no new requests, waits for those that run, and ends the engines."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        try:
            self._front.say("leave")
        except httpx.HTTPError:
            log.info("the front has gone already")
        deadline = time.monotonic() + self._config.http.drain_timeout_seconds
        while self.in_flight and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._runtime is not None:
            self._runtime.close()
        if self._server is not None:
            self._server.should_exit = True

    def _report(self) -> None:
        """Tells the front every second that it is there, and what it holds; joins again where the front has lost it."""
        silent = 0.0
        while not self._stopping.wait(REPORT_SECONDS):
            try:
                if not self._front.say("report", hashes=pack_hashes(self.held.new()))["known"] and not self.failure:
                    self._join()
                silent = 0.0
            except ParallmError as error:
                self._start_anew(error.message)
            except httpx.HTTPError:
                silent += REPORT_SECONDS
                if silent > 60:
                    self._start_anew("the front has not answered for a minute")

    def _on_failure(self, reason: str) -> None:
        """Tells the front that the engine has failed; on the engine's thread. Ray's next health check ends this process
        and starts another."""
        self.failure = reason
        try:
            self._front.say("failed", message=reason, fatal=False)
        except httpx.HTTPError:
            log.critical("the engine has failed for good: %s", reason)

    def _start_anew(self, reason: str) -> None:
        log.critical("this replica ends, for Ray to start another: %s", reason)
        os._exit(1)
