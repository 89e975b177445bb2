"""What the server is doing as a whole, and the way from the engine thread to the event loop."""

import asyncio
import logging
from dataclasses import dataclass, field

from mlx_parallm.errors import ParallmError
from mlx_parallm.server.recent_requests import RecentRequests
from mlx_parallm.types import Delta, OnDelta

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ServerState:
    draining: bool = False
    recent: RecentRequests = field(default_factory=RecentRequests)


class Dispatcher:
    """Takes each step's events from an engine thread to the event loop, in one call however many rows there are."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __call__(self, events: list[tuple[OnDelta, Delta]]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_deliver, events)


def _deliver(events: list[tuple[OnDelta, Delta]]) -> None:
    for on_delta, delta in events:
        try:
            on_delta(delta)
        except Exception:  # whatever is wrong with one request, the others must get their deltas
            log.exception("a delta of %s can't be delivered", delta.request_id)
            _give_up(on_delta, delta)


def _give_up(on_delta: OnDelta, delta: Delta) -> None:
    error = ParallmError("the server has failed at this request; its log says why")
    try:
        on_delta(Delta(delta.request_id, delta.index, finish_reason="error", error=error))
    except Exception:
        log.exception("nor can its failure")
