"""What the server is doing as a whole, and the way from the engine thread to the event loop."""

import asyncio
from dataclasses import dataclass

from mlx_parallm.types import Delta, Request


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
        request.on_delta(delta)
