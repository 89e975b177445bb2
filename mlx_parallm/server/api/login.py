"""Signing in from a browser: `/dashboard/login` sets a cookie that stands for a key, `/dashboard/logout` ends it.

The cookie is of no use to scripts (HttpOnly) nor to other sites (SameSite=Strict), and crosses no plain connection that
follows an encrypted one (Secure). `/dashboard/session` tells a page who it works for.
"""

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from mlx_parallm.errors import AuthenticationError, InvalidRequestError
from mlx_parallm.server.auth.access import AccessControl, session_token
from mlx_parallm.server.auth.caller import Caller, current_caller
from mlx_parallm.server.auth.keys import Role
from mlx_parallm.server.auth.logins import COOKIE
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.http.http_errors import JSONResponse
from mlx_parallm.server.http.request_state import state_of
from mlx_parallm.server.http.route_table import Route
from mlx_parallm.server.http.routing import router_of
from mlx_parallm.server.http.schema import Body, Status, response_body


class LoginBody(Body):
    model_config = ConfigDict(json_schema_extra={"example": {"key": "sk-parallm-..."}})
    key: str = Field(min_length=1, max_length=4096, description="A key of this server")


@response_body
class SessionInfo(TypedDict):
    name: Annotated[str | None, Field(description="Of the key; null without one")]
    role: Annotated[Role | None, Field(description="What this caller may do; null: nothing before it signs in")]
    needs_key: Annotated[bool, Field(description="Whether some routes of this server need a key")]


class LoginRoutes:
    def __init__(self, access: AccessControl) -> None:
        self._access = access

    async def login(self, body: LoginBody, request: Request) -> Response:
        """The cookie stands for the key, with its role and limits, for twelve hours or until the key is removed."""
        if not self._access.ring.guards("admin"):
            raise InvalidRequestError("this server has no keys, and needs none", param="key", code="no_keys")
        key = self._access.ring.find(body.key)
        if key is None:
            raise AuthenticationError("the key is wrong", param="key")
        caller = self._access.caller(key)
        state_of(request.scope).caller = caller  # for the logs
        response = JSONResponse(self._told(caller))
        response.set_cookie(
            COOKIE, self._access.logins.begin(key), max_age=int(self._access.logins.seconds), **_kind(request)
        )
        return response

    async def logout(self, request: Request) -> Response:
        """Ends the session; without one it does nothing."""
        token = session_token(request.headers)
        if token is not None:
            self._access.logins.end(token)
        response = JSONResponse(Status(status="signed out"))
        response.delete_cookie(COOKIE, **_kind(request))
        return response

    async def session(self) -> Response:
        """Says who is signed in, by cookie or bearer key. A page that gets no role asks for a key."""
        return JSONResponse(self._told(current_caller.get()))

    def _told(self, caller: Caller) -> SessionInfo:
        key = caller.key
        return {
            "name": None if key is None else key.name,
            "role": self._access.role_of_anybody() if key is None else key.role,
            "needs_key": self._access.ring.guards("admin"),
        }


def _kind(request: Request) -> dict[str, Any]:
    return {"httponly": True, "samesite": "strict", "secure": request.url.scheme == "https", "path": "/"}


ROUTES = (
    Route(
        "/dashboard/login",
        "POST",
        LoginRoutes.login,
        SessionInfo,
        "Sign in with a key: sets a cookie",
        role=None,
        audited=True,
    ),
    Route(
        "/dashboard/logout",
        "POST",
        LoginRoutes.logout,
        Status,
        "Sign out: ends the cookie's session",
        role=None,
        audited=True,
        replicas="logout",
    ),
    Route("/dashboard/session", "GET", LoginRoutes.session, SessionInfo, "Who is signed in", role=None),
)


def router(context: ServerContext) -> APIRouter:
    return router_of("Sign in", ROUTES, LoginRoutes(context.access))
