"""Adapters that come from files or the network, and those that learn here: `AdapterClient` for models of this process.

What the registries do is theirs; here is what they can't know: how files are read, and that a trained adapter's name
belongs to its trainer.
"""

from collections.abc import Callable, Mapping
from typing import Any

from mlx_parallm.arms import Decision
from mlx_parallm.errors import ConflictError, InvalidRequestError
from mlx_parallm.lora.adapter_files import parse, parse_config, read_adapter, read_contents, usual_config
from mlx_parallm.runtime.checkpoint_adapters import CheckpointAdapters
from mlx_parallm.runtime.pool import ModelPool
from mlx_parallm.training.training_service import TrainingService
from mlx_parallm.types import AdapterVersion

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
