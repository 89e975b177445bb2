"""The dashboard's event stream: one snapshot a second, made once and sent to all viewers; none while nobody looks."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator

import orjson

from mlx_parallm.errors import QueueFullError
from mlx_parallm.server.dashboard.snapshot import Snapshots, points
from mlx_parallm.server.http.state import ServerState

log = logging.getLogger(__name__)

SECONDS = 1.0
MAX_VIEWERS = 32
HISTORY = 300  # snapshots whose points a new viewer gets


class LiveFeed:
    """Event loop only."""

    def __init__(self, snapshots: Snapshots, state: ServerState) -> None:
        self._snapshots = snapshots
        self._state = state
        self._viewers: set[asyncio.Queue[bytes]] = set()
        self._history: deque[dict[str, object]] = deque(maxlen=HISTORY)
        self._latest: bytes | None = None
        self._task: asyncio.Task[None] | None = None

    def check_room(self) -> None:
        if len(self._viewers) >= MAX_VIEWERS:
            raise QueueFullError(f"{MAX_VIEWERS} dashboards are open: close one first", retry_after=5)

    async def events(self) -> AsyncIterator[bytes]:
        """The charts' past, then a snapshot a second, until the viewer leaves or the server shuts down."""
        waiting: asyncio.Queue[bytes] = asyncio.Queue(maxsize=1)
        self._viewers.add(waiting)
        if self._task is None or self._task.done():
            self._tick()
            self._task = asyncio.ensure_future(self._run())
        elif self._latest is not None:
            waiting.put_nowait(self._latest)
        try:
            yield b"retry: 2000\nevent: history\ndata: " + orjson.dumps(list(self._history)) + b"\n\n"
            while not self._state.draining:
                yield await waiting.get()
        finally:
            self._viewers.discard(waiting)

    async def _run(self) -> None:
        while self._viewers:
            await asyncio.sleep(SECONDS)
            try:
                self._tick()
            except Exception:  # one that can't be made must not end those that follow
                log.exception("the dashboard's snapshot has failed")

    def _tick(self) -> None:
        snapshot = self._snapshots.take()
        self._history.append(points(snapshot))
        snapshot["viewers"] = len(self._viewers)
        self._latest = b"event: snapshot\ndata: " + orjson.dumps(snapshot) + b"\n\n"
        for waiting in self._viewers:
            if waiting.full():  # a slow viewer gets the newest, not all
                waiting.get_nowait()
            waiting.put_nowait(self._latest)
