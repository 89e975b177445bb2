"""The list of served models and adapters."""

from typing import Any, Literal

from pydantic import Field
from starlette.responses import Response

from mlx_parallm.server.errors import JSONResponse
from mlx_parallm.server.models import ModelTable, ServedModel
from mlx_parallm.server.schema import AnswerBody


class Model(AnswerBody):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str = Field(description="Where the model came from")
    parent: str | None = Field(description="The base model, for an adapter")
    max_model_len: int


class ModelList(AnswerBody):
    object: Literal["list"]
    data: list[Model]


class ModelRoutes:
    def __init__(self, models: ModelTable) -> None:
        self._models = models

    async def models(self) -> Response:
        """Every model this server answers for; `default` names the first of them."""
        data = [_describe(served) for served in self._models]
        data += [_describe_adapter(served, name) for served in self._models for name in served.adapters.names]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, model_id: str) -> Response:
        """One of them by its id."""
        served = self._models.find(model_id)
        described = _describe_adapter(served, model_id) if model_id in served.adapters else _describe(served)
        return JSONResponse(described)


def _describe(served: ServedModel) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "mlx-parallm",
        "root": served.model.source,
        "parent": None,
        "max_model_len": served.context_length,
    }


def _describe_adapter(served: ServedModel, name: str) -> dict[str, Any]:
    version = served.adapters.find(name)
    return _describe(served) | {
        "id": name,
        "created": int(version.created),
        "root": version.source,
        "parent": served.name,
    }
