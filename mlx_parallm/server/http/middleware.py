"""What every request passes on its way to a route. Pure ASGI: a disconnect reaches the route as it happens.

From the outside in: `RequestLog` (id, access log, audit log, last resort), CORS when configured, `access.OriginGuard`,
`access.Authentication`, `BodyLimit`.
"""

import logging
import re
import time
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_parallm.errors import ParallmError, PayloadTooLargeError
from mlx_parallm.server.auth.audit import AuditLog
from mlx_parallm.server.http import unknown_fields
from mlx_parallm.server.http.freed_memory import FreedMemory
from mlx_parallm.server.http.http_errors import CLIENT_LEFT, error_response
from mlx_parallm.server.http.logs import request_id
from mlx_parallm.server.http.request_state import RequestState, enter, route_name
from mlx_parallm.server.http.route_table import RouteTable
from mlx_parallm.server.recent_requests import RecentRequests

log = logging.getLogger("mlx_parallm.access")

_USABLE_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestLog:
    """Gives each request its id, answers with it, logs the end, and lets no exception out."""

    def __init__(
        self,
        app: ASGIApp,
        routes: RouteTable,
        audit: AuditLog | None = None,
        recent: RecentRequests | None = None,
    ) -> None:
        self.app = app
        self._routes = routes
        self._audit = audit
        self._recent = recent  # where the end of each is noted for the dashboard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        state = enter(scope, self._routes)
        identity = usable_request_id(Headers(scope=scope).get("x-request-id"))
        state.id = identity
        token = request_id.set(identity)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = identity
                if state.adapter is not None:
                    headers["X-Parallm-Adapter"] = state.adapter
                if state.warning is not None:
                    headers[unknown_fields.HEADER] = state.warning
                if state.route.error_shape.id_header is not None:
                    headers[state.route.error_shape.id_header] = identity
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception:
            log.exception("%s %s has failed", scope["method"], route_name(scope))
            if not status:
                error = ParallmError("the server has failed at this request; its log says why")
                await error_response(error)(scope, receive, send_with_id)
        finally:
            for release in state.held_models:
                release()
            self._log(scope, state, status or CLIENT_LEFT, time.perf_counter() - started)
            if self._recent is not None:
                self._recent.note(scope, status or CLIENT_LEFT, started)
            request_id.reset(token)

    def _log(self, scope: Scope, state: RequestState, status: int, seconds: float) -> None:
        key = state.caller.key
        route = state.route
        if self._audit is not None and route.is_audited:
            self._audit.write(
                key=None if key is None else key.name,
                role=None if key is None else key.role,
                method=scope["method"],
                path=route_name(scope),
                status=status,
                request_id=state.id,
            )
        level = logging.DEBUG if route.probe else logging.INFO
        if not log.isEnabledFor(level):
            return
        client = scope["client"][0] if scope.get("client") else "-"
        fields: dict[str, Any] = dict(
            method=scope["method"], path=route_name(scope), status=status, seconds=round(seconds, 4), client=client
        )
        line = "%(method)s %(path)s %(status)s %(seconds).3fs from %(client)s"
        if key is not None:
            fields["key"] = key.name
            line += " as %(key)s"
        if outcome := state.outcome:  # of a stream whose status was sent long before its end
            fields["outcome"] = outcome
            line += " (%(outcome)s)"
            level = max(level, logging.WARNING if outcome.startswith("cut off") else level)
        log.log(level, line, fields, extra=fields)


def usable_request_id(given: str | None) -> str:
    return given if given and _USABLE_ID.fullmatch(given) else uuid.uuid4().hex


class BodyLimit:
    """Refuses bodies over the limit, by their Content-Length or, when they have none, as they come in."""

    def __init__(self, app: ASGIApp, limit: int, upload_limit: int, routes: RouteTable) -> None:
        self.app = app
        self._routes = routes
        self._limit = limit
        self._upload_limit = upload_limit
        self._freed = FreedMemory()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        uploads = enter(scope, self._routes).route.uploads
        is_large = uploads is not None and uploads.large
        limit = max(self._limit, self._upload_limit) if is_large else self._limit
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdigit() and int(length) > limit:
            await error_response(self._error(limit))(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > limit:
                raise HTTPException(413) from self._error(limit)
            return message

        try:
            await self.app(scope, counted, send)
        finally:
            self._freed.note(seen)

    def _error(self, limit: int) -> PayloadTooLargeError:
        return PayloadTooLargeError(f"the body is larger than {limit} bytes")
