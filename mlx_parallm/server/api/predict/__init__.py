"""`/v1/predict` for networks and `/v1/rl/act` for policies: tensors in, tensors out, as JSON or as safetensors."""

from typing import Any

from fastapi import APIRouter

from mlx_parallm.server.api.predict.act import ActRoutes
from mlx_parallm.server.api.predict.bodies import ActBody, Acted, PredictBody, Predicted
from mlx_parallm.server.api.predict.predict import PredictRoutes
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.http.route_table import TENSORS_WANTED, Route, Uploads
from mlx_parallm.server.http.routing import router_of
from mlx_parallm.server.http.schema import Body
from mlx_parallm.tensors import SAFETENSORS_TYPES

BINARY = {"schema": {"type": "string", "format": "binary"}}


TENSORS = Uploads(frozenset(SAFETENSORS_TYPES), TENSORS_WANTED)


def _content(body: type[Body]) -> dict[str, Any]:
    return {"application/json": {"schema": body.model_json_schema(by_alias=False)}, SAFETENSORS_TYPES[0]: BINARY}


ROUTES = (
    Route(
        "/v1/predict",
        "POST",
        PredictRoutes.predict,
        Predicted,
        "Run a network",
        uploads=TENSORS,
        body=_content(PredictBody),
    ),
    Route("/v1/rl/act", "POST", ActRoutes.act, Acted, "Actions of a policy", uploads=TENSORS, body=_content(ActBody)),
)


def router(context: ServerContext) -> APIRouter:
    return router_of("Networks and policies", ROUTES, PredictRoutes(context), ActRoutes(context))
