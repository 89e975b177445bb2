"""The only way a process comes up: from a config to models, their engines and memory, adapters, and training.

The server, `LLM`, `RLIntegratedServer` and `mlx_parallm_train` call `start`, and `close` what it returns.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mlx_parallm.config import ServeConfig
from mlx_parallm.engine.delivery import StepEvents
from mlx_parallm.engine.engine import Engine
from mlx_parallm.engine.start import StartingEngine, plan_engines
from mlx_parallm.errors import ConfigError, ParallmError
from mlx_parallm.models.kinds import Kind, kind_of
from mlx_parallm.models.loader import load
from mlx_parallm.models.memory import size_text
from mlx_parallm.runtime.adapters import LocalAdapters, load_adapter
from mlx_parallm.runtime.pool import LocalPredictor, Pool, load_predictor
from mlx_parallm.training.manager import TrainingManager
from mlx_parallm.training.service import TrainingService

Progress = Callable[[str], AbstractContextManager[None]]  # told of each slow step of a start as it begins


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
    adapters = config.named_adapters()  # what is wrong with them is said before a model is loaded
    kinds = {name: kind_of(source) for name, source in config.named_models().items()}
    if all(kinds.values()):
        raise ConfigError(f"{', '.join(kinds)} can't generate text: serve a language model beside them")
    engines = _start_engines(config, [name for name, kind in kinds.items() if kind is None], deliver, progress)
    try:
        first = next(iter(engines.values()))
        for name, path in adapters.items():
            load_adapter(first, name, path, config.adapters.max_lora_bytes)
        predictors = _load_predictors(config, kinds, first, progress)
        manager = TrainingManager(first, config)
        if learn:
            manager.start()
    except BaseException:
        _stop(engines)
        raise
    local = LocalAdapters(engines, manager, config.adapters.max_lora_bytes)
    return Runtime(Pool(engines, predictors), manager, TrainingService(manager), local)


def _load_predictors(
    config: ServeConfig, kinds: Mapping[str, Kind | None], engine: Engine, progress: Progress
) -> dict[str, LocalPredictor]:
    """On the engine's thread, where they will run."""
    predictors: dict[str, LocalPredictor] = {}
    for name, kind in kinds.items():
        source = config.named_models()[name]
        if kind is not None and source is not None:
            with progress(f"loading {name} from {source}"):
                predictors[name] = load_predictor(engine, kind, Path(source).expanduser())
    return predictors


def _start_engines(
    config: ServeConfig, names: Sequence[str], deliver: Callable[[StepEvents], None], progress: Progress
) -> Mapping[str, Engine]:
    """All models are in memory before any plans what is left of it."""
    starting: dict[str, StartingEngine] = {}
    loaded, engines = [], {}
    try:
        for name in names:
            source = config.named_models()[name]
            loader = partial(
                load,
                source,
                name=name,
                dtype=config.model.dtype,
                max_model_len=config.model.max_model_len,
                trust_remote_code=config.model.trust_remote_code,
            )
            starting[name] = StartingEngine(loader, config, deliver)
            with progress(f"loading {name}" + (", the embedded model" if source is None else f" from {source}")):
                loaded.append(starting[name].load())
        for name, one, plan in zip(starting, loaded, plan_engines(loaded, config), strict=True):
            with progress(f"warming up {name}, {size_text(one.model.weight_bytes)} of weights"):
                engines[name] = starting[name].start(plan)
    except ParallmError:
        _stop(starting)
        raise
    return engines


def _stop(engines: Mapping[str, Engine | StartingEngine]) -> None:
    for engine in engines.values():
        engine.stop()
