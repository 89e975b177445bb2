"""What a route is, as data: who may call it, what it reads, how its errors look, what replicas do with it.

Each dialect of `server.api` declares its routes once; guards, logs, the router, the front of replicas and the tests
read them here. A path that no route has is treated as those beside it.
"""

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from re import Pattern
from typing import Any

from starlette.responses import Response
from starlette.routing import compile_path

from mlx_parallm.server.auth.keys import ROLES, Role
from mlx_parallm.server.http.error_shapes import OPENAI, ErrorShape
from mlx_parallm.server.http.schema import Status

Endpoint = Callable[..., Coroutine[Any, Any, Response]]
CHANGING_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})
UNKNOWN = "(no such route)"
JSON_WANTED = "the body must be JSON, sent with Content-Type: application/json"
TENSORS_WANTED = f"{JSON_WANTED}, or a safetensors file with -H 'Content-Type: application/octet-stream'"


@dataclass(frozen=True, slots=True)
class Uploads:
    """Bodies that a route reads beside JSON, or in place of it."""

    types: frozenset[str]  # media types
    wanted: str  # what to send, for the error of another type
    reads_json: bool = True
    large: bool = False  # as large as an adapter may be


@dataclass(frozen=True)
class Route:
    """One method of one path. `endpoint` is a method of the dialect's class, which `routing.router_of` binds."""

    path: str
    method: str
    endpoint: Endpoint
    answer: Any = Status  # the type of its response; NoReturn: it is always an error
    summary: str = ""  # empty: it is not in the OpenAPI document
    role: Role | None = field(default="user", kw_only=True)  # the least that may call it; None: nobody is asked
    audited: bool | None = field(default=None, kw_only=True)  # None: where it changes something and is no user's
    counted: bool = field(default=True, kw_only=True)  # in the limits of its key, where it changes something
    probe: bool = field(default=False, kw_only=True)  # asked every few seconds: its log lines are for debugging
    uploads: Uploads | None = field(default=None, kw_only=True)
    error_shape: ErrorShape = field(default=OPENAI, kw_only=True)
    replicas: str = field(default="", kw_only=True)  # how their `front` answers it; empty: one does
    streams: bool = field(default=False, kw_only=True)
    # Content by media type, where it is not the JSON of one class.
    body: Mapping[str, Any] | None = field(default=None, kw_only=True)
    content: Mapping[str, Any] | None = field(default=None, kw_only=True)  # of the response

    @property
    def changes(self) -> bool:
        return self.method in CHANGING_METHODS

    @property
    def is_audited(self) -> bool:
        return self.changes and (self.role in ("trainer", "admin") if self.audited is None else self.audited)

    @property
    def is_counted(self) -> bool:
        return self.changes and self.counted and self.role is not None

    @cached_property
    def _compiled(self) -> tuple[Pattern[str], str, Mapping[str, Any]]:
        return compile_path(self.path)

    @property
    def name(self) -> str:
        """The path for logs, with the names of its parameters: a client may write a key or a text in their place."""
        return self._compiled[1]

    @property
    def has_parameters(self) -> bool:
        return bool(self._compiled[2])

    def parameters(self, path: str) -> Mapping[str, str] | None:
        """What a path has in place of the parameters; None: it is not of this route."""
        found = self._compiled[0].match(path)
        return None if found is None else found.groupdict()


class RouteTable:
    """All routes, found by method and path."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._exact: dict[str, dict[str, Route]] = {}
        self._patterns: dict[str, dict[str, Route]] = {}
        below: dict[str, list[Route]] = {}  # by each prefix of a path, up to a slash
        for route in self.routes:
            table = self._patterns if route.has_parameters else self._exact
            table.setdefault(route.path, {}).setdefault(route.method, route)
            for prefix in _prefixes(route.path):
                below.setdefault(prefix, []).append(route)
        self._unknown = {prefix: _unknown(found) for prefix, found in below.items()}

    def find(self, method: str, path: str) -> Route:
        """Finds a route. Of a method that a path lacks, it is the path's first; without the path, by its neighbours."""
        methods = self._exact.get(path) or next(
            (found for found in self._patterns.values() if next(iter(found.values())).parameters(path) is not None), {}
        )
        if (route := methods.get(method)) is not None:
            return route
        if methods:
            return replace(next(iter(methods.values())), method=method)
        found = next((self._unknown[one] for one in _prefixes(path) if one in self._unknown), Route("", "", not_ours))
        return replace(found, method=method)


def _unknown(neighbours: Sequence[Route]) -> Route:
    """Returns what is true of a path that is not there, by those beside it: their shape of errors, where all have one,
    and a role above a user's, where all that change something need one."""
    shapes = {route.error_shape for route in neighbours}
    roles = [route.role for route in neighbours if route.changes] or [route.role for route in neighbours]
    least = min(ROLES.index(role or "user") for role in roles)
    strictest = max(ROLES.index(role or "user") for role in roles)
    shape = next(iter(shapes)) if len(shapes) == 1 else OPENAI
    return Route("", "", not_ours, role=ROLES[strictest if least else 0], error_shape=shape)


def _prefixes(path: str) -> Iterable[str]:
    """A path, and what it is in, the longest first: /api/chat, /api."""
    while path.count("/") > 1:
        yield path
        path = path.rpartition("/")[0]
    yield path


async def not_ours() -> Response:
    """Stands where this server has no endpoint."""
    raise AssertionError("nobody calls it")
