"""`/v1/predict` for networks and `/v1/rl/act` for policies: tensors in, tensors out, as JSON or as safetensors."""

from typing import Any

from fastapi import APIRouter

from mlx_parallm.server.api.predict.act import ActRoutes
from mlx_parallm.server.api.predict.bodies import ActBody, Acted, PredictBody, Predicted
from mlx_parallm.server.api.predict.predict import PredictRoutes
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.routing import JSONRoute, add_routes
from mlx_parallm.tensors import SAFETENSORS_TYPES

BINARY = {"schema": {"type": "string", "format": "binary"}}


def router(context: ServerContext) -> APIRouter:
    routes = APIRouter(route_class=JSONRoute, tags=["Networks and policies"])
    for route, body in (
        (("/v1/predict", "POST", PredictRoutes(context).predict, Predicted, "Run a network"), PredictBody),
        (("/v1/rl/act", "POST", ActRoutes(context).act, Acted, "Actions of a policy"), ActBody),
    ):
        content: dict[str, Any] = {"application/json": {"schema": body.model_json_schema(by_alias=False)}}
        add_routes(routes, route, body=content | {SAFETENSORS_TYPES[0]: BINARY})
    return routes
