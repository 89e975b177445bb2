"""The `openai` package of npm against our server: runs the suites in openai_node where Node is at hand."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.servers import ServerProcess

SUITE = Path(__file__).parent / "openai_node"
FILES = ("suite.test.mjs", "responses.test.mjs")


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the suite and the package installed. No registry, no test."""
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("openai_node")
    for name in ("package.json", *FILES):
        shutil.copy(SUITE / name, folder)
    install = [npm, "install", "--no-package-lock", "--no-audit", "--no-fund", "--fetch-retries=0"]
    try:
        answer = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip("the npm registry does not answer")
    if answer.returncode != 0:
        pytest.skip(f"npm can't install openai: {answer.stderr.strip().splitlines()[-1] if answer.stderr else '?'}")
    return folder


def test_suite(suite: Path, tiny_server: ServerProcess) -> None:
    env = os.environ | {"OPENAI_BASE_URL": f"{tiny_server.url}/v1"}
    command = ["node", "--test", "--test-reporter=tap", "--test-concurrency=1", *FILES]
    answer = subprocess.run(command, cwd=suite, env=env, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stdout[-8000:] + answer.stderr[-2000:]
    assert "# fail 0" in answer.stdout
