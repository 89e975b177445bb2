"""OpenAI's `/v1/responses`: responses as items, which the server keeps so that a request can continue another.

`items` and `tools` are what clients send, `conversation` makes messages of them for the chat template, `output` and
`writer` make items and events of the response, `store` keeps responses, `background` runs those that nobody waits for.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter

from mlx_parallm.paths import user_data
from mlx_parallm.server.api.responses.response_store import ResponseStore
from mlx_parallm.server.api.responses.response_types import (
    InputItemList,
    InputTokenCount,
    ResponseDeleted,
    ResponseObject,
)
from mlx_parallm.server.api.responses.routes import ResponseRoutes
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.http.error_shapes import OPENAI
from mlx_parallm.server.http.route_table import Route
from mlx_parallm.server.http.routing import router_of

SHAPE = replace(OPENAI, named_events=True)
STORED = "/v1/responses/{response_id}"
# What only reads, counts or cancels does not count in a key's limits.
stored = partial(Route, error_shape=SHAPE, counted=False, replicas="owner")
ROUTES = (
    Route(
        "/v1/responses",
        "POST",
        ResponseRoutes.create,
        ResponseObject,
        "Answer items with items",
        error_shape=SHAPE,
        replicas="creates",
        streams=True,
    ),
    Route(
        "/v1/responses/input_tokens",
        "POST",
        ResponseRoutes.count,
        InputTokenCount,
        "Count the tokens of an input",
        error_shape=SHAPE,
        counted=False,
    ),
    stored(STORED, "GET", ResponseRoutes.retrieve, ResponseObject, "A stored response"),
    stored(STORED, "DELETE", ResponseRoutes.delete, ResponseDeleted, "Remove a stored response"),
    stored(f"{STORED}/cancel", "POST", ResponseRoutes.cancel, ResponseObject, "Cancel a background response"),
    stored(f"{STORED}/input_items", "GET", ResponseRoutes.input_items, InputItemList, "What a response was given"),
)


def router(context: ServerContext) -> APIRouter:
    config = context.config.http
    folder = Path(config.responses_dir).expanduser() if config.responses_dir else user_data("responses")
    store = ResponseStore(folder, config.responses_max_bytes)

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        yield
        await store.close()

    return router_of("OpenAI Responses", ROUTES, ResponseRoutes(context.service, store), lifespan=lifespan)
