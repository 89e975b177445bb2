"""The models that a server knows by name: those of its flags, of `--model-dir`, and those that were loaded by a path.
The pool's lock is held by whoever calls.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from mlx_parallm.config import ServeConfig
from mlx_parallm.devices.device import device_kind
from mlx_parallm.errors import ConflictError, InvalidRequestError, ModelNotFoundError
from mlx_parallm.runtime.entries import PoolEntry, kind_name, models_in, stamp_of
from mlx_parallm.runtime.weight_files import weight_bytes

LOOK_SECONDS = 1.0  # between two looks into the folder of models, where nobody asks for one that is not known


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
        """For a model at a path: the one that is known by this name, or a new one."""
        self.look_into_folder()
        known = self.entries.get(name)
        if known is not None and known.source == source:
            return known
        if known is not None and (known.lasting or known.status not in ("unloaded", "failed")):
            raise ConflictError(f"{name!r} is the model at {known.source}; take another name", param="model")
        if not name.isprintable() or name != name.strip():
            raise InvalidRequestError("a name has no control characters, and no spaces around it", param="model")
        _check_path(source)
        size = weight_bytes(source, device_kind())
        entry = self.entries[name] = PoolEntry(name, source, kind_name(source), lasting=False, bytes=size)
        return entry

    def forget(self, entry: PoolEntry) -> None:
        """Once it is unloaded, a model that was loaded by a path is no longer known."""
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
