"""The models of this process, by name: loaded at the start or on their first request, unloaded when memory is short.

A request holds the model that it uses; one that is not loaded is, while the request waits. Models leave memory, the
longest unused first, when another needs their place, or when they were idle for `--idle-unload-seconds` or for what
`keep_alive` says of them; those that are pinned, that train, or that have adapters or newer weights stay. Any thread
may call the pool; models come and go on a thread of its own, one by one.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx

from mlx_parallm.config import ServeConfig
from mlx_parallm.engine.delivery import StepEvents
from mlx_parallm.engine.engine import Engine
from mlx_parallm.engine.ranks import Ranks
from mlx_parallm.errors import (
    ConflictError,
    MemoryLimitError,
    ModelLoadError,
    ModelNotFoundError,
    ParallmError,
    QueueFullError,
    UnavailableError,
)
from mlx_parallm.models.device import device_kind
from mlx_parallm.models.memory import size_text
from mlx_parallm.progress import StartProgress, silent
from mlx_parallm.runtime.entries import PoolEntry, kind_name, models_in
from mlx_parallm.runtime.loading import Loader
from mlx_parallm.runtime.predicting import LocalPredictor
from mlx_parallm.runtime.weights import weight_bytes
from mlx_parallm.types import ModelStatus

log = logging.getLogger(__name__)

ROOM_SHARE = 10  # one part in so many of the memory is kept for requests, where models can leave for it
IDLE_CHECK_SECONDS = 60.0  # at most, between two looks for idle models
LOOK_SECONDS = 1.0  # between two looks into the folder of models
SHUTTING_DOWN = "the server is shutting down"


class ModelPool:
    def __init__(self, config: ServeConfig, deliver: Callable[[StepEvents], None], ranks: Ranks | None = None) -> None:
        self._config = config
        self._split = ranks is not None
        self._loader = Loader(config, deliver, ranks)
        self._folder = None if config.model.model_dir is None else Path(config.model.model_dir).expanduser()
        self._changed = threading.Condition(threading.RLock())
        self._entries: dict[str, PoolEntry] = {}
        self._jobs = ThreadPoolExecutor(1, thread_name_prefix="pool")
        self._closing = threading.Event()
        self._looked = -LOOK_SECONDS  # when, into the folder of models
        self.on_failure: Callable[[str], None] | None = None  # when an engine has died
        self._listeners: list[Callable[[], None]] = []
        self._idle_watch: threading.Thread | None = None
        for name, source in config.named_models().items():
            self._entries[name] = PoolEntry(name, source, kind_name(source))

    def start(self, progress: StartProgress = silent) -> None:
        """Loads the models that the config names, as many as there is memory for; raises what is wrong with one."""
        for entry in list(self._entries.values()):
            if not self._fits(self._size_of(entry)) and (self._loader.engines or self._loader.predictors):
                log.warning("%s does not fit beside the others: it is loaded when it is asked for", entry.name)
            else:
                self._bring_up(entry, progress)
        if self._config.model.idle_unload_seconds is not None:
            self._watch_for_idle()

    def listen(self, listener: Callable[[], None]) -> None:
        """Has it called when models came or went, on the pool's thread: who knows models by name must let go of those
        that have gone, or their memory stays taken."""
        self._listeners.append(listener)

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()

    @property
    def generators(self) -> Mapping[str, Engine]:
        """Those that are loaded, in the order of the config."""
        with self._changed:
            return {name: one.model for name, one in self._entries.items() if isinstance(one.model, Engine)}

    @property
    def predictors(self) -> Mapping[str, LocalPredictor]:
        with self._changed:
            return {name: one.model for name, one in self._entries.items() if isinstance(one.model, LocalPredictor)}

    def statuses(self) -> list[ModelStatus]:
        """Of all models, loaded or not, those in the folder of models included."""
        held = mx.get_active_memory()
        with self._changed:
            self._look_into_folder(at_most_every=LOOK_SECONDS)
            return [entry.describe(held, self._idle_seconds(entry)) for entry in self._entries.values()]

    def acquire(self, name: str) -> "Future[None]":
        """Holds a model for a request, until `release`; loads it where it is not. Its future can be cancelled."""
        future: Future[None] = Future()
        with self._changed:
            entry = self._find(name)
            entry.used = time.monotonic()
            if entry.status == "ready":
                entry.users += 1
                future.set_result(None)
            elif entry.error is not None:
                raise entry.failure()
            else:
                if len(entry.waiting) >= self._config.batch.max_queue_size:
                    raise QueueFullError(f"{len(entry.waiting)} requests wait for {name!r} to load; try again later")
                self._await(entry, future)
        return future

    def release(self, name: str) -> None:
        with self._changed:
            entry = self._entries[name]
            entry.users -= 1
            entry.used = time.monotonic()
            assert entry.users >= 0, f"{name} is released twice"
            self._changed.notify_all()

    def load(self, name: str, source: str | None = None, pin: bool | None = None) -> "Future[None]":
        """Loads a model: one that is known, or the one at `source` under a new name. `pin`: whether it must stay."""
        future: Future[None] = Future()
        with self._changed:
            entry = self._find(name) if source is None else self._entry_of(name, source)
            entry.pinned = entry.pinned if pin is None else pin
            if entry.status == "ready":
                future.set_result(None)
                return future
            if entry.status == "failed":
                entry.status, entry.error = "unloaded", None
            future.add_done_callback(lambda done: None if done.exception() else self.release(name))
            self._await(entry, future)
        return future

    def keep_alive(self, name: str, seconds: float) -> None:
        """How long a model stays after its last request, until it has left: 0 is not at all, `math.inf` pins it."""
        with self._changed:
            entry = self._find(name)
            entry.pinned = seconds == math.inf
            entry.keep_alive = None if entry.pinned else seconds
            self._watch_for_idle()

    def unload(self, name: str, timeout: float) -> None:
        """Waits for the requests that use a model, no longer than that, and frees its memory. Blocks."""
        with self._changed:
            entry = self._find(name)
            if entry.status == "ready":
                if self._is_fixed(entry):
                    raise ConflictError(f"{name!r} trains, scores or is split over ranks: it stays", param="model")
                entry.status = "unloading"
                job = self._jobs.submit(self._unload, entry, timeout, True)
            elif entry.status in ("unloaded", "failed"):
                entry.status, entry.error = "unloaded", None
                job = None
            else:
                raise ConflictError(f"{name!r} is {entry.status} now; try again when it is done", param="model")
        if job is not None:
            job.result()
        with self._changed:
            if not entry.lasting and entry.status == "unloaded" and not entry.waiting:
                self._entries.pop(name, None)

    def stop(self) -> None:
        """Ends all engines; what still runs is cut off, who waits for a model is told."""
        self._closing.set()
        with self._changed:
            for entry in self._entries.values():
                entry.wake(UnavailableError(SHUTTING_DOWN))
            self._changed.notify_all()
        self._jobs.shutdown(wait=True, cancel_futures=True)
        self._loader.stop()

    # With the lock.

    def _find(self, name: str) -> PoolEntry:
        if name not in self._entries:
            self._look_into_folder()
        if name not in self._entries:
            known = ", ".join(self._entries) or "none"
            raise ModelNotFoundError(f"there is no model {name!r} here; there is {known}", param="model")
        return self._entries[name]

    def _look_into_folder(self, at_most_every: float = 0.0) -> None:
        if self._folder is None or time.monotonic() - self._looked < at_most_every:
            return
        self._looked = time.monotonic()
        found, named = dict(models_in(self._folder)), self._config.named_models()
        for name, path in found.items():
            if name not in self._entries:
                self._entries[name] = PoolEntry(name, path, kind_name(path), bytes=weight_bytes(path, device_kind()))
        for name, entry in list(self._entries.items()):
            gone = entry.lasting and name not in named and name not in found
            if gone and entry.status in ("unloaded", "failed") and not entry.waiting:
                del self._entries[name]

    def _entry_of(self, name: str, source: str) -> PoolEntry:
        """For a model at a path: the one that is known by this name, or a new one."""
        self._look_into_folder()
        known = self._entries.get(name)
        if known is not None and known.source == source:
            return known
        if known is not None and (known.lasting or known.status not in ("unloaded", "failed")):
            raise ConflictError(f"{name!r} is the model at {known.source}; take another name", param="model")
        size = weight_bytes(source, device_kind())
        entry = self._entries[name] = PoolEntry(name, source, kind_name(source), lasting=False, bytes=size)
        return entry

    def _await(self, entry: PoolEntry, future: "Future[None]") -> None:
        if self._closing.is_set():
            raise UnavailableError(SHUTTING_DOWN)
        entry.waiting.append(future)
        if entry.status == "unloaded":
            self._begin(entry)

    def _begin(self, entry: PoolEntry) -> None:
        entry.status, entry.held_before = "loading", mx.get_active_memory()
        self._jobs.submit(self._load, entry)

    def _is_fixed(self, entry: PoolEntry) -> bool:
        """Whether it is the one that trains, whose state is bound to it, or that other processes hold parts of."""
        training = self._split or self._config.trains or bool(self._config.training.rewards.named_reward_models())
        return training and bool(self._loader.engines) and entry.model is self._loader.engines[0]

    def _may_leave(self, entry: PoolEntry) -> bool:
        stays = entry.pinned or entry.has_changed or self._is_fixed(entry)
        return entry.status == "ready" and not stays

    # On the pool's thread.

    def _load(self, entry: PoolEntry) -> None:
        begun = time.monotonic()
        try:
            self._make_room(entry)
            self._bring_up_beside_others(entry)
        except Exception as error:
            if not isinstance(error, ParallmError):
                log.exception("loading %s has failed", entry.name)
                error = ModelLoadError(f"{type(error).__name__}: {error}")
            self._fail(entry, error)
        else:
            log.info("%s is loaded, after %.1f s", entry.name, time.monotonic() - begun)

    def _bring_up_beside_others(self, entry: PoolEntry) -> None:
        """Others leave where its weights fit, and what is left is too little to work in."""
        while True:
            try:
                return self._bring_up(entry)
            except MemoryLimitError:
                if not self._have_one_leave():
                    if self._loader.weight_bytes:
                        raise self._no_room(entry) from None
                    raise

    def _bring_up(self, entry: PoolEntry, progress: StartProgress = silent) -> None:
        model = self._loader.bring_up(entry.name, entry.source, self._size_of(entry), progress)
        with self._changed:
            if isinstance(model, Engine):
                model.on_failure = lambda reason: self.on_failure(reason) if self.on_failure is not None else None
                entry.kind, entry.bytes = model.model.kind, model.model.weight_bytes
            else:
                entry.kind, entry.bytes = model.info.kind, model.info.weight_bytes
            entry.model = model
        try:
            self._tell()
        except BaseException:
            with self._changed:
                entry.model = None
            self._loader.take_down(model)
            raise
        with self._changed:
            entry.status, entry.error, entry.used = "ready", None, time.monotonic()
            entry.loads += 1
            entry.wake(None)
            self._changed.notify_all()

    def _fail(self, entry: PoolEntry, error: ParallmError) -> None:
        log.error("%s can't be loaded: %s", entry.name, entry.without_path(error.message))
        with self._changed:
            if isinstance(error, UnavailableError):  # there was no memory for it: there may be, later
                entry.status = "unloaded"
                entry.wake(error)
            else:
                entry.status, entry.error = "failed", error
                entry.wake(entry.failure())
            self._changed.notify_all()

    def _unload(self, entry: PoolEntry, timeout: float, cut_off: bool) -> bool:
        """Waits until nobody uses a model, and takes it out of memory; False where it is still used and not cut off."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self._changed.wait_for(lambda: not entry.users or self._closing.is_set(), timeout)
            model = entry.model
            if model is None or (entry.users and not cut_off) or self._closing.is_set():
                entry.status = "ready" if model is not None else entry.status
                entry.wake(None if model is not None else UnavailableError(SHUTTING_DOWN))
                return False
            entry.model = None
        if isinstance(model, Engine):
            model.drain(max(0.0, deadline - time.monotonic()))
        self._loader.take_down(model)
        self._tell()
        del model
        self._loader.reclaim()
        log.info("%s has left memory", entry.name)
        with self._changed:
            entry.status, entry.keep_alive = "unloaded", None
            if entry.waiting:
                self._begin(entry)
            self._changed.notify_all()
        return True

    def _size_of(self, entry: PoolEntry) -> int:
        return entry.bytes or (weight_bytes(entry.source, device_kind()) if entry.source is not None else 0)

    def _fits(self, size: int) -> bool:
        limit = self._loader.limit
        return self._loader.weight_bytes + size <= limit - limit // ROOM_SHARE

    def _make_room(self, entry: PoolEntry) -> None:
        """Has others leave, the longest unused first, until the model's weights fit beside the rest."""
        size, limit = self._size_of(entry), self._loader.limit
        if size > limit:
            raise MemoryLimitError(
                f"its weights take {size_text(size)}, and the process may hold {size_text(limit)} (--memory-limit)"
            )
        while not self._fits(size) and self._have_one_leave():
            continue
        if self._loader.weight_bytes + size > limit:
            raise self._no_room(entry)

    def _have_one_leave(self) -> bool:
        """The longest unused that may; one that is in use when its requests have ended, while new ones wait."""
        with self._changed:
            leaving = [one for one in self._entries.values() if self._may_leave(one)]
            if not leaving:
                return False
            first = min(leaving, key=lambda one: (one.users > 0, one.used))
            first.status = "unloading"
        return self._unload(first, self._config.batch.request_timeout_seconds or 600.0, False)

    def _no_room(self, entry: PoolEntry) -> UnavailableError:
        size, limit, held = self._size_of(entry), self._loader.limit, self._loader.weight_bytes
        return UnavailableError(
            f"there is no memory for {entry.name!r}: its weights take {size_text(size)}, {size_text(limit - held)} of "
            f"{size_text(limit)} is left, and no other model can leave; unload or unpin one, or raise --memory-limit",
            code="out_of_memory",
        )

    def _idle_seconds(self, entry: PoolEntry) -> float | None:
        """After how many it leaves; None: never."""
        return entry.keep_alive if entry.keep_alive is not None else self._config.model.idle_unload_seconds

    def _watch_for_idle(self) -> None:
        with self._changed:
            if self._idle_watch is None:
                self._idle_watch = threading.Thread(target=self._watch_idle, name="idle models", daemon=True)
                self._idle_watch.start()
            self._changed.notify_all()

    def _watch_idle(self) -> None:
        """Has models leave that nobody has asked for in a while. Whoever changes when that is, wakes it."""
        with self._changed:
            while not self._closing.is_set():
                self._changed.wait(self._unload_idle())

    def _unload_idle(self) -> float:
        """Seconds until it is worth another look."""
        waits = [IDLE_CHECK_SECONDS]
        for entry in self._entries.values():
            patience = self._idle_seconds(entry)
            if patience is None or entry.users or not self._may_leave(entry):
                continue
            left = entry.used + patience - time.monotonic()
            if left > 0:
                waits.append(left)
            else:
                entry.status = "unloading"
                self._jobs.submit(self._unload, entry, 0.0, False)
        return min(waits)
