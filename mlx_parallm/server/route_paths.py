"""What logs call a request's path: that of its route, with the names of the parameters in place of what a client wrote.

A client may put a key, a text or a file's path there, and no log is to hold it.
"""

from collections.abc import Iterable

from starlette.routing import BaseRoute, compile_path
from starlette.types import Scope

UNKNOWN = "(no such route)"


class RoutePaths:
    """The paths of an application, to be found for requests that do not come as far as their route."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        compiled = [
            compile_path(path) for path in dict.fromkeys(getattr(route, "path", "") for route in routes) if path
        ]
        self._plain = {path for _, path, parameters in compiled if not parameters}
        self._patterns = [(pattern, path) for pattern, path, parameters in compiled if parameters]

    def find(self, path: str) -> str:
        if path in self._plain:
            return path
        return next((found for pattern, found in self._patterns if pattern.match(path)), UNKNOWN)


def route_path(scope: Scope) -> str:
    paths = getattr(getattr(scope.get("app"), "state", None), "paths", None)
    return paths.find(scope["path"]) if isinstance(paths, RoutePaths) else str(scope["path"])
