"""The models of this process, by name: loaded at the start or on their first request, unloaded when memory is short.

A request holds the model that it uses; one that is not loaded is, while the request waits. Models leave memory, the
longest unused first, when another needs their place, or when they were idle for `--idle-unload-seconds` or for what
`keep_alive` says of them; those that are pinned, that train, or that have adapters or newer weights stay. Any thread
may call the pool; models come and go on a thread of its own, one by one, which never waits for requests to end: a load
that needs the place of a model in use is tried again when that one has left.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import mlx.core as mx

from mlx_parallm.config import ServeConfig
from mlx_parallm.engine.delivery import StepEvents
from mlx_parallm.engine.engine import Engine
from mlx_parallm.engine.ranks import Ranks
from mlx_parallm.engine.thread import SHUTTING_DOWN
from mlx_parallm.errors import (
    ConflictError,
    MemoryLimitError,
    ModelLoadError,
    ParallmError,
    QueueFullError,
    UnavailableError,
)
from mlx_parallm.models.memory import size_text
from mlx_parallm.progress import StartProgress, silent
from mlx_parallm.runtime.entries import LOOK_SECONDS, Holds, IdleWatch, KnownModels, PoolEntry, pass_on
from mlx_parallm.runtime.loading import Loader
from mlx_parallm.runtime.memory_shares import MemoryShares
from mlx_parallm.runtime.predicting import LocalPredictor
from mlx_parallm.types import ModelStatus

log = logging.getLogger(__name__)

ROOM_SHARE = 10  # one part in so many of the memory is kept for requests, where models can leave for it
ROOM_SECONDS = 600.0  # for which a load waits for models in use to leave, where requests have no limit
LAST_STEP_SECONDS = 1.0  # for an engine whose requests have ended


class WaitsForRoom(Exception):
    """A load has to be tried again when a model in use has left."""


class ModelPool:
    def __init__(self, config: ServeConfig, deliver: Callable[[StepEvents], None], ranks: Ranks | None = None) -> None:
        self._config = config
        self._split = ranks is not None
        self._memory = MemoryShares(config)
        self._loader = Loader(config, self._memory, deliver, ranks)
        self._changed = threading.Condition(threading.RLock())
        self._known = KnownModels(config)
        self._holds = Holds()
        self._without_room: list[PoolEntry] = []  # loads that wait for models in use to leave
        self._jobs = ThreadPoolExecutor(1, thread_name_prefix="pool")
        self._closing = threading.Event()
        self.on_failure: Callable[[str], None] | None = None  # when an engine has died
        self._listeners: list[Callable[[], None]] = []
        idle = config.model.idle_unload_seconds
        known = self._known
        self._idle_watch = IdleWatch(self._changed, self._closing, known, idle, self._may_leave, self._leave)

    def start(self, progress: StartProgress = silent) -> None:
        """Loads the models that the config names, as many as there is memory for; raises what is wrong with one."""
        for entry in self._known:
            if entry.needs_download:
                entry.download()
            if not self._fits(entry.size) and (self._memory.engines or self._memory.predictors):
                log.warning("%s does not fit beside the others: it is loaded when it is asked for", entry.name)
            else:
                self._bring_up(entry, progress)
        if self._config.model.idle_unload_seconds is not None:
            self._idle_watch.wake()

    def listen(self, listener: Callable[[], None]) -> None:
        """Has it called when models came or went, on the pool's thread: who knows models by name must let go of those
        that have gone, or their memory stays taken."""
        self._listeners.append(listener)

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()

    @property
    def generators(self) -> Mapping[str, Engine]:
        """The models that generate and are loaded, in the order of the config."""
        with self._changed:
            return {one.name: one.model for one in self._known if isinstance(one.model, Engine)}

    @property
    def predictors(self) -> Mapping[str, LocalPredictor]:
        with self._changed:
            return {one.name: one.model for one in self._known if isinstance(one.model, LocalPredictor)}

    def statuses(self) -> list[ModelStatus]:
        """Returns the statuses of all models, loaded or not, those in the folder of models included."""
        held = mx.get_active_memory()
        with self._changed:
            self._known.look_into_folder(at_most_every=LOOK_SECONDS)
            return [entry.describe(held, self._idle_watch.seconds_of(entry)) for entry in self._known]

    def acquire(self, name: str) -> "Future[int]":
        """Holds a model for a request, until its result is given to `release`; loads it where it is not. The future can
        be cancelled."""
        future: Future[int] = Future()
        with self._changed:
            entry = self._known.find(name)
            entry.used = time.monotonic()
            if entry.status == "ready":
                self._holds.begin(entry, future)
            elif entry.error is not None:
                raise entry.failure()
            else:
                if len(entry.waiting) >= self._config.batch.max_queue_size:
                    raise QueueFullError(f"{len(entry.waiting)} requests wait for {name!r} to load; try again later")
                self._await(entry, future)
        return future

    def release(self, hold: int) -> None:
        with self._changed:
            entry = self._holds.end(hold)
            if entry.leaves_for_another and not entry.users and not self._closing.is_set():
                entry.leaves_for_another = False
                self._jobs.submit(self._take_down, entry)
            self._changed.notify_all()

    def load(self, name: str, source: str | None = None, pin: bool | None = None) -> "Future[None]":
        """Loads a model: one that is known, or the one at `source` under a new name. `pin`: whether it must stay."""
        loaded: Future[None] = Future()
        with self._changed:
            entry = self._known.find(name) if source is None else self._known.find_or_add(name, source)
            entry.pinned = entry.pinned if pin is None else pin
            if entry.status == "ready":
                loaded.set_result(None)
                return loaded
            if entry.status == "failed":
                entry.status, entry.error = "unloaded", None
            held: Future[int] = Future()
            held.add_done_callback(lambda done: pass_on(done, self.release, loaded))
            self._await(entry, held)
        return loaded

    def keep_alive(self, name: str, seconds: float) -> None:
        """Sets how long a model stays after its last request, until it has left: 0 is not at all, `math.inf`
        pins it."""
        with self._changed:
            entry = self._known.find(name)
            entry.pinned = seconds == math.inf
            entry.keep_alive = None if entry.pinned else seconds
            self._idle_watch.wake()

    def unload(self, name: str, timeout: float) -> None:
        """Waits for the requests that use a model, no longer than that, and frees its memory. Blocks."""
        with self._changed:
            entry = self._known.find(name)
            if entry.status == "ready":
                if self._is_fixed(entry):
                    raise ConflictError(f"{name!r} trains, scores or is split over ranks: it stays", param="model")
                entry.status = "unloading"
                self._changed.wait_for(lambda: not entry.users or self._closing.is_set(), timeout)
                if self._closing.is_set():
                    raise UnavailableError(SHUTTING_DOWN)
                job = self._jobs.submit(self._take_down, entry)
            elif entry.status in ("unloaded", "failed"):
                entry.status, entry.error = "unloaded", None
                job = None
            else:
                raise ConflictError(f"{name!r} is {entry.status} now; try again when it is done", param="model")
        try:
            if job is not None:
                job.result()
        except CancelledError:
            raise UnavailableError(SHUTTING_DOWN) from None
        with self._changed:
            self._known.forget(entry)

    def drain(self, timeout: float) -> bool:
        """Waits until no request uses a model any more, or waits for one; False where it takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not any(one.users or one.waiting for one in self._known), timeout)

    def stop(self) -> None:
        """Ends all engines; what still runs is cut off, who waits for a model is told."""
        with self._changed:
            self._closing.set()
            for entry in self._known:
                entry.tell_waiting(UnavailableError(SHUTTING_DOWN))
            self._changed.notify_all()
        self._jobs.shutdown(wait=True, cancel_futures=True)
        self._loader.stop()

    # With the lock.

    def _await(self, entry: PoolEntry, future: "Future[int]") -> None:
        if self._closing.is_set():
            raise UnavailableError(SHUTTING_DOWN)
        entry.waiting.append(future)
        if entry.status == "unloaded":
            self._begin(entry)

    def _begin(self, entry: PoolEntry) -> None:
        entry.status, entry.held_before = "loading", mx.get_active_memory()
        self._jobs.submit(self._load, entry)

    def _make_ready(self, entry: PoolEntry) -> None:
        entry.status, entry.error, entry.used = "ready", None, time.monotonic()
        waiting = entry.waiting
        entry.waiting = []
        for future in waiting:
            self._holds.begin(entry, future)
        self._changed.notify_all()

    def _is_fixed(self, entry: PoolEntry) -> bool:
        """Returns whether it is the one that trains, with state bound to it, or other processes hold parts of it."""
        training = self._split or self._config.trains or bool(self._config.training.rewards.named_reward_models())
        return training and bool(self._memory.engines) and entry.model is self._memory.engines[0]

    def _may_leave(self, entry: PoolEntry) -> bool:
        stays = entry.pinned or entry.has_changed or self._is_fixed(entry)
        return entry.status == "ready" and not stays

    def _leave(self, entry: PoolEntry) -> None:
        """Unloads a model that nobody uses."""
        entry.status = "unloading"
        self._jobs.submit(self._take_down, entry)

    # On the pool's thread.

    def _load(self, entry: PoolEntry) -> None:
        if entry.needs_download:  # which may take hours, and must not hold up other models
            threading.Thread(target=self._download, args=(entry,), name="download", daemon=True).start()
            return
        begun = time.monotonic()
        try:
            self._make_room(entry)
            self._bring_up_beside_others(entry)
        except WaitsForRoom:
            return
        except Exception as error:
            if not isinstance(error, ParallmError):
                log.exception("loading %s has failed", entry.name)
                error = ModelLoadError(f"{type(error).__name__}: {error}")
            self._fail(entry, error)
        else:
            log.info("%s is loaded, after %.1f s", entry.name, time.monotonic() - begun)

    def _download(self, entry: PoolEntry) -> None:
        """Downloads a model, on a thread of its own, and has it loaded."""
        try:
            entry.download()
        except ParallmError as error:
            self._fail(entry, error)
            return
        with self._changed:
            if not self._closing.is_set():
                self._jobs.submit(self._load, entry)

    def _bring_up_beside_others(self, entry: PoolEntry) -> None:
        """Others leave where its weights fit, and what is left is too little to work in."""
        while True:
            try:
                return self._bring_up(entry)
            except MemoryLimitError:
                if not self._have_one_leave(entry):
                    if self._memory.weight_bytes:
                        raise self._no_room(entry) from None
                    raise

    def _bring_up(self, entry: PoolEntry, progress: StartProgress = silent) -> None:
        model = self._loader.bring_up(entry.name, entry.path, entry.size, progress, entry.source)
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
            entry.loads += 1
            entry.room_by = None
            self._make_ready(entry)

    def _fail(self, entry: PoolEntry, error: ParallmError) -> None:
        with self._changed:
            entry.room_by = None
            if isinstance(error, UnavailableError):  # there was no memory for it: there may be, later
                entry.status = "unloaded"
                entry.tell_waiting(error)
            else:
                entry.status, entry.error = "failed", error
                entry.tell_waiting(entry.failure())
            self._changed.notify_all()
        log.error("%s can't be loaded: %s", entry.name, entry.without_path(error.message))

    def _take_down(self, entry: PoolEntry) -> None:
        """Takes a model out of memory; requests that still use it are cut off."""
        with self._changed:
            model, entry.model = entry.model, None
        if model is not None:
            try:
                model.drain(LAST_STEP_SECONDS if not entry.users else 0.0, f"{entry.name!r} was unloaded")
                self._loader.take_down(model)
                self._tell()
                del model
                self._loader.reclaim()
                log.info("%s has left memory", entry.name)
            except Exception:  # it is gone all the same, and others wait
                log.exception("unloading %s has failed", entry.name)
        with self._changed:
            entry.status, entry.keep_alive = "unloaded", None
            waiting = self._without_room
            self._without_room = []
            if not self._closing.is_set():
                for other in waiting:
                    self._jobs.submit(self._load, other)
                if entry.waiting:
                    self._begin(entry)
            self._changed.notify_all()

    def _fits(self, size: int) -> bool:
        limit = self._memory.limit
        return self._memory.weight_bytes + size <= limit - limit // ROOM_SHARE

    def _make_room(self, entry: PoolEntry) -> None:
        """Has others leave, the longest unused first, until the model's weights fit beside the rest."""
        size, limit = entry.size, self._memory.limit
        if size > limit:
            raise MemoryLimitError(
                f"its weights take {size_text(size)}, and the process may hold {size_text(limit)} (--memory-limit)"
            )
        with self._changed:
            can_leave = sum(one.bytes for one in self._known if self._may_leave(one) or one.status == "unloading")
        if self._memory.weight_bytes - can_leave + size > limit:
            raise self._no_room(entry)  # before any model is unloaded in vain
        while not self._fits(size) and self._have_one_leave(entry):
            continue
        if self._memory.weight_bytes + size > limit:
            raise self._no_room(entry)

    def _have_one_leave(self, entry: PoolEntry) -> bool:
        """Has the longest unused leave that may, for a load. One in use leaves when its requests have ended, while new
        ones wait: WaitsForRoom."""
        with self._changed:
            leaving = [one for one in self._known if self._may_leave(one)]
            first = min(leaving, key=lambda one: (one.users > 0, one.used), default=None)
            idle = first is not None and not first.users
            if not idle and any(one.status == "unloading" for one in self._known):
                self._wait_for_room(entry)
            if first is None:
                return False
            first.status = "unloading"
            if not idle:
                first.leaves_for_another = True
                self._wait_for_room(entry)
        self._take_down(first)
        return True

    def _wait_for_room(self, entry: PoolEntry) -> None:
        now = time.monotonic()
        patience = self._config.batch.request_timeout_seconds or ROOM_SECONDS
        entry.room_by = entry.room_by or now + patience
        self._without_room.append(entry)
        timer = threading.Timer(max(0.0, entry.room_by - now), self._give_up, (entry, entry.room_by))
        timer.daemon = True
        timer.start()
        raise WaitsForRoom

    def _give_up(self, entry: PoolEntry, room_by: float) -> None:
        """Fails a load for which no model in use has left in time; on its own thread. Those that were to leave stay."""
        with self._changed:  # a timer of a load that found room may end during the next
            if entry not in self._without_room or entry.room_by != room_by or self._closing.is_set():
                return
            self._without_room.remove(entry)
            for one in self._known if not self._without_room else ():
                if one.leaves_for_another:
                    one.leaves_for_another = False
                    self._make_ready(one)
        self._fail(entry, self._no_room(entry))

    def _no_room(self, entry: PoolEntry) -> UnavailableError:
        size, limit = entry.size, self._memory.limit
        held = self._memory.weight_bytes
        return UnavailableError(
            f"there is no memory for {entry.name!r}: its weights take {size_text(size)}, {size_text(limit - held)} of "
            f"{size_text(limit)} is left, and no other model can leave; unload or unpin one, or raise --memory-limit",
            code="out_of_memory",
        )
