"""Work in steps: a generator that yields where it may be paused, and returns what came of it."""

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]


def run_through(steps: Steps[T]) -> T:
    """Runs all steps without a pause; returns the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: T = end.value
            return found
