"""What the server is doing as a whole, and the way from the engine thread to the event loop."""

import asyncio
import logging
from dataclasses import dataclass

from mlx_parallm.errors import ParallmError
from mlx_parallm.types import Delta, Request

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ServerState:
    draining: bool = False


class Dispatcher:
    """Takes each step's news from an engine thread to the event loop, in one call however many rows there are."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __call__(self, news: list[tuple[Request, Delta]]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_deliver, news)


def _deliver(news: list[tuple[Request, Delta]]) -> None:
    for request, delta in news:
        try:
            request.on_delta(delta)
        except Exception:  # whatever is wrong with one, the others must hear theirs
            log.exception("%s can't be told its news", request.id)
            _give_up(request, delta)


def _give_up(request: Request, delta: Delta) -> None:
    error = ParallmError("the server has failed at this request; its log says why")
    try:
        request.on_delta(Delta(request.id, delta.index, finish_reason="error", error=error))
    except Exception:
        log.exception("nor that it has failed")
