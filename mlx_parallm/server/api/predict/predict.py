"""`/v1/predict`: named tensors through a network."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.api.predict.bodies import PredictBody, Predicted
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.http.http_errors import validated
from mlx_parallm.server.tensor_bodies import (
    is_safetensors,
    join,
    parse_body,
    pieces,
    read_tensors,
    respond,
    wants_safetensors,
    written,
)
from mlx_parallm.signature import NetworkInfo
from mlx_parallm.tensors import Array

T = TypeVar("T")
INLINE_BYTES = 1 << 14  # of a body that is decoded on the event loop; larger ones on a thread


class PredictRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._predictors = context.predictors

    async def predict(self, request: Request) -> Response:
        """Named inputs through a network, checked against its signature (`GET /v1/models/NAME`). As a body of
        `Content-Type: application/x-safetensors` the inputs are its tensors, and `model_id` is in the query. `Accept:
        application/x-safetensors` asks for the outputs in that format; without one, they come as the inputs did."""
        if is_safetensors(request):
            tensors = await off_loop(request, parse_body)
            body = validated(PredictBody, query(request, "model_id", "model", "encoding") | {"inputs": tensors})
        else:
            body = validated(PredictBody, await json_of(request))
        async with self._predictors.use(body.model_id, "network", "policy", request=request, param="model_id") as model:
            info = model.info
            assert isinstance(info, NetworkInfo)
            signature = info.tensors

            def read(_: bytes) -> list[Any]:
                arrays = read_tensors(body.inputs, signature, signature.inputs, "inputs")
                return [block for _, block in pieces(arrays, signature.inputs)]

            found = await model.predict(await off_loop(request, read), request)
        outputs = {name: join([part[name] for part in found]) for name in found[0]}
        raw = wants_safetensors(request)
        answer = None if raw else await off_loop(request, lambda _: _written(model.name, outputs, body))
        return respond(outputs, {"model_id": model.name}, answer)


def _written(name: str, outputs: dict[str, Array], body: PredictBody) -> Predicted:
    tensors = {key: written(key, array, body.encoding) for key, array in outputs.items()}
    return Predicted(model_id=name, outputs=tensors)


async def off_loop(request: Request, work: Callable[[bytes], T]) -> T:
    """What takes long for a large body must not hold up others."""
    data = await request.body()
    if len(data) <= INLINE_BYTES:
        return work(data)
    return await asyncio.to_thread(work, data)


async def json_of(request: Request) -> Any:
    try:
        return await request.json()
    except ValueError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error


def query(request: Request, *names: str) -> dict[str, Any]:
    return {name: request.query_params[name] for name in names if name in request.query_params}
