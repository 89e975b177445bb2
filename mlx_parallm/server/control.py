"""What trainers ask of the server: to stop and go on between two steps, and what weights it has. Also as SGLang."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm import __version__
from mlx_parallm.config import ServeConfig
from mlx_parallm.engine.engine import PauseMode
from mlx_parallm.errors import InvalidRequestError, RequestTimeoutError
from mlx_parallm.server import answers
from mlx_parallm.server.errors import JSONResponse
from mlx_parallm.server.models import ModelTable
from mlx_parallm.server.routing import JSONRoute, add_routes
from mlx_parallm.server.schemas import PauseBody, PauseModeName

ModeQuery = Annotated[PauseModeName | None, Query(description="What becomes of running requests; default abort")]
ClearQuery = Annotated[bool | None, Query(description="Forget cached prompts, once nothing runs")]
MODES: dict[PauseModeName, PauseMode] = {
    "abort": "abort",
    "in_place": "keep",
    "retract": "keep",
    "keep": "keep",
    "wait": "wait",
}


class Control:
    def __init__(self, table: ModelTable, config: ServeConfig) -> None:
        self._table = table
        self._config = config

    def router(self) -> APIRouter:
        router = APIRouter(route_class=JSONRoute, tags=["RL data plane"])
        add_routes(
            router,
            ("/pause", "POST", self.pause, answers.Status, "Stop between two steps"),
            ("/pause_generation", "POST", self.pause_generation, answers.Status, "Stop between two steps, as SGLang"),
            ("/resume", "POST", self.resume, answers.Status, "Go on after a pause"),
            ("/continue_generation", "POST", self.resume, answers.Status, "Go on after a pause, as SGLang"),
            ("/is_paused", "GET", self.is_paused, answers.Paused, "Whether it is paused"),
            ("/get_weight_version", "GET", self.weight_version, answers.WeightVersion, "The current policy's version"),
            ("/server_info", "GET", self.server_info, answers.ServerInfo, "What this server is and has"),
            ("/get_server_info", "GET", self.server_info, answers.ServerInfo, "The same, by SGLang's name"),
        )
        return router

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
        for served in self._table:
            await asyncio.to_thread(served.engine.resume)
        return JSONResponse({"status": "resumed"})

    async def is_paused(self) -> Response:
        """True from the moment when nothing runs."""
        return JSONResponse({"is_paused": all(served.engine.paused for served in self._table)})

    async def weight_version(self) -> Response:
        """Of the adapter that the model's own name serves, or else of the one published last; 0 without any."""
        version = self._table.default.engine.adapters.policy_version
        return JSONResponse({"weight_version": str(version), "policy_version": version})

    async def server_info(self) -> Response:
        """The models with their adapters, the limits, and whether it is paused."""
        models = [
            {
                "id": served.name,
                "model_path": served.model.source,
                "precision": served.model.precision,
                "max_model_len": served.context_length,
                "vocab_size": served.model.vocab_size,
                "policy_version": served.engine.adapters.policy_version,
                "serves": {route.label: route.share for route in served.engine.adapters.routes} or {"base": 1.0},
                "adapters": {entry.name: entry.current for entry in served.engine.adapters},
            }
            for served in self._table
        ]
        first, config = self._table.default, self._config
        return JSONResponse(
            {
                "version": __version__,
                "model_path": first.model.source,
                "served_model_name": first.name,
                "weight_version": str(first.engine.adapters.policy_version),
                "max_batch_size": config.max_batch_size,
                "max_queue_size": config.max_queue_size,
                "max_loras": config.max_loras,
                "max_lora_rank": config.max_lora_rank,
                "is_paused": all(served.engine.paused for served in self._table),
                "models": models,
            }
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
        patience = self._config.request_timeout_seconds or 600.0
        for served in self._table:
            if not await asyncio.to_thread(served.engine.pause, mode, patience):
                for other in self._table:
                    await asyncio.to_thread(other.engine.resume)
                raise RequestTimeoutError(
                    f"there is no pause: what runs was not finished within {patience:g} seconds, or it was resumed"
                )
            if clear_cache:
                await asyncio.to_thread(served.engine.flush_cache)
        return JSONResponse({"status": "paused"})
