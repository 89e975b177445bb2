"""The only way a process comes up: from a config to models, their engines and memory, adapters, and training.

The server, `LLM`, `RLIntegratedServer` and `mlx_parallm_train` call `start`, and `close` what it returns.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from mlx_parallm import heap
from mlx_parallm.arms import Decision
from mlx_parallm.config import ServeConfig
from mlx_parallm.engine.delivery import StepEvents
from mlx_parallm.engine.engine import Engine
from mlx_parallm.engine.ranks import Ranks
from mlx_parallm.errors import ConfigError, UnavailableError
from mlx_parallm.lora.adapter_files import read_adapter
from mlx_parallm.paths import user_data
from mlx_parallm.platforms import hold_off_sleep
from mlx_parallm.progress import StartProgress, silent
from mlx_parallm.runtime.adapters import LocalAdapters, SplitFile
from mlx_parallm.runtime.pool import ModelPool
from mlx_parallm.runtime.predicting import LocalPredictor
from mlx_parallm.training.manager import TrainingManager
from mlx_parallm.training.training_service import TrainingService
from mlx_parallm.types import UNNAMED_ADAPTER

log = logging.getLogger(__name__)


class Runtime:
    """Models that serve, their adapters, and training, which is of the default model."""

    def __init__(self, config: ServeConfig, pool: ModelPool, learn: bool = True) -> None:
        """`learn`: whether the adapters that the config names for it will be trained."""
        self.pool = pool
        self.training = TrainingService()  # what clients ask of the manager
        self.adapters = LocalAdapters(pool, self.training, config.adapters.max_lora_bytes)
        self._config = config
        self._trained = set(config.training.adapters) if learn and config.trains else set()
        self._manager: TrainingManager | None = None
        self.resources = ExitStack()  # what ends with it
        pool.listen(self._follow)

    @property
    def models(self) -> Mapping[str, Engine]:
        return self.pool.generators

    @property
    def predictors(self) -> Mapping[str, LocalPredictor]:
        return self.pool.predictors

    @property
    def engine(self) -> Engine:
        """The default model's."""
        return self.manager.engine

    @property
    def manager(self) -> TrainingManager:
        if self._manager is None:
            raise UnavailableError("no model that generates text is loaded")
        return self._manager

    def _follow(self) -> None:
        """The default model has come, or gone: training, and the adapters that the config names, are its own."""
        default = next(iter(self.pool.generators.values()), None)
        if self._manager is not None and self._manager.engine is default:
            return
        if default is not None:
            for name, path in self._config.named_adapters().items():
                if name in self._trained:  # its trainer begins with it
                    continue
                adapter, its_config, folder = read_adapter(path, self._config.adapters.max_lora_bytes)
                own = name == UNNAMED_ADAPTER and self._config.adapters.has_unnamed
                default.adapters.publish(name, adapter, folder, config=its_config, own=own)
        self._manager = None if default is None else TrainingManager(default, self._config)
        self.training.bind(self._manager)

    def follow_split(self) -> None:
        """The default model's own name serves what a rule has come to, over restarts; `adapters` tells of decisions."""
        engine = self.engine
        config = self._config
        folder = Path(config.checkpoints.checkpoint_dir).expanduser() if config.trains else user_data("splits")
        self._split = SplitFile(folder, engine.model.name)
        self._split.restore(engine.adapters, lambda name: self.adapters.checkpoint(engine.model.name, name))
        self._split.follow(engine.adapters)

        def decided(decision: Decision) -> None:
            log.info("the better arm serves all requests from now on: %s", decision.facts())
            self.adapters.on_decision(engine.model.name, decision)

        engine.adapters.traffic.on_decision = decided

    def close(self) -> None:
        """Writes training's state and ends the engines; what still runs is cut off."""
        self.training.close()
        self.resources.close()


def start(
    config: ServeConfig,
    deliver: Callable[[StepEvents], None],
    *,
    learn: bool = True,
    ranks: Ranks | None = None,
    progress: StartProgress = silent,
) -> Runtime:
    """Loads what the config names. `deliver` takes each step's events, on an engine's thread.

    `learn`: False where the caller trains by other means, so that no adapter begins to. `ranks`: other processes that
    hold parts of the model.
    """
    heap.share_heaps()
    config.named_adapters()  # wrong ones are errors before any load
    pool = ModelPool(config, deliver, ranks)
    runtime = Runtime(config, pool, learn)
    with ExitStack() as undo:
        if not config.http.allow_sleep:
            undo.callback(hold_off_sleep())
        undo.callback(pool.stop)
        pool.start(progress)
        if learn and runtime.models:
            runtime.manager.start()
            runtime.follow_split()
        elif not runtime.models and (config.trains or config.named_adapters()):
            raise ConfigError("training and adapters need a model that generates text: name it with --model-path")
        runtime.resources = undo.pop_all()
    return runtime
