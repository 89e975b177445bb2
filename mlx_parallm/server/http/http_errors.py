"""Every way a request can fail, as the JSON shape that its clients get. `server.http.app` registers the handlers here.

Whatever is raised becomes `{"error": {"message", "type", "param", "code"}}`, or the shape that the path's dialect has
for errors (`error_shapes`); no traceback leaves the process.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlx_parallm.errors import InvalidRequestError, ParallmError, QueueFullError
from mlx_parallm.server.http.error_shapes import OPENAI, Failure, openai_error
from mlx_parallm.server.http.request_state import known_state, route_name

log = logging.getLogger(__name__)

LOOKED_AT = 100  # errors of one request, of which one is told
CLIENT_LEFT = 499  # nobody reads it, but the log does
B = TypeVar("B", bound=BaseModel)
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


class ClientLeft(Exception):
    """The client has disconnected: there is nobody to answer."""


class JSONResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


class TensorJSONResponse(JSONResponse):
    """A response with NumPy arrays in it, which become nested lists."""

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


class ErrorResponse(JSONResponse):
    """An error, written when it is sent: by then it is known which dialect it answers."""

    def __init__(self, failure: Failure, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(openai_error(failure), failure.status, headers)
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = known_state(scope)
        shape, identity = (OPENAI, "") if state is None else (state.route.error_shape, state.id)
        self.body = self.render(shape.body(self._failure, identity))
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def error_response(error: ParallmError) -> Response:
    headers: dict[str, str] = {}
    if isinstance(error, QueueFullError):
        headers["Retry-After"] = str(error.retry_after)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return ErrorResponse(Failure.of(error), headers)


def add_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ParallmError, _on_ours)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(ClientLeft, _on_left)
    app.add_exception_handler(ClientDisconnect, _on_left)  # in the middle of its body
    app.add_exception_handler(Exception, _on_unknown)


async def _on_ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, ParallmError)
    if error.status >= 500:  # without its message: that may name a path which came in the body
        log.warning("%s %s: %s", request.method, route_name(request.scope), error.code or error.type)
    return error_response(error)


async def _on_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(validation_error(error.errors(), error.body))


async def _on_http(request: Request, error: Exception) -> Response:
    """A route or method that does not exist, or what FastAPI made of an error while it read the body."""
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, ParallmError):
        return error_response(error.__cause__)
    if isinstance(error.__cause__, ClientDisconnect):
        return await _on_left(request, error)
    message = str(error.detail)
    if error.status_code in (404, 405):
        message = f"{message}: {request.method} {request.url.path}"
    kind = _TYPES.get(error.status_code, "invalid_request_error" if error.status_code < 500 else "server_error")
    return ErrorResponse(Failure(error.status_code, kind, message), error.headers)


async def _on_left(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)


async def _on_unknown(request: Request, error: Exception) -> Response:
    return error_response(ParallmError("the server has failed at this request; its log says why"))


def validated(kind: type[B], fields: Any) -> B:
    """Fields that came in another way than as a JSON body, refused as those of one would be."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError(error.errors(), body=fields) from error


def validation_error(errors: Sequence[Any], body: Any) -> InvalidRequestError:
    """The most telling of pydantic's errors: a value that fits no member of a union fails once for each of them."""
    if errors and errors[0]["type"] == "json_invalid":
        return InvalidRequestError(f"the body is not valid JSON: {errors[0]['ctx']['error']}", code="invalid_json")
    if errors and errors[0]["loc"][:1] == ("query",):
        param = str(errors[0]["loc"][1])
        return InvalidRequestError(f"{param}: {errors[0]['msg']}", param=param, code=_code(errors[0]["type"]))
    errors = errors[:LOOKED_AT]
    paths = [_path(error, body) for error in errors]
    deepest = max(range(len(errors)), key=lambda index: len(paths[index]))
    error = errors[deepest]
    path = paths[deepest]
    if not path and isinstance(body, Mapping):  # it is about several fields together
        return InvalidRequestError(errors[0]["msg"], code="invalid_value")
    if not path:
        return InvalidRequestError(_about_the_body(body), code="invalid_json")
    rivals = {other["msg"] for other, where in zip(errors, paths, strict=True) if where == path}
    param = ".".join(map(str, path))
    return InvalidRequestError(f"{param}: {'; or '.join(sorted(rivals))}", param=param, code=_code(error["type"]))


def _path(error: Mapping[str, Any], body: Any) -> list[str | int]:
    """Returns where in the body an error is. Pydantic's location also names members of unions, which are no places."""
    path: list[str | int] = []
    location = error["loc"][1:] if error["loc"][:1] == ("body",) else error["loc"]
    for number, part in enumerate(location, start=1):
        if isinstance(body, Mapping):
            inside = part in body
        else:
            inside = isinstance(body, list) and isinstance(part, int) and 0 <= part < len(body)
        if inside:
            path.append(part)
            body = body[part]
        elif number == len(location) and isinstance(body, Mapping) and _is_absent(error, body):
            path.append(part)
    return path


def _is_absent(error: Mapping[str, Any], body: Mapping[str, Any]) -> bool:
    """Returns whether the last name is a field that should be there, and not a member of a union that the body is
    not."""
    return bool(error["type"] == "missing" or error["input"] != body)


def _about_the_body(body: Any) -> str:
    if isinstance(body, bytes):
        return "the body must be JSON, sent with Content-Type: application/json"
    return "the body must be a JSON object" if body is not None else "the request needs a JSON body"


def _code(kind: str) -> str:
    return "missing_required_parameter" if kind == "missing" else "invalid_value"
