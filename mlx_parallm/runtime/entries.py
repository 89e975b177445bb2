"""What the pool knows of a model by its name, loaded or not, and which models a folder holds."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_parallm.engine.engine import Engine
from mlx_parallm.errors import ModelNotFoundError, ParallmError, UnavailableError
from mlx_parallm.models.kinds import kind_of
from mlx_parallm.runtime.predicting import LocalPredictor
from mlx_parallm.types import ModelState, ModelStatus

MARKS = ("config.json", "network.json")  # a folder with one of these is a model


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
    waiting: "list[Future[None]]" = field(default_factory=list)  # for it to be ready

    @property
    def has_changed(self) -> bool:
        """Whether it holds what its files don't: adapters, or newer weights of a policy."""
        if isinstance(self.model, Engine):
            return bool(self.model.adapters.names)
        return self.model is not None and self.model.predictor.has_changed

    def without_path(self, message: str) -> str:
        """A message for the log, which does not say where users have their files."""
        paths = [] if self.source is None else [self.source, str(Path(self.source).expanduser().resolve())]
        for path in sorted(paths, key=len, reverse=True):
            message = message.replace(path, repr(self.name))
        return message

    def failure(self) -> ParallmError:
        """What a request for it gets once it has failed: no flag or folder promises a model that is not `lasting`."""
        assert self.error is not None
        kind = UnavailableError if self.lasting else ModelNotFoundError
        message = f"{self.name!r} can't be loaded: {self.error.message}; POST /v1/models/load tries again"
        return kind(message, code="model_failed")

    def wake(self, error: BaseException | None) -> None:
        """Tells all that wait: each of them uses it from now on, or gets the reason why it can't."""
        waiting, self.waiting = self.waiting, []
        for future in waiting:
            try:
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(None)
                    self.users += 1
            except InvalidStateError:  # its client has left
                continue

    def describe(self, held: int, idle_seconds: float | None) -> ModelStatus:
        """`held`: bytes that are in memory now, by which loading is measured. `idle_seconds`: after which it leaves."""
        model, progress = self.model, 1.0 if self.status == "ready" else 0.0
        if self.status == "loading" and self.bytes:
            progress = round(min(0.99, max(0.0, (held - self.held_before) / self.bytes)), 2)
        stays = self.pinned or idle_seconds is None or model is None
        left = None if stays else max(0.0, (idle_seconds or 0.0) + self.used - time.monotonic())
        context, signature = None, None
        if isinstance(model, Engine):
            context = model.model.context_length
        elif model is not None:
            context, signature = model.info.context_length, model.info.signature
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
    """The kind of a model that is not loaded, as far as its config tells."""
    kind = kind_of(source)
    if kind is not None:
        return kind.__name__.rpartition(".")[2]
    return "vision" if "vision_config" in _config(source) else "chat"


def _config(source: str | None) -> dict[str, Any]:
    try:
        config = json.loads((Path(source or "").expanduser() / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def models_in(folder: Path) -> Iterator[tuple[str, str]]:
    """Name and path of each model in a folder, as `name` or `owner/name`."""
    for path in _listed(folder):
        if _is_model(path):
            yield (path.stem if path.suffix == ".gguf" else path.name), str(path)
        elif path.is_dir():
            yield from ((f"{path.name}/{inner.stem}", str(inner)) for inner in _listed(path) if _is_model(inner))


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return []


def _is_model(path: Path) -> bool:
    return (path.suffix == ".gguf" and path.is_file()) or any((path / mark).is_file() for mark in MARKS)
