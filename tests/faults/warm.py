"""Runs pytest in forks of a process that has imported the libraries, which takes longer than most tests of a fault.

What the project itself holds is imported by each fork anew, from the tree in which the fault is; so is MLX, whose
streams have threads, which no fork keeps.
"""

import contextlib
import importlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest

OWN = frozenset({"mlx_parallm", "tests"})
LIBRARIES = (
    "fastapi",
    "httpx",
    "huggingface_hub",
    "hypothesis",
    "jinja2",
    "llguidance",
    "numpy",
    "openai",
    "orjson",
    "prometheus_client",
    "rich.console",
    "rich.progress",
    "rich.table",
    "safetensors.numpy",
    "tokenizers",
    "transformers",
    "uvicorn",
    "yaml",
)
LOOK_SECONDS = 0.02
OUT_OF_TIME = -1  # in place of an exit status


def import_libraries() -> None:
    for name in LIBRARIES:
        importlib.import_module(name)
    for name in ("AutoTokenizer", "PreTrainedTokenizerFast"):  # imported when they are asked for
        getattr(sys.modules["transformers"], name)


def run_pytest(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], seconds: float
) -> tuple[int, str]:
    """Its exit status and output; OUT_OF_TIME where it took longer. All that it has started ends with it."""
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            _become_pytest(arguments, folder, environment, output.fileno())
        status = _wait(child, time.monotonic() + seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if status is None:
            os.waitpid(child, 0)
            return OUT_OF_TIME, ""
        output.seek(0)
        return status, output.read().decode(errors="replace")


def _wait(child: int, deadline: float) -> int | None:
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(LOOK_SECONDS)
    return None


def _become_pytest(arguments: Sequence[str], folder: Path, environment: Mapping[str, str], output: int) -> NoReturn:
    status: int = pytest.ExitCode.INTERNAL_ERROR
    try:
        os.setsid()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.path.insert(0, str(folder))
        sys.dont_write_bytecode = True
        for name in [name for name in sys.modules if name.partition(".")[0] in OWN]:
            del sys.modules[name]
        sys.modules["__main__"] = ModuleType("__main__")  # processes that tests start would run the old one again
        status = pytest.main(["-W", "ignore::pytest.PytestAssertRewriteWarning", *arguments])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)
