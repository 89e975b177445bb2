"""Short work on the engine thread, for training's own threads: MLX is called there alone."""

from collections.abc import Callable, Generator
from typing import TypeVar

from mlx_parallm.engine.engine import Engine

T = TypeVar("T")


def once(work: Callable[[], T]) -> Generator[None, None, T]:
    """One step that returns a result."""
    yield from ()
    return work()


def run_on_engine(engine: Engine, work: Callable[[], T]) -> T:
    """Waits for it. Never on the engine thread itself."""
    return engine.work(once(work)).result()
