"""Models that come and go while the server runs: `/v1/models/load` and `/v1/models/unload`."""

import asyncio
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter
from pydantic import ConfigDict, Field
from starlette.responses import Response
from typing_extensions import TypedDict

from mlx_parallm.errors import ConflictError, InvalidRequestError, ModelNotFoundError, UnavailableError
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.http.http_errors import JSONResponse
from mlx_parallm.server.http.route_table import Route
from mlx_parallm.server.http.routing import router_of
from mlx_parallm.server.http.schema import Body, response_body
from mlx_parallm.server.model_table import BASE, DEFAULT
from mlx_parallm.types import ModelStatus


class LoadModelBody(Body):
    model_config = ConfigDict(json_schema_extra={"example": {"model": "reranker", "path": "models/reranker"}})
    model: str = Field(min_length=1, max_length=256, description="The name that requests use")
    path: str | None = Field(
        None, min_length=1, description="Folder, .gguf file or hub id; left out for a model that is listed already"
    )
    pin: bool | None = Field(None, description="Keep it in memory whatever else is asked for")
    wait: bool = Field(True, description="Answer when it is ready; else at once, with the status `loading`")


class UnloadModelBody(Body):
    model_config = ConfigDict(json_schema_extra={"example": {"model": "reranker"}})
    model: str = Field(min_length=1, max_length=256)


@response_body
class PoolModel(TypedDict):
    model: str
    status: str
    kind: str
    progress: Annotated[float, Field(description="Of loading, up to 1")]
    pinned: bool
    bytes: Annotated[int, Field(description="Of its weights")]
    error: Annotated[str | None, Field(description="Why it can't be loaded")]


class PoolRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._pool = context.runtime.pool
        self._models = context.models
        self._patience = context.config.http.drain_timeout_seconds

    async def load(self, body: LoadModelBody) -> Response:
        """One that is listed in `/v1/models`, or with `path` another one under a name of its own. Others leave memory
        for it, the longest unused first, unless they are pinned; where that is not enough, it is a 503. A `path` that
        can't be loaded is a 400, and leaves nothing behind; a listed model that can't be is a 409."""
        if body.path is not None:
            if body.model in (DEFAULT, BASE):
                raise InvalidRequestError(f"{body.model!r} is no name for a model", param="model")
            if any(body.model in served.adapters for served in self._models):
                raise InvalidRequestError(f"{body.model!r} is the name of an adapter", param="model")
        known = {status.name for status in await asyncio.to_thread(self._pool.statuses)}
        loading = await asyncio.to_thread(self._pool.load, body.model, body.path, body.pin)
        if body.wait:
            try:
                await asyncio.wrap_future(loading)
            except (UnavailableError, ModelNotFoundError) as error:
                if error.code != "model_failed":
                    raise
                if body.path is None:
                    raise ConflictError(error.message, param="model", code=error.code) from error
                if body.model not in known:  # a name that was never served is none of the server's models
                    await asyncio.to_thread(self._pool.unload, body.model, self._patience)
                raise InvalidRequestError(error.message, param="path", code=error.code) from error
        return JSONResponse(_describe(await self._status(body.model)))

    async def unload(self, body: UnloadModelBody) -> Response:
        """Unloads a model once the requests that use it have ended; those that take longer than
        `--drain-timeout-seconds` are cut off. A model that a flag named, or that lies in `--model-dir`, is loaded again
        on the next request for it."""
        before = await self._status(body.model)
        await asyncio.to_thread(self._pool.unload, body.model, self._patience)
        return JSONResponse(_describe(replace(before, status="unloaded", progress=0.0, error=None)))

    async def _status(self, name: str) -> ModelStatus:
        for status in await asyncio.to_thread(self._pool.statuses):
            if status.name == name:
                return status
        raise ModelNotFoundError(f"there is no model {name!r} here", param="model")


def _describe(status: ModelStatus) -> PoolModel:
    return {
        "model": status.name,
        "status": status.status,
        "kind": status.kind,
        "progress": status.progress,
        "pinned": status.pinned,
        "bytes": status.bytes,
        "error": status.error,
    }


ROUTES = (
    Route("/v1/models/load", "POST", PoolRoutes.load, PoolModel, "Load a model, or pin it", role="admin"),
    Route("/v1/models/unload", "POST", PoolRoutes.unload, PoolModel, "Unload a model", role="admin"),
)


def router(context: ServerContext) -> APIRouter:
    return router_of("Models", ROUTES, PoolRoutes(context))
