"""An engine on its way up: its thread loads the model, waits for a share of the memory, builds the parts and serves.

`runtime.startup` starts one engine per model, and gives all of them a plan once all are loaded; `start_engine` is for
callers with a single one. MLX's streams belong to the thread that made them, so all of it happens on the engine thread.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

import mlx.core as mx

from mlx_parallm.config import ServeConfig
from mlx_parallm.devices.device import this_device
from mlx_parallm.devices.freed_memory import AllocatorCache, process_allocator_cache
from mlx_parallm.devices.machine_memory import wire_memory
from mlx_parallm.devices.profile import DeviceProfile
from mlx_parallm.engine.background import Background
from mlx_parallm.engine.build import BaseParts, LoadedModel, build
from mlx_parallm.engine.compute.patch import patch_layers
from mlx_parallm.engine.compute.tuned import Tune
from mlx_parallm.engine.delivery import Outbox, StepEvents
from mlx_parallm.engine.engine import Engine
from mlx_parallm.engine.live_requests import LiveRequests
from mlx_parallm.engine.loop import EngineLoop
from mlx_parallm.engine.ranks import Ranks
from mlx_parallm.engine.thread import EngineThread
from mlx_parallm.errors import ModelLoadError, ParallmError
from mlx_parallm.metrics import EngineMetrics, MemoryPlan
from mlx_parallm.models.language import LanguageModel
from mlx_parallm.models.memory import LORA_RANK, plan_memory

log = logging.getLogger(__name__)

T = TypeVar("T")
GENERATING_SHARE = 0.6  # of the time, where models that predict have work too


def start_engine(
    load: Callable[[], LanguageModel],
    config: ServeConfig,
    dispatch: Callable[[StepEvents], None],
    *,
    profile: DeviceProfile | None = None,
    allocator_cache: AllocatorCache = process_allocator_cache,
) -> Engine:
    """Starts the only engine of a process: all memory is its own."""
    starting = StartingEngine(load, config, dispatch, profile=profile, allocator_cache=allocator_cache)
    try:
        (plan,) = plan_engines([starting.load()], config)
        return starting.start(plan)
    except ParallmError:
        starting.stop()  # the thread may hold the weights and wait for a plan
        raise


def plan_engines(
    loaded: "Sequence[LoadedModel | Engine]", config: ServeConfig, *, limit: int | None = None, predictors: int = 0
) -> list[MemoryPlan]:
    """Plans how loaded models share the memory; the first is the one that trains."""
    weights = [one.model.weight_bytes for one in loaded]
    adapters = [one.layout.adapter_bytes(LORA_RANK) for one in loaded]
    return plan_memory(weights, adapters, config, limit=limit, predictors=predictors)


class StartingEngine:
    """Call `load`, then `start`; `stop` at any time ends the thread, and the engine if it runs already."""

    def __init__(
        self,
        load: Callable[[], LanguageModel],
        config: ServeConfig,
        dispatch: Callable[[StepEvents], None],
        *,
        profile: DeviceProfile | None = None,  # None: what suits the device
        allocator_cache: AllocatorCache = process_allocator_cache,
        ranks: Ranks | None = None,
        tune: Tune | None = None,  # None: the profile stays as it is
    ) -> None:
        self._ranks = ranks
        self._tune = tune
        self._load = load
        self._config = config
        self._dispatch = dispatch
        self._profile = profile
        self._allocator_cache = allocator_cache
        self._thread = EngineThread(self._main)
        self._plans: SimpleQueue[MemoryPlan | None] = SimpleQueue()
        self._loaded: Future[LoadedModel] = Future()
        self._started: Future[Engine] = Future()

    @property
    def weight_bytes(self) -> int:
        return self._loaded.result().model.weight_bytes if self._loaded.done() else 0

    def load(self) -> LoadedModel:
        """Starts the thread and waits until the weights are in memory."""
        self._thread.start()
        return self._wait_for(self._loaded)

    def start(self, plan: MemoryPlan) -> Engine:
        """Waits until the engine is built and warm. `plan`: its share of the memory."""
        self._plans.put(plan)
        return self._wait_for(self._started)

    def stop(self) -> None:
        self._thread.close()
        self._plans.put(None)  # it may wait for one
        self._thread.stop()

    def _wait_for(self, future: "Future[T]") -> T:
        error = future.exception()
        if error is not None:
            self._thread.join()  # it still puts MLX in order
            raise error
        return future.result()

    # The engine thread from here on.

    def _main(self) -> None:
        loop = self._bring_up()
        if loop is not None:
            loop.run()
        if self._ranks is not None and self._thread.failure is None:
            self._ranks.close()
        mx.synchronize()
        self._allocator_cache.release(self._thread)

    def _bring_up(self) -> EngineLoop | None:
        """Loads and builds, and tells whoever waits for that; None where it has failed or was stopped."""
        try:
            profile = (self._profile or this_device().profile).speculating(self._config.batch.speculation)
            profile = profile if self._ranks is None else self._ranks.profile(profile)
            model = self._load()
            split = None if self._ranks is None else self._ranks.adapter_split
            loaded = LoadedModel(model, patch_layers(model.module, profile, split))
            self._loaded.set_result(loaded)
            plan = self._plans.get()
            if plan is None:
                self._fail(self._thread.unavailable())
                return None
            if self._ranks is not None:
                plan = self._ranks.agree(model, plan)
            wire_memory()
            self._allocator_cache.allow(self._thread, plan.kept)
            parts = build(self._base(profile), loaded, plan)
            loop = EngineLoop(parts)
            if self._ranks is not None:
                self._ranks.watch(loop.abandon)
            self._started.set_result(Engine(parts))
            return loop
        except ParallmError as error:
            self._fail(error)
        except Exception as error:
            log.exception("loading failed")
            self._fail(ModelLoadError(f"the model can't be loaded: {error}"))
        return None

    def _base(self, profile: DeviceProfile) -> BaseParts:
        config = self._config
        metrics = EngineMetrics()
        return BaseParts(
            config=config,
            profile=profile,
            thread=self._thread,
            outbox=Outbox(self._dispatch),
            allocator_cache=self._allocator_cache,
            live=LiveRequests(share=config.batch.dedupe),
            background=Background(config.serving_share, metrics.background),
            predictions=Background(GENERATING_SHARE, metrics.predictions, carries_over=False),
            metrics=metrics,
            ranks=self._ranks,
            tune=self._tune,
        )

    def _fail(self, error: ParallmError) -> None:
        for future in (self._loaded, self._started):
            if not future.done():
                future.set_exception(error)
