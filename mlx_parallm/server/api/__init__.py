"""The dialects that the server speaks, a file or folder each: its bodies, its answers, its writers, its routes.

A module here with a function `router(context) -> APIRouter` is served; nothing else needs to know of it.
"""

import importlib
import pkgutil
from collections.abc import Iterator

from fastapi import APIRouter

from mlx_parallm.server.context import ServerContext


def routers(context: ServerContext) -> Iterator[APIRouter]:
    for module in pkgutil.iter_modules(__path__):
        yield importlib.import_module(f"{__name__}.{module.name}").router(context)
