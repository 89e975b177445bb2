"""The only way a process comes up: from a config to models, their engines and memory, adapters, and training.

The server, `LLM`, `RLIntegratedServer` and `mlx_parallm_train` call `start`, and `close` what it returns.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mlx_parallm.config import ServeConfig
from mlx_parallm.engine.delivery import StepEvents
from mlx_parallm.engine.engine import Engine
from mlx_parallm.lora.files import read_adapter
from mlx_parallm.runtime.adapters import LocalAdapters
from mlx_parallm.runtime.pool import Pool, Progress, load_pool
from mlx_parallm.runtime.predicting import LocalPredictor
from mlx_parallm.training.manager import TrainingManager
from mlx_parallm.training.service import TrainingService


@dataclass(slots=True)
class Runtime:
    """Models that serve, their adapters, and training, which is of the default model."""

    pool: Pool
    manager: TrainingManager
    training: TrainingService  # what clients ask of the manager
    adapters: LocalAdapters

    @property
    def models(self) -> Mapping[str, Engine]:
        return self.pool.generators

    @property
    def predictors(self) -> Mapping[str, LocalPredictor]:
        return self.pool.predictors

    @property
    def engine(self) -> Engine:
        """The default model's."""
        return self.pool.default

    def close(self) -> None:
        """Writes training's state and ends the engines; what still runs is cut off."""
        self.training.close()
        self.pool.stop()


def start(
    config: ServeConfig,
    deliver: Callable[[StepEvents], None],
    *,
    learn: bool = True,
    progress: Progress = lambda what: contextlib.nullcontext(),
) -> Runtime:
    """Loads what the config names. `deliver` takes each step's events, on an engine's thread.

    `learn`: False where the caller trains by other means, so that no adapter begins to.
    """
    adapters, limit = config.named_adapters(), config.adapters.max_lora_bytes  # wrong ones are errors before any load
    pool = load_pool(config, deliver, progress)
    try:
        for name, path in adapters.items():
            adapter, its_config, folder = read_adapter(path, limit)
            pool.default.adapters.publish(name, adapter, folder, config=its_config)
        manager = TrainingManager(pool.default, config)
        if learn:
            manager.start()
    except BaseException:
        pool.stop()
        raise
    return Runtime(pool, manager, TrainingService(manager), LocalAdapters(pool.generators, manager, limit))
