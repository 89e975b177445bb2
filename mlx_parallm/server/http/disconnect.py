"""Whether a client is still there."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from starlette.types import Receive

from mlx_parallm.server.http.http_errors import ClientLeft

T = TypeVar("T")


async def client_left(receive: Receive) -> None:
    """Returns when the client has disconnected. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        continue


@contextmanager
def when_left(receive: Receive, tell: Callable[[], None]) -> Iterator[None]:
    """Calls `tell` when the client disconnects before the block is over."""
    watcher = asyncio.ensure_future(client_left(receive))
    watcher.add_done_callback(lambda watcher: None if watcher.cancelled() else tell())
    try:
        yield
    finally:
        watcher.cancel()


async def unless_left(receive: Receive, work: Awaitable[T], seconds: float | None = None) -> T:
    """Awaits `work`. It is cancelled when the client disconnects, with ClientLeft, or is late, with TimeoutError."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(client_left(receive))
    try:
        await asyncio.wait((task, watcher), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return await task
        task.cancel()
        await asyncio.wait((task,))
        raise ClientLeft if watcher.done() else TimeoutError
    finally:
        watcher.cancel()
        task.cancel()
