"""A language model as the engine sees it: mlx-lm's module, its tokenizer, and what was found out at load.

`models.loader` makes one; the engine thread owns the module, everyone may read the rest.
"""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_parallm.host import to_numpy
from mlx_parallm.types import ModelInfo

if TYPE_CHECKING:
    from mlx_parallm.models.vision.encoder import ImageEncoder
    from mlx_parallm.models.vision.processor import ImageProcessor


@dataclass(frozen=True, slots=True)
class Vision:
    """What a model has that reads images."""

    encoder: "ImageEncoder"  # the engine thread's
    processor: "ImageProcessor"  # anybody's


@dataclass(slots=True, kw_only=True)
class LanguageModel(ModelInfo):
    module: nn.Module  # mlx-lm's Model: module(tokens (B, T), cache=[one per layer]) -> logits (B, T, V)
    tokenizer: TokenizerWrapper
    config: dict[str, Any]  # config.json
    eos_token_ids: frozenset[int]
    weight_bytes: int
    vision: Vision | None = None


def fingerprint(module: nn.Module) -> str:
    """Of all weights, as they are held: sums over every row and column of their bits."""
    digest = hashlib.sha256()
    for name, array in tree_flatten(module.parameters()):
        digest.update(repr((name, array.shape, str(array.dtype))).encode())
        bits = array.reshape(-1, array.shape[-1] if array.ndim else 1)
        bits = bits.view({1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[array.dtype.size])
        for axis in (0, 1):
            digest.update(to_numpy(mx.sum(bits.astype(mx.uint32), axis=axis)).tobytes())
    return digest.hexdigest()[:32]
