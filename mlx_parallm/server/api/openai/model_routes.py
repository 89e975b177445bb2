"""The list of models and adapters, loaded or not."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired

from fastapi import Path
from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from mlx_parallm.runtime.client import PoolClient
from mlx_parallm.server.auth.caller import current_caller
from mlx_parallm.server.http.http_errors import JSONResponse
from mlx_parallm.server.http.schema import response_body
from mlx_parallm.server.model_table import ModelTable, ServedModel, adapter_names
from mlx_parallm.types import ModelState, ModelStatus

ModelId = Annotated[str, Path(description="Of a model or an adapter", examples=["default"])]


@response_body
class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: Annotated[str, Field(description="Where the model came from")]
    parent: Annotated[str | None, Field(description="The base model, for an adapter")]
    max_model_len: Annotated[int | None, Field(description="Tokens of its context; null for a model that takes none")]
    kind: Annotated[str, Field(description="chat, vision, embedding, classifier, reward, network or policy")]
    status: Annotated[ModelState, Field(description="unloaded: the next request for it loads it")]
    progress: Annotated[float, Field(description="Of loading, up to 1")]
    pinned: Annotated[bool, Field(description="Whether it stays in memory")]
    error: NotRequired[Annotated[str, Field(description="Why it could not be loaded")]]
    signature: NotRequired[
        Annotated[Mapping[str, Any], Field(description="Names, shapes and dtypes of a network's tensors")]
    ]


@response_body
class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]


class ModelRoutes:
    def __init__(self, models: ModelTable, pool: PoolClient) -> None:
        self._models = models
        self._pool = pool

    async def models(self) -> Response:
        """Every model that this server answers for and the key may use; `default` names the first that generates."""
        data = [_describe(status) for status in self._models.visible_statuses().values()]
        visible = self._models.visible().values()
        data += [self._adapter(served, name) for served in visible for name in adapter_names(served.adapters)]
        return JSONResponse(ModelList(object="list", data=data))

    async def model(self, model_id: ModelId) -> Response:
        """One of them by its id."""
        statuses = self._models.visible_statuses()
        if model_id in statuses:
            return JSONResponse(_describe(statuses[model_id]))
        served = self._models.find(model_id)
        if model_id in served.adapters:
            return JSONResponse(self._adapter(served, model_id))
        return JSONResponse(_describe(statuses[served.name]))

    def _adapter(self, served: ServedModel, name: str) -> Model:
        status = next(status for status in self._pool.statuses() if status.name == served.name)
        version = served.adapters.find(name)
        described = _describe(status)
        described["id"] = name
        described["created"] = int(version.created)
        described["root"] = current_caller.get().visible_source(version.source)
        described["parent"] = served.name
        return described


def _describe(status: ModelStatus) -> Model:
    caller = current_caller.get()
    described = Model(
        id=status.name,
        object="model",
        created=status.created,
        owned_by="mlx-parallm",
        root=caller.visible_source(status.source),
        parent=None,
        max_model_len=status.context_length,
        kind=status.kind,
        status=status.status,
        progress=status.progress,
        pinned=status.pinned,
    )
    if status.error is not None:
        described["error"] = caller.visible_error(status.error)
    if status.signature is not None:
        described["signature"] = status.signature
    return described
