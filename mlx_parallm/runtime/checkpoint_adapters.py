"""Checkpoints of training as adapters: each is served by its name, beside the policy that trains on.

A checkpoint is loaded when a request names it, on the caller's thread, and leaves when nobody has for a while. Its name
in the registry has its adapter's before it: `policy/step-00000300`; requests may leave that out where one adapter is
trained, and write `checkpoint-300`. `LocalAdapters` has one of these.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mlx_parallm.errors import InvalidRequestError, ParallmError
from mlx_parallm.lora.adapter_files import read_adapter
from mlx_parallm.lora.registry import Registry
from mlx_parallm.training.rl.session import Session
from mlx_parallm.training.storage.checkpoints import NAME, STATE
from mlx_parallm.types import AdapterVersion

IDLE_SECONDS = 60.0  # after its last request a checkpoint leaves
STEP_ALIAS = re.compile(r"checkpoint-(\d{1,12})")

Stamp = tuple[int, int]  # of a checkpoint's file: `latest` is written again and again


@dataclass(slots=True)
class LoadedCheckpoint:
    version: AdapterVersion
    stamp: Stamp
    used: float = field(default_factory=time.monotonic)


class CheckpointAdapters:
    def __init__(self, sessions: Callable[[], Mapping[str, Session]], limit: int, idle: float = IDLE_SECONDS) -> None:
        self._sessions = sessions
        self._limit = limit  # bytes of an adapter's file
        self._idle = idle
        self._loaded: dict[str, LoadedCheckpoint] = {}
        self._lock = threading.Lock()
        self._sweeping = False

    def has(self, name: str) -> bool:
        return name in self._loaded

    def load(
        self, registry: Registry, name: str, may_use: Callable[[str], bool] = lambda name: True
    ) -> AdapterVersion | None:
        """The checkpoint that a name means, in the registry; None where it means none. Adapters that may not be used
        have none."""
        found = self._find(name, may_use)
        if found is None:
            return None
        qualified, folder = found
        with self._lock:
            if (known := self._known(registry, qualified, folder)) is not None:
                return known
            adapter, config, source = read_adapter(str(folder), self._limit)
            newest = max((version.number for version in registry.versions(qualified)), default=0)
            number = _number(folder)
            version = registry.publish(qualified, adapter, source, number if number > newest else None, config)
            self._loaded[qualified] = LoadedCheckpoint(version, _stamp(folder))
            self._sweep_later(registry)
            return version

    def _known(self, registry: Registry, name: str, folder: Path) -> AdapterVersion | None:
        loaded = self._loaded.get(name)
        if loaded is None or name not in registry or loaded.stamp != _stamp(folder):
            return None
        loaded.used = time.monotonic()
        return loaded.version

    def _find(self, name: str, may_use: Callable[[str], bool]) -> tuple[str, Path] | None:
        """Its name with its adapter's, and its folder."""
        sessions = {owner: session for owner, session in self._sessions().items() if may_use(owner)}
        owner, slash, rest = name.rpartition("/")
        if slash:
            session = sessions.get(owner)
            folder = None if session is None else _folder(session, rest)
            return None if folder is None else (f"{owner}/{folder.name}", folder)
        found = {owner: folder for owner, session in sessions.items() if (folder := _folder(session, name)) is not None}
        if found and len(sessions) > 1:
            names = ", ".join(f"{owner}/{name}" for owner in found)
            raise InvalidRequestError(
                f"several adapters are trained here: say which one's it is: {names}", param="model"
            )
        return next(((f"{owner}/{folder.name}", folder) for owner, folder in found.items()), None)

    def _sweep_later(self, registry: Registry) -> None:
        if not self._sweeping:
            self._sweeping = True
            timer = threading.Timer(self._idle / 2, self._sweep, [registry])
            timer.daemon = True
            timer.start()

    def _sweep(self, registry: Registry) -> None:
        """Those that nobody uses leave; while some stay, it comes again."""
        with self._lock:
            self._sweeping = False
            for name, loaded in list(self._loaded.items()):
                if name not in registry:
                    del self._loaded[name]
                    continue
                routed = any(route.name == name for route in registry.routes)
                busy = any(version.rows for version in registry.versions(name))
                if routed or busy or time.monotonic() - loaded.used < self._idle:
                    continue
                try:
                    registry.unload(name, remember=False)
                except ParallmError:  # somebody has begun to serve it, or the engine has ended
                    continue
                del self._loaded[name]
            if self._loaded:
                self._sweep_later(registry)


def _folder(session: Session, name: str) -> Path | None:
    if session.checkpoints is None or not NAME.fullmatch(name):
        return None
    names = [name]
    if (step := STEP_ALIAS.fullmatch(name)) is not None:
        names.append(f"step-{int(step[1]):08d}")
    folders = (session.checkpoints.folder / one for one in names)
    return next((folder for folder in folders if (folder / STATE).is_file()), None)


def _stamp(folder: Path) -> Stamp:
    facts = (folder / STATE).stat()
    return facts.st_mtime_ns, facts.st_ino


def _number(folder: Path) -> int:
    """The version that it was; 0 where nobody knows."""
    try:
        state = json.loads((folder / STATE).read_bytes())
        return int(state.get("policy_version") or state.get("served_version") or 0)
    except (OSError, ValueError, TypeError, AttributeError):
        return 0
