"""docs/EXTENDING.md: what it shows is put where it says, and works."""

import asyncio
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from mlx_parallm.config import ServeConfig
from mlx_parallm.errors import ConfigError, ModelLoadError
from mlx_parallm.kv import block_size
from mlx_parallm.models import kinds
from mlx_parallm.runtime.startup import Runtime, start
from mlx_parallm.server import api
from mlx_parallm.server.http.app import create_app
from mlx_parallm.server.http.state import Dispatcher
from tests.tiny import save_tiny, tiny

ROOT = Path(__file__).parents[2]
EXTENDING = ROOT / "docs" / "EXTENDING.md"
# A block's file, and how the line begins that it stands after or before; without one it is the whole file.
BLOCK = re.compile(r"```python\n(# (\S+\.py)(?:, (after|before): ([^\n]+))?\n.*?)```", re.DOTALL)


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


def extend(tree: Path) -> list[str]:
    """Puts the page's blocks into a copy of the tree, and returns their files."""
    touched = []
    for block, name, side, anchor in BLOCK.findall(EXTENDING.read_text()):
        file = tree / name
        touched.append(name)
        if not side:
            file.write_text(block)
            continue
        lines = file.read_text().splitlines(keepends=True)
        places = [number for number, line in enumerate(lines) if line.strip().startswith(anchor)]
        assert len(places) == 1, f"{name}: {len(places)} lines begin with {anchor!r}"
        lines.insert(places[0] + (side == "after"), block.partition("\n")[2])
        file.write_text("".join(lines))
    return touched


def run_tests(tree: Path, *arguments: str, **environment: str) -> None:
    """The tests of a copy of the tree, over the copy."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    surroundings = os.environ | {"PYTHONPATH": str(tree), **environment}
    done = subprocess.run(command, cwd=tree, env=surroundings, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


@pytest.mark.slow
def test_the_tasks_are_done_by_the_files_that_the_page_names(tmp_path: Path) -> None:
    """A new parameter, objective, embedding family and block size policy, in a copy of the tree, with its tests."""
    for folder in ("mlx_parallm", "tests", "docs"):  # with what Python has compiled of them
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    touched = extend(tmp_path)
    run_tests(tmp_path, "tests/unit/test_surface.py", WRITE_SURFACE="1")
    surface = tmp_path / "tests" / "golden" / "surface"
    assert "--top-a" in (surface / "commands.txt").read_text()
    assert "'spo'" in (surface / "train.txt").read_text()
    assert "| `top_a` |" in (tmp_path / "docs" / "GUIDE.md").read_text()
    chosen = "reference_says or spo or electra or narrower"
    run_tests(
        tmp_path,
        *(f"tests/unit/test_{name}.py" for name in ("sampling", "objectives", "electra", "encoders", "surface")),
        *("tests/engine/test_trainer.py", "-k", chosen),
    )
    changed = {
        str(path.relative_to(tmp_path))
        for path in tmp_path.rglob("*.py")
        if not (ROOT / path.relative_to(tmp_path)).is_file()
        or path.read_bytes() != (ROOT / path.relative_to(tmp_path)).read_bytes()
    }
    assert changed == set(touched)


async def test_a_block_size_policy_is_followed(
    extended: Path, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_size, "tokens_per_block", lambda asked, context_length: 3)
    runtime = start(ServeConfig.of(model_path=(f"tiny={extended / 'tiny'}",), ssd=False), dispatcher)
    app = create_app(runtime, ServeConfig.of(), dispatcher)
    dispatcher.bind(asyncio.get_running_loop())
    body = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "one two three four five"}]}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000") as client:
        first, second = [(await client.post("/v1/messages", json=body)).json()["usage"] for _ in range(2)]
    total = first["input_tokens"] + first["cache_creation_input_tokens"]
    assert first["cache_creation_input_tokens"] == total // 3 * 3
    assert second["cache_read_input_tokens"] > 0
    assert runtime.models["tiny"].block_size == 3
    await asyncio.to_thread(runtime.close)
