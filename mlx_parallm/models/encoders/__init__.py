"""Encoders, a small file for each family: bidirectional transformers that give a hidden state for each token.

`load_encoder(folder)` reads a folder as transformers writes it. Kinds that pool, classify or rank use it, on the
engine's thread. A module here with `MODEL_TYPES`, `PREFIXES` and `build` is a family; nothing else needs to know of it.
"""

import importlib
import pkgutil
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx

from mlx_parallm.errors import ModelLoadError
from mlx_parallm.models.encoders.encoder_layers import Encoder
from mlx_parallm.models.encoders.encoder_weights import Settings, Weights
from mlx_parallm.models.encoders.packed import packed_encoder

__all__ = ["Encoder", "Settings", "Weights", "families", "is_encoder", "load_encoder"]


@cache
def families() -> dict[str, ModuleType]:
    """The families' modules by the model types that they read."""
    modules = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    return {name: module for module in modules for name in getattr(module, "MODEL_TYPES", ())}


def is_encoder(config: dict[str, Any]) -> bool:
    """Whether a folder with this config.json holds one of these families, with whatever head."""
    return config.get("model_type") in families()


def load_encoder(folder: Path, weights: Weights | None = None) -> Encoder:
    """The encoder in a folder, evaluated. `weights`: the folder's, where the caller takes other tensors too."""
    settings = Settings.of(folder)
    kind = str(settings.get("model_type"))
    family = families().get(kind)
    if family is None:
        raise ModelLoadError(f"{folder}: encoders of the type {kind!r} are not supported, only {', '.join(families())}")
    weights = weights or Weights.of(folder)
    weights.prefixes = family.PREFIXES
    encoder: Encoder = family.build(settings, weights)
    mx.eval(encoder.arrays())
    encoder.packed = packed_encoder(encoder)
    return encoder
