"""What a model's own name serves, over restarts, where a rule decides that: shares, rewards so far, the better arm.

Written at once when it is chosen or decided, and a few seconds after rewards came in. `Runtime` restores it at its
start, when all of its adapters are there.
"""

import contextlib
import json
import logging
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlx_parallm.arms import AutoSplit
from mlx_parallm.errors import ParallmError
from mlx_parallm.lora.registry import Registry
from mlx_parallm.types import AdapterRoute

log = logging.getLogger(__name__)

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
        """What a rule decides or has decided; a disk that can't be written costs no more than this. The file leaves
        when somebody has chosen what is served, and not because a start could not serve what it says."""
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
        """What an earlier process served, if it was a split, or what a split has come to. Its arms may be checkpoints,
        which are loaded first."""
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
