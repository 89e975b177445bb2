"""`make mutate`: runs mutmut over some modules and says how many of their mutants the tests caught.

    python -m tests.mutation [MODULE ...]    engine.scheduler, kv.blocks, …; none: all of [tool.mutmut]

mutmut keeps its results in mutants/, so modules may be run one after another, and a run of all goes on where the last
one stopped; remove that folder to begin anew. `mutmut results` lists what survived, `mutmut show NAME` shows a mutant.
This file is also a pytest plugin of those runs.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
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
    print(f"{'module':<24} {'mutants':>8} {'caught':>8} {'survived':>9} {'share':>7}")  # noqa: T201
    total = caught = 0
    for module in modules:
        codes = [code for code in verdicts(module).values() if code is not None]  # None: not run
        killed = sum(code not in SURVIVED for code in codes)
        total, caught = total + len(codes), caught + killed
        if codes:
            line = f"{module:<24} {len(codes):>8} {killed:>8} {len(codes) - killed:>9} {killed / len(codes):>7.1%}"
            print(line)  # noqa: T201
    share = caught / max(total, 1)
    print(f"{'all':<24} {total:>8} {caught:>8} {total - caught:>9} {share:>7.1%}")  # noqa: T201
    return share


def main(modules: list[str]) -> int:
    names = [f"{PACKAGE}.{module}.*" for module in modules]
    mutmut = Path(sys.executable).with_name("mutmut")
    cached = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    status = subprocess.run([mutmut, "run", "--max-children", "2", *names], check=False, env=cached).returncode
    if status:
        return status
    return int(report(modules or known_modules()) < WANTED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
