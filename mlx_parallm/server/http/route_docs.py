"""How a route is described in the OpenAPI document: its response, its errors, and an example that a server has sent."""

import json
from importlib.resources import files
from typing import Any, NoReturn

from mlx_parallm.server.http.error_shapes import Failure
from mlx_parallm.server.http.route_table import Route

# Responses of a real server to the examples of requests, by method and path: tests/e2e/test_openapi_examples.py.
EXAMPLES: dict[str, Any] = json.loads(files("mlx_parallm.server").joinpath("examples.json").read_text())
WRONG = Failure(
    400,
    "invalid_request_error",
    "temperature: Input should be less than or equal to 2",
    "temperature",
    "invalid_value",
)
ERRORS = {
    400: "The request is wrong; `param` says where",
    401: "No key, or a wrong one",
    404: "No such model (code `model_not_found`)",
    413: "The body is too large",
    429: "The queue is full; `Retry-After` says when to try again",
    503: "The server is shutting down, or its engine has died",
    504: "The request took longer than the server allows",
}


def documented_responses(route: Route, brings_schema: bool = True) -> dict[int | str, dict[str, Any]]:
    """Returns the `responses` of a route.

    FastAPI builds a validator for each model that it is given, which takes most of a start: one route of those with the
    same errors `brings_schema` into the document, and all point there.
    """
    response: dict[str, Any] = {"description": "The response"}
    shape = route.error_shape
    described: dict[int | str, dict[str, Any]] = {} if route.answer is NoReturn else {200: response}
    pointer = {"schema": {"$ref": f"#/components/schemas/{shape.model.__name__}"}}
    for code, text in ERRORS.items():
        described[code] = {"description": text, "content": {"application/json": pointer}}
    wrong = {"example": shape.body(WRONG, "req_1f3a")}
    if brings_schema:
        described[400] = {"model": shape.model, "description": ERRORS[400], "content": {"application/json": wrong}}
    else:
        described[400]["content"] = {"application/json": pointer | wrong}
    content = dict(route.content or {})
    if route.answer is not str:
        response["model"] = route.answer
    if route.streams:
        response["description"] += ", or with `stream` its chunks as server-sent events, then `[DONE]`"
        content["text/event-stream"] = {"schema": {"type": "string"}}
    known = EXAMPLES.get(f"{route.method} {route.name}")
    if known is not None:
        content["application/json"] = {"example": known}
    if content:
        response["content"] = content
    return described
