"""`make mutate --sample`: what is planted, in which order, and which tests are run for it."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import sample as module
from tests.faults.places import Fault, faults_of, sample
from tests.faults.reach import Reached
from tests.faults.sample import chosen_tests, equivalents, report, verdicts

SOURCE = '''"""What it owns, and 1 + 1."""
import logging
log = logging.getLogger(__name__)
LIMIT = 5
Kind = Literal["free", "taken"]

class Pool:
    def take(self, count: int | None = 3) -> list[str]:
        """Not this: 1 + 1."""
        log.info("taken %d", count + 1)
        assert count < 4, "too many"
        if count > LIMIT and not (count == 7):
            raise ValueError(f"{count + 1} is too many")
        self.left -= count  # 1 + 1
        return ["é"] + ["a text for people"] * min(
            count, 9
        )
'''


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "mlx_parallm" / "kv").mkdir(parents=True)
    (tmp_path / "mlx_parallm" / "kv" / "pool.py").write_text(SOURCE)
    return tmp_path


def test_faults_are_where_they_could_be_noticed(root: Path) -> None:
    found = faults_of(root)
    source = (root / "mlx_parallm" / "kv" / "pool.py").read_bytes()
    assert {fault.name.removeprefix("kv.pool:") for fault in found} >= {
        ": 5 -> 6",
        "Pool.take: 3 -> 4",
        "Pool.take: count > LIMIT -> count >= LIMIT",
        "Pool.take: not (count == 7) -> (count == 7)",
        "Pool.take: count == 7 -> count != 7",
        "Pool.take: self.left -= count -> pass",
        "Pool.take: min( count, 9 ) -> max( count, 9 )",
        "Pool.take: \"é\" -> 'éXX'",
        "Pool.take: 9 -> 10",
    }
    assert len({fault.name for fault in found}) == len(found) == 15
    for fault in found:
        assert ast.dump(ast.parse(fault.planted(source))) != ast.dump(ast.parse(source)), fault.name


def test_a_larger_sample_begins_with_the_smaller(root: Path) -> None:
    faults = faults_of(root)
    small = sample(faults, 4, seed=1)
    assert sample(faults[::-1], 9, seed=1)[:4] == small
    assert sample(faults, 4, seed=2) != small


def fault(path: str = "kv/pool.py", function: str = "Pool.take") -> Fault:
    return Fault(path, function, 1, 0, 1, "", "a -> b")


def test_tests_of_its_name_come_first_then_those_that_reach_little_else() -> None:
    reached = {
        "tests/unit/test_pool.py": Reached(
            "", {"tests/unit/test_pool.py::slow": 5.0}, {"kv/pool.py:Pool.take": [0]}, []
        ),
        "tests/e2e/test_all.py": Reached(
            "",
            {"tests/e2e/test_all.py::a": 4.0, "tests/e2e/test_all.py::b": 9.0, "tests/e2e/test_all.py::c": 0.1},
            {"kv/pool.py:Pool.take": [0, 1], "kv/pool.py:Pool.give": [2]},
            ["kv/pool.py"],
        ),
    }
    assert chosen_tests(fault(), reached, 11.0) == ["tests/unit/test_pool.py::slow", "tests/e2e/test_all.py::a"]
    assert chosen_tests(fault(function="Pool.give"), reached, 11.0) == ["tests/e2e/test_all.py::c"]
    assert chosen_tests(fault(function=""), reached, 11.0) == ["tests/e2e/test_all.py::c", "tests/e2e/test_all.py::a"]
    assert chosen_tests(fault("kv/other.py"), reached, 11.0) == []
    # Importing another file takes a second, too.
    assert chosen_tests(fault(), reached, 10.0) == ["tests/unit/test_pool.py::slow"]
    reached["tests/e2e/test_all.py"] = replace(reached["tests/e2e/test_all.py"], setup=2.0)  # a server's start
    assert chosen_tests(fault(), reached, 11.0) == ["tests/unit/test_pool.py::slow"]
    broad = {"kv/pool.py:Pool.take": [0, 1], "kv/pool.py:Pool.give": [0], "kv/pool.py:Pool.size": [0]}
    names = {"tests/e2e/test_all.py::quick": 0.1, "tests/e2e/test_all.py::narrow": 0.2}
    reached = {"tests/e2e/test_all.py": Reached("", names, broad, [])}
    assert chosen_tests(fault(), reached, 11.0) == ["tests/e2e/test_all.py::narrow", "tests/e2e/test_all.py::quick"]
    assert chosen_tests(fault(), reached, 11.0, broadest=True)[0] == "tests/e2e/test_all.py::quick"


def test_the_report_counts_by_folder_without_equivalents(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = faults_of(root)
    results, notes = root / "seed-1.jsonl", root / "notes.md"
    words = ["caught"] * 6 + ["survived", "unreached", "error", "survived"]
    lines = [f'{{"name": {_json(one.name)}, "verdict": "{word}"}}' for one, word in zip(faults, words, strict=False)]
    results.write_text("\n".join(lines))
    notes.write_text(f"# Notes\n\n- `{faults[9].name}`: both ways do the same.\n")
    monkeypatch.setattr(module, "NOTES", notes)
    assert equivalents(notes.read_text()) == {faults[9].name: "both ways do the same."}
    assert faults[8].name not in verdicts(results), "it is planted again"
    assert report(faults, results) == 1  # less than is wanted
    printed = capsys.readouterr().out
    assert f"survived: {faults[6].name}\n" in printed
    assert f"unreached: {faults[7].name}\n" in printed
    assert printed.splitlines()[-2].split() == ["kv", "6", "1", "1", "1", "6", "75.0%"]


def _json(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
