"""Finds a route by its path and method in one lookup; FastAPI tries one route after another, over a hundred of them."""

from collections.abc import Iterable

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send


class ExactPaths(BaseRoute):
    """Stands before all other routes. Paths with parameters, wrong methods and unknown paths are left to those."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._routes: dict[tuple[str, str], APIRoute] = {}
        for route in routes:
            if isinstance(route, APIRoute) and not route.param_convertors:
                for method in route.methods or ():
                    self._routes.setdefault((method, route.path), route)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        route = self._find(scope)
        return (Match.NONE, {}) if route is None else route.matches(scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._find(scope)
        assert route is not None
        await route.handle(scope, receive, send)

    def _find(self, scope: Scope) -> APIRoute | None:
        if scope["type"] != "http" or scope.get("root_path"):
            return None
        return self._routes.get((scope["method"], scope["path"]))
