"""Whether a client is still there."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from mlx_parallm.server.http.http_errors import ClientLeft

T = TypeVar("T")


async def client_left(receive: Receive) -> None:
    """Returns when the client has disconnected. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        continue


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`, which is cancelled, with ClientLeft, when the client disconnects."""
    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(client_left(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return await task
    finally:
        watcher.cancel()
        task.cancel()
