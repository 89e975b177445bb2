"""A language model as the engine sees it: mlx-lm's module, its tokenizer, and what was found out at load.

`models.loader` makes one; the engine thread owns the module, everyone may read the rest.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

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
