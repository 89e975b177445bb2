"""What the pool knows of a model by its name, loaded or not, and which models a folder holds."""

import contextlib
import itertools
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_parallm.config import ServeConfig
from mlx_parallm.devices.device import this_device
from mlx_parallm.engine.engine import Engine
from mlx_parallm.errors import ConflictError, InvalidRequestError, ModelNotFoundError, ParallmError, UnavailableError
from mlx_parallm.models.hub import download, is_hub_id
from mlx_parallm.models.kinds import kind_of
from mlx_parallm.runtime.predicting import LocalPredictor
from mlx_parallm.runtime.weight_files import weight_bytes
from mlx_parallm.types import UNKNOWN, ModelState, ModelStatus

LOOK_SECONDS = 1.0  # between two looks into the folder of models, where nobody asks for one that is not known
MAX_SECONDS = 60.0  # between two looks
MARKS = ("config.json", "network.json")  # a folder with one of these is a model
Stamp = tuple[tuple[str, int, int], ...]  # name, time and size of each file of a model: whether they have changed


@dataclass(slots=True, eq=False)
class PoolEntry:
    """All but `model` belongs to the pool's lock."""

    name: str
    source: str | None  # None: the embedded model
    kind: str
    lasting: bool = True  # named by a flag or found in --model-dir: can be loaded again after it was unloaded
    pinned: bool = False
    keep_alive: float | None = None  # seconds that it stays after its last request; None: as the config says
    status: ModelState = "unloaded"
    error: ParallmError | None = None  # why it has failed
    model: Engine | LocalPredictor | None = None
    users: int = 0
    loads: int = 0
    used: float = field(default_factory=time.monotonic)  # last
    bytes: int = 0
    held_before: int = 0  # bytes in memory when its loading began
    created: int = field(default_factory=lambda: int(time.time()))
    waiting: "list[Future[int]]" = field(default_factory=list)  # for it to be ready
    leaves_for_another: bool = False  # as soon as nobody uses it any more
    room_by: float | None = None  # until when its load may wait for others to leave
    stamp: Stamp = ()  # of its files, when they were last looked at
    downloaded: str | None = None  # the folder of its files, where the source is a name on the hub

    @property
    def has_changed(self) -> bool:
        """Whether it holds what its files don't: adapters, or newer weights of a policy."""
        if isinstance(self.model, Engine):
            return bool(self.model.adapters.names)
        return self.model is not None and self.model.predictor.has_changed

    @property
    def path(self) -> str | None:
        """The path of its files, or the hub's name of a model whose files have to be downloaded first."""
        return self.downloaded or self.source

    @property
    def size(self) -> int:
        """Bytes of its weights; 0: not known."""
        return self.bytes or (weight_bytes(self.path, this_device()) if self.path is not None else 0)

    @property
    def needs_download(self) -> bool:
        return is_hub_id(self.path)

    def download(self) -> None:
        """Fetches a model of the hub, and looks at its files; ModelLoadError."""
        folder = str(download(str(self.source)))
        self.downloaded = folder
        self.kind = kind_name(folder)
        self.bytes = weight_bytes(folder, this_device())

    def without_path(self, message: str) -> str:
        """A message for the log, which does not say where users have their files."""
        paths = [path for path in (self.source, self.downloaded) if path is not None]
        for path in list(paths):
            with contextlib.suppress(OSError, ValueError, RuntimeError):  # not every string is a path
                paths.append(str(Path(path).expanduser().resolve()))
        for path in sorted(set(paths) - {self.name}, key=len, reverse=True):
            # A folder's name may also be a part of the words around it.
            begin = r"\b" if path[:1].isalnum() else ""
            end = r"\b" if path[-1:].isalnum() else ""
            message = re.sub(begin + re.escape(path) + end, lambda _: repr(self.name), message)
        return message

    def failure(self) -> ParallmError:
        """Returns what a request for it gets if it has failed: no flag or folder promises one that isn't `lasting`."""
        assert self.error is not None
        kind = UnavailableError if self.lasting else ModelNotFoundError
        message = f"{self.name!r} can't be loaded: {self.error.message}; POST /v1/models/load tries again"
        return kind(message, code="model_failed")

    def tell_waiting(self, error: BaseException) -> None:
        """Fails all requests that wait for it."""
        waiting = self.waiting
        self.waiting = []
        for future in waiting:
            if future.set_running_or_notify_cancel():  # else its client has left
                future.set_exception(error)

    def look_again(self, stamp: Stamp) -> None:
        """Reads its files again after they have changed; a failure to load them may be outdated, too."""
        self.stamp = stamp
        self.kind = kind_name(self.source)
        self.bytes = weight_bytes(str(self.source), this_device())
        self.status = "unloaded"
        self.error = None

    def describe(self, held: int, idle_seconds: float | None) -> ModelStatus:
        """`held`: bytes that are in memory now, by which loading is measured. `idle_seconds`: after which it leaves."""
        model = self.model
        progress = 1.0 if self.status == "ready" else 0.0
        if self.status == "loading" and self.bytes:
            progress = round(min(0.99, max(0.0, (held - self.held_before) / self.bytes)), 2)
        stays = self.pinned or idle_seconds is None or model is None
        left = None if stays else max(0.0, (idle_seconds or 0.0) + self.used - time.monotonic())
        context = None
        signature = None
        if isinstance(model, Engine):
            context = model.model.context_length
        elif model is not None:
            context = model.info.context_length
            signature = model.info.signature
        return ModelStatus(
            name=self.name,
            kind=self.kind,
            status=self.status,
            source=model.model.source if isinstance(model, Engine) else str(self.source),
            created=self.created,
            progress=progress,
            error=None if self.error is None else self.error.message,
            pinned=self.pinned,
            users=self.users,
            loads=self.loads,
            bytes=self.bytes,
            context_length=context,
            signature=signature,
            leaves_in=left,
        )


def kind_name(source: str | None) -> str:
    """The kind of a model that is not loaded, as far as its config tells; UNKNOWN of one that is not downloaded."""
    if is_hub_id(source):
        return UNKNOWN
    kind = kind_of(source)
    if kind is not None:
        return kind.__name__.rpartition(".")[2]
    return "vision" if "vision_config" in _config(source) else "chat"


def _config(source: str | None) -> dict[str, Any]:
    try:
        config = json.loads((Path(source or "").expanduser() / "config.json").read_text())
    except (OSError, ValueError, RuntimeError):  # RecursionError is a RuntimeError
        return {}
    return config if isinstance(config, dict) else {}


def models_in(folder: Path) -> Iterator[tuple[str, str]]:
    """Name and path of each model in a folder, as `name` or `owner/name`."""
    for path in _listed(folder):
        if _is_model(path):
            yield (path.stem if path.suffix == ".gguf" else path.name), str(path)
        elif path.is_dir():
            yield from ((f"{path.name}/{inner.stem}", str(inner)) for inner in _listed(path) if _is_model(inner))


def stamp_of(path: Path) -> Stamp:
    """Returns the stamp of a folder's files, or of a file."""
    try:
        if path.is_file():
            found = path.stat()
            return ((path.name, found.st_mtime_ns, found.st_size),)
        with os.scandir(path) as entries:
            stats = [(entry.name, entry.stat()) for entry in entries]
    except (OSError, ValueError):
        return ()
    return tuple(sorted((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats))


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return []


def _is_model(path: Path) -> bool:
    return (path.suffix == ".gguf" and path.is_file()) or any((path / mark).is_file() for mark in MARKS)


class Holds:
    """The models that requests use, by the number that they release them with: another may have the name by then."""

    def __init__(self) -> None:
        self._entries: dict[int, PoolEntry] = {}
        self._numbers = itertools.count(1)

    def begin(self, entry: PoolEntry, future: "Future[int]") -> None:
        """Hands a model over, unless its client has left."""
        if future.set_running_or_notify_cancel():
            hold = next(self._numbers)
            self._entries[hold] = entry
            entry.users += 1
            future.set_result(hold)

    def end(self, hold: int) -> PoolEntry:
        entry = self._entries.pop(hold)
        entry.users -= 1
        entry.used = time.monotonic()
        return entry


def pass_on(held: "Future[int]", release: Callable[[int], None], loaded: "Future[None]") -> None:
    """A load holds nothing: it is done, or has failed."""
    error = held.exception()
    if error is None:
        release(held.result())
    if not loaded.set_running_or_notify_cancel():
        return
    if error is None:
        loaded.set_result(None)
    else:
        loaded.set_exception(error)


class KnownModels:
    def __init__(self, config: ServeConfig) -> None:
        self._named = config.named_models()
        self._folder = None if config.model.model_dir is None else Path(config.model.model_dir).expanduser()
        self._looked = -LOOK_SECONDS  # when, into the folder of models
        self.entries = {name: PoolEntry(name, source, kind_name(source)) for name, source in self._named.items()}

    def __iter__(self) -> Iterator[PoolEntry]:
        return iter(list(self.entries.values()))

    def find(self, name: str) -> PoolEntry:
        """Looks into the folder for a name that is not known; ModelNotFoundError."""
        if name not in self.entries:
            self.look_into_folder()
        if name not in self.entries:
            known = ", ".join(self.entries) or "none"
            raise ModelNotFoundError(f"there is no model {name!r} here; there is {known}", param="model")
        return self.entries[name]

    def find_or_add(self, name: str, source: str) -> PoolEntry:
        """Returns the entry of a model at a path: the one that is known by this name, or a new one."""
        self.look_into_folder()
        known = self.entries.get(name)
        if known is not None and known.source == source:
            return known
        if known is not None and (known.lasting or known.status not in ("unloaded", "failed")):
            raise ConflictError(f"{name!r} is the model at {known.source}; take another name", param="model")
        if not name.isprintable() or name != name.strip():
            raise InvalidRequestError("a name has no control characters, and no spaces around it", param="model")
        _check_path(source)
        size = weight_bytes(source, this_device())
        entry = self.entries[name] = PoolEntry(name, source, kind_name(source), lasting=False, bytes=size)
        return entry

    def forget(self, entry: PoolEntry) -> None:
        """Forgets a model that was loaded by a path, once it is unloaded."""
        if not entry.lasting and entry.status == "unloaded" and not entry.waiting:
            self.entries.pop(entry.name, None)

    def look_into_folder(self, at_most_every: float = 0.0) -> None:
        """Takes note of models that have come, have gone, or whose files have changed."""
        if self._folder is None or time.monotonic() - self._looked < at_most_every:
            return
        self._looked = time.monotonic()
        found = dict(models_in(self._folder))
        for name, path in found.items():
            entry = self.entries.setdefault(name, PoolEntry(name, path, "chat"))
            idle = entry.status in ("unloaded", "failed") and not entry.waiting and name not in self._named
            if idle and entry.source == path and (stamp := stamp_of(Path(path))) != entry.stamp:
                entry.look_again(stamp)
        for name, entry in list(self.entries.items()):
            gone = entry.lasting and name not in self._named and name not in found
            if gone and entry.status in ("unloaded", "failed") and not entry.waiting:
                del self.entries[name]


def _check_path(source: str) -> None:
    """InvalidRequestError for what no file can be called."""
    try:
        os.stat(Path(source).expanduser())
    except FileNotFoundError:  # a name on the hub perhaps
        return
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidRequestError(f"this is no path of a model: {reason}", param="path") from None


class IdleWatch:
    def __init__(
        self,
        changed: threading.Condition,
        closing: threading.Event,
        entries: Iterable[PoolEntry],
        seconds: float | None,
        may_leave: Callable[[PoolEntry], bool],
        leave: Callable[[PoolEntry], None],
    ) -> None:
        """`changed` has the lock of the entries, with which `may_leave` and `leave` are called. `seconds`: after which
        models leave that say nothing else; None: never."""
        self._changed = changed
        self._closing = closing
        self._entries = entries
        self._seconds = seconds
        self._may_leave = may_leave
        self._leave = leave
        self._thread: threading.Thread | None = None

    def seconds_of(self, entry: PoolEntry) -> float | None:
        """Returns after how many seconds without requests a model leaves; None: never."""
        return entry.keep_alive if entry.keep_alive is not None else self._seconds

    def wake(self) -> None:
        """When it has changed how long a model stays; the first time that any leaves at all."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._main, name="idle models", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _main(self) -> None:
        with self._changed:
            while not self._closing.is_set():
                self._changed.wait(self._look())

    def _look(self) -> float:
        """Seconds until it is worth another look."""
        waits = [MAX_SECONDS]
        for entry in self._entries:
            patience = self.seconds_of(entry)
            if patience is None or entry.users or not self._may_leave(entry):
                continue
            left = entry.used + patience - time.monotonic()
            if left > 0:
                waits.append(left)
            else:
                self._leave(entry)
        return min(waits)
