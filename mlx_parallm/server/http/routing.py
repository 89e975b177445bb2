"""Routes that read their JSON body strictly and fast: no NaN, no Infinity. Routers use `JSONRoute`.

`router_of` serves the routes that a dialect declares, and documents each with its response and its errors.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Collection, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Any, NoReturn

import orjson
from fastapi import APIRouter
from fastapi._compat import ModelField
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.http import unknown_fields
from mlx_parallm.server.http.request_state import state_of
from mlx_parallm.server.http.route_docs import documented_responses
from mlx_parallm.server.http.route_table import Route
from mlx_parallm.server.http.unknown_fields import known_fields

MAX_DEPTH = 128  # of a body
MAX_VALUES = 1 << 22
MAX_COLONS = 1 << 18  # as many names at most: each is a string of its own
MAX_OBJECTS = 50_000
NESTED_OPTIONS = frozenset({"options", "sampling_params", "generation_kwargs"})
LONG_BODY = 32 << 10  # bytes; shorter ones are validated on the event loop, in some milliseconds at worst

_readers = ThreadPoolExecutor(2, thread_name_prefix="body")


def router_of(
    tag: str,
    routes: Iterable[Route],
    *owners: object,
    route_class: type[APIRoute] | None = None,
    lifespan: Callable[[Any], AbstractAsyncContextManager[None]] | None = None,
) -> APIRouter:
    """Serves what a dialect has declared, by the objects that have its endpoints."""
    router = APIRouter(tags=[tag], route_class=route_class or JSONRoute, lifespan=lifespan)
    described: set[Any] = set()  # the models of errors that a documented route has brought
    for route in routes:
        name = route.endpoint.__name__
        owner = next(one for one in owners if getattr(type(one), name, None) is route.endpoint)
        router.add_api_route(
            route.path,
            getattr(owner, name),
            methods=[route.method],
            summary=route.summary or None,
            include_in_schema=bool(route.summary),
            status_code=400 if route.answer is NoReturn else None,
            response_model=None,
            responses=documented_responses(route, brings_schema=route.error_shape.model not in described),
            openapi_extra=None if route.body is None else {"requestBody": {"content": route.body}},
        )
        if route.summary:
            described.add(route.error_shape.model)
    return router


class StrictRequest(Request):
    """Its body is parsed and validated once: here, and on a thread where it is long enough to hold up others."""

    names: Collection[str] = ()  # of the body's fields, once it is read

    async def json(self) -> Any:
        if not hasattr(self, "_read"):
            try:
                self._read = _parsed(await self.body())
            except json.JSONDecodeError as error:
                raise state_of(self.scope).media_type_error or error from None
            self.names = _field_names(self._read)
            state_of(self.scope).sent_fields = _sent(self._read)
        return self._read

    async def validate(self, field: ModelField) -> None:
        """What `json` then returns is the route's body already, which FastAPI takes as it is."""
        body = await self.body()
        loop = asyncio.get_running_loop()
        try:
            self._read, self.names, state_of(self.scope).sent_fields = await loop.run_in_executor(
                _readers, _validated, body, field
            )
        except json.JSONDecodeError as error:
            place = {"type": "json_invalid", "loc": ("body", error.pos), "msg": error.msg, "input": {}}
            invalid = RequestValidationError([place | {"ctx": {"error": error.msg}}], body=body)
            raise state_of(self.scope).media_type_error or invalid from None

    def check_encoding(self) -> None:
        encoding = self.headers.get("content-encoding", "identity")
        if encoding.strip().lower() not in ("", "identity"):
            raise InvalidRequestError(
                f"Content-Encoding {encoding[:40]!r} is not supported: send the body as it is",
                code="unsupported_media_type",
            )


def _parsed(body: bytes) -> Any:
    # Parsing it would hold up everybody else: nobody can interrupt it.
    if body.count(b",") > MAX_VALUES:
        raise InvalidRequestError(f"the body holds more than {MAX_VALUES} values", code="invalid_value")
    if body.count(b":") > MAX_COLONS:
        raise InvalidRequestError(f"the body holds more than {MAX_COLONS} colons", code="invalid_value")
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise json.JSONDecodeError(error.msg, "", error.pos) from None  # the kind that FastAPI looks for
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH:
        _check_depth(parsed)
    if body.count(b"{") > MAX_OBJECTS:
        _check_objects(parsed)
    return parsed


def _field_names(parsed: Any) -> list[str]:
    """Those that mean something: null is the same as nothing."""
    return [name for name, value in parsed.items() if value is not None] if isinstance(parsed, dict) else []


def _sent(parsed: Any) -> frozenset[str]:
    """Names of all fields that came, those of sampling options in an object of their own too."""
    names = set(_field_names(parsed))
    for inner in NESTED_OPTIONS & names:
        names.update(_field_names(parsed[inner]))
    return frozenset(names)


def _validated(body: bytes, field: ModelField) -> tuple[Any, list[str], frozenset[str]]:
    parsed = _parsed(body)
    value, errors = field.validate(parsed, {}, loc=("body",))
    if errors:
        raise RequestValidationError(errors, body=parsed)
    return value, _field_names(parsed), _sent(parsed)


def _check_objects(parsed: Any) -> None:
    """Each object costs tens of microseconds to validate. Braces within texts do not count."""
    count = 0
    stack = [parsed]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            count += 1
            if count > MAX_OBJECTS:
                raise InvalidRequestError(f"the body holds more than {MAX_OBJECTS} objects", code="invalid_value")
            stack += [inner for inner in value.values() if isinstance(inner, dict | list)]
        else:
            stack += [inner for inner in value if isinstance(inner, dict | list)]


def _check_depth(parsed: Any) -> None:
    """Refuses what is nested so deeply that a template, a grammar or a response could not be made of it.

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
        field = self.body_field
        known = frozenset() if field is None else known_fields(field.field_info.annotation)

        async def handle(request: Request) -> Response:
            strict = StrictRequest(request.scope, request.receive)
            strict.check_encoding()
            if field is not None and _is_json(strict):
                if len(await strict.body()) > LONG_BODY:
                    await strict.validate(field)
                await _look_for_unknown(strict, known)
            return await handler(strict)

        return handle


async def _look_for_unknown(request: StrictRequest, known: frozenset[str]) -> None:
    mode = request.app.state.unknown_fields
    if mode == "ignore" or not await request.body():
        return
    with contextlib.suppress(json.JSONDecodeError):  # FastAPI tells of it
        await request.json()
        if mode == "refuse":
            unknown_fields.refuse(request.names, known)
        elif (told := unknown_fields.warning(request.names, known)) is not None:
            state_of(request.scope).warning = told


def _is_json(request: Request) -> bool:
    """Returns whether the body is JSON, as FastAPI tells it."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    return kind.startswith("application/") and (kind == "application/json" or kind.endswith("+json"))
