"""How a model comes into memory and leaves it, and how those that are there share the memory. The pool's thread alone.

A generator gets an engine with a thread of its own; a predictor runs on the thread of the first engine, in its turn
between decode steps, or on one of its own where nothing generates. Whenever a model comes or goes, what the weights
leave of the memory is divided anew.
"""

import gc
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import mlx.core as mx

from mlx_parallm.config import ServeConfig
from mlx_parallm.engine.build import LoadedModel
from mlx_parallm.engine.delivery import StepEvents
from mlx_parallm.engine.engine import Engine
from mlx_parallm.engine.ranks import Ranks
from mlx_parallm.engine.start import StartingEngine, plan_engines
from mlx_parallm.errors import ConflictError, MemoryLimitError, ModelLoadError, ParallmError
from mlx_parallm.models.device import give_memory_back
from mlx_parallm.models.kinds import Kind, kind_of
from mlx_parallm.models.language import LanguageModel
from mlx_parallm.models.loader import load
from mlx_parallm.models.memory import memory_limit, size_flag, size_text
from mlx_parallm.progress import Share, StartProgress, Tell, unknown
from mlx_parallm.runtime.predict_thread import PredictThread
from mlx_parallm.runtime.predicting import LocalPredictor
from mlx_parallm.types import MemoryPlan

Model = Engine | LocalPredictor

log = logging.getLogger(__name__)

RELEASE_SECONDS = 5.0  # for those that still refer to a model that leaves
PREDICTION_BYTES = 256 << 20  # that predictions compute in; less where the memory is small


class Loader:
    def __init__(self, config: ServeConfig, deliver: Callable[[StepEvents], None], ranks: Ranks | None = None) -> None:
        self._config = config
        self._deliver = deliver
        self._ranks = ranks
        self._thread: PredictThread | None = None
        self._leaving: Callable[[], Model | None] = lambda: None
        self.limit = memory_limit(config)
        self.engines: list[Engine] = []  # the first hosts the predictors, and is the one that trains
        self.predictors: list[LocalPredictor] = []

    @property
    def weight_bytes(self) -> int:
        """Of all that is loaded."""
        generators = sum(engine.model.weight_bytes for engine in self.engines)
        return generators + sum(predictor.info.weight_bytes for predictor in self.predictors)

    def bring_up(
        self, name: str, source: str | None, size: int, progress: StartProgress, origin: str | None = None
    ) -> Model:
        """Loads a model, and gives all their share of the memory; raises what is wrong, and all is as it was.

        `origin`: what users call the source, where it was downloaded. `size`: bytes that its weights will take. The
        others make room for them before they come.
        """
        kind = kind_of(source)
        if self._ranks is not None:
            size //= self._ranks.size
            if kind is not None or self.engines:
                raise ConflictError("a group of ranks serves one model that generates; start another server for others")
        try:
            self._divide(beside=size)
            if kind is None:
                engine = self._start_engine(name, source, size, progress, origin)
                self.engines.append(engine)
                self._move_predictors()
                return engine
            predictor = self._load_predictor(name, Path(str(source)).expanduser(), size, kind, progress)
        except BaseException:
            self._divide()
            raise
        self.predictors.append(predictor)
        return predictor

    def take_down(self, model: Model) -> None:
        """Ends a model; what still runs is cut off."""
        if isinstance(model, Engine):
            self.engines.remove(model)
            self._move_predictors()
            model.stop()
            model.release()
        else:
            self.predictors.remove(model)
            model.stop()
        self._leaving = weakref.ref(model)

    def reclaim(self) -> None:
        """After the caller has let go of a model that was taken down: its memory goes back, and the others may have it.

        A batch whose results are known already may still have to end on the thread of an engine.
        """
        deadline = time.monotonic() + RELEASE_SECONDS
        gc.unfreeze()  # what came at the start is not looked at otherwise
        gc.collect()
        while self._leaving() is not None and time.monotonic() < deadline:
            time.sleep(0.02)
            gc.collect()
        gc.freeze()
        if self._leaving() is not None:
            log.warning(
                "a model that has left is still referred to after %g s: its memory is not free", RELEASE_SECONDS
            )
        give_memory_back()
        self._divide()

    def stop(self) -> None:
        """Ends all engines; what still runs is cut off."""
        for engine in self.engines:
            engine.stop()
        if self._thread is not None:
            self._thread.stop()

    def _start_engine(
        self, name: str, source: str | None, size: int, progress: StartProgress, origin: str | None
    ) -> Engine:
        # What comes from the hub has bars of the hub's own.
        share = _loaded_share(size) if source is None or Path(source).expanduser().exists() else None
        where = ", the embedded model" if source is None else f" from {origin or source}"
        with ExitStack() as undo:
            with progress(f"loading {name}{where}", share) as tell:
                starting = StartingEngine(
                    self._load_from(source, name, tell, origin), self._config, self._deliver, ranks=self._ranks
                )
                undo.callback(starting.stop)
                loaded = starting.load()
            plan = self._divide(loaded)
            with progress(f"warming up {name}, {size_text(loaded.model.weight_bytes)} of weights", unknown):
                engine = starting.start(plan)
            undo.pop_all()
            return engine

    def _load_from(self, source: str | None, name: str, tell: Tell, origin: str | None) -> Callable[[], LanguageModel]:
        options = self._config.model
        return partial(
            load,
            source,
            name=name,
            dtype=options.dtype,
            max_model_len=options.max_model_len,
            trust_remote_code=options.trust_remote_code,
            split=None if self._ranks is None else self._ranks.split,
            tell=tell,
            origin=origin,
        )

    def _load_predictor(
        self, name: str, folder: Path, size: int, kind: Kind, progress: StartProgress
    ) -> LocalPredictor:
        host = self._host()
        try:
            with progress(f"loading {name} from {folder}", _loaded_share(size)):
                predictor = host.run(partial(kind.load, folder))
            self._divide(beside=predictor.info.weight_bytes)
            with progress(f"warming up {name}", unknown):
                host.run(predictor.warm_up)
        except ParallmError:
            raise
        except Exception as error:
            raise ModelLoadError(f"{folder} can't be loaded: {type(error).__name__}: {error}") from error
        return LocalPredictor(predictor, host, self._config.batch.max_queue_size)

    def _host(self) -> Engine | PredictThread:
        if self.engines:
            return self.engines[0]
        if self._thread is None:
            self._thread = PredictThread()
        return self._thread

    def _move_predictors(self) -> None:
        """To the thread of the engine that is the first now: its steps and theirs take turns."""
        for predictor in self.predictors:
            predictor.move(self._host())

    def _divide(self, newcomer: LoadedModel | None = None, beside: int = 0) -> MemoryPlan:
        """Gives each engine its share of what the weights leave; returns that of a newcomer, which starts with it.

        `beside`: bytes of a predictor that is new.
        """
        loaded: Sequence[LoadedModel | Engine] = [*self.engines, *([newcomer] if newcomer is not None else [])]
        held = beside + sum(one.info.weight_bytes for one in self.predictors)
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


def _loaded_share(size: int) -> Share:
    """How much of so many bytes of weights has come into memory since."""
    before = mx.get_active_memory()

    def share() -> float | None:
        return min(1.0, max(0.0, (mx.get_active_memory() - before) / size)) if size else None

    return share
