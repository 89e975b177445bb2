"""docs/EXTENDING.md: its dialect and its model kind are files of their own, and work as they stand there."""

import asyncio
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from mlx_parallm.config import ServeConfig
from mlx_parallm.errors import ConfigError, ModelLoadError
from mlx_parallm.models import kinds
from mlx_parallm.runtime.startup import Runtime, start
from mlx_parallm.server import api
from mlx_parallm.server.http.app import create_app
from mlx_parallm.server.http.state import Dispatcher
from tests.tiny import save_tiny, tiny

EXTENDING = Path(__file__).parents[2] / "docs" / "EXTENDING.md"


def example(path: str) -> str:
    """The block of the page that begins with the name of its file."""
    found = re.search(rf"```python\n(# {re.escape(path)}\n.*?)```", EXTENDING.read_text(), re.DOTALL)
    assert found is not None, f"docs/EXTENDING.md shows no {path}"
    return found.group(1)


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The page's files, in the places that it names."""
    root = tmp_path_factory.mktemp("extended")
    for package, name in ((api, "server/api/shout"), (kinds, "models/kinds/mean")):
        folder = root / Path(name).parent
        folder.mkdir(parents=True)
        (root / f"{name}.py").write_text(example(f"mlx_parallm/{name}.py"))
        package.__path__.append(str(folder))
    importlib.invalidate_caches()
    (root / "mean").mkdir()
    (root / "mean" / "config.json").write_text(json.dumps({"kind": "mean", "scale": 2.0}))
    (root / "tiny").mkdir()
    save_tiny(tiny("llama"), root / "tiny")
    yield root
    for package in (api, kinds):
        package.__path__.pop()


@pytest.fixture(scope="module")
def dispatcher() -> Dispatcher:
    return Dispatcher()


@pytest.fixture(scope="module")
def runtime(extended: Path, dispatcher: Dispatcher) -> Iterator[Runtime]:
    paths = (f"tiny={extended / 'tiny'}", f"mean={extended / 'mean'}")
    found = start(ServeConfig.of(model_path=paths, ssd=False), dispatcher)
    yield found
    found.close()


def test_a_model_kind_predicts(runtime: Runtime) -> None:
    assert list(runtime.models) == ["tiny"]
    predictor = runtime.predictors["mean"]
    assert predictor.info.kind == "mean"
    assert predictor.predict([[1.0, 2.0], [5.0]]).result(60) == [3.0, 10.0]
    with pytest.raises(ValueError, match="Invalid type str"):
        predictor.predict(["no vector"]).result(60)
    assert predictor.predict([[4.0]]).result(60) == [8.0], "what failed has harmed nobody"


@pytest.mark.long
async def test_a_dialect_answers(runtime: Runtime, dispatcher: Dispatcher) -> None:
    app = create_app(runtime, ServeConfig.of(), dispatcher)
    dispatcher.bind(asyncio.get_running_loop())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000") as client:
        answer = await client.post("/v1/shout", json={"text": "hello", "length": 4})
        assert answer.status_code == 200, answer.text
        assert answer.json()["text"] == answer.json()["text"].upper()
        stream = await client.post("/v1/shout", json={"text": "hello", "length": 4, "stream": True})
        assert stream.text.endswith("data: [DONE]\n\n")
        wrong = await client.post("/v1/shout", json={"text": "hello", "length": 0})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "length")
        assert "/v1/shout" in (await client.get("/openapi.json")).json()["paths"]


def test_a_predictor_needs_no_language_model(extended: Path) -> None:
    runtime = start(ServeConfig.of(model_path=(f"mean={extended / 'mean'}",), ssd=False), lambda events: None)
    assert runtime.predictors["mean"].predict([[4.0]]).result(60) == [8.0]
    assert not runtime.models
    runtime.close()


def test_what_can_not_be_served_is_said(extended: Path) -> None:
    alone = (f"mean={extended / 'mean'}",)
    with pytest.raises(ConfigError, match="training and adapters need a model that generates text"):
        start(ServeConfig.of(model_path=alone, ssd=False, enable_rl_training=True), lambda events: None)
    broken = extended / "broken"
    broken.mkdir()
    (broken / "config.json").write_text(json.dumps({"kind": "mean"}))
    paths = (f"tiny={extended / 'tiny'}", f"broken={broken}")
    with pytest.raises(ModelLoadError, match="broken can't be loaded: KeyError: 'scale'"):
        start(ServeConfig.of(model_path=paths, ssd=False), lambda events: None)
