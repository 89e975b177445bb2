"""A request waits for a model that is being loaded: no longer than it may, and not when its client has left."""

import asyncio

from starlette.requests import Request

from mlx_parallm.errors import RequestTimeoutError
from mlx_parallm.runtime.client import PoolClient
from mlx_parallm.server.http.disconnect import unless_left


async def acquire(pool: PoolClient, name: str, request: Request, seconds: float | None) -> int:
    """Holds a model for a request; give what it returns to `release` when the request is answered."""
    held = pool.acquire(name)
    if held.done():
        return held.result()
    loaded = asyncio.wrap_future(held)
    try:
        return await unless_left(request.receive, loaded, seconds)
    except TimeoutError as error:
        if not loaded.cancelled():  # loading it has failed so
            raise
        message = f"{name!r} is still being loaded after {seconds:g} seconds; try again later"
        raise RequestTimeoutError(message) from error
    finally:
        if loaded.cancelled() and not held.cancel() and held.exception() is None:  # it came at the last moment
            pool.release(held.result())
