"""Problems to learn from that need no download, and their exact scores.

A task makes problems from a random generator at a level of difficulty, and scores an answer by what it was told of the
problem. The same scores serve as scoring functions: a request brings its problem's facts as `metadata`. No MLX.
"""

import json
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_parallm.common_words import WORDS
from mlx_parallm.errors import ConfigError
from mlx_parallm.training.supervised.datasets import DatasetRow, read_rows, split

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Problem:
    messages: tuple[Mapping[str, str], ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""  # where it comes from, as people may look it up

    @property
    def key(self) -> tuple[tuple[str, str], ...]:
        """What is asked: two problems with the same are one."""
        return tuple((message["role"], message["content"]) for message in self.messages)


def last_number(text: object) -> float | None:
    """None where there is none."""
    numbers = NUMBER.findall(str(text))
    return float(numbers[-1].replace(",", "")) if numbers else None


class Scorer(ABC):
    """What an answer is worth, by the facts that come with it as `metadata`. Needs no download and starts nothing."""

    name: str
    needs: tuple[str, ...] = ()  # facts without which there is no score
    numbers: tuple[str, ...] = ()  # those among them that must hold a number

    @abstractmethod
    def score(self, completion: str, metadata: Mapping[str, Any]) -> float:
        """Returns the score of a completion, from 0 to 1. `metadata` has its `finish_reason`, too."""

    def scores(
        self, prompts: Sequence[str], completions: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[float]:
        return [self.score(completion, facts) for completion, facts in zip(completions, metadata, strict=True)]

    def lacks(self, metadata: Mapping[str, Any]) -> str:
        """Returns what is missing in these facts, for an error; empty: nothing."""
        for name in self.needs:
            if name not in metadata:
                return f"metadata.{name}"
            if name in self.numbers and last_number(metadata[name]) is None:
                return f"a number in metadata.{name}, not {metadata[name]!r}"
        return ""


class Task(Scorer):
    """`levels`: of difficulty, the easiest is 1. `max_tokens`: how long an answer may be."""

    levels = 1
    max_tokens = 32

    @abstractmethod
    def problem(self, random: random.Random, level: int) -> Problem: ...

    def held_out(self) -> Sequence[Problem] | None:
        """Those that are never learnt from, where the task has them apart; None: they are sampled like others."""
        return None


def _asked(question: str, system: str = "Be brief.") -> tuple[Mapping[str, str], ...]:
    return ({"role": "system", "content": system}, {"role": "user", "content": question})


LARGEST_BY_LEVEL = {1: 9, 2: 49}  # of arithmetic's numbers


class Arithmetic(Task):
    """Sums: one digit, two, then differences and three numbers."""

    name = "arithmetic"
    needs = numbers = ("answer",)
    levels = 4
    max_tokens = 8

    def problem(self, random: random.Random, level: int) -> Problem:
        top = LARGEST_BY_LEVEL.get(level, 99)
        a, b, c = (random.randint(1, top) for _ in range(3))
        if level >= 4:
            return Problem(_asked(f"{a} + {b} - {c} ="), {"answer": a + b - c})
        if level == 3 and random.random() < 0.5:
            return Problem(_asked(f"{max(a, b)} - {min(a, b)} ="), {"answer": abs(a - b)})
        return Problem(_asked(f"{a} + {b} ="), {"answer": a + b})

    def score(self, completion: str, metadata: Mapping[str, Any]) -> float:
        found = last_number(completion)
        return float(found is not None and found == last_number(metadata["answer"]))


class Format(Task):
    """An answer in the form that was asked for: <answer>…</answer> and nothing else."""

    name = "format"
    max_tokens = 24

    def problem(self, random: random.Random, level: int) -> Problem:
        a = random.choice(WORDS)
        b = random.choice(WORDS)
        question = f"Which word is longer, {a} or {b}? Write only <answer>the word</answer>."
        return Problem(_asked(question), {})

    def score(self, completion: str, metadata: Mapping[str, Any]) -> float:
        text = completion.strip()
        parts = (text.startswith("<answer>"), text.endswith("</answer>"), text.count("<answer>") == 1)
        return sum(parts) / 3 if "<answer>" in text or "</answer>" in text else 0.0


class Length(Task):
    """A task to write as many words as were asked for, and an end; a completion that had to be cut off gets nothing."""

    name = "length"
    needs = numbers = ("words",)
    max_tokens = 12

    def problem(self, random: random.Random, level: int) -> Problem:
        count = random.randint(3, 6)
        return Problem(_asked(f"Say something about {random.choice(WORDS)} in {count} words."), {"words": count})

    def score(self, completion: str, metadata: Mapping[str, Any]) -> float:
        if metadata.get("finish_reason") == "length":
            return 0.0
        wanted = max(1.0, last_number(metadata["words"]) or 1.0)
        return max(0.0, 1.0 - abs(len(completion.split()) - wanted) / wanted)


class Letters(Task):
    """How often a letter occurs in a word."""

    name = "letters"
    needs = numbers = ("answer",)
    levels = 2
    max_tokens = 8

    def problem(self, random: random.Random, level: int) -> Problem:
        word = random.choice([word for word in WORDS if (len(word) <= 5) == (level == 1)])
        letter = random.choice(word)
        question = f'How many times does "{letter}" occur in "{word}"? Write a number.'
        return Problem(_asked(question), {"answer": word.count(letter)})

    def score(self, completion: str, metadata: Mapping[str, Any]) -> float:
        numbers = NUMBER.findall(completion)
        return float(bool(numbers) and float(numbers[0].replace(",", "")) == last_number(metadata["answer"]))


class LastNumber(Scorer):
    """GSM8K's score: the last number of the text is that of `metadata.answer`, which may be the published solution."""

    name = "gsm8k"
    needs = numbers = ("answer",)

    def score(self, completion: str, metadata: Mapping[str, Any]) -> float:
        found = last_number(completion)
        return float(found is not None and found == last_number(metadata["answer"]))


TASKS: dict[str, Task] = {task.name: task for task in (Arithmetic(), Format(), Length(), Letters())}
SCORERS: dict[str, Scorer] = {**TASKS, LastNumber.name: LastNumber()}  # scoring functions that are always there


class ReasoningGym(Task):
    """A task of the package reasoning-gym, with its own scores."""

    max_tokens = 256

    def __init__(self, dataset: str) -> None:
        try:
            import reasoning_gym
        except ImportError as error:
            raise ConfigError("reasoning-gym is not installed: pip install mlx-parallm[tasks]") from error
        self.name = f"reasoning_gym:{dataset}"
        self._gym = reasoning_gym
        self._dataset = dataset
        try:
            self._scorer = reasoning_gym.create_dataset(dataset, size=1, seed=0)
        except ValueError as error:
            raise ConfigError(f"reasoning-gym has no task {dataset!r}: {error}") from error

    def problem(self, random: random.Random, level: int) -> Problem:
        entry = self._gym.create_dataset(self._dataset, size=1, seed=random.randrange(1 << 30))[0]
        question = f"{entry['question']}\nWrite the answer inside <answer></answer>."
        return Problem(_asked(question, "Think step by step."), {"entry": entry})

    def score(self, completion: str, metadata: Mapping[str, Any]) -> float:
        answers = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
        return float(self._scorer.score_answer(answers[-1].strip() if answers else None, metadata["entry"]))


class Gsm8k(Task):
    """GSM8K from a JSON-lines file with question and answer, as it is published."""

    name = "gsm8k"
    max_tokens = 256

    def __init__(self, path: str) -> None:
        try:
            lines = Path(path).expanduser().read_text().splitlines()
            self._entries = [json.loads(line) for line in lines if line.strip()]
            self._answers = [entry["answer"].rsplit("####", 1)[-1].strip() for entry in self._entries]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no file of GSM8K problems: {error}") from error
        if not self._entries:
            raise ConfigError(f"{path} has no problems in it")

    def problem(self, random: random.Random, level: int) -> Problem:
        place = random.randrange(len(self._entries))
        question = f"{self._entries[place]['question']}\nEnd with #### and the number."
        return Problem(_asked(question, "Think step by step."), {"answer": self._answers[place]})

    def score(self, completion: str, metadata: Mapping[str, Any]) -> float:
        numbers = NUMBER.findall(completion.rsplit("####", 1)[-1])
        return float(
            bool(numbers) and float(numbers[-1].replace(",", "")) == float(metadata["answer"].replace(",", ""))
        )


class Rows(Task):
    """Prompts from the rows of a file, some of them held out. A row's fields are what its answers are scored by; there
    is no score but that of the components of a reward."""

    name = "dataset"
    max_tokens = 256

    def __init__(self, path: str, held_out_share: float = 0.1, seed: int = 0) -> None:
        rows = read_rows(path)
        problems = {problem.key: problem for problem in map(_problem, rows)}
        self._problems, self._held_out = split(list(problems.values()), held_out_share, seed)
        if not self._held_out:
            raise ConfigError("at least one row must be held out: give an --eval-share above 0")

    def problem(self, random: random.Random, level: int) -> Problem:
        return random.choice(self._problems)

    def held_out(self) -> Sequence[Problem]:
        return self._held_out

    def score(self, completion: str, metadata: Mapping[str, Any]) -> float:
        raise ConfigError("a dataset has no score of its own: give --reward")


def _problem(row: DatasetRow) -> Problem:
    messages = row.messages("prompt", "user")
    facts = {name: value for name, value in row.fields.items() if name != "prompt"}
    asked = tuple({"role": one["role"], "content": one["content"]} for one in messages)
    return Problem(asked, facts, f"{row.path}, line {row.line}")
