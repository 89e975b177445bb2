"""Whether a client is still there."""

from starlette.types import Receive


async def client_left(receive: Receive) -> None:
    """Returns when the client has disconnected. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        continue
