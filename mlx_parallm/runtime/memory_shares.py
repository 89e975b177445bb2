"""What is in memory, and each engine's share of what the weights leave. The pool's thread alone changes it."""

from collections.abc import Sequence

from mlx_parallm.config import ServeConfig
from mlx_parallm.engine.build import LoadedModel
from mlx_parallm.engine.engine import Engine
from mlx_parallm.engine.start import plan_engines
from mlx_parallm.errors import MemoryLimitError
from mlx_parallm.metrics import MemoryPlan
from mlx_parallm.models.kinds import Predictor
from mlx_parallm.models.memory import memory_limit, size_flag, size_text
from mlx_parallm.runtime.predicting import LocalPredictor

PREDICTION_BYTES = 256 << 20  # that predictions compute in; less where the memory is small


class MemoryShares:
    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self.limit = memory_limit(config)
        self.engines: list[Engine] = []  # the first hosts the predictors, and is the one that trains
        self.predictors: list[LocalPredictor] = []

    @property
    def weight_bytes(self) -> int:
        """The bytes of all weights that are loaded."""
        generators = sum(engine.model.weight_bytes for engine in self.engines)
        return generators + sum(predictor.info.weight_bytes for predictor in self.predictors)

    def divide(self, newcomer: LoadedModel | Predictor | None = None, expected: int = 0) -> MemoryPlan:
        """Gives each engine its share; returns the last one's: a newcomer that generates starts with it.

        `expected`: bytes of weights that are about to come. MemoryLimitError, and all is as it was.
        """
        loaded: Sequence[LoadedModel | Engine] = self.engines
        held = expected + sum(one.info.weight_bytes for one in self.predictors)
        if isinstance(newcomer, Predictor):
            held += newcomer.info.weight_bytes
        elif newcomer is not None:
            loaded = [*self.engines, newcomer]
        if held:
            held += min(PREDICTION_BYTES, self.limit // 8)
        if held > self.limit:
            raise MemoryLimitError(
                f"the weights take {size_text(held)}, and the process may hold {size_text(self.limit)}: "
                f"--memory-limit {size_flag(held)} would hold them"
            )
        if not loaded:
            return MemoryPlan(limit=self.limit)
        plans = plan_engines(loaded, self._config, limit=self.limit, predictors=held)
        alive = [(engine, plan) for engine, plan in zip(self.engines, plans, strict=False) if engine.failure is None]
        for engine, plan in alive:
            engine.check_room(plan)
        for engine, plan in alive:
            engine.resize(plan)
        return plans[-1]
