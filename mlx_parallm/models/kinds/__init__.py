"""Kinds of models beside language models, a file each. A model of such a kind predicts: a batch in, a batch out.

A module here with `recognises(config)` and `load(folder)` is a kind; nothing else needs to know of it. Its models are
served under the names that `--model-path NAME=FOLDER` gives them, on the engine's thread, between two steps.
"""

import importlib
import json
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from mlx_parallm.steps import LazySteps
from mlx_parallm.types import PredictorInfo


class Predictor(ABC):
    """A loaded model. Its weights are evaluated in `load`; both run on an engine's thread, which may change between two
    calls, so nothing lazy may be kept."""

    info: PredictorInfo
    tokenizer: Any = None  # a `tokenizers.Tokenizer`, where inputs are texts: the server tokenises, off that thread

    @property
    def has_changed(self) -> bool:
        """Whether it holds what its files don't: it then stays in memory."""
        return False

    def cost(self, item: Any) -> int:
        """What an input weighs in a batch: its tokens, where it has any. Batches are of inputs of similar cost."""
        return 1

    def warm_up(self) -> None:  # noqa: B027  (nothing, where nothing is compiled)
        """Runs once after loading: compiles what the first batches would otherwise wait for."""

    def steps(self, batch: Sequence[Any]) -> LazySteps[list[Any]]:
        """`predict` as a generator: at each `yield` the engine's thread may do other work first. Override it for models
        that may take longer than a decode step for a single input."""
        yield from ()
        return self.predict(batch)

    @abstractmethod
    def predict(self, batch: Sequence[Any]) -> list[Any]:
        """An output for each input. Both are plain values or NumPy arrays, never MLX's. The batch may be of several
        clients: what is wrong with an input is found before it comes here, or raised, and then each is tried alone."""


class Kind(Protocol):
    """A module of this package."""

    __name__: str

    def recognises(self, config: dict[str, Any]) -> bool:
        """Whether a folder with this config.json is one of its models. Where it has a modules.json, that is
        `config["modules"]`."""
        ...

    def load(self, folder: Path) -> Predictor: ...


def kind_of(source: str | None) -> Kind | None:
    """The kind of model in a folder; None: a language model, or none at all."""
    config = _config(source)
    if config is None:
        return None
    for module in pkgutil.iter_modules(__path__):
        kind: Any = importlib.import_module(f"{__name__}.{module.name}")
        if _is_recognised(kind, config):
            found: Kind = kind
            return found
    return None


def _is_recognised(kind: Kind, config: dict[str, Any]) -> bool:
    """A config with values of the wrong type is nobody's: loading says what is wrong with it."""
    try:
        return kind.recognises(config)
    except (TypeError, ValueError, AttributeError, LookupError):
        return False


def _config(source: str | None) -> dict[str, Any] | None:
    """config.json; a folder that has network.json in its place is {"network": what is in it}."""
    if source is None:
        return None
    folder = Path(source)
    config = _read(folder / "config.json")
    modules = _read(folder / "modules.json")
    if isinstance(modules, list):  # sentence-transformers' folders may have config.json in one of their own
        return (config if isinstance(config, dict) else {}) | {"modules": modules}
    if config is None and _exists(folder / "network.json"):
        network = _read(folder / "network.json")
        return {"network": network if isinstance(network, dict) else {}}  # its kind says what is wrong with it
    return config if isinstance(config, dict) else None


def _exists(path: Path) -> bool:
    try:
        return path.expanduser().is_file()
    except (OSError, ValueError, RuntimeError):
        return False


def _read(path: Path) -> Any:
    try:
        return json.loads(path.expanduser().read_text())
    except (OSError, ValueError, RuntimeError):  # RecursionError is a RuntimeError
        return None
