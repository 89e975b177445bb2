"""What trainers ask of the server: to stop and go on between two steps, and what weights it has. Also as SGLang."""

import asyncio
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from mlx_parallm import __version__
from mlx_parallm.errors import ConflictError, InvalidRequestError, RequestTimeoutError
from mlx_parallm.server.auth.caller import current_caller
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.http.http_errors import JSONResponse
from mlx_parallm.server.http.route_table import Route
from mlx_parallm.server.http.routing import router_of
from mlx_parallm.server.http.schema import Body, Status, response_body
from mlx_parallm.server.model_table import DEFAULT, adapter_names
from mlx_parallm.types import PauseMode

PauseModeName = Literal["abort", "wait", "keep", "in_place", "retract"]
ModeQuery = Annotated[PauseModeName | None, Query(description="What becomes of running requests; default abort")]
ClearQuery = Annotated[bool | None, Query(description="Forget cached prompts, once nothing runs")]
MODES: dict[PauseModeName, PauseMode] = {
    "abort": "abort",
    "in_place": "keep",
    "retract": "keep",
    "keep": "keep",
    "wait": "wait",
}


class PauseBody(Body):
    model_config = ConfigDict(json_schema_extra={"example": {"mode": "keep"}})
    mode: PauseModeName | None = Field(None, description="What becomes of running requests; default abort")
    clear_cache: bool | None = Field(None, description="Forget cached prompts, once nothing runs")


@response_body
class Paused(TypedDict):
    is_paused: bool


@response_body
class WeightVersion(TypedDict):
    weight_version: str
    policy_version: int


@response_body
class ModelSummary(TypedDict):
    id: str
    model_path: str
    precision: str
    max_model_len: int
    vocab_size: int
    policy_version: int
    serves: dict[str, float]
    adapters: Annotated[dict[str, int], Field(description="What each name means: its version")]
    tuning: Annotated[
        dict[str, Any],
        Field(description="What was measured on this machine, and `source`; --profile takes it from a file"),
    ]


@response_body
class ServerInfo(TypedDict):
    version: str
    model_path: str
    served_model_name: str
    weight_version: str
    max_batch_size: int
    max_queue_size: int
    max_loras: int
    max_lora_rank: int
    is_paused: bool
    models: list[ModelSummary]


class Control:
    def __init__(self, context: ServerContext) -> None:
        self._models = context.models
        self._config = context.config

    async def pause(
        self, body: PauseBody | None = None, mode: ModeQuery = None, clear_cache: ClearQuery = None
    ) -> Response:
        """`abort` ends running requests with what they have, `wait` lets them end, `keep` (SGLang's `in_place` and
        `retract`) lets them go on after `/resume`. Requests that come meanwhile wait. The mode stands in the query or
        in the body. Cached prompts are forgotten, unless `clear_cache` is false or the mode is `keep`."""
        return await self._pause(body or PauseBody.model_validate({}), mode, clear_cache, clears=True)

    async def pause_generation(
        self, body: PauseBody | None = None, mode: ModeQuery = None, clear_cache: ClearQuery = None
    ) -> Response:
        """The same as `/pause`, except that cached prompts are kept unless `clear_cache` is true."""
        return await self._pause(body or PauseBody.model_validate({}), mode, clear_cache, clears=False)

    async def resume(self, request: Request) -> Response:
        """What waits or was stopped goes on."""
        for served in self._models:
            await asyncio.to_thread(served.client.resume)
        return JSONResponse(Status(status="resumed"))

    async def is_paused(self) -> Response:
        """True from the moment when nothing runs."""
        return JSONResponse(Paused(is_paused=all(served.client.paused for served in self._models)))

    async def weight_version(self) -> Response:
        """Returns the version of the adapter that the model's own name serves, or else of the one published last; 0
        without any."""
        version = self._models.default.adapters.policy_version
        return JSONResponse(WeightVersion(weight_version=str(version), policy_version=version))

    async def server_info(self) -> Response:
        """The models with their adapters, the limits, and whether it is paused."""
        caller = current_caller.get()
        models: list[ModelSummary] = [
            {
                "id": served.name,
                "model_path": caller.visible_source(served.model.source),
                "precision": served.model.precision,
                "max_model_len": served.context_length,
                "vocab_size": served.model.vocab_size,
                "policy_version": served.adapters.served_version,
                "serves": {
                    route.label: route.share
                    for route in served.adapters.routes
                    if route.name is None or caller.may_use_adapter(route.name)
                }
                or {"base": 1.0},
                "adapters": {name: served.adapters.find(name).number for name in adapter_names(served.adapters)},
                "tuning": served.client.metrics.tuning,
            }
            for served in self._models.visible().values()
        ]
        first = self._models.find(DEFAULT)
        config = self._config
        return JSONResponse(
            ServerInfo(
                version=__version__,
                model_path=caller.visible_source(first.model.source),
                served_model_name=first.name,
                weight_version=str(first.adapters.policy_version),
                max_batch_size=config.batch.max_batch_size,
                max_queue_size=config.batch.max_queue_size,
                max_loras=config.adapters.max_loras,
                max_lora_rank=config.adapters.max_lora_rank,
                is_paused=all(served.client.paused for served in self._models),
                models=models,
            )
        )

    async def _pause(
        self, body: PauseBody, asked: PauseModeName | None, clear_cache: bool | None, *, clears: bool
    ) -> Response:
        if asked is not None and body.mode is not None and asked != body.mode:
            raise InvalidRequestError(f"mode is {asked!r} in the query and {body.mode!r} in the body", param="mode")
        mode = MODES[asked or body.mode or "abort"]
        wanted = next((value for value in (clear_cache, body.clear_cache) if value is not None), clears)
        return await self._pause_all(mode, wanted and mode != "keep")

    async def _pause_all(self, mode: PauseMode, clear_cache: bool) -> Response:
        patience = self._config.batch.request_timeout_seconds or 600.0
        for served in self._models:
            begun = time.monotonic()
            if not await asyncio.to_thread(served.client.pause, mode, patience):
                for other in self._models:
                    await asyncio.to_thread(other.client.resume)
                if time.monotonic() - begun < patience:
                    raise ConflictError("there is no pause: another request has resumed meanwhile")
                raise RequestTimeoutError(f"there is no pause: what runs was not finished within {patience:g} seconds")
            if clear_cache:
                await asyncio.to_thread(served.client.flush_cache)
        return JSONResponse(Status(status="paused"))


ROUTES = (
    Route("/pause", "POST", Control.pause, Status, "Stop between two steps", role="trainer"),
    Route(
        "/pause_generation",
        "POST",
        Control.pause_generation,
        Status,
        "Stop between two steps, as SGLang",
        role="trainer",
    ),
    Route("/resume", "POST", Control.resume, Status, "Go on after a pause", role="trainer"),
    Route("/continue_generation", "POST", Control.resume, Status, "Go on after a pause, as SGLang", role="trainer"),
    Route("/is_paused", "GET", Control.is_paused, Paused, "Whether it is paused"),
    Route("/get_weight_version", "GET", Control.weight_version, WeightVersion, "The current policy's version"),
    Route("/server_info", "GET", Control.server_info, ServerInfo, "What this server is and has"),
    Route("/get_server_info", "GET", Control.server_info, ServerInfo, "The same, by SGLang's name"),
)


def router(context: ServerContext) -> APIRouter:
    return router_of("RL data plane", ROUTES, Control(context))
