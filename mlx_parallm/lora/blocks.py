"""Blocks in which the kernels that add rows' adapters also do what comes behind: RoPE, swiglu, the sum with the inputs.

Where a decode step is bound by the number of kernels that it starts, an adapter on all layers costs four more a block;
these take the place of five. For blocks of Llama's form; any other stays as it is, and so does a pass for which there
are no such kernels.
"""

import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen2, qwen3
from mlx_lm.models.activations import swiglu
from mlx_lm.models.rope_utils import Llama3RoPE

from mlx_parallm.lora.kernel import log2_inv_freq
from mlx_parallm.lora.layers import LoRAHook, Residual, RopeParams

MODELS: tuple[Any, ...] = (llama, qwen2, qwen3)  # whose blocks and MLP compute in the same order
BLOCKS = [model.TransformerBlock for model in MODELS]
ATTENTIONS = [model.Attention for model in MODELS]
MLPS = [model.MLP for model in MODELS]
TURNING = [llama.Attention, qwen2.Attention]  # with nothing between the layers of queries and keys and RoPE


def fuse(module: nn.Module) -> None:
    """After the layers have their seats."""
    for block in getattr(module, "layers", ()):
        if not _is_known(block):
            continue
        attention, mlp = block.self_attn, block.mlp
        block.residual = Residual()
        for layer in (attention.o_proj, mlp.down_proj):
            layer.hook = layer.hook.with_residual(block.residual)
        gate: LoRAHook = mlp.gate_proj.hook
        if gate.bundle is not None:
            gate.bundle.gate = gate
        _change_class(block, _fused_block)
        _change_class(mlp, _fused_mlp)
        turn = _turn_of(attention)
        if turn is not None:
            attention.turn = turn
            _change_class(attention, _fused_attention)


def _is_known(block: Any) -> bool:
    if not _computes_as(block, BLOCKS):
        return False
    known = _computes_as(block.self_attn, ATTENTIONS) and _computes_as(block.mlp, MLPS)
    return known and all(
        hasattr(layer, "hook") for layer in (block.self_attn.o_proj, block.mlp.gate_proj, block.mlp.down_proj)
    )


def _computes_as(layer: Any, kinds: Sequence[Any]) -> bool:
    """Whether it runs the very code of one of these: its class may be made from theirs, with other names bound."""
    code = getattr(type(layer).__call__, "__code__", None)
    return any(code is kind.__call__.__code__ for kind in kinds)


def _change_class(layer: Any, fused: Any) -> None:
    layer.__class__ = fused(type(layer))


def _turn_of(attention: Any) -> RopeParams | None:
    """None where it is not done by halves, or not to whole heads, or the layers have no seats together."""
    rope, seats = attention.rope, [getattr(attention[f"{name}_proj"], "hook", None) for name in "qkv"]
    bundle = seats[0].bundle if seats[0] is not None else None
    if not _computes_as(attention, TURNING) or bundle is None or [hook for hook, _, _ in bundle.members] != seats:
        return None
    if type(rope) not in (nn.RoPE, Llama3RoPE) or rope.traditional:
        return None
    if attention.k_proj["weight"].shape[0] != attention.n_kv_heads * rope.dims or rope.dims % 2:
        return None
    if isinstance(rope, Llama3RoPE):
        inv_freq = 1.0 / rope._freqs.astype(mx.float32)
        mx.eval(inv_freq)  # else a trace computes it at every step
        return RopeParams(inv_freq, in_log2=False)
    return RopeParams(log2_inv_freq(rope.base, rope.dims // 2), in_log2=True) if rope.scale == 1.0 else None


@functools.cache
def _fused_block(original: Any) -> type:
    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        self.residual.given = x
        h: mx.array = self.residual.sum(self.self_attn(self.input_layernorm(x), mask, cache))
        self.residual.given = h
        out: mx.array = self.residual.sum(self.mlp(self.post_attention_layernorm(h)))
        return out

    return type(original.__name__, (original,), {"__call__": call})


@functools.cache
def _fused_mlp(original: Any) -> type:
    def call(self: Any, x: mx.array) -> mx.array:
        gate, up = self.gate_proj(x), self.up_proj(x)
        # One array for both: a kernel has found what swiglu makes of them.
        found: mx.array = self.down_proj(gate if gate is up else swiglu(gate, up))
        return found

    return type(original.__name__, (original,), {"__call__": call})


@functools.cache
def _fused_attention(original: Any) -> type:
    attend = original.__call__.__globals__["scaled_dot_product_attention"]  # which may ask the cache first

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        offsets = getattr(cache, "offset", None)
        found = None
        if x.shape[1] == 1 and isinstance(offsets, mx.array):
            found = self.q_proj.hook.bundle.with_rope(x, self.turn, offsets)
        if found is None:
            plain: mx.array = original.__call__(self, x, mask, cache)
            return plain
        queries, fresh = found[0], found[1:]
        keys, values = cache.update_and_fetch(*fresh)
        attended = attend(queries, keys, values, cache=cache, scale=self.scale, mask=mask)
        output: mx.array = self.o_proj(attended.transpose(0, 2, 1, 3).reshape(len(x), 1, -1))
        return output

    return type(original.__name__, (original,), {"__call__": call})
