"""Routes that read their JSON body strictly and fast: no NaN, no Infinity. Every router uses `JSONRoute`.

`add_routes` documents each route with its answer and its errors.
"""

import json
from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.server import answers

Endpoint = Callable[..., Coroutine[Any, Any, Response]]


def add_routes(
    router: APIRouter, *routes: tuple[str, str, Endpoint, type[BaseModel], str], streams: bool = False
) -> None:
    """Path, method, endpoint, answer and summary of each."""
    for path, method, endpoint, answer, summary in routes:
        router.add_api_route(
            path,
            endpoint,
            methods=[method],
            summary=summary,
            response_model=None,
            responses=answers.responses(answer, streams=streams),
        )


class StrictRequest(Request):
    async def json(self) -> Any:
        try:
            return orjson.loads(await self.body())
        except orjson.JSONDecodeError as error:
            raise json.JSONDecodeError(error.msg, "", error.pos) from None  # the kind that FastAPI looks for


class JSONRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return handle
