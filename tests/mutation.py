"""`make mutate`: puts small faults into the package and says how many of them the tests notice.

    python -m tests.mutation [--sample N ...]   a random sample over the whole package: tests/faults/sample.py
    python -m tests.mutation MODULE ...         all faults in engine.scheduler, kv.blocks, … by mutmut
    python -m tests.mutation all                the same of all modules that [tool.mutmut] names

mutmut keeps its results in mutants/, so modules may be run one after another, and a run goes on where the last one
stopped; remove that folder to begin anew. `mutmut results` lists what survived, `mutmut show NAME` shows a mutant.
This file is also a pytest plugin of those runs.
"""

import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

PACKAGE = "mlx_parallm"
WANTED = 0.85
SURVIVED = (0, 33, 255)  # exit codes: all tests passed, no test reaches it, pytest itself could not start
LEFT_OUT = ("test_long_calls_take_linear_time", "test_cut_in_two_anywhere")  # they take more time than all others
LAST = ("test_cut_off_anywhere", "test_malformed_text_means_the_same_however_it_is_cut", "test_any_text_survives")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """The slowest tests come last. mutmut 3.8 reads names from an attribute that pytest 9.2 no longer has."""
    items[:] = sorted((item for item in items if _name(item) not in LEFT_OUT), key=lambda item: _name(item) in LAST)
    for item in items:
        item._nodeid = item.nodeid


def _name(item: Any) -> str:
    return str(getattr(item, "originalname", item.name))


def verdicts(module: str) -> dict[str, int | None]:
    """Exit codes by mutant."""
    path = Path("mutants") / PACKAGE / (module.replace(".", "/") + ".py.meta")
    found: dict[str, int | None] = json.loads(path.read_text())["exit_code_by_key"]
    return found


def known_modules() -> list[str]:
    root = Path("mutants") / PACKAGE
    paths = sorted(root.rglob("*.py.meta"))
    return [".".join(path.relative_to(root).parts).removesuffix(".py.meta") for path in paths]


def report(modules: Iterable[str]) -> float:
    """Prints the shares, of the mutants that were run; those not run yet are counted beside them."""
    print(f"{'module':<24} {'run':>6} {'of':>6} {'caught':>7} {'survived':>9} {'share':>7}")  # noqa: T201
    rows = [(module, *_counts(verdicts(module).values())) for module in modules]
    run, every, caught = (sum(numbers) for numbers in list(zip(*rows, strict=True))[1:])
    for name, *numbers in [*rows, ("all", run, every, caught)]:
        some, whole, killed = numbers
        share = killed / max(some, 1)
        print(f"{name:<24} {some:>6} {whole:>6} {killed:>7} {some - killed:>9} {share:>7.1%}")  # noqa: T201
    return caught / max(run, 1)


def _counts(codes: Collection[int | None]) -> tuple[int, int, int]:
    """How many were run, how many there are, and how many were caught."""
    run = [code for code in codes if code is not None]
    return len(run), len(codes), sum(code not in SURVIVED for code in run)


def not_run(module: str) -> list[str]:
    """The mutants without a verdict; a pattern for all of them where the module was never mutated.

    mutmut runs those that are named once more, so a run that was broken off must not name what it had done.
    """
    try:
        codes = verdicts(module)
    except FileNotFoundError:
        return [f"{PACKAGE}.{module}.*"]
    return [name for name, code in codes.items() if code is None]


def main(modules: list[str]) -> int:
    names = [name for module in modules for name in not_run(module)]
    if modules and not names:
        return int(report(modules) < WANTED)
    mutmut = Path(sys.executable).with_name("mutmut")
    cached = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    status = subprocess.run([mutmut, "run", "--max-children", "2", *names], check=False, env=cached).returncode
    if status:
        return status
    return int(report(modules or known_modules()) < WANTED)


if __name__ == "__main__":
    from tests.faults.sample import main as plant_sample

    arguments = sys.argv[1:]
    if arguments and not arguments[0].startswith("-"):
        sys.exit(main([] if arguments == ["all"] else arguments))
    sys.exit(plant_sample(arguments))
