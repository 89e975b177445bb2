"""Packages of npm against our server: runs the suites in `openai_node` and `ai_sdk_node` where Node is at hand."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.embedding_folders import write_model
from tests.support.servers import ServerProcess, ours, running

HERE = Path(__file__).parent


def installed(suite: str, folder: Path) -> Path:
    """A folder with the suite and its packages installed. No registry, no test."""
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("node and npm are not installed")
    shutil.copytree(HERE / suite, folder, dirs_exist_ok=True)
    install = [npm, "install", "--no-package-lock", "--no-audit", "--no-fund", "--fetch-retries=0"]
    try:
        answer = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip("the npm registry does not answer")
    if answer.returncode != 0:
        pytest.skip(f"npm can't install {suite}: {answer.stderr.strip().splitlines()[-1] if answer.stderr else '?'}")
    return folder


def run_suite(folder: Path, url: str) -> None:
    env = os.environ | {"OPENAI_BASE_URL": f"{url}/v1", "SERVER_URL": url}
    files = sorted(file.name for file in folder.glob("*.test.mjs"))
    command = ["node", "--test", "--test-reporter=tap", "--test-concurrency=1", *files]
    answer = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stdout[-8000:] + answer.stderr[-2000:]
    assert "# fail 0" in answer.stdout
    assert "# pass 0" not in answer.stdout


def test_openai(tmp_path: Path, tiny_server: ServerProcess) -> None:
    run_suite(installed("openai_node", tmp_path), tiny_server.url)


@pytest.fixture(scope="module")
def two_models(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    words = write_model(tmp_path_factory.mktemp("models") / "words", "cls")
    with running(ours(f"tiny={tiny_folder}", ["--model-path", f"words={words}"])) as server:
        yield server


@pytest.mark.slow
def test_vercel_ai_sdk(tmp_path: Path, two_models: ServerProcess) -> None:
    run_suite(installed("ai_sdk_node", tmp_path), two_models.url)
