"""OpenAI's `/v1/responses`: answers as items, which the server keeps so that a request can continue another.

`items` and `tools` are what clients send, `conversation` makes messages of them for the chat template, `output` and
`writer` make items and events of the answer, `store` keeps responses, `background` runs those that nobody waits for.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import APIRouter

from mlx_parallm.paths import user_cache
from mlx_parallm.server.api.responses.answers import InputItemList, InputTokenCount, ResponseAnswer, ResponseDeleted
from mlx_parallm.server.api.responses.routes import ResponseRoutes
from mlx_parallm.server.api.responses.store import ResponseStore
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.routing import JSONRoute, add_routes


def router(context: ServerContext) -> APIRouter:
    config = context.config.http
    folder = Path(config.responses_dir).expanduser() if config.responses_dir else user_cache() / "responses"
    store = ResponseStore(folder, config.responses_max_bytes)

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        yield
        await store.close()

    routes = APIRouter(route_class=JSONRoute, tags=["OpenAI Responses"], lifespan=lifespan)
    responses = ResponseRoutes(context.service, store)
    one = "/v1/responses/{response_id}"
    add_routes(
        routes, ("/v1/responses", "POST", responses.create, ResponseAnswer, "Answer items with items"), streams=True
    )
    add_routes(
        routes,
        ("/v1/responses/input_tokens", "POST", responses.count, InputTokenCount, "Count the tokens of an input"),
        (one, "GET", responses.retrieve, ResponseAnswer, "A stored response"),
        (one, "DELETE", responses.delete, ResponseDeleted, "Remove a stored response"),
        (f"{one}/cancel", "POST", responses.cancel, ResponseAnswer, "Cancel a background response"),
        (f"{one}/input_items", "GET", responses.input_items, InputItemList, "What a response was given"),
    )
    return routes
