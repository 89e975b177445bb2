"""The models of this process, by name. Loading and unloading while it runs will live here.

Two shapes: a generator has a KV cache, and an engine with a thread of its own; a predictor has `predict(batch)`, and
runs on the default engine's thread, in its turn between decode steps.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mlx_parallm.config import ServeConfig
from mlx_parallm.engine.delivery import StepEvents
from mlx_parallm.engine.engine import Engine
from mlx_parallm.engine.start import StartingEngine, plan_engines
from mlx_parallm.errors import ConfigError, ModelLoadError, ParallmError
from mlx_parallm.models.kinds import kind_of
from mlx_parallm.models.loader import load
from mlx_parallm.models.memory import size_text
from mlx_parallm.runtime.predicting import LocalPredictor

Progress = Callable[[str], AbstractContextManager[None]]  # told of each slow step of a start as it begins


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


def load_pool(config: ServeConfig, deliver: Callable[[StepEvents], None], progress: Progress) -> Pool:
    """Loads all models that the config names: the predictors onto the thread of the first that generates."""
    kinds = {name: kind_of(source) for name, source in config.named_models().items()}
    if all(kinds.values()):
        raise ConfigError(f"{', '.join(kinds)} can't generate text: serve a language model beside them")
    pool = Pool(_start_engines(config, [name for name, kind in kinds.items() if kind is None], deliver, progress), {})
    try:
        predictors = {}
        for name, kind in kinds.items():
            if kind is not None:
                folder = Path(str(config.named_models()[name])).expanduser()
                with progress(f"loading {name} from {folder}"):
                    predictor = pool.default.run(partial(kind.load, folder))
                predictors[name] = LocalPredictor(predictor, pool.default, config.batch.max_queue_size)
    except ParallmError:
        pool.stop()
        raise
    except Exception as error:
        pool.stop()
        raise ModelLoadError(f"{folder} can't be loaded: {type(error).__name__}: {error}") from error
    except BaseException:
        pool.stop()
        raise
    return Pool(pool.generators, predictors)


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
        for name, model, plan in zip(starting, loaded, plan_engines(loaded, config), strict=True):
            with progress(f"warming up {name}, {size_text(model.model.weight_bytes)} of weights"):
                engines[name] = starting[name].start(plan)
    except ParallmError:
        for one in starting.values():
            one.stop()
        raise
    return engines
