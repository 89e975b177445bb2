"""The models of this process, by name. Loading and unloading while it runs will live here.

Two shapes: a generator has a KV cache, and an engine with a thread of its own; a predictor has `predict(batch)`, and
runs on the default engine's thread, in its turn between decode steps.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_parallm.engine.background import Steps
from mlx_parallm.engine.engine import Engine
from mlx_parallm.errors import ModelLoadError, ParallmError
from mlx_parallm.models.kinds import Kind, Predictor


@dataclass(frozen=True, slots=True)
class LocalPredictor:
    """A predictor, and the engine whose thread it runs on."""

    kind: str
    predictor: Predictor
    engine: Engine

    def predict(self, batch: Sequence[Any]) -> "Future[list[Any]]":
        return self.engine.work(self._steps(batch))

    def _steps(self, batch: Sequence[Any]) -> Steps[list[Any]]:
        yield from ()
        return self.predictor.predict(batch)


def load_predictor(engine: Engine, kind: Kind, folder: Path) -> LocalPredictor:
    """Loads a model of a kind on the engine's thread."""

    def steps() -> Steps[Predictor]:
        yield from ()
        return kind.load(folder)

    try:
        predictor = engine.work(steps()).result()
    except ParallmError:
        raise
    except Exception as error:
        raise ModelLoadError(f"{folder} can't be loaded: {type(error).__name__}: {error}") from error
    return LocalPredictor(kind.__name__.rpartition(".")[2], predictor, engine)


@dataclass(frozen=True, slots=True)
class Pool:
    generators: Mapping[str, Engine]
    predictors: Mapping[str, LocalPredictor]

    @property
    def default(self) -> Engine:
        return next(iter(self.generators.values()))

    def stop(self) -> None:
        """Ends the engines; what still runs is cut off."""
        for engine in self.generators.values():
            engine.stop()
