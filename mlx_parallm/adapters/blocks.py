"""Blocks in which a kernel that adds rows' adapters also does what comes behind: swiglu, and the sum with the inputs.

Where a decode step is bound by the number of kernels that it starts, an adapter on all layers costs four more a block;
with these, which take the place of others, it is one. For blocks of Llama's form; any other stays as it is, and so
does a pass for which there is no such kernel.
"""

import functools
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen2, qwen3
from mlx_lm.models.activations import swiglu

from mlx_parallm.adapters.layers import Residual, Seat

MODELS: tuple[Any, ...] = (llama, qwen2, qwen3)  # whose blocks, attention and MLP compute in the same order
BLOCKS = tuple(model.TransformerBlock for model in MODELS)
ATTENTIONS = tuple(model.Attention for model in MODELS)
MLPS = tuple(model.MLP for model in MODELS)


def join_sums(module: nn.Module) -> None:
    """After the layers have their seats."""
    for block in getattr(module, "layers", ()):
        if not _is_known(block):
            continue
        block.residual = Residual()
        for layer in (block.self_attn.o_proj, block.mlp.down_proj):
            layer.seat = layer.seat.closing(block.residual)
        gate: Seat = block.mlp.gate_proj.seat
        if gate.bundle is not None:
            gate.bundle.gate = gate
        kinds: tuple[Any, Any] = type(block), type(block.mlp)
        block.__class__, block.mlp.__class__ = _joining_block(kinds[0]), _joining_mlp(kinds[1])


def _is_known(block: Any) -> bool:
    known = isinstance(block, BLOCKS) and isinstance(block.self_attn, ATTENTIONS) and isinstance(block.mlp, MLPS)
    return known and all(
        hasattr(layer, "seat") for layer in (block.self_attn.o_proj, block.mlp.gate_proj, block.mlp.down_proj)
    )


@functools.cache
def _joining_block(original: Any) -> type:
    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        self.residual.given = x
        h: mx.array = self.residual.sum(self.self_attn(self.input_layernorm(x), mask, cache))
        self.residual.given = h
        out: mx.array = self.residual.sum(self.mlp(self.post_attention_layernorm(h)))
        return out

    return type(original.__name__, (original,), {"__call__": call})


@functools.cache
def _joining_mlp(original: Any) -> type:
    def call(self: Any, x: mx.array) -> mx.array:
        gate, up = self.gate_proj(x), self.up_proj(x)
        # One array for both: a kernel has found what swiglu makes of them.
        found: mx.array = self.down_proj(gate if gate is up else swiglu(gate, up))
        return found

    return type(original.__name__, (original,), {"__call__": call})
