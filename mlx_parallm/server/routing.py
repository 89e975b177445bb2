"""Routes that read their JSON body strictly and fast: no NaN, no Infinity. Every router uses `JSONRoute`.

`add_routes` documents each route with its answer and its errors.
"""

import json
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import orjson
from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.schema import Error, responses

MAX_DEPTH = 128  # of a body
MAX_VALUES = 1 << 23

Endpoint = Callable[..., Coroutine[Any, Any, Response]]


def add_routes(
    router: APIRouter,
    *routes: tuple[str, str, Endpoint, type[BaseModel], str],
    streams: bool = False,
    body: Mapping[str, Any] | None = None,
    answer: Mapping[str, Any] | None = None,
    error: type[BaseModel] = Error,
) -> None:
    """Path, method, endpoint, answer and summary of each.

    `body`, `answer`: OpenAPI's description of their content, by media type, where it is not the JSON of a class.
    `error`: the shape of errors, where the dialect has its own.
    """
    for path, method, endpoint, model, summary in routes:
        documented = responses(model, streams=streams, error=error)
        if answer is not None:
            documented[200]["content"] = answer
        router.add_api_route(
            path,
            endpoint,
            methods=[method],
            summary=summary,
            response_model=None,
            responses=documented,
            openapi_extra=None if body is None else {"requestBody": {"content": body}},
        )


class StrictRequest(Request):
    async def json(self) -> Any:
        encoding = self.headers.get("content-encoding", "identity")
        if encoding.strip().lower() not in ("", "identity"):
            raise InvalidRequestError(
                f"Content-Encoding {encoding[:40]!r} is not supported: send the body as it is",
                code="unsupported_media_type",
            )
        body = await self.body()
        if body.count(b",") > MAX_VALUES:  # parsing it would hold up everybody else for seconds
            raise InvalidRequestError(f"the body holds more than {MAX_VALUES} values", code="invalid_value")
        try:
            parsed = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise json.JSONDecodeError(error.msg, "", error.pos) from None  # the kind that FastAPI looks for
        if body.count(b"{") + body.count(b"[") > MAX_DEPTH:
            _check_depth(parsed)
        return parsed


def _check_depth(parsed: Any) -> None:
    """Refuses what is nested so deeply that a template, a grammar or an answer could not be made of it.

    orjson writes 254 levels and no more, and finds out faster than Python could.
    """
    for _ in range(254 - MAX_DEPTH):
        parsed = [parsed]
    try:
        orjson.dumps(parsed)
    except TypeError:
        message = f"the body is nested more than {MAX_DEPTH} levels deep"
        raise InvalidRequestError(message, code="invalid_value") from None


class JSONRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return handle
