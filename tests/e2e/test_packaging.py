"""What users install: the wheel in an empty environment, and the steps of the Dockerfiles."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runner() -> Any:
    """packaging/run_dockerfile.py, which is no module of the package."""
    spec = importlib.util.spec_from_file_location("run_dockerfile", ROOT / "packaging/run_dockerfile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_the_script_knows_every_step(runner: Any, name: str) -> None:
    steps = runner.instructions((ROOT / "packaging" / name).read_text())
    names = [step for step, _ in steps]
    assert names[0] == "FROM"
    assert names[-1] == "ENTRYPOINT"
    assert all(hasattr(runner.Build, f"do_{step.lower()}") for step in names)
    assert ("USER", "10001") in steps
    copies = [value.split()[:-1] for step, value in steps if step == "COPY" and "--from" not in value]
    copied = [source for sources in copies for source in sources]
    assert all((ROOT / source).exists() for source in copied)


@pytest.mark.slow
def test_the_wheel_in_an_empty_environment(tmp_path: Path) -> None:
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path), "twine"]
    if shutil.which("curl") is None or subprocess.run(download).returncode:
        pytest.skip("needs curl and a package index")
    ended = subprocess.run([str(ROOT / "packaging/check_wheel.sh"), sys.executable], cwd=ROOT, timeout=900)
    assert ended.returncode == 0
