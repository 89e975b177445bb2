"""Puts the C kernels into a model: its layers get subclasses that call them. Called by `models.loader` on the CPU.

mlx-lm's attention and MLP classes call `scaled_dot_product_attention` and `swiglu`; here those names are bound to C.
These kernels have no gradients, so a training tree is built from mlx-lm's own classes. Anything that is not plain
float32 goes the way it went before.
"""

import ctypes
import functools
import platform
import threading
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import llama
from mlx_lm.models.activations import swiglu as mlx_swiglu
from mlx_lm.models.base import scaled_dot_product_attention as mlx_attention

from mlx_parallm.host import numpy_view
from mlx_parallm.models.layers import rebound, replace_layers
from mlx_parallm.models.native import kernels

WIDE = 16  # of a head's elements, at a time
FEW_QUERIES = 4  # above, matrix products are faster
MANY_ROWS = 192  # from here on a BLAS is faster; on x86 it always is
FIRST_WAVES = 4096  # positions whose cosines and sines are computed at once

Array = np.ndarray[Any, Any]
Sizes = ctypes.c_int64 * 12


def speed_up(module: nn.Module) -> None:
    library = kernels()
    if library is not None:
        replace_layers(module, functools.partial(_fast_class, library))


@functools.cache
def _fast_class(library: Any, original: type) -> type | None:
    if original is nn.RoPE:
        return type("Rope", (Rope,), {"kernels": library})
    if original is nn.RMSNorm:
        return type("RMSNorm", (RMSNorm,), {"kernels": library})
    if original is llama.TransformerBlock and _has_lane_products():
        from mlx_parallm.models.native.blocks import NativeBlock

        return type("Block", (NativeBlock,), {"kernels": library})
    if original is nn.Linear and _has_lane_products():
        return type("Linear", (Linear,), {"kernels": library})
    if original is nn.Embedding and _has_lane_products():
        return type("Embedding", (Embedding,), {"kernels": library})
    return rebound(
        original,
        {
            "scaled_dot_product_attention": (mlx_attention, functools.partial(_attention, library)),
            "swiglu": (mlx_swiglu, functools.partial(_swiglu, library)),
        },
    )


def low_rank_adder() -> Callable[..., list[mx.array] | None] | None:
    """Adds each row's own low-rank product to what layers gave, for a few rows; None where there are no kernels."""
    library = kernels()
    return None if library is None else functools.partial(_add_low_rank, library)


def _add_low_rank(
    library: Any, x: mx.array, layers: Sequence[tuple[mx.array, int, int]], choice: Any
) -> list[mx.array] | None:
    """For each layer's y (B, 1, N) + x (B, 1, K) · own lines of a (L, rank, K) · own lines of b (L, rank, N).

    `choice.row_groups(group)` says where those lie, and which rows' own they are. Written into each y itself, which
    nobody else has seen. None where MLX should do it.
    """
    if x.ndim != 3 or x.shape[1] != 1 or x.dtype != mx.float32:
        return None
    outputs = [numpy_view(y) for y, _, _ in layers]  # which evaluates them, and x
    if not all(view.dtype == np.float32 and view.flags.c_contiguous and view.flags.writeable for view in outputs):
        return None
    inputs = np.ascontiguousarray(numpy_view(x))
    for view, (_, group, number) in zip(outputs, layers, strict=True):
        row_groups = choice.row_groups(group)
        sizes = len(row_groups), view.shape[2], inputs.shape[2], number
        if library.add_low_rank(_at(inputs), _at(view), _at(row_groups), *sizes):
            raise MemoryError
    return [y for y, _, _ in layers]


def slot_attention() -> Callable[..., mx.array | None] | None:
    """Attention of one query a row over slots, which also puts the new tokens there; None where there is no kernel."""
    library = kernels()
    return None if library is None else functools.partial(_attend_slots, library)


def _attend_slots(
    library: Any,
    queries: mx.array,  # (S, H, 1, D)
    keys: mx.array,  # (S, K, C, D)
    values: mx.array,
    fresh: tuple[mx.array, mx.array],  # (S, K, 1, D)
    offsets: mx.array,  # (S,): tokens that each row has
    scale: float,
) -> mx.array | None:
    """(S, H, 1, D); None, and nothing written, where MLX should do it."""
    arrays = (queries, keys, values, *fresh)
    width = queries.shape[-1]
    if width % WIDE or keys.shape != values.shape or any(array.dtype != mx.float32 for array in arrays):
        return None
    mx.eval(arrays)
    q, k, v, new_k, new_v = (numpy_view(array) for array in arrays)
    if not all(slots.flags.c_contiguous and slots.flags.writeable for slots in (k, v)):
        return None
    rows, heads = q.shape[:2]
    out = np.empty((rows, heads, 1, width), np.float32)
    sizes = Sizes(rows, heads, *k.shape[1:])
    strides = Sizes(*(stride for view in (q, new_k, new_v) for stride in _strides(view)[:2]))
    lengths = numpy_view(offsets)
    if library.attend_slots(*map(_at, (q, k, v, new_k, new_v, lengths, out)), sizes, strides, scale):
        raise MemoryError
    return mx.array(out)


def adapted_products() -> Callable[..., list[mx.array] | None] | None:
    """Products of layers of the same inputs, with each row's own low-rank ones added; None where there is no kernel."""
    library = kernels()
    return functools.partial(_adapted, library) if library is not None and _has_lane_products() else None


def _adapted(
    library: Any, x: mx.array, layers: Sequence[tuple[nn.Module, int, int]], choice: Any
) -> list[mx.array] | None:
    """x (B, T, size), each layer with its group and its number there. None where MLX should do it, or a BLAS."""
    if x.ndim != 3 or x.shape[0] * x.shape[1] > MANY_ROWS:  # before row_groups are made of so many tokens
        return None
    own = [
        None
        if (weights := weights_of(layer)) is None
        else (weights, choice.row_groups(group, x.shape[1]) if choice.has(group) else None, number)
        for layer, group, number in layers
    ]
    return _products(library, x, own)


class Rope(nn.RoPE):
    kernels: Any

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        if x.dtype != mx.float32 or x.ndim != 4 or self.traditional or self.scale != 1.0:
            result: mx.array = super().__call__(x, offset)
            return result
        mx.eval(x)
        view = numpy_view(x)  # (B, H, T, D)
        offsets, furthest = offsets_of(offset, view.shape[0])
        table = self.rope_table(furthest + view.shape[2])
        out = np.empty(view.shape, np.float32)
        sizes = Sizes(*view.shape, self.dims)
        self.kernels.rope(_at(view), _at(out), _at(offsets), _at(table), sizes, Sizes(*_strides(view)[:3]))
        return mx.array(out)

    def rope_table(self, positions: int) -> Array:
        """(positions, dims): cosines, then sines, of each position's angles; grows by doubling."""
        table: Array | None = getattr(self, "_rope_table", None)
        if table is None or len(table) < positions:
            count = max(FIRST_WAVES, 1 << (positions - 1).bit_length())
            half = self.dims // 2
            base = np.float32(np.log(self.base))
            speeds = np.exp(-np.arange(half, dtype=np.float32) * (base / np.float32(half)))
            angles = np.arange(count, dtype=np.float32)[:, None] * speeds
            table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
            object.__setattr__(self, "_rope_table", table)
        return table


_asked = threading.local()  # the last offsets: one array for all layers of a pass


def offsets_of(offset: Any, rows: int) -> tuple[Array, int]:
    """(rows,) and the largest."""
    if getattr(_asked, "offset", None) is not offset or len(_asked.found[0]) != rows:
        found = np.ascontiguousarray(np.broadcast_to(_host_offsets(offset), (rows,)))
        _asked.offset, _asked.found = offset, (found, int(found.max()))
    known: tuple[Array, int] = _asked.found
    return known


def _host_offsets(offset: Any) -> Array:
    return numpy_view(offset).astype(np.int64) if isinstance(offset, mx.array) else np.asarray(offset, np.int64)


class RMSNorm(nn.RMSNorm):
    kernels: Any

    def __call__(self, x: mx.array) -> mx.array:
        weight = self.weight
        if x.dtype != mx.float32 or weight.dtype != mx.float32:
            result: mx.array = super().__call__(x)
            return result
        mx.eval(x)
        view = np.ascontiguousarray(numpy_view(x))
        out = np.empty(view.shape, np.float32)
        dims = view.shape[-1]
        self.kernels.rms_norm(_at(view), _at(numpy_view(weight)), _at(out), view.size // dims, dims, self.eps)
        return mx.array(out)


class Linear(nn.Linear):
    kernels: Any

    def __call__(self, x: mx.array) -> mx.array:
        weights = weights_of(self)
        found = None if weights is None else _products(self.kernels, x, [(weights, None, 0)])
        if found is not None:
            return found[0]
        result: mx.array = super().__call__(x)
        return result


class Embedding(nn.Embedding):
    kernels: Any

    def as_linear(self, x: mx.array) -> mx.array:
        weights = weights_of(self)
        found = None if weights is None else _products(self.kernels, x, [(weights, None, 0)])
        if found is not None:
            return found[0]
        result: mx.array = super().as_linear(x)
        return result


def _has_lane_products() -> bool:
    """Whether the processor multiplies a vector by one element of another, which the kernel is written for."""
    return platform.machine() in ("aarch64", "arm64")


class _Weights:
    """Where a layer's weights lie."""

    __slots__ = ("added", "bias", "lie", "out_features", "size", "usable", "views", "weight")

    def __init__(self, weight: mx.array, bias: mx.array | None) -> None:
        self.weight, self.bias = weight, bias
        self.out_features, self.size = weight.shape
        arrays = [weight] if bias is None else [weight, bias]
        self.usable = self.size % 4 == 0 and all(array.dtype == mx.float32 for array in arrays)
        self.views = [numpy_view(array) for array in arrays] if self.usable else []
        self.usable = self.usable and all(view.flags.c_contiguous for view in self.views)
        self.lie, self.added = [*map(_address, self.views), 0, 0][:2]


def weights_of(layer: nn.Module) -> _Weights | None:
    """Found once, and again when the layer has others; None where they are no plain numbers."""
    if "scales" in layer:
        return None
    known: _Weights | None = layer.__dict__.get("_lying")
    weight, bias = layer["weight"], layer.get("bias")
    if known is None or known.weight is not weight or known.bias is not bias:
        known = _Weights(weight, bias)
        object.__setattr__(layer, "_lying", known)
    return known if known.usable else None


Own = tuple[_Weights, Array | None, int]  # a layer's weights, the row_groups that add to it, its number among theirs


def _products(library: Any, x: mx.array, layers: Sequence[Own | None]) -> list[mx.array] | None:
    """Of each layer for a few rows; None where a BLAS should do it."""
    shape = x.shape
    rows = x.size // shape[-1]
    own = [layer for layer in layers if layer is not None]
    if not 1 < rows <= MANY_ROWS or x.dtype != mx.float32 or len(own) < len(layers):
        return None
    mx.eval(x)
    outputs = products_of(library, numpy_view(x).reshape(rows, -1), own)
    return [mx.array(out.reshape(*shape[:-1], -1)) for out in outputs]


def products_of(library: Any, x: Array, layers: Sequence[Own]) -> list[Array]:
    """x (M, K) · weightᵀ + bias of each layer, and what its row_groups add: (M, N) each."""
    x = np.ascontiguousarray(x)
    table: list[int] = []
    outputs = []
    for weights, row_groups, number in layers:
        out = np.empty((len(x), weights.out_features), np.float32)
        outputs.append(out)
        table += (weights.lie, weights.added, _address(out), weights.out_features)
        table += (0, 0, 0) if row_groups is None else (_address(row_groups), len(row_groups), number)
    if library.products(_at(x), *x.shape, (ctypes.c_int64 * len(table))(*table), len(outputs)):
        raise MemoryError
    return outputs


def _swiglu(library: Any, gate: mx.array, up: mx.array) -> mx.array:
    if gate.dtype != mx.float32 or up.dtype != mx.float32 or gate.shape != up.shape:
        result: mx.array = mlx_swiglu(gate, up)
        return result
    mx.eval(gate, up)
    first, second = np.ascontiguousarray(numpy_view(gate)), np.ascontiguousarray(numpy_view(up))
    out = np.empty(first.shape, np.float32)
    library.swiglu(_at(first), _at(second), _at(out), first.size)
    return mx.array(out)


def _attention(
    library: Any,
    queries: mx.array,  # (B, H, T, D)
    keys: mx.array,  # (B, K, N, D)
    values: mx.array,  # (B, K, N, V)
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    if sinks is None and hasattr(cache, "attend"):
        attended: mx.array | None = cache.attend(queries, scale, mask)
        if attended is not None:
            return attended
    plain = sinks is None and not hasattr(cache, "bits") and _plain_mask(mask, queries, keys)
    if not plain or any(array.dtype != mx.float32 for array in (queries, keys, values)):
        return mlx_attention(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
    if queries.shape[2] <= FEW_QUERIES:
        return _few(library, queries, keys, values, scale, mask)
    return _many(library, queries, keys, values, scale, mask)


def _plain_mask(mask: Any, queries: mx.array, keys: mx.array) -> bool:
    if mask is None:
        return queries.shape[2] == 1
    if isinstance(mask, str):
        return mask == "causal"
    return mask.dtype == mx.bool_ and mask.shape[-1] == keys.shape[2] and (mask.ndim == 2 or mask.shape[-3] == 1)


def _few(library: Any, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any) -> mx.array:
    seen, lines = _mask_lines(mask, queries)
    mx.eval(queries, keys, values)
    q, k, v = numpy_view(queries), numpy_view(keys), numpy_view(values)
    (b, h, t, d), (_, groups, n, width) = q.shape, v.shape
    out = np.empty((b, t, h, width), np.float32)
    strides = Sizes(*_strides(q)[:3], *_strides(k)[:3], *_strides(v)[:3], *lines)
    sizes = Sizes(b, h, groups, t, n, d, width)
    if library.attend(_at(q), _at(k), _at(v), _at(seen), _at(out), sizes, strides, scale):
        raise MemoryError
    return mx.array(out).transpose(0, 2, 1, 3)


def _many(library: Any, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any) -> mx.array:
    seen, lines = _mask_lines(mask, queries)
    b, h, t, d = queries.shape
    groups, n = keys.shape[1:3]
    grouped = queries.reshape(b, groups, -1, d)
    scores = grouped @ keys.swapaxes(-1, -2)  # (B, K, H / K * T, N)
    mx.eval(scores)
    library.softmax(_at(numpy_view(scores)), _at(seen), Sizes(b, h, t, n), Sizes(*lines), scale)
    return (scores @ values).reshape(b, h, t, -1)


def _mask_lines(mask: Any, queries: mx.array) -> tuple[Array | None, tuple[int, int]]:
    """A mask's bytes, and how far apart two rows' and two queries' lines are; no bytes for a causal one."""
    if mask is None or isinstance(mask, str):
        return None, (0, 0)
    rows, width = queries.shape[0], mask.shape[-1]
    seen = np.ascontiguousarray(numpy_view(mask)).reshape(-1, mask.shape[-2], width)
    by_row = seen.shape[1] * width if seen.shape[0] == rows and rows > 1 else 0
    return seen, (by_row, width if seen.shape[1] > 1 else 0)


def _strides(view: Array) -> tuple[int, ...]:
    return tuple(stride // 4 for stride in view.strides)


def _at(view: Array | None) -> int | None:
    return None if view is None else _address(view)


def _address(view: Array) -> int:
    address: int = view.__array_interface__["data"][0]
    return address
