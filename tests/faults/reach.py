"""Which tests reach which functions: measured by coverage, by test file, in mutants-sample/reach; `--pack` keeps it.

Tests are run in a copy of the tree, each file in a process of its own. What a server does that a test file has started
counts for all tests of that file. A test that fails or is left out here reaches nothing. This file is also the pytest
plugin of those runs.
"""

import ast
import json
import lzma
import os
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import coverage
import pytest

from tests.faults.places import PACKAGE, Functions

WORK = Path("mutants-sample")
REACH = WORK / "reach"
PACKED = Path("tests/faults/reach.json.xz")  # the same of all files, in the repository
TREE = WORK / os.environ.get("FAULTS_TREE", "tree")  # of this process
FILE_SECONDS = 900  # for one test file with coverage
SETTINGS = """[run]
source = {tree}/mlx_parallm
data_file = {data}
parallel = true
patch = subprocess
sigterm = true
"""


@dataclass(frozen=True)
class Reached:
    """By the tests of one file."""

    digest: str  # of that file
    seconds: dict[str, float]  # by test
    by_function: dict[str, list[int]]  # by path:function, the numbers of tests in that order
    modules: list[str]  # paths that are imported at least
    setup: float = 0.0  # seconds of the longest setup: what the file's tests share is made by whichever runs first

    def tests(self, function: str) -> dict[str, float]:
        """Those that reach a function, with their seconds."""
        names = list(self.seconds)
        return {names[number]: self.seconds[names[number]] for number in self.by_function.get(function, ())}

    @cached_property
    def breadth(self) -> Counter[str]:
        """How many functions each test reaches."""
        names = list(self.seconds)
        return Counter(names[number] for tests in self.by_function.values() for number in tests)


@dataclass(frozen=True, slots=True)
class Part:
    """Which of the work is done here, where several processes share it."""

    number: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "Part":
        number, _, count = text.partition("/")
        return cls(int(number) - 1, int(count))

    def of(self, work: Sequence[Any]) -> list[Any]:
        return list(work[self.number :: self.count])


class Recorder:
    """Tells coverage which test runs, and writes down how long each took that passed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.setup = 0.0
        self.passed: set[str] = set()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        measured = coverage.Coverage.current()
        assert measured is not None
        measured.switch_context(item.nodeid)
        yield
        measured.switch_context("")

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.when == "setup":
            self.setup = max(self.setup, report.duration)
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        kept = {name: round(self.seconds[name], 3) for name in self.passed}
        times = {"seconds": kept, "setup": round(self.setup, 3)}
        Path(os.environ["FAULTS_TIMES"]).write_text(json.dumps(times))


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(Recorder())


def copy_tree() -> None:
    """The tree as it is now, in which faults may be planted."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True, check=True
    )
    shutil.rmtree(TREE, ignore_errors=True)
    for name in filter(os.path.isfile, listed.stdout.splitlines()):
        (TREE / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(name, TREE / name)
    _compile_tree()


def _compile_tree() -> None:
    """Once, the tests with pytest's assertions: processes that run a fault's tests write no bytecode."""
    collect = ["-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests"]
    for command in (["-m", "compileall", "-q", PACKAGE], collect):
        subprocess.run([sys.executable, *command], cwd=TREE, env=environment_in_tree(), capture_output=True, check=True)


def environment_in_tree() -> dict[str, str]:
    """For tests in the copy: the package there comes before the one that is installed."""
    return os.environ | {"PYTHONPATH": str(TREE.resolve()), "MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def test_files(under: Sequence[str]) -> list[str]:
    """All of the suite, or those below some folders."""
    found = [str(path) for path in sorted(Path("tests").rglob("test_*.py"))]
    return [path for path in found if not under or path.startswith(tuple(under))]


def measure_all(under: Sequence[str], part: "Part") -> None:
    """Measures the test files that are new or have changed since."""
    known = load()
    todo = [path for path in test_files(under) if path not in known or known[path].digest != _digest(path)]
    todo = part.of(todo)
    for number, path in enumerate(todo, 1):
        begun = time.monotonic()
        reached = measure(path)
        REACH.mkdir(parents=True, exist_ok=True)
        _file_of(path).write_text(json.dumps(asdict(reached)))
        count, took = len(reached.seconds), time.monotonic() - begun
        print(f"{number}/{len(todo)} {path}: {count} tests in {took:.0f} s", flush=True)  # noqa: T201


def measure(path: str) -> Reached:
    with TemporaryDirectory() as scratch:
        times, settings = Path(scratch, "times.json"), Path(scratch, "settings")
        settings.write_text(SETTINGS.format(tree=TREE.resolve(), data=Path(scratch, "data")))
        command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest", "-q"]
        command += ["-p", "tests.faults.reach", "-p", "no:cacheprovider", "-m", "not slow", path]
        environment = environment_in_tree() | {"FAULTS_TIMES": str(times)}
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(command, cwd=TREE, env=environment, capture_output=True, timeout=FILE_SECONDS)
        found = json.loads(times.read_text()) if times.exists() else {"seconds": {}, "setup": 0.0}
        return replace(_read(_digest(path), settings, found["seconds"]), setup=found["setup"])


def _read(digest: str, settings: Path, seconds: dict[str, float]) -> Reached:
    measured = coverage.Coverage(config_file=str(settings))
    with suppress(coverage.exceptions.NoDataError, coverage.exceptions.DataError):
        measured.combine()
    data = measured.get_data()
    by_function: dict[str, set[str]] = defaultdict(set)
    modules = []
    for file in data.measured_files():
        path = str(Path(file).relative_to(TREE.resolve() / PACKAGE))
        contexts = data.contexts_by_lineno(file)
        modules += [path] if contexts else []
        places = dict(functions_by_line(Path(file)))
        for line, tests in contexts.items():
            if line in places:  # without a test: by a process that a test has started
                by_function[f"{path}:{places[line]}"].update(tests if any(tests) else seconds)
    numbers = {test: number for number, test in enumerate(seconds)}
    kept = {name: sorted(numbers[test] for test in tests & numbers.keys()) for name, tests in by_function.items()}
    return Reached(digest, seconds, {name: tests for name, tests in kept.items() if tests}, sorted(modules))


def functions_by_line(file: Path) -> Iterator[tuple[int, str]]:
    """The function whose body each line is of, the innermost last."""

    def within(node: ast.AST, name: str) -> Iterator[tuple[int, str]]:
        if isinstance(node, Functions | ast.ClassDef):
            name = f"{name}.{node.name}" if name else node.name
        if isinstance(node, Functions):
            yield from ((line, name) for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1))
        for child in ast.iter_child_nodes(node):
            yield from within(child, name)

    return within(ast.parse(file.read_bytes()), "")


def load() -> dict[str, Reached]:
    """What was measured so far, by test file: what is in the repository, and what was measured anew since."""
    known = {path: Reached(**one) for path, one in _unpacked().items()}
    found = {path: _file_of(path) for path in test_files(())}
    known |= {path: Reached(**json.loads(file.read_text())) for path, file in found.items() if file.exists()}
    return {path: known[path] for path in found if path in known}


def pack() -> None:
    """Puts what is known into the repository: numbers of tests as ranges, compressed."""
    known = {path: asdict(one) for path, one in load().items()}
    for one in known.values():
        one["by_function"] = {name: _ranges(numbers) for name, numbers in one["by_function"].items()}
    PACKED.write_bytes(lzma.compress(json.dumps(known, sort_keys=True).encode()))


def _unpacked() -> dict[str, Any]:
    if not PACKED.exists():
        return {}
    known: dict[str, Any] = json.loads(lzma.decompress(PACKED.read_bytes()))
    for one in known.values():
        one["by_function"] = {
            name: [number for first, last in ranges for number in range(first, last + 1)]
            for name, ranges in one["by_function"].items()
        }
    return known


def _ranges(numbers: Sequence[int]) -> list[list[int]]:
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


def _file_of(path: str) -> Path:
    return REACH / (path.replace("/", "+") + ".json")


def _digest(path: str) -> str:
    return blake2b(Path(path).read_bytes(), digest_size=8).hexdigest()
