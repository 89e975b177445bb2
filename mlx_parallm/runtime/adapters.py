"""Adapters that come from files or the network, and those that learn here: `AdapterClient` for models of this process.

What the registries do is theirs; here is what they can't know: how files are read, and that a trained adapter's name
belongs to its trainer.
"""

import contextlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_parallm.arms import AutoSplit, Decision
from mlx_parallm.errors import ConflictError, InvalidRequestError, ParallmError
from mlx_parallm.lora.adapter_files import parse, parse_config, read_adapter, read_contents, usual_config
from mlx_parallm.lora.registry import Registry
from mlx_parallm.runtime.pool import ModelPool
from mlx_parallm.training.rl.session import Session
from mlx_parallm.training.storage.checkpoints import NAME, STATE
from mlx_parallm.training.training_service import TrainingService
from mlx_parallm.types import AdapterRoute, AdapterVersion

log = logging.getLogger(__name__)

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
        """Unloads adapters that nobody uses; while some stay, it comes again."""
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


WRITE_SECONDS = 5.0  # after a reward


class SplitFile:
    def __init__(self, folder: Path, model: str) -> None:
        self._path = folder / f"split-{re.sub(r'[^A-Za-z0-9._-]', '-', model)[-100:]}.json"
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def follow(self, registry: Registry) -> None:
        """Keeps up with a registry from now on."""
        registry.traffic.on_change = lambda: self.write(registry, chosen=True)
        registry.traffic.on_reward = lambda: self._write_later(registry)

    def write(self, registry: Registry, chosen: bool = False) -> None:
        """Writes what a rule decides or has decided; a disk that can't be written costs no more than this. The file
        leaves when somebody has chosen what is served, and not because a start could not serve what it says."""
        with self._lock:
            self._timer = None
            try:
                if not registry.traffic.by_rule:
                    if chosen:
                        self._path.unlink(missing_ok=True)
                    return
                auto = registry.auto
                document = {
                    "routes": [[route.name, route.number, route.share] for route in registry.routes],
                    "auto": None if auto is None else auto.to_json(),
                }
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                partial = self._path.with_suffix(".partial")
                partial.write_text(json.dumps(document))
                os.replace(partial, self._path)
            except OSError as error:
                log.warning("what %s serves can't be kept in %s: %s", registry.policy_name, self._path, error)

    def _write_later(self, registry: Registry) -> None:
        with self._lock:
            if self._timer is None:
                self._timer = threading.Timer(WRITE_SECONDS, self.write, [registry])
                self._timer.daemon = True
                self._timer.start()

    def restore(self, registry: Registry, load_checkpoint: Callable[[str], object]) -> None:
        """Serves again what an earlier process served, if it was a split, or what a split has come to. Its arms may be
        checkpoints, which are loaded first."""
        document = self._read()
        if document is None:
            return
        try:
            routes = [AdapterRoute(name, number, float(share)) for name, number, share in document["routes"]]
            auto = None if document["auto"] is None else AutoSplit.of_json(document["auto"])
        except (KeyError, TypeError, ValueError) as error:
            log.warning("%s is damaged and is not used: %s", self._path, error)
            return
        with contextlib.suppress(ParallmError):
            for route in routes:
                if route.name is not None and route.name not in registry:
                    load_checkpoint(route.name)
            registry.serve(routes, auto)
            registry.traffic.by_rule = True
            return
        log.warning("%s names adapters that are not loaded now: the model's own name does not serve it", self._path)

    def _read(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None


REPLACED = (
    "the next update would replace what is loaded under its name; load it under another name, or start the server with "
    "another --train-adapter"
)
UNLOADED = "it stays while the server runs; start it without this --train-adapter"


class LocalAdapters:
    def __init__(self, pool: ModelPool, training: TrainingService, limit: int) -> None:
        self._pool = pool
        self._training = training
        self._limit = limit  # bytes of an adapter's file
        self.on_decision: Callable[[str, Decision], None] = lambda model, decision: None
        self._checkpoints = CheckpointAdapters(lambda: training.sessions, limit)

    def checkpoint(
        self, model: str, name: str, may_use: Callable[[str], bool] = lambda name: True
    ) -> AdapterVersion | None:
        """A checkpoint of training by its name, loaded; None where there is none, or none of an adapter that may be
        used."""
        return self._checkpoints.load(self._pool.generators[model].adapters, name, may_use)

    def load(self, model: str, name: str, path: str, number: int | None = None, *, own: bool = False) -> AdapterVersion:
        self._check_untrained(name, REPLACED)
        adapter, config, folder = read_adapter(path, self._limit)
        return self._pool.generators[model].adapters.publish(name, adapter, folder, number, config, own=own)

    def publish(
        self,
        model: str,
        name: str,
        data: bytes,
        config: Mapping[str, Any] | bytes | None,
        number: int | None,
        source: str = "upload",
        *,
        own: bool = False,
    ) -> AdapterVersion:
        self._check_untrained(name, REPLACED)
        known = self.config_for(model, name, data, config)
        registry = self._pool.generators[model].adapters
        return registry.publish(name, parse(known, data, self._limit), source, number, known, own=own)

    def config_for(
        self, model: str, name: str, data: bytes, config: Mapping[str, Any] | bytes | None
    ) -> Mapping[str, Any]:
        """The config that weights are published with: the one that came, that of the version before, or the usual."""
        registry = self._pool.generators[model].adapters
        if isinstance(config, bytes):
            config = parse_config(config)
        if config is None and name in registry:
            config = registry.find(name).config
        return config if config is not None else usual_config(data, self._limit)

    def read(self, path: str) -> tuple[Mapping[str, Any], bytes, str]:
        """The config and the weights of an adapter's folder, as `publish` takes them, and the folder."""
        return read_contents(path, self._limit)

    def check(self, model: str, name: str, data: bytes, config: Mapping[str, Any]) -> None:
        """Raises what `publish` would, and publishes nothing."""
        self._check_untrained(name, REPLACED)
        self._pool.generators[model].adapters.check(name, parse(config, data, self._limit))

    def unload(self, model: str, name: str) -> AdapterVersion:
        registry = self._pool.generators[model].adapters
        version = registry.find(name)
        self._check_untrained(name, UNLOADED)
        registry.unload(name, remember=not self._checkpoints.has(name))  # a checkpoint comes again under its number
        return version

    def rollback(self, model: str, name: str, number: int | None, checkpoint: str | None) -> tuple[AdapterVersion, str]:
        """Back to an earlier version; the training of an adapter goes back too, with its optimiser."""
        registry = self._pool.generators[model].adapters
        session = self._training.sessions.get(name)
        if session is not None:
            restored = session.rollback(number) if checkpoint is None else session.restore(checkpoint, number)
            return registry.find(name, restored.version), restored.message
        if checkpoint is not None:
            raise InvalidRequestError(f"{name!r} is not trained here, so it has no checkpoints", param="checkpoint")
        version = registry.rollback(name, number)
        return version, f"{version.label} is what {version.name!r} means now"

    def _check_untrained(self, name: str, remedy: str) -> None:
        if name in self._training.sessions:
            raise ConflictError(f"{name!r} is being trained here: {remedy}", param="name", code="adapter_in_training")
