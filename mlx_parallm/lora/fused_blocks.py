"""Attention, MLP and whole blocks that compute their layers together and own the kernels for it.

Layers that read the same inputs (queries, keys and values; gate and up) are one product, or one kernel that adds rows'
adapters. On CUDA, where a decode step is bound by the number of kernels that it starts, such layers' weights lie side
by side, so that they are one product; RoPE, attention and the writes into the cache are one kernel, swiglu is one, and
the product behind each adds the residual. So a block is eight kernels, and one more for each product with adapters.

A block takes the place of a layer whose `__call__` has the very code of one of mlx-lm's classes below: Llama's form, in
which most of its architectures are written. Other layers stay as they are, each with its own hook. `compute.patch` puts
the blocks into a model.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import deepseek_v3, llama, qwen3
from mlx_lm.models.activations import swiglu as mlx_swiglu
from mlx_lm.models.rope_utils import Llama3RoPE

from mlx_parallm.devices.cuda_attention import HeadNorms, RopeParams
from mlx_parallm.lora.hooks import JointKernels, LayerOutput, LoRAHook, is_plain
from mlx_parallm.lora.kernel import log2_inv_freq

PLAIN_ATTENTION: Sequence[Any] = (llama.Attention,)
NORMED_ATTENTION: Sequence[Any] = (qwen3.Attention,)  # queries and keys are normed before RoPE
SWIGLU_MLPS: Sequence[Any] = (llama.MLP, deepseek_v3.DeepseekV3MLP)
BLOCKS: Sequence[Any] = (llama.TransformerBlock,)


@dataclass(frozen=True, slots=True, eq=False)
class JointWeights:
    """Weights of layers of the same inputs, side by side in memory: the layers' own are parts of them."""

    transposed: mx.array  # (size, all out_features)
    bias: mx.array | None
    out_features: tuple[int, ...]

    @classmethod
    def of(cls, layers: Sequence[Any]) -> "JointWeights | None":
        """Puts the layers' weights beside each other; None where they can't be one product."""
        weights = [layer["weight"] for layer in layers if is_plain(layer)]
        biases = [layer["bias"] for layer in layers if "bias" in layer]
        if len(weights) < len(layers) or len(biases) not in (0, len(layers)):
            return None
        if len({array.dtype for array in (*weights, *biases)}) > 1:
            return None
        out_features = tuple(len(weight) for weight in weights)
        for name, arrays in (("weight", weights), ("bias", biases)):
            if arrays:
                joint = mx.concatenate(arrays)
                parts = mx.split(joint, list(itertools.accumulate(out_features))[:-1])
                mx.eval(joint, parts)  # views, so that memory holds nothing twice
                for layer, part in zip(layers, parts, strict=True):
                    layer[name] = part
                arrays[:] = [joint]
        return cls(weights[0].T, biases[0] if biases else None, out_features)

    def product(self, x: mx.array) -> mx.array:
        return x @ self.transposed if self.bias is None else mx.addmm(self.bias, x, self.transposed)


class JointProjections:
    """Layers that read the same inputs, computed together."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = tuple(layers)
        self._hooks: list[LoRAHook] = [layer.hook for layer in layers]
        self.active = self._hooks[0].active
        self._places = tuple((hook.group, hook.number) for hook in self._hooks)
        self.active.joint_inputs.append(self._places)
        self._kernels: JointKernels | None = self.active.kernels.joint
        self._weights = None if self._kernels is None else JointWeights.of(layers)

    def side_by_side(self, x: mx.array) -> mx.array | None:
        """Each layer's output for x (B, size) with the rows' adapters, in one array; None where they can't be one."""
        weights = self._weights
        if weights is None or self._kernels is None:
            return None
        row_adapters = self.active.row_adapters
        y = weights.product(x)
        if not any(row_adapters.has(group) for group, _ in self._places):
            return y
        if not all(row_adapters.without_dora(group) for group, _ in self._places):
            return None
        total = self._kernels.add(x[:, None], y[:, None], self._places, weights.out_features, row_adapters)
        return None if total is None else total[:, 0]

    def __call__(self, x: mx.array) -> list[mx.array]:
        """Each layer's output for x with the rows' adapters."""
        products = self._multiplied(x)
        return self.add(x, self.base_products(x)) if products is None else products

    def base_products(self, x: mx.array) -> list[mx.array]:
        return [layer.base_product(x) for layer in self._layers]

    def add(self, x: mx.array, ys: Sequence[mx.array]) -> list[mx.array]:
        """The rows' adapters added to the layers' outputs ys."""
        row_adapters = self.active.row_adapters
        sums = list(ys)
        adapted = [place for place, hook in enumerate(self._hooks) if row_adapters.has(hook.group)]
        by_kernel = self._added_by_kernel(x, ys) if adapted else {}
        for place in adapted:
            total = by_kernel.get(place)
            hook = self._hooks[place]
            layer = self._layers[place]
            sums[place] = hook.add_by_operations(x, ys[place], layer) if total is None else total
        return sums

    def _added_by_kernel(self, x: mx.array, ys: Sequence[mx.array]) -> dict[int, mx.array]:
        """Adds by one kernel, for all layers that LoRA alone changes; returns the sums by the layers' places here."""
        add = self.active.kernels.add
        row_adapters = self.active.row_adapters
        outputs: list[LayerOutput] = [(y, *place) for y, place in zip(ys, self._places, strict=True)]
        places = [
            place
            for place, hook in enumerate(self._hooks)
            if row_adapters.has(hook.group) and row_adapters.without_dora(hook.group)
        ]
        if add is None or not places:
            return {}
        sums = add(x, [outputs[place] for place in places], row_adapters)
        return {} if sums is None else dict(zip(places, sums, strict=True))

    def _multiplied(self, x: mx.array) -> list[mx.array] | None:
        """Computes the layers' outputs by one kernel that also multiplies, except what DoRA changes; None where there
        is none for this pass."""
        row_adapters = self.active.row_adapters
        multiply = self.active.kernels.multiply
        if multiply is None:
            return None
        hooks = self._hooks
        together = [place for place, hook in enumerate(hooks) if row_adapters.without_dora(hook.group)]
        if not together:
            return None
        layers = [(self._layers[place], hooks[place].group, hooks[place].number) for place in together]
        products = multiply(x, layers, row_adapters)
        if products is None:
            return None
        by_place = dict(zip(together, products, strict=True))
        return [by_place[place] if place in by_place else layer(x) for place, layer in enumerate(self._layers)]


class OutputProjection:
    """The last layer of attention or MLP, whose output is added to the block's residual."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._hook: LoRAHook = layer.hook

    def __call__(self, x: mx.array, residual: mx.array | None) -> mx.array:
        if residual is None:
            return self._hook.linear(x, self._layer)
        return self._hook.linear_and_residual(x, self._layer, residual)

    def decode(self, x: mx.array, residual: mx.array) -> mx.array:
        """The same of one token a row: (B, size), (B, out_features). The product is of this shape with adapters and
        without: another might be another kernel's, with other roundings."""
        return self._hook.linear_and_residual(x, self._layer, residual)


class FusedMLP:
    """down(swiglu(gate(x), up(x)))"""

    def __init__(self, mlp: Any) -> None:
        self._gate_and_up = JointProjections([mlp.gate_proj, mlp.up_proj])
        self._down = OutputProjection(mlp.down_proj)
        self._swiglu = type(mlp).__call__.__globals__["swiglu"]  # which may be bound to a kernel of ours
        joint = self._gate_and_up.active.kernels.joint
        self._gate_kernel = joint.gate if joint is not None and self._swiglu is mlx_swiglu else None

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        if _takes_rows(self._gate_and_up, x):
            return self._down(self._gated(x.reshape(len(x), -1)), residual).reshape(x.shape)
        return self._down(self._gated(x), residual)

    def decode(self, x: mx.array, residual: mx.array) -> mx.array | None:
        """The same of one token a row (B, D), by kernels; None where they can't."""
        y = None if self._gate_kernel is None else self._gate_and_up.side_by_side(x)
        gated = None if y is None or self._gate_kernel is None else self._gate_kernel(y)
        return None if gated is None else self._down.decode(gated, residual)

    def _gated(self, x: mx.array) -> mx.array:
        gate, up = self._gate_and_up(x)
        product: mx.array = self._swiglu(gate, up)
        return product


class FusedAttention:
    """Queries, keys and values together, RoPE, attention, and the layer behind it."""

    def __init__(self, attention: Any, norms: tuple[Any, Any] | None) -> None:
        self._projections = JointProjections([attention.q_proj, attention.k_proj, attention.v_proj])
        self._output = OutputProjection(attention.o_proj)
        self._heads = (attention.n_heads, attention.n_kv_heads, attention.n_kv_heads)
        self._norms = (*norms, None) if norms is not None else (None, None, None)
        self._rope = attention.rope
        self._scale = attention.scale
        self._attend = type(attention).__call__.__globals__["scaled_dot_product_attention"]  # maybe the cache's own
        by_kernel = self._projections.active.kernels.joint is not None
        self._rope_params = _rope_params(attention) if by_kernel else None
        self._head_norms = None if norms is None else HeadNorms(norms[0].weight, norms[1].weight, norms[0].eps)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None, residual: mx.array | None = None) -> mx.array:
        queries, keys, values = self._rotated_heads(x, 0 if cache is None else cache.offset)
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
        attended = self._attend(queries, keys, values, cache=cache, scale=self._scale, mask=mask)
        attended = attended.transpose(0, 2, 1, 3)
        if _takes_rows(self._projections, x):
            return self._output(attended.reshape(len(x), -1), residual).reshape(x.shape)
        return self._output(attended.reshape(*x.shape[:2], -1), residual)

    def decode(self, x: mx.array, mask: Any, cache: Any, residual: mx.array) -> mx.array | None:
        """The same of one token a row (B, D), by kernels; None, with nothing written, where they can't."""
        if self._rope_params is None or not hasattr(cache, "rotate_and_attend"):
            return None
        y = self._projections.side_by_side(x)
        if y is None:
            return None
        attended = cache.rotate_and_attend(y, self._heads[0], self._rope_params, self._head_norms, self._scale, mask)
        return None if attended is None else self._output.decode(attended, residual)

    def _rotated_heads(self, x: mx.array, offset: Any) -> Sequence[mx.array]:
        """Queries, keys and values (B, heads, T, width), the first two at their positions."""
        projections = self._projections
        ys = projections(x.reshape(len(x), -1) if _takes_rows(projections, x) else x)
        tokens = x.shape[1]
        queries, keys, values = (
            self._split(y, tokens, heads, norm) for y, heads, norm in zip(ys, self._heads, self._norms, strict=True)
        )
        return self._rope(queries, offset=offset), self._rope(keys, offset=offset), values

    @staticmethod
    def _split(y: mx.array, tokens: int, heads: int, norm: Any) -> mx.array:
        """(B, T, heads * width), or (B, heads * width) for one token, -> (B, heads, T, width)"""
        split = y.reshape(len(y), tokens, heads, -1)
        return (split if norm is None else norm(split)).transpose(0, 2, 1, 3)


class FusedBlock:
    """A block whose attention and MLP add the residual themselves."""

    def __init__(self, block: Any) -> None:
        self._attention: FusedAttention = block.self_attn.fused
        self._mlp: FusedMLP = block.mlp.fused
        self._attention_norm = block.input_layernorm
        self._mlp_norm = block.post_attention_layernorm

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        decoded = self._decoded(x.reshape(len(x), -1), mask, cache) if x.shape[1] == 1 else None
        if decoded is not None:
            return decoded.reshape(x.shape)
        h = self._attention(self._attention_norm(x), mask, cache, residual=x)
        return self._mlp(self._mlp_norm(h), residual=h)

    def _decoded(self, x: mx.array, mask: Any, cache: Any) -> mx.array | None:
        """(B, D) -> (B, D), by kernels; None where they can't."""
        h = self._attention.decode(self._attention_norm(x), mask, cache, residual=x)
        if h is None:
            return None
        normed = self._mlp_norm(h)
        decoded = self._mlp.decode(normed, residual=h)
        return self._mlp(normed[:, None], residual=h[:, None])[:, 0] if decoded is None else decoded


def fused_part(layer: Any) -> FusedAttention | FusedMLP | None:
    """Makes what takes the place of an attention or MLP layer; None where that has another form, or no hooks."""
    if _has_code_of(layer, SWIGLU_MLPS) and _have_hooks(layer, ("gate_proj", "up_proj", "down_proj")):
        return FusedMLP(layer)
    if not _have_hooks(layer, ("q_proj", "k_proj", "v_proj", "o_proj")):
        return None
    if _has_code_of(layer, PLAIN_ATTENTION):
        return FusedAttention(layer, norms=None)
    return FusedAttention(layer, norms=(layer.q_norm, layer.k_norm)) if _has_code_of(layer, NORMED_ATTENTION) else None


def fused_block(layer: Any) -> FusedBlock | None:
    """Makes what takes the place of a block whose attention and MLP are fused; None where it has another form."""
    if not _has_code_of(layer, BLOCKS):
        return None
    fused = isinstance(getattr(layer.self_attn, "fused", None), FusedAttention)
    return FusedBlock(layer) if fused and isinstance(getattr(layer.mlp, "fused", None), FusedMLP) else None


@functools.cache
def fused_class(original: Any) -> type:
    """The same layer, computed by what it has in `fused`."""

    def call(self: Any, *args: Any, **kwargs: Any) -> mx.array:
        output: mx.array = self.fused(*args, **kwargs)
        return output

    return type(original.__name__, (original,), {"__call__": call})


def _takes_rows(projections: JointProjections, x: mx.array) -> bool:
    """Returns whether layers compute x (B, 1, K), one token of each row, without an axis for tokens: each product of
    MLX's would take that axis away, and put it back."""
    return projections.active.kernels.by_operations and x.shape[1] == 1


def _have_hooks(layer: nn.Module, names: Sequence[str]) -> bool:
    return all(hasattr(layer.get(name), "hook") for name in names)


def _has_code_of(layer: Any, classes: Sequence[Any]) -> bool:
    """Returns whether a layer has the code of one of these, maybe with other functions bound to global names."""
    kind: Any = type(layer)
    code = _code(kind)
    return code is not None and any(code == _code(known) for known in classes)


@functools.cache
def _code(kind: Any) -> tuple[Any, ...] | None:
    code = getattr(kind.__call__, "__code__", None)
    return None if code is None else (code.co_code, code.co_names, code.co_consts, code.co_varnames)


def _rope_params(attention: Any) -> RopeParams | None:
    """None where RoPE does not rotate whole heads by halves."""
    rope = attention.rope
    if type(rope) not in (nn.RoPE, Llama3RoPE) or rope.traditional:
        return None
    if attention.k_proj["weight"].shape[0] != attention.n_kv_heads * rope.dims or rope.dims % 2:
        return None
    if isinstance(rope, Llama3RoPE):
        inv_freq = 1.0 / rope._freqs.astype(mx.float32)
        mx.eval(inv_freq)  # else a trace computes it at every step
        return RopeParams(inv_freq, in_log2=False)
    return RopeParams(log2_inv_freq(rope.base, rope.dims // 2), in_log2=True) if rope.scale == 1.0 else None
