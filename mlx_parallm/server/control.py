"""Trainers stop and start the engines between two steps: /pause, /resume and /is_paused, with SGLang's names too."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.config import ServeConfig
from mlx_parallm.engine.engine import PauseMode
from mlx_parallm.errors import RequestTimeoutError
from mlx_parallm.server import answers
from mlx_parallm.server.errors import JSONResponse
from mlx_parallm.server.models import ModelTable
from mlx_parallm.server.routing import JSONRoute
from mlx_parallm.server.schemas import PauseBody

SGLANG_MODES: dict[str, PauseMode] = {
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
        for path, method, endpoint, answer, summary in (
            ("/pause", "POST", self.pause, answers.Status, "Stop between two steps"),
            ("/pause_generation", "POST", self.pause_generation, answers.Status, "Stop between two steps, as SGLang"),
            ("/resume", "POST", self.resume, answers.Status, "Go on after a pause"),
            ("/continue_generation", "POST", self.resume, answers.Status, "Go on after a pause, as SGLang"),
            ("/is_paused", "GET", self.is_paused, answers.Paused, "Whether it is paused"),
        ):
            router.add_api_route(
                path,
                endpoint,
                methods=[method],
                summary=summary,
                response_model=None,
                responses=answers.responses(answer),
            )
        return router

    async def pause(
        self,
        mode: Annotated[PauseMode, Query(description="What becomes of running requests")] = "abort",
        clear_cache: Annotated[bool, Query(description="Forget cached prompts, once nothing runs")] = True,
    ) -> Response:
        """`abort` ends running requests with what they have, `wait` lets them end, `keep` lets them go on after
        `/resume`. Requests that come meanwhile wait. Cached prompts are kept in mode `keep`."""
        return await self._pause(mode, clear_cache and mode != "keep")

    async def pause_generation(self, body: PauseBody) -> Response:
        """Modes `abort`, `in_place` and `retract`; the last two are `keep`."""
        return await self._pause(SGLANG_MODES[body.mode], False)

    async def resume(self, request: Request) -> Response:
        """What waits or was stopped goes on."""
        for served in self._table:
            await asyncio.to_thread(served.engine.resume)
        return JSONResponse({"status": "resumed"})

    async def is_paused(self) -> Response:
        """True from the moment when nothing runs."""
        return JSONResponse({"is_paused": all(served.engine.paused for served in self._table)})

    async def _pause(self, mode: PauseMode, clear_cache: bool) -> Response:
        patience = self._config.request_timeout_seconds or 600.0
        for served in self._table:
            if not await asyncio.to_thread(served.engine.pause, mode, patience):
                raise RequestTimeoutError(
                    f"there is no pause: what runs was not finished within {patience:g} seconds, or it was resumed"
                )
            if clear_cache:
                await asyncio.to_thread(served.engine.flush_cache)
        return JSONResponse({"status": "paused"})
