"""The dialects that the server speaks, a file or folder each: its bodies, its responses, its writers, its routes.

A module here with `ROUTES` and a function `router(context) -> APIRouter` is served; nothing else needs to know of it.
"""

import importlib
import pkgutil
from collections.abc import Iterator
from functools import cache
from types import ModuleType

from fastapi import APIRouter

from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.http.route_table import Route, RouteTable, not_ours

# Pages that FastAPI serves itself.
DOCUMENTS = ("/docs", "/docs/oauth2-redirect", "/openapi.json", "/static-offline-docs/{name:path}")


@cache
def route_table() -> RouteTable:
    """What all dialects have declared."""
    declared = [route for dialect in _dialects() for route in dialect.ROUTES]
    return RouteTable([*declared, *(Route(path, "GET", not_ours) for path in DOCUMENTS)])


def routers(context: ServerContext) -> Iterator[APIRouter]:
    for dialect in _dialects():
        yield dialect.router(context)


def _dialects() -> Iterator[ModuleType]:
    for module in pkgutil.iter_modules(__path__):
        yield importlib.import_module(f"{__name__}.{module.name}")
