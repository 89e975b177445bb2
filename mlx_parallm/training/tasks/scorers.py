"""Scoring functions: what a completion is worth. Looked up by name, called in batches on own threads, within limits.

A scoring function takes three lists of one length (prompts, completions, metadata) and gives a number for each. Those
of the built-in tasks have their tasks' names; others are named by `module:function` or `file.py:function`, when the
server starts: a request can only choose among names that somebody has put there. A function may have an attribute
`needs`, with the names of the metadata that it can't do without: requests without them are refused.
"""

import importlib
import importlib.util
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_parallm.errors import ConfigError, InvalidRequestError
from mlx_parallm.training.rl.trajectories import MAX_REWARD
from mlx_parallm.training.tasks.built_in import SCORERS, Scorer

log = logging.getLogger(__name__)

MAX_HANGING = 4  # calls of a scoring function that may never come back: each keeps a thread
Score = Callable[[Sequence[str], Sequence[str], Sequence[Mapping[str, Any]]], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Item:
    prompt: str
    completion: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tokens: Sequence[int] = ()  # of both, for reward models


class Rewards:
    def __init__(
        self, named: Mapping[str, Score] | None = None, *, timeout: float = 30.0, batch_size: int = 32
    ) -> None:
        self._named: dict[str, Score] = {name: scorer.scores for name, scorer in SCORERS.items()} | dict(named or {})
        self._models: dict[str, Callable[[Sequence[Sequence[int]]], Sequence[float]]] = {}
        self._timeout = timeout
        self._batch_size = batch_size
        self.failures = 0  # completions that got no score
        self.timeouts = 0  # calls that were given up
        self._lost: dict[str, list[threading.Thread]] = {}  # calls that were given up and have not come back
        self._lock = threading.Lock()

    @classmethod
    def of(cls, entries: Sequence[str], *, timeout: float, batch_size: int) -> "Rewards":
        """`NAME=module:function` or `NAME=file.py:function`; without a name, it is the function's."""
        named = {}
        for entry in entries:
            name, equals, target = entry.partition("=")
            target = target if equals else entry
            named[name if equals else target.replace(":", ".").rsplit(".", 1)[-1]] = load_function(target)
        return cls(named, timeout=timeout, batch_size=batch_size)

    @property
    def names(self) -> list[str]:
        return sorted({*self._named, *self._models})

    def check(self, name: str, *metadata: Mapping[str, Any]) -> None:
        """Whether there is such a scoring function, and whether answers with these facts can be scored by it."""
        if name not in self._named and name not in self._models:
            raise InvalidRequestError(
                f"there is no scoring function {name!r} here; there is {', '.join(self.names)}",
                param="scoring_function",
            )
        for facts in metadata:
            if lacking := self._lacking(name, facts):
                raise InvalidRequestError(
                    f"scoring function {name!r} needs {lacking}: send it with the request", param="metadata"
                )

    def _lacking(self, name: str, facts: Mapping[str, Any]) -> str:
        """What a scoring function can't do without; empty: nothing."""
        function = self._named.get(name)
        scorer = getattr(function, "__self__", None)
        if isinstance(scorer, Scorer):
            return scorer.lacks(facts)
        return next((f"metadata.{need}" for need in getattr(function, "needs", ()) if need not in facts), "")

    def add(self, name: str, function: Score) -> None:
        self._named[name] = function

    def add_model(self, name: str, scores: Callable[[Sequence[Sequence[int]]], Sequence[float]]) -> None:
        """A reward model, which reads tokens."""
        self._models[name] = scores

    def score(self, name: str, items: Sequence[Item]) -> list[float | None]:
        """A number for each; None for those whose scoring failed or took too long. Blocks: not for the event loop."""
        self.check(name)
        scores: list[float | None] = []
        for first in range(0, len(items), self._batch_size):
            scores += self._batch(name, items[first : first + self._batch_size])
        return scores

    def _batch(self, name: str, items: Sequence[Item]) -> list[float | None]:
        results: list[Sequence[float]] = []
        errors: list[BaseException] = []

        def call() -> None:
            try:
                results.append(list(self._call(name, items)))
            except BaseException as error:
                errors.append(error)

        if hanging := self._hanging(name):
            self.failures += len(items)
            log.warning(
                "scoring function %s is not called: %d calls of it have not come back after %g s each; it is called "
                "again when one of them has",
                name, hanging, self._timeout,
            )  # fmt: skip
            return [None] * len(items)
        # A thread of its own: one that never comes back holds nobody else up.
        thread = threading.Thread(target=call, name=f"score-{name}", daemon=True)
        thread.start()
        thread.join(self._timeout)
        if not results:
            self.failures += len(items)
            if not errors:
                self.timeouts += 1
                with self._lock:
                    self._lost.setdefault(name, []).append(thread)
            why = f"{type(errors[0]).__name__}: {errors[0]}" if errors else f"nothing within {self._timeout:g} s"
            log.warning("scoring function %s: %s", name, why)
            return [None] * len(items)
        return self._numbers(name, results[0], len(items))

    def _hanging(self, name: str) -> int:
        """Calls of it that hang, where there are too many to begin another; else 0."""
        with self._lock:
            self._lost[name] = [thread for thread in self._lost.get(name, ()) if thread.is_alive()]
            count = len(self._lost[name])
        return count if count >= MAX_HANGING else 0

    def _call(self, name: str, items: Sequence[Item]) -> Sequence[float]:
        if name in self._models:
            return self._models[name]([item.tokens for item in items])
        return self._named[name](
            [item.prompt for item in items], [item.completion for item in items], [item.metadata for item in items]
        )

    def _numbers(self, name: str, scores: Sequence[Any], count: int) -> list[float | None]:
        if len(scores) != count:
            log.warning("scoring function %s gave %d numbers for %d answers", name, len(scores), count)
            scores = [None] * count
        numbers = [_number(score) for score in scores]
        self.failures += numbers.count(None)
        return numbers


def _number(score: Any) -> float | None:
    try:
        number = float(score)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= MAX_REWARD else None


def load_function(target: str) -> Any:
    """`module:function`, `module.function` or `file.py:function`."""
    place, colon, name = target.rpartition(":")
    if not colon:
        place, _, name = target.rpartition(".")
    if not place or not name:
        raise ConfigError(f"{target!r} names no function: write module:function or file.py:function")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, Path(place).expanduser())
            if spec is None or spec.loader is None or not Path(place).expanduser().is_file():
                raise ConfigError(f"{target!r}: there is no file {place}")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        function = getattr(module, name)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ConfigError(f"{target!r} can't be loaded: {error}") from error
    if not callable(function):
        raise ConfigError(f"{target!r} is no function")
    return function
