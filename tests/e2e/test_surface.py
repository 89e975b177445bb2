"""Routes, their fields and the metrics are what they were; `tests/surface.py` says how to change them."""

import httpx

from tests import surface
from tests.support.servers import ServerProcess


def test_routes(tiny_server: ServerProcess) -> None:
    surface.check("routes", surface.routes(httpx.get(f"{tiny_server.url}/openapi.json", timeout=60).json()))


def test_metrics(tiny_server: ServerProcess) -> None:
    surface.check("metrics", surface.metrics(httpx.get(f"{tiny_server.url}/metrics").text), more=True)
