"""Parts of a reward: named, weighted, scored and logged one by one. No MLX.

    --reward number --reward regex='^<answer>.*</answer>$'@0.2 --reward tone=scores.py:polite@0.5

A component is a scoring function (`rewards`): it is handed prompts, completions and their rows' fields. The reward is
the weighted sum.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_parallm.errors import ConfigError
from mlx_parallm.training.tasks.built_in import Task, last_number
from mlx_parallm.training.tasks.scorers import Score, load_function

TASK = "task"  # the component that is the task's own score
REFERENCES = ("answer", "reference")  # fields of a row that a completion is compared with, the first that is there
Part = Callable[[str, Mapping[str, Any]], float]


@dataclass(frozen=True, slots=True)
class Component:
    name: str
    weight: float
    scores: Score


def parse_components(entries: Sequence[str], task: Task) -> list[Component]:
    """`NAME[=ARGUMENT][@WEIGHT]`: a built-in component, with its argument, or a function of one's own."""
    components: list[Component] = []
    for entry in entries:
        text, weight = _weight(entry)
        name, equals, argument = text.partition("=")
        if name in {one.name for one in components}:
            raise ConfigError(f"two rewards are called {name!r}; give each its own NAME=module:function")
        components.append(Component(name, weight, _scores(name, argument if equals else None, task)))
    return components


def _weight(entry: str) -> tuple[str, float]:
    text, at, weight = entry.rpartition("@")
    if not at:
        return entry, 1.0
    try:
        number = float(weight)
    except ValueError:
        return entry, 1.0  # the @ is part of a pattern or a path
    if not math.isfinite(number):
        raise ConfigError(f"reward {entry!r}: its weight must be a finite number")
    return text, number


def _scores(name: str, argument: str | None, task: Task) -> Score:
    if name == TASK and argument is None:
        return task.scores
    if name in PLAIN and argument is None:
        return _each(PLAIN[name])
    if name in WITH_ARGUMENT and argument:
        return _each(WITH_ARGUMENT[name](argument))
    if argument and name not in PLAIN and name not in WITH_ARGUMENT:
        function: Score = load_function(argument)
        return function
    known = [TASK, *PLAIN, *(f"{name}=…" for name in WITH_ARGUMENT)]
    raise ConfigError(f"there is no reward {name!r}; there is {', '.join(known)} and NAME=module:function")


def _each(part: Part) -> Score:
    def scores(
        prompts: Sequence[str], completions: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Sequence[float]:
        return [part(completion, facts) for completion, facts in zip(completions, metadata, strict=True)]

    return scores


def _reference(facts: Mapping[str, Any]) -> str:
    for name in REFERENCES:
        if name in facts:
            return str(facts[name])
    raise ValueError(f"the row has no field {' or '.join(REFERENCES)}")


def _number(completion: str, facts: Mapping[str, Any]) -> float:
    last = last_number(completion)
    return float(last is not None and last == last_number(_reference(facts)))


def _exact(completion: str, facts: Mapping[str, Any]) -> float:
    return float(completion.strip() == _reference(facts).strip())


def _regex(pattern: str) -> Part:
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"--reward regex: {pattern!r} is no regular expression: {error}") from None
    return lambda completion, facts: float(compiled.search(completion.strip()) is not None)


def _length(words: str) -> Part:
    try:
        most = int(words)
    except ValueError:
        most = 0
    if most < 1:
        raise ConfigError(f"--reward length: {words!r} is no number of words")
    return lambda completion, facts: min(1.0, max(0.0, 2.0 - len(completion.split()) / most))


PLAIN: dict[str, Part] = {
    "number": _number,  # the completion's last number is the reference's last
    "exact": _exact,  # the completion is the reference, but for spaces around it
}
WITH_ARGUMENT: dict[str, Callable[[str], Part]] = {
    "regex": _regex,  # the pattern is found in the completion; ^ and $ are its ends
    "length": _length,  # 1 up to so many words, falling to 0 at twice as many
}
