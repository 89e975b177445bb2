"""Shared by all tests: the package comes first, so that MLX finds its BLAS, and no test touches the user's cache."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import mlx_parallm  # noqa: F401  before any test module imports MLX
from mlx_parallm.models.device import give_memory_back
from tests.support import log_check


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "keep all logs of servers in this folder, and fail if they hold keys, prompts or paths that tests have sent"
    parser.addoption("--check-logs", metavar="FOLDER", type=Path, help=text)


def pytest_configure(config: pytest.Config) -> None:
    if folder := config.getoption("--check-logs"):
        log_check.start(folder / os.environ.get("PYTEST_XDIST_WORKER", "main"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    check = log_check.active
    if check is None or not check.logs:
        return
    found = list(check.findings())
    counts = ", ".join(f"{len(values)} {kind}s" for kind, values in check.sent.items())
    summary = f"{len(check.logs)} logs of {check.lines()} lines were searched for {counts}: {len(found)} found"
    (check.folder / "findings.txt").write_text("\n".join([summary, *found]) + "\n")
    if reporter := session.config.pluginmanager.get_plugin("terminalreporter"):
        reporter.write_line("\n".join(["", summary, *found[:20]]))
    if found:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache folder for the whole run: the embedded model is converted once. No test asks the hub."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(autouse=True, scope="module")
def memory_goes_back() -> Iterator[None]:
    """What a module's models and caches held does not stay for the rest of the run."""
    yield
    gc.collect()
    give_memory_back()
