"""Shared by all tests: the package comes first, so that MLX finds its BLAS, and no test touches the user's cache."""

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mlx_parallm  # noqa: F401  before any test module imports MLX
from mlx_parallm.devices.device import this_device
from mlx_parallm.devices.freed_memory import give_memory_back
from mlx_parallm.devices.tuning import Tuning
from mlx_parallm.engine.compute import tuner
from tests.support import log_check


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "keep all logs of servers in this folder, and fail if they hold keys, prompts or paths that tests have sent"
    parser.addoption("--check-logs", metavar="FOLDER", type=Path, help=text)


def pytest_configure(config: pytest.Config) -> None:
    if folder := config.getoption("--check-logs"):
        log_check.start(folder / os.environ.get("PYTEST_XDIST_WORKER", "main"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(3600))


WORKERS_FINDINGS: list[list[str]] = []  # of xdist's processes: a summary, then what was found


def pytest_sessionfinish(session: pytest.Session) -> None:
    check, reports = log_check.active, [*WORKERS_FINDINGS]
    if check is not None and check.logs:
        reports.append(check.report())
    if hasattr(session.config, "workeroutput"):  # a process of xdist's: the one that started it fails the run
        session.config.workeroutput["log_check"] = reports[0] if reports else []
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    for summary, *found in reports:
        if reporter:
            reporter.write_line("\n".join(["", summary, *found[:20]]))
        if found:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    if findings := getattr(node, "workeroutput", {}).get("log_check"):
        WORKERS_FINDINGS.append(findings)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache folder for the whole run: the embedded model is converted once. No test asks the hub, and nothing
    that a test starts measures what suits this machine, unless the test takes PARALLM_PROFILE away."""
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        if built := os.environ.get("TEST_KERNELS"):  # the CPU's, which take ten seconds to build
            (cache / "mlx-parallm").mkdir()
            (cache / "mlx-parallm" / "native").symlink_to(built)
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        profile = cache / "profile.json"
        profile.write_text(json.dumps(Tuning.of(this_device().profile).as_json()))
        patch.setenv("PARALLM_PROFILE", str(profile))
        patch.setattr(tuner, "SECONDS", 0.0)
        yield


@pytest.fixture(autouse=True, scope="module")
def memory_goes_back() -> Iterator[None]:
    """What a module's models and caches held does not stay for the rest of the run."""
    yield
    gc.collect()
    give_memory_back()
