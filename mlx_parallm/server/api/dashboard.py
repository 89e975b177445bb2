"""`/dashboard`: the web page, its event stream, recent requests and recent rollouts."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.routing import APIRoute
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from typing_extensions import TypedDict

from mlx_parallm.sampling_params import INT64
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.dashboard.feed import LiveFeed
from mlx_parallm.server.dashboard.page_files import PAGE, PageFiles
from mlx_parallm.server.dashboard.recent_rollouts import RolloutNote, describe
from mlx_parallm.server.dashboard.snapshot import ServerSnapshot, Snapshots
from mlx_parallm.server.http.http_errors import JSONResponse
from mlx_parallm.server.http.route_table import Route
from mlx_parallm.server.http.routing import router_of
from mlx_parallm.server.http.schema import response_body
from mlx_parallm.server.recent_requests import MAX_REQUESTS, RecentRequest

EVENT_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
COUNT = "At most so many, the newest first"


@response_body
class RequestNotes(TypedDict):
    requests: list[RecentRequest]


@response_body
class RolloutNotes(TypedDict):
    adapters: Annotated[list[str], Field(description="Those that learn")]
    groups: list[RolloutNote]


class Dashboard:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._files = PageFiles()
        self._feed = LiveFeed(Snapshots(context), context.state)

    async def page(self, request: Request) -> Response:
        return self._files.respond(PAGE, request)

    async def file(self, name: str, request: Request) -> Response:
        return self._files.respond(name, request)

    async def events(self) -> Response:
        """One snapshot a second, as server-sent events."""
        self._feed.check_room()
        return StreamingResponse(self._feed.events(), media_type="text/event-stream", headers=EVENT_HEADERS)

    async def snapshot(self) -> Response:
        """The engines' counters of all models together, as the dashboard's event stream has them."""
        return JSONResponse(Snapshots(self._context, live=False).take())

    async def requests(
        self,
        limit: Annotated[int, Query(ge=1, le=MAX_REQUESTS, description=COUNT)] = 100,
        after: Annotated[int, Query(ge=0, le=INT64, description="Only those that ended after this number")] = 0,
    ) -> Response:
        """When, where, which model and adapter, how many tokens, how long. Neither prompts nor answers."""
        found = self._context.state.recent.latest(limit, after)
        return JSONResponse(RequestNotes(requests=list(found)))

    async def rollouts(
        self, adapter: str | None = None, limit: Annotated[int, Query(ge=1, le=48, description=COUNT)] = 12
    ) -> Response:
        """Groups of responses with their rewards, each token with its log-probability and the version that sampled it:
        of the first adapter that learns, or of the one that is named; empty where nothing is trained."""
        training = self._context.runtime.training
        if not training.adapters:
            return JSONResponse(RolloutNotes(adapters=[], groups=[]))
        groups = await asyncio.to_thread(training.recent, adapter, limit)
        described = await asyncio.to_thread(describe, groups, self._context.models.default.vocabulary)
        return JSONResponse(RolloutNotes(adapters=list(training.adapters), groups=described))


ROUTES = (
    Route("/dashboard", "GET", Dashboard.page, role=None),  # it holds no data, and asks for a key itself
    Route("/dashboard/static/{name:path}", "GET", Dashboard.file, role=None),
    Route("/dashboard/events", "GET", Dashboard.events, role="admin", replicas="events"),  # it never ends
    Route(
        "/dashboard/snapshot",
        "GET",
        Dashboard.snapshot,
        ServerSnapshot,
        "What the server is doing now",
        role="admin",
        replicas="snapshot",
    ),
    Route(
        "/dashboard/requests",
        "GET",
        Dashboard.requests,
        RequestNotes,
        "The requests that ended last",
        role="admin",
        replicas="requests",
    ),
    Route(
        "/dashboard/rollouts",
        "GET",
        Dashboard.rollouts,
        RolloutNotes,
        "The rollouts that came in last",
        role="admin",
        replicas="rollouts",
    ),
)


def router(context: ServerContext) -> APIRouter:
    return router_of("Dashboard", ROUTES, Dashboard(context), route_class=APIRoute)
