"""How a model comes into memory and leaves it. The pool's thread alone.

A generator gets an engine with a thread of its own; a predictor runs on the thread of the first engine, in its turn
between decode steps, or on one of its own where nothing generates. Whenever a model comes or goes, what the weights
leave of the memory is divided anew.
"""

import gc
import logging
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TypeVar

import mlx.core as mx

from mlx_parallm.config import ServeConfig
from mlx_parallm.devices.freed_memory import give_memory_back
from mlx_parallm.devices.machine_memory import check_free_memory
from mlx_parallm.engine.background import Background
from mlx_parallm.engine.compute.tuned import tuned_by
from mlx_parallm.engine.delivery import StepEvents
from mlx_parallm.engine.engine import Engine
from mlx_parallm.engine.ranks import Ranks
from mlx_parallm.engine.start import StartingEngine
from mlx_parallm.engine.thread import EngineThread
from mlx_parallm.errors import ConflictError, ModelLoadError, ParallmError
from mlx_parallm.metrics import BackgroundMetrics, MemoryPlan
from mlx_parallm.models.kinds import Kind, Predictor, kind_of
from mlx_parallm.models.loader import load
from mlx_parallm.models.memory import size_text
from mlx_parallm.progress import Share, StartProgress, Tell, unknown
from mlx_parallm.runtime.memory_shares import MemoryShares
from mlx_parallm.runtime.predicting import LocalPredictor, PredictionHost
from mlx_parallm.steps import Steps

T = TypeVar("T")
log = logging.getLogger(__name__)


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


class PredictThread:
    def __init__(self) -> None:
        self.metrics = BackgroundMetrics()
        self._background = Background(0.5, self.metrics)
        self._thread = EngineThread(self._main)
        self._thread.start()

    @property
    def slice_seconds(self) -> float:
        return self._background.slice_seconds

    def predict(self, steps: "Steps[T]") -> "Future[T]":
        future: Future[T] = Future()
        if self._thread.stopping:
            future.set_exception(self._thread.unavailable())
        else:
            self._thread.inbox.put(lambda: self._background.add(steps, future))
        return future

    def run(self, work: Callable[[], T]) -> T:
        """Has the thread do something short, and waits for it. Never on that thread itself."""

        def step() -> Steps[T]:
            yield from ()
            return work()

        return self.predict(step()).result()

    def stop(self) -> None:
        self._thread.stop()

    def _main(self) -> None:
        inbox = self._thread.inbox
        while not self._thread.stopping:
            if not self._background.waiting:
                inbox.get()()
            while not inbox.empty():
                inbox.get()()
            if self._background.due(serving=False) and not self._thread.stopping:
                self._background.step(serving=False)
        self._background.close()
        self._thread.empty_inbox()
        mx.synchronize()


Model = Engine | LocalPredictor


RELEASE_SECONDS = 5.0  # for those that still refer to a model that leaves


class Loader:
    def __init__(
        self,
        config: ServeConfig,
        memory: MemoryShares,
        deliver: Callable[[StepEvents], None],
        ranks: Ranks | None = None,
    ) -> None:
        self._config = config
        self._memory = memory
        self._deliver = deliver
        self._ranks = ranks
        self._thread: PredictThread | None = None
        self._leaving: Callable[[], Model | None] = lambda: None

    def bring_up(
        self, name: str, source: str | None, size: int, progress: StartProgress, origin: str | None = None
    ) -> Model:
        """Loads a model, and gives all their share of the memory; raises what is wrong, and all is as it was.

        `origin`: what users call the source, where it was downloaded. `size`: bytes that its weights will take. The
        others make room for them before they come.
        """
        kind = kind_of(source)
        memory = self._memory
        if self._ranks is not None:
            size //= self._ranks.size
            if kind is not None or memory.engines:
                raise ConflictError("a group of ranks serves one model that generates; start another server for others")
        check_free_memory(size)
        where = ", the embedded model" if source is None else f" from {origin or source}"
        with ExitStack() as undo:
            undo.callback(memory.divide)
            memory.divide(expected=size)
            with progress(f"loading {name}{where}", _loaded_share(size)) as tell:
                starting = self._starting(kind, source, name, tell, origin)
                undo.callback(starting.stop)
                loaded = starting.load()
            plan = memory.divide(loaded)
            with progress(f"warming up {name}, {size_text(starting.weight_bytes)} of weights", unknown):
                model = starting.start(plan)
            undo.pop_all()
        if isinstance(model, Engine):
            memory.engines.append(model)
            self._move_predictors()
        else:
            memory.predictors.append(model)
        return model

    def take_down(self, model: Model) -> None:
        """Ends a model; what still runs is cut off."""
        if isinstance(model, Engine):
            self._memory.engines.remove(model)
            self._move_predictors()
            model.stop()
            model.release()
        else:
            self._memory.predictors.remove(model)
            model.stop()
        self._leaving = weakref.ref(model)

    def reclaim(self) -> None:
        """Gives back the memory of a model that was taken down, after the caller has let go of it; the others may have
        it.

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
        self._memory.divide()

    def stop(self) -> None:
        """Ends all engines; what still runs is cut off."""
        for engine in self._memory.engines:
            engine.stop()
        if self._thread is not None:
            self._thread.stop()

    def _starting(
        self, kind: Kind | None, source: str | None, name: str, tell: Tell, origin: str | None
    ) -> StartingEngine | StartingPredictor:
        if kind is not None:
            folder = Path(str(source)).expanduser()
            return StartingPredictor(kind, folder, self._host(), self._config.batch.max_queue_size)
        options = self._config.model
        load_model = partial(
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
        tune = tuned_by(self._config) if self._ranks is None else None  # ranks must work in one way
        return StartingEngine(load_model, self._config, self._deliver, ranks=self._ranks, tune=tune)

    def _host(self) -> Engine | PredictThread:
        if self._memory.engines:
            return self._memory.engines[0]
        if self._thread is None:
            self._thread = PredictThread()
        return self._thread

    def _move_predictors(self) -> None:
        """Moves predictors to the thread of the engine that is the first now: its steps and theirs take turns."""
        for predictor in self._memory.predictors:
            predictor.move(self._host())


def _loaded_share(size: int) -> Share:
    """Returns a function that says which share of so many bytes of weights has come into memory since."""
    before = mx.get_active_memory()

    def share() -> float | None:
        return min(1.0, max(0.0, (mx.get_active_memory() - before) / size)) if size else None

    return share
