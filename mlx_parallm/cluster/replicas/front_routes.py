"""What replicas say to the front, on a port of its own: join, ready, report, leave, failed, and propose a change."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from mlx_parallm.cluster.replicas.changes import decode
from mlx_parallm.cluster.replicas.links import knows_secret, unpack_hashes, write_error
from mlx_parallm.cluster.replicas.members import Member, Members
from mlx_parallm.errors import ParallmError, PermissionDeniedError
from mlx_parallm.server.http.http_errors import JSONResponse, error_response


class FrontRoutes:
    """`on_failed` is told why a replica can't start, before any has."""

    def __init__(self, members: Members, secret: str, on_failed: Callable[[str], None]) -> None:
        self._members = members
        self._secret = secret
        self._on_failed = on_failed
        self.lines: list[str] = []  # what a replica tells people of itself
        endpoints = (self.join, self.ready, self.report, self.leave, self.failed, self.propose)
        self._app = Starlette(routes=[Route(f"/{one.__name__}", one, methods=["POST"]) for one in endpoints])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not knows_secret(scope["headers"], self._secret):
            error = PermissionDeniedError("this port is for the server's own replicas")
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def join(self, request: Request) -> Response:
        fields = await _fields(request)
        self.lines = fields["lines"]
        member = Member(fields["name"], fields["url"], fields["pid"], fields["node"])
        changes = await self._members.join(member, fields["position"])
        if changes is None:
            return Response(status_code=409)
        headers = {"x-parallm-position": str(self._members.state.position)}
        return Response(b"".join(change.encode() for change in changes), headers=headers)

    async def ready(self, request: Request) -> Response:
        fields = await _fields(request)
        hashes = unpack_hashes(fields["hashes"])
        return JSONResponse({"ready": await self._members.make_ready(fields["name"], fields["position"], hashes)})

    async def report(self, request: Request) -> Response:
        fields = await _fields(request)
        return JSONResponse({"known": self._members.heard(fields["name"], unpack_hashes(fields["hashes"]))})

    async def leave(self, request: Request) -> Response:
        fields = await _fields(request)
        await self._members.remove(fields["name"], "it was told to stop")
        return JSONResponse({})

    async def failed(self, request: Request) -> Response:
        fields = await _fields(request)
        self._members.failure = fields["message"]
        await self._members.remove(fields["name"], fields["message"])
        if fields["fatal"]:
            self._on_failed(fields["message"])
        return JSONResponse({})

    async def propose(self, request: Request) -> Response:
        change = next(decode(await request.body()))
        work = asyncio.ensure_future(self._members.propose(change))
        try:
            made = await asyncio.shield(work)  # a change that has begun is brought to its end, whoever has left
        except ParallmError as error:
            return Response(write_error(error), 400)
        return Response(replace(made, data=b"").encode())  # the replica has the weights already


async def _fields(request: Request) -> Any:
    return orjson.loads(await request.body())
