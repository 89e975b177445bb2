"""Parts of a reward: what the built-in ones give, how they are written, what is wrong with an entry."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.errors import ConfigError
from mlx_parallm.training.tasks.built_in import TASKS
from mlx_parallm.training.tasks.components import parse_components

LENGTH = TASKS["length"]


def score(entry: str, completion: str, **facts: Any) -> float:
    (one,) = parse_components([entry], LENGTH)
    return next(iter(one.scores(["?"], [completion], [facts])))


@pytest.mark.parametrize(
    ("entry", "completion", "facts", "expected"),
    [
        ("number", "it is 1,204 or 42.0", {"answer": 42}, 1),
        ("number", "it is 42 or 43", {"answer": "42"}, 0),
        ("number", "none", {"answer": "none"}, 0),
        ("number", "7", {"reference": "5 + 2 = 7\n#### 7"}, 1),
        ("exact", " yes\n", {"answer": "yes"}, 1),
        ("exact", "yes.", {"answer": "yes"}, 0),
        ("regex=^<a>.*</a>$", "<a>x\ny</a> ", {}, 1),
        ("regex=^<a>.*</a>$", "oh <a>x</a>", {}, 0),
        ("regex=a@b", "a@b", {}, 1),
        ("length=4", "one two three four", {}, 1),
        ("length=4", "1 2 3 4 5 6", {}, 0.5),
        ("length=4", "1 2 3 4 5 6 7 8 9", {}, 0),
        ("task", "one two three", {"words": 3}, 1),
    ],
)
def test_built_in_parts(entry: str, completion: str, facts: Mapping[str, Any], expected: float) -> None:
    assert score(entry, completion, **facts) == expected


def shout(prompts: Sequence[str], completions: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[float]:
    return [float(text.isupper() and facts["loud"]) for text, facts in zip(completions, metadata, strict=True)]


def test_names_weights_and_functions_of_one_s_own() -> None:
    found = parse_components(["number@2", "regex=^a@b$@0.5", f"loud={Path(__file__)}:shout@-1", "exact"], LENGTH)
    assert [(one.name, one.weight) for one in found] == [("number", 2), ("regex", 0.5), ("loud", -1), ("exact", 1)]
    assert list(found[2].scores(["?"], ["HI"], [{"loud": True}])) == [1.0]


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        (["nothing"], "no reward 'nothing'; there is task, number, exact, regex=…, length=…"),
        (["regex"], "no reward 'regex'"),
        (["number=4"], "no reward 'number'"),
        (["regex=("], "is no regular expression"),
        (["length=many"], "is no number of words"),
        (["own=nothing:here"], "can't be loaded"),
        (["number", "number@2"], "two rewards are called 'number'"),
    ],
)
def test_wrong_entries(entries: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_components(entries, LENGTH)
    assert problem in caught.value.message


def test_a_row_without_a_reference_is_no_zero() -> None:
    with pytest.raises(ValueError, match="no field answer or reference"):
        score("number", "4")
