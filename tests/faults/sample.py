"""Plants faults one by one in a copy of the tree, runs the tests that reach each, and writes down what became of it.

    python -m tests.mutation --sample 400 --seed 1           plants so many; goes on where the last call stopped
    python -m tests.mutation --sample 400 --seed 1 --report  what is known of them so far, folder by folder
    python -m tests.mutation --map [tests/unit ...]          measures which tests reach what, where they have changed

With --jobs N so many processes share the work, each in a copy of the tree of its own.

Results are in tests/faults/results/seed-1.jsonl, a line for each fault; remove a line, and its fault is planted again.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlx_parallm.paths import user_cache
from tests.faults import reach, warm
from tests.faults.places import PACKAGE, Fault, faults_of, sample
from tests.faults.reach import TREE, WORK, Part, Reached

MUTANT_SECONDS = 60.0  # after which a fault counts as noticed, if its tests take less without it
TEST_SECONDS = 25.0  # of tests for one fault, as they were measured, with coverage
FILE_SECONDS = 1.0  # to import a file of tests, beside what its setup takes
FEW_CASES = 3  # of one test come before more of them
SETUP_SHARE = 0.4  # of a setup as it was measured: with coverage servers are started, without it they are forked
GOLDEN = ("tests/e2e/test_golden_answers.py", "tests/unit/test_surface.py", "tests/e2e/test_surface.py")
WANTED = 0.85
RESULTS = Path("tests/faults/results")
NOTES = Path("docs/MUTATION.md")
MISSING = re.compile(r"^ERROR: not found: (.+)$", re.MULTILINE)
EQUIVALENT = re.compile(r"^- `(?P<name>[^`]+)`: (?P<reason>.+)$", re.MULTILINE)


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.jobs > 1:
        _share(arguments, options.jobs)
        arguments = [*arguments, "--report"]
        options = _parser().parse_args(arguments)
    if options.map is not None:
        if not options.report:
            reach.copy_tree()
            reach.measure_all(options.map, options.part)
        return 0
    if options.pack:
        reach.pack()
        return 0
    results = RESULTS / f"seed-{options.seed}.jsonl"
    chosen = sample(faults_of(Path()), options.sample, options.seed)
    if not options.report:
        reach.copy_tree()
        if not reach.load():
            reach.measure_all((), Part())
        run = _run_again if options.again else _run
        run(options.part.of(chosen), results, options.seconds)
    return report(chosen, results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make mutate", description="Faults at random, over the whole package.")
    parser.add_argument("--sample", type=int, default=400, metavar="N", help="plant so many (default: 400)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (default: 1)")
    parser.add_argument("--report", action="store_true", help="plant none: tell what is known so far")
    parser.add_argument("--map", nargs="*", metavar="TESTS", help="measure which of these tests reach what, and end")
    text = f"of tests for one fault, as they were measured (default: {TEST_SECONDS:g})"
    parser.add_argument("--seconds", type=float, default=TEST_SECONDS, help=text)
    parser.add_argument("--again", action="store_true", help="plant those that were not caught once more")
    parser.add_argument("--pack", action="store_true", help="put the map into the repository, and end")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes that share the work (default: 1)")
    parser.add_argument("--part", type=Part.parse, default=Part(), metavar="K/N", help="do one part of the work alone")
    return parser


def _share(arguments: Sequence[str], jobs: int) -> None:
    """Runs all parts at once, each in a copy of the tree of its own."""
    command = [sys.executable, "-m", "tests.mutation", *arguments, "--jobs", "1"]
    running = [
        subprocess.Popen([*command, "--part", f"{number}/{jobs}"], env=os.environ | {"FAULTS_TREE": f"tree-{number}"})
        for number in range(1, jobs + 1)
    ]
    for one in running:
        one.wait()


def _run(chosen: Sequence[Fault], results: Path, seconds: float) -> None:
    known, reached = verdicts(results), reach.load()
    todo = [fault for fault in chosen if fault.name not in known]
    _plant_all({fault: chosen_tests(fault, reached, seconds) for fault in _without_equivalents(todo)}, results)


def _run_again(faults: Sequence[Fault], results: Path, seconds: float) -> None:
    """Those that were not caught, against more tests, or against those that are new."""
    known, reached = verdicts(results), reach.load()
    todo = [fault for fault in faults if known.get(fault.name) in ("survived", "unreached")]
    tests = {fault: chosen_tests(fault, reached, seconds, broadest=True) for fault in _without_equivalents(todo)}
    _plant_all(tests, results)


def _without_equivalents(faults: Sequence[Fault]) -> list[Fault]:
    same = equivalents(NOTES.read_text())
    return [fault for fault in faults if fault.name not in same]


def _plant_all(todo: Mapping[Fault, Sequence[str]], results: Path) -> None:
    warm.import_libraries()
    for number, (fault, tests) in enumerate(todo.items(), 1):
        begun = time.monotonic()
        verdict = _plant(fault, tests) if tests else "unreached"
        line = {"name": fault.name, "verdict": verdict, "line": fault.line, "tests": len(tests)}
        results.parent.mkdir(exist_ok=True)
        with results.open("a") as file:
            file.write(json.dumps(line | {"seconds": round(time.monotonic() - begun, 1)}) + "\n")
        print(f"{number}/{len(todo)} {verdict:<9} {fault.name}", flush=True)  # noqa: T201


def chosen_tests(
    fault: Fault, reached: Mapping[str, Reached], seconds: float = TEST_SECONDS, broadest: bool = False
) -> list[str]:
    """Tests that reach a fault's function, as many as there is time for: first those of a file of its name, then those
    that reach little else, a few cases of each; at last those that compare what users see with golden files. Of code
    that runs on import, all tests that import it. `broadest`: before all others the one that reaches most."""
    found: dict[str, float] = {}
    breadth: Counter[str] = Counter()
    for one in reached.values():
        tests = one.tests(fault.reached_as)
        found |= tests
        breadth.update({test: one.breadth[test] for test in tests})
    for one in reached.values() if not found else ():
        found |= one.seconds if fault.path in one.modules else {}
    path = Path(fault.path)
    words = _words(path.parent if path.stem == "__init__" else path)

    seen: Counter[str] = Counter()
    alike: dict[str, int] = {}  # how many cases of the same test come before it
    for test in found:
        alike[test] = seen[test.partition("[")[0]]
        seen[test.partition("[")[0]] += 1

    def rank(test: str) -> tuple[bool, int, int, float]:
        elsewhere = words.isdisjoint(_words(Path(test.partition("::")[0])))
        return elsewhere, alike[test] // FEW_CASES, breadth[test], found[test]

    chosen: list[str] = []
    files: set[str] = set()
    left = seconds
    ordered = sorted(found, key=rank)
    if broadest and breadth:
        ordered.sort(key=breadth.most_common(1)[0][0].__ne__)
    for test in ordered:
        file = test.partition("::")[0]
        cost = found[test] + (0.0 if file in files else FILE_SECONDS + SETUP_SHARE * reached[file].setup)
        if cost <= left:
            left -= cost
            files.add(file)
            chosen.append(test)
    return chosen + [test for test in ordered if test not in chosen and test.partition("::")[0] in GOLDEN]


def _words(path: Path) -> set[str]:
    """Those of a file's name, in the singular."""
    return {word.removesuffix("s") for word in path.stem.split("_")} - {"test"}


def _plant(fault: Fault, tests: Sequence[str]) -> str:
    """Runs tests with a fault in place: caught, survived, or an error where they could not be run."""
    file = TREE / PACKAGE / fault.path
    whole = file.read_bytes()
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()  # one of the same size and second would be taken for it
    try:
        file.write_bytes(fault.planted(whole))
        status, output = _pytest(tests, builds="native/" in fault.path)
        if status == warm.OUT_OF_TIME:
            file.write_bytes(whole)
            return "error" if _pytest(tests)[0] == warm.OUT_OF_TIME else "caught"  # else the machine is busy
        if missing := MISSING.findall(output):  # the map is older than the tests, or a name is new each time
            tests = [test for test in tests if not any(name.endswith(test) for name in missing)]
            status, output = _pytest(tests) if tests else (0, "")
    finally:
        file.write_bytes(whole)
    if MISSING.search(output):
        return "error"
    return "survived" if status == 0 else "caught"


def _pytest(tests: Sequence[str], builds: bool = False) -> tuple[int, str]:
    """`builds`: the CPU's kernels are built anew, not taken from the user's cache."""
    names = WORK / f"{TREE.name}.txt"
    names.write_text("\n".join(tests))
    arguments = ["-q", "-x", "-p", "no:cacheprovider", f"@{names.resolve()}"]
    environment = reach.environment_in_tree() | {"PYTHONDONTWRITEBYTECODE": "1"}
    built = user_cache() / "native"
    if built.is_dir() and not builds:
        environment["TEST_KERNELS"] = str(built)
    return warm.run_pytest(arguments, TREE.resolve(), environment, MUTANT_SECONDS)


def verdicts(results: Path) -> dict[str, str]:
    """By fault, without those whose tests could not be run."""
    lines = results.read_text().splitlines() if results.exists() else []
    found = [json.loads(line) for line in lines]
    return {one["name"]: one["verdict"] for one in found if one["verdict"] != "error"}


def equivalents(notes: str) -> dict[str, str]:
    """Faults that change nothing, each with the reason."""
    return {found["name"]: found["reason"] for found in EQUIVALENT.finditer(notes)}


def report(chosen: Sequence[Fault], results: Path) -> int:
    """Prints what survived, and the counts by folder; 1 where too little was caught."""
    known, same = verdicts(results), equivalents(NOTES.read_text())
    counts: Counter[tuple[str, str]] = Counter()
    for fault in chosen:
        verdict = "equivalent" if fault.name in same else known.get(fault.name, "not run")
        counts[fault.path.rpartition("/")[0].partition("/")[0] or ".", verdict] += 1
        counts["all", verdict] += 1
        if verdict in ("survived", "unreached"):
            print(f"{verdict}: {fault.name}")  # noqa: T201
    verdict_names = ("caught", "survived", "unreached", "equivalent", "not run")
    print(f"{'folder':<12}" + "".join(f"{verdict:>12}" for verdict in verdict_names) + f"{'share':>8}")  # noqa: T201
    share = 1.0
    for folder in [*sorted({folder for folder, _ in counts} - {"all"}), "all"]:
        numbers = [counts[folder, verdict] for verdict in verdict_names]
        share = numbers[0] / max(1, sum(numbers[:3]))
        print(f"{folder:<12}" + "".join(f"{number:>12}" for number in numbers) + f"{share:>8.1%}")  # noqa: T201
    return int(share < WANTED)
