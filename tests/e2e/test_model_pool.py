"""Models that come and go over HTTP: from a folder on their first request, by a route, and out again."""

import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.servers import ServerProcess, free_port, running
from tests.tiny import save_tiny, tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pool")
    for seed, name in enumerate(("first", "second", "elsewhere")):
        (root / name).mkdir()
        save_tiny(tiny("llama", seed=seed), root / name)
    (root / "models").mkdir()
    for name in ("first", "second"):
        shutil.move(root / name, root / "models" / name)
    (root / "models" / "broken").mkdir()
    (root / "models" / "broken" / "config.json").write_text('{"model_type": "llama"}')
    return root


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    port = free_port()
    command = [sys.executable, "-m", "mlx_parallm", "serve", "--port", str(port), "--model-dir", f"{folder / 'models'}"]
    with running(ServerProcess(command, port, "first", fork=True)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def ask(client: httpx.Client, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "hello there", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return client.post("/v1/completions", json=body)


def statuses(client: httpx.Client) -> dict[str, str]:
    return {entry["id"]: entry["status"] for entry in client.get("/v1/models").json()["data"]}


def test_a_model_loads_on_its_first_request(client: httpx.Client) -> None:
    assert statuses(client) == {"broken": "unloaded", "first": "unloaded", "second": "unloaded"}
    assert client.get("/health").json() == {"status": "healthy", "model_loaded": True}
    assert client.get("/metrics").status_code == client.get("/debug/metrics").status_code == 200
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: ask(client, "second"), range(4)))
    assert [answer.status_code for answer in answers] == [200] * 4, answers[0].text
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
    entry = client.get("/v1/models/second").json()
    assert (entry["status"], entry["kind"], entry["progress"], entry["max_model_len"]) == ("ready", "chat", 1.0, 2048)
    assert client.post("/tokenize", json={"model": "first", "prompt": "hello"}).json()["count"] > 0
    assert statuses(client) == {"broken": "unloaded", "first": "ready", "second": "ready"}


def test_one_that_can_not_be_loaded_says_why(client: httpx.Client) -> None:
    for _ in range(2):
        answer = ask(client, "broken")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_failed")
        assert "broken" in answer.json()["error"]["message"]
    entry = client.get("/v1/models/broken").json()
    assert entry["status"] == "failed"
    assert "broken" in entry["error"]
    assert ask(client, "first").status_code == 200, "the others go on"
    missing = ask(client, "third")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_models_come_and_go_by_name_and_path(client: httpx.Client, folder: Path) -> None:
    before = ask(client, "first").json()["choices"][0]["text"]
    other = {"model": "extra", "path": str(folder / "elsewhere"), "pin": True}
    loaded = client.post("/v1/models/load", json=other)
    assert loaded.status_code == 200, loaded.text
    assert (loaded.json()["status"], loaded.json()["pinned"]) == ("ready", True)
    assert ask(client, "extra").json()["choices"][0]["text"] != before
    assert client.post("/v1/models/load", json=other).status_code == 200, "twice is no mistake"
    unloaded = client.post("/v1/models/unload", json={"model": "first"})
    assert (unloaded.status_code, unloaded.json()["status"]) == (200, "unloaded")
    assert statuses(client)["first"] == "unloaded"
    assert ask(client, "first").json()["choices"][0]["text"] == before, "it is loaded again"
    assert client.post("/v1/models/unload", json={"model": "extra"}).status_code == 200
    assert "extra" not in statuses(client)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "model"),
        ({"model": "nowhere"}, 404, "model"),
        ({"model": "broken"}, 409, "model"),
        ({"model": "default", "path": "somewhere"}, 400, "model"),
        ({"model": "first", "path": "/nowhere/else"}, 409, "model"),
        ({"model": "new", "path": ""}, 400, "path"),
        ({"model": "new", "path": "/nowhere/else"}, 400, "path"),
        ({"model": "new", "path": "a\0b"}, 400, "path"),
        ({"model": "new", "path": "~nobody-of-this-name/x"}, 400, "path"),
        ({"model": "new", "path": "x" * 5000}, 400, "path"),
        ({"model": "new\n", "path": "/nowhere"}, 400, "model"),
    ],
)
def test_what_can_not_be_loaded_is_refused(
    client: httpx.Client, body: dict[str, str], status: int, param: str | None
) -> None:
    answer = client.post("/v1/models/load", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert "new" not in statuses(client)
    assert ask(client, "new").status_code == 404
    assert ask(client, "second").status_code == 200


def test_a_name_that_only_a_failed_load_gave_is_not_found(client: httpx.Client) -> None:
    """No 5xx: nothing is wrong with the server."""
    body = {"model": "new", "path": "/nowhere/else", "wait": False}
    assert client.post("/v1/models/load", json=body).status_code == 200
    for _ in range(100):
        if statuses(client)["new"] == "failed":
            break
        time.sleep(0.1)
    answer = ask(client, "new")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_failed"), answer.text
    assert "POST /v1/models/load tries again" in answer.json()["error"]["message"]
    assert client.post("/v1/models/load", json=body | {"wait": True}).status_code == 400
    assert client.post("/v1/models/unload", json={"model": "new"}).status_code == 200
    assert "new" not in statuses(client)
    assert ask(client, "new").json()["error"]["code"] == "model_not_found"


def test_a_failed_load_is_no_model_of_another_kind(client: httpx.Client) -> None:
    body = {"model": "new", "path": "/nowhere/else", "wait": False}
    assert client.post("/v1/models/load", json=body).status_code == 200
    while statuses(client)["new"] != "failed":
        time.sleep(0.05)
    answer = client.post("/v1/predict", json={"model_id": "new", "inputs": {}})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_failed"), answer.text
    assert client.post("/v1/models/unload", json={"model": "new"}).status_code == 200


@pytest.mark.slow
def test_memory_comes_back(server: ServerProcess, client: httpx.Client, tmp_path: Path) -> None:
    save_tiny(tiny("llama", intermediate_size=1 << 16), tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    without = []
    for _ in range(3):
        assert client.post("/v1/models/load", json={"model": "heavy", "path": str(tmp_path)}).status_code == 200
        assert ask(client, "heavy").status_code == 200
        held = server.memory()
        assert client.post("/v1/models/unload", json={"model": "heavy"}).status_code == 200
        without.append(server.memory())
        assert held - without[-1] > size // 2, "its weights are still there"
    assert without[-1] - without[0] < size // 4, "something stays each time"
