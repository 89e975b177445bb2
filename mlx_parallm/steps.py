"""Work in steps: a generator that yields where it may be paused, and returns what came of it."""

from collections.abc import Generator
from typing import Any, TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
# Yields an array that is not computed yet, where it has one: who pauses there computes it first. Others compute all at
# once, which is faster on a GPU.
LazySteps = Generator[Any, None, T]


def run_through(steps: LazySteps[T]) -> T:
    """Runs all steps without a pause; returns the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: T = end.value
            return found
