"""An adapter as the rest of the program knows it, whatever file it came from: for each layer, two thin matrices.

For a weight (N, K) of the model, linear layer or embedding alike, the adapted weight is W + b · a, with the scale in b
already; with DoRA the rows of its weight are then scaled to the norms in m. `files` makes these, `registry` keeps them,
`layers` compute with them. NumPy, not MLX: they are read and checked on any thread.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mlx_parallm.errors import InvalidRequestError

Array = np.ndarray[Any, np.dtype[np.float32]]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
MAX_NAME = 200
LANGUAGE_MODEL = "language_model."
TRANSFORMERS_PREFIXES = ("model.language_model.", "model.text_model.", "model.", "")


class AdapterError(InvalidRequestError):
    """An adapter that can't be used with this model; says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """A layer that adapters may change: its weight is (out_features, size)."""

    kind: Literal["linear", "embedding"]
    out_features: int
    size: int


@dataclass(frozen=True, slots=True)
class Part:
    """An adapter's change to one layer."""

    a: Array  # (rank, size)
    b: Array  # (out_features, rank), times the scale
    m: Array | None = None  # (out_features,): DoRA's norms of the adapted weight's rows

    @property
    def rank(self) -> int:
        return int(self.a.shape[0])


@dataclass(frozen=True, slots=True)
class Adapter:
    """Parts by the path of their layer in the model."""

    parts: Mapping[str, Part]

    @property
    def rank(self) -> int:
        return max(part.rank for part in self.parts.values())

    @property
    def dora(self) -> bool:
        return any(part.m is not None for part in self.parts.values())


def check_name(name: str) -> str:
    if len(name) > MAX_NAME or not NAME.fullmatch(name):
        raise AdapterError(
            "an adapter's name has letters, digits, '.', '_', '-' and single '/' between them, "
            f"{MAX_NAME} characters at most",
            param="name",
        )
    return name


def with_paths_of(adapter: Adapter, targets: Mapping[str, Target]) -> Adapter:
    """The same adapter, where the model has its layers in a language model of its own and the adapter's file has not.

    transformers calls these layers model.language_model.layers or model.text_model.layers, and earlier model.layers.
    """
    if not any(path.startswith(LANGUAGE_MODEL) for path in targets):
        return adapter
    return Adapter({_path_among(path, targets): part for path, part in adapter.parts.items()})


def _path_among(path: str, targets: Mapping[str, Target]) -> str:
    """Layers of an image encoder have other names, and stay as they are: they can't be adapted."""
    ends = [path.removeprefix(prefix) for prefix in TRANSFORMERS_PREFIXES if path.startswith(prefix)]
    candidates = [path, *(f"{LANGUAGE_MODEL}{inner}{end}" for end in ends for inner in ("model.", ""))]
    return next((candidate for candidate in candidates if candidate in targets), path)


def check_fit(adapter: Adapter, targets: Mapping[str, Target], max_rank: int) -> None:
    """Raises when a model with these layers can't be adapted so."""
    if not adapter.parts:
        raise AdapterError("there is no adapter weight in it")
    wrong = [message for path, part in adapter.parts.items() if (message := _misfit(path, part, targets, max_rank))]
    if wrong:
        more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
        raise AdapterError("the adapter does not fit the model: " + "; ".join(wrong[:5]) + more)


def _misfit(path: str, part: Part, targets: Mapping[str, Target], max_rank: int) -> str | None:
    target = targets.get(path)
    if target is None:
        return f"the model has no layer {path} that can be adapted"
    if part.a.ndim != 2 or part.b.ndim != 2 or part.a.shape[0] != part.b.shape[1]:
        return f"{path}: {_shape(part.b)} times {_shape(part.a)} is no low-rank matrix"
    if (part.b.shape[0], part.a.shape[1]) != (target.out_features, target.size):
        found = f"{part.b.shape[0]} × {part.a.shape[1]}"
        return f"{path}: it is for a layer of {found}, and the model's has {target.out_features} × {target.size}"
    if not 1 <= part.rank <= max_rank:
        return f"{path}: its rank is {part.rank}, and at most {max_rank} is possible"
    if part.m is not None and part.m.shape != (target.out_features,):
        return f"{path}: {part.m.size} magnitudes for {target.out_features} out_features"
    arrays = [part.a, part.b] + ([] if part.m is None else [part.m])
    if not all(np.isfinite(array).all() for array in arrays):
        return f"{path}: it holds values that are not finite"
    return None


def _shape(array: Array) -> str:
    return "(" + ", ".join(map(str, array.shape)) + ")"
