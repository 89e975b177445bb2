"""A request waits for a model that is being loaded: no longer than it may, and not when its client has left."""

import asyncio

from starlette.requests import Request

from mlx_parallm.errors import RequestTimeoutError
from mlx_parallm.runtime.client import PoolClient
from mlx_parallm.server.http.disconnect import client_left
from mlx_parallm.server.http.http_errors import ClientLeft


async def acquire(pool: PoolClient, name: str, request: Request, seconds: float | None) -> int:
    """Holds a model for a request; give what it returns to `release` when the request is answered."""
    held = pool.acquire(name)
    if held.done():
        return held.result()
    loaded, watcher = asyncio.wrap_future(held), asyncio.ensure_future(client_left(request.receive))
    try:
        await asyncio.wait((loaded, watcher), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if loaded.done():
            return await loaded
        if watcher.done():
            raise ClientLeft
        raise RequestTimeoutError(f"{name!r} is still being loaded after {seconds:g} seconds; try again later")
    finally:
        watcher.cancel()
        if not loaded.done():
            loaded.cancel()
            if not held.cancel() and held.exception() is None:  # it came at the last moment
                pool.release(held.result())
