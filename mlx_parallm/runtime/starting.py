"""A model that predicts, on its way up: as `engine.start.StartingEngine` is for one that generates."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from mlx_parallm.errors import ModelLoadError, ParallmError
from mlx_parallm.metrics import MemoryPlan
from mlx_parallm.models.kinds import Kind, Predictor
from mlx_parallm.runtime.predicting import LocalPredictor, PredictionHost

T = TypeVar("T")


class StartingPredictor:
    """Call `load`, then `start`."""

    def __init__(self, kind: Kind, folder: Path, host: PredictionHost, max_queue_size: int) -> None:
        self._kind = kind
        self._folder = folder
        self._host = host
        self._max_queue_size = max_queue_size
        self._predictor: Predictor | None = None

    @property
    def weight_bytes(self) -> int:
        return 0 if self._predictor is None else self._predictor.info.weight_bytes

    def load(self) -> Predictor:
        """Waits until the weights are in memory."""
        self._predictor = self._on_host(partial(self._kind.load, self._folder))
        return self._predictor

    def start(self, plan: MemoryPlan) -> LocalPredictor:
        """Warms it up, now that all have their `plan`; it has no share of its own."""
        assert self._predictor is not None, "it is loaded first"
        self._on_host(self._predictor.warm_up)
        return LocalPredictor(self._predictor, self._host, self._max_queue_size)

    def stop(self) -> None:
        """Lets go of the weights."""
        self._predictor = None

    def _on_host(self, work: Callable[[], T]) -> T:
        try:
            return self._host.run(work)
        except ParallmError:
            raise
        except Exception as error:
            raise ModelLoadError(f"{self._folder} can't be loaded: {type(error).__name__}: {error}") from error
