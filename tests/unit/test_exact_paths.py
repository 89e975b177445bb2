"""Every route is found at once by its path, and what is no exact match still is answered as FastAPI does."""

from fastapi import APIRouter, FastAPI
from fastapi.testclient import TestClient

from mlx_parallm.server.http.exact_paths import ExactPaths


def _client(root_path: str = "") -> TestClient:
    router = APIRouter()

    async def named(name: str) -> dict[str, str]:
        return {"name": name}

    async def renamed(name: str) -> dict[str, str]:
        return {"renamed": name}

    async def load() -> dict[str, str]:
        return {"called": "load"}

    async def listed() -> dict[str, str]:
        return {"called": "list"}

    router.add_api_route("/models/{name}", named, methods=["GET"])
    router.add_api_route("/models/{name}", renamed, methods=["POST"])
    router.add_api_route("/models/load", load, methods=["POST"])
    router.add_api_route("/models", listed, methods=["GET"])
    app = FastAPI()
    app.include_router(router)
    app.router.routes.insert(0, ExactPaths(router.routes))
    return TestClient(app, root_path=root_path)


def test_an_exact_path_is_found_whatever_route_stands_before_it() -> None:
    assert _client().post("/models/load").json() == {"called": "load"}
    assert _client().get("/models").json() == {"called": "list"}


def test_parameters_wrong_methods_slashes_and_unknown_paths_are_left_to_fastapi() -> None:
    client = _client()
    assert client.get("/models/load").json() == {"name": "load"}
    assert client.get("/models/other").json() == {"name": "other"}
    assert client.delete("/models").status_code == 405
    assert client.get("/models/").json() == {"called": "list"}  # redirected
    assert client.get("/nothing").status_code == 404


def test_routes_stay_in_the_document_once() -> None:
    paths = _client().get("/openapi.json").json()["paths"]
    assert sorted(paths) == ["/models", "/models/load", "/models/{name}"]


def test_a_root_path_is_left_to_fastapi() -> None:
    assert _client("/v2").get("/v2/models").json() == {"called": "list"}
