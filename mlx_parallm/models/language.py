"""A language model as the engine sees it: mlx-lm's module, its tokenizer, and what was found out at load.

`models.loader` makes one; the engine thread owns the module, everyone may read the rest.
"""

from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper


@dataclass(slots=True)
class LanguageModel:
    name: str
    module: nn.Module  # mlx-lm's Model: module(tokens (B, T), cache=[one per layer]) -> logits (B, T, V)
    tokenizer: TokenizerWrapper
    config: dict[str, Any]  # config.json
    context_length: int
    vocab_size: int  # the width of the logits, at least the tokenizer's
    eos_token_ids: frozenset[int]
    weight_bytes: int
    precision: str  # "float32", "bfloat16", "4-bit" …: what start-up prints
    source: str  # the path or hub id it came from
