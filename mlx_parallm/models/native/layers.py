"""Puts the C kernels into a model: its layers get subclasses that call them. Called by `models.loader` on the CPU.

mlx-lm's attention and MLP classes call `scaled_dot_product_attention` and `swiglu`; here those names are bound to C.
These kernels have no gradients, so a training tree is built from mlx-lm's own classes. Anything that is not plain
float32 goes the way it went before.
"""

import ctypes
import functools
import platform
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.activations import swiglu as mlx_swiglu
from mlx_lm.models.base import scaled_dot_product_attention as mlx_attention

from mlx_parallm.models.layers import rebound, replace_layers
from mlx_parallm.models.native import kernels

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

    `choice.parties(group)` says where those lie, and which rows' own they are. Written into each y itself, which nobody
    else has seen. None where MLX should do it.
    """
    if x.ndim != 3 or x.shape[1] != 1 or x.dtype != mx.float32:
        return None
    outputs = [np.asarray(y) for y, _, _ in layers]  # which evaluates them, and x
    if not all(view.dtype == np.float32 and view.flags.c_contiguous and view.flags.writeable for view in outputs):
        return None
    inputs = np.ascontiguousarray(np.asarray(x))
    for view, (_, group, number) in zip(outputs, layers, strict=True):
        parties = choice.parties(group)
        sizes = len(parties), view.shape[2], inputs.shape[2], number
        if library.add_low_rank(_at(inputs), _at(view), _at(parties), *sizes):
            raise MemoryError
    return [y for y, _, _ in layers]


def adapted_product() -> Callable[..., mx.array | None] | None:
    """A layer's product with each row's own low-rank one added; None where there is no such kernel."""
    library = kernels()
    return functools.partial(_adapted, library) if library is not None and _has_lane_products() else None


def _adapted(library: Any, x: mx.array, layer: nn.Module, choice: Any, group: int, number: int) -> mx.array | None:
    """None where MLX should do it, or a BLAS."""
    if x.ndim != 3 or "scales" in layer:
        return None
    return _product(library, x, layer["weight"], layer.get("bias"), choice.parties(group, x.shape[1]), number)


class Rope(nn.RoPE):
    kernels: Any

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        if x.dtype != mx.float32 or x.ndim != 4 or self.traditional or self.scale != 1.0:
            result: mx.array = super().__call__(x, offset)
            return result
        mx.eval(x)
        view = np.asarray(x)  # (B, H, T, D)
        offsets = np.ascontiguousarray(np.broadcast_to(np.asarray(offset, np.int64), view.shape[:1]))
        waves = self._waves_for(int(offsets.max()) + view.shape[2])
        out = np.empty(view.shape, np.float32)
        sizes = Sizes(*view.shape, self.dims)
        self.kernels.rope(_at(view), _at(out), _at(offsets), _at(waves), sizes, Sizes(*_strides(view)[:3]))
        return mx.array(out)

    def _waves_for(self, positions: int) -> Array:
        """(positions, dims): cosines, then sines, of each position's angles; grows by doubling."""
        waves: Array | None = getattr(self, "_waves", None)
        if waves is None or len(waves) < positions:
            count = max(FIRST_WAVES, 1 << (positions - 1).bit_length())
            half = self.dims // 2
            base = np.float32(np.log(self.base))
            speeds = np.exp(-np.arange(half, dtype=np.float32) * (base / np.float32(half)))
            angles = np.arange(count, dtype=np.float32)[:, None] * speeds
            waves = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
            object.__setattr__(self, "_waves", waves)
        return waves


class RMSNorm(nn.RMSNorm):
    kernels: Any

    def __call__(self, x: mx.array) -> mx.array:
        weight = self.weight
        if x.dtype != mx.float32 or weight.dtype != mx.float32:
            result: mx.array = super().__call__(x)
            return result
        mx.eval(x)
        view = np.ascontiguousarray(np.asarray(x))
        out = np.empty(view.shape, np.float32)
        dims = view.shape[-1]
        self.kernels.rms_norm(_at(view), _at(np.asarray(weight)), _at(out), view.size // dims, dims, self.eps)
        return mx.array(out)


class Linear(nn.Linear):
    kernels: Any

    def __call__(self, x: mx.array) -> mx.array:
        found = _product(self.kernels, x, self["weight"], self.get("bias"))
        if found is not None:
            return found
        result: mx.array = super().__call__(x)
        return result


class Embedding(nn.Embedding):
    kernels: Any

    def as_linear(self, x: mx.array) -> mx.array:
        found = _product(self.kernels, x, self["weight"], None)
        if found is not None:
            return found
        result: mx.array = super().as_linear(x)
        return result


def _has_lane_products() -> bool:
    """Whether the processor multiplies a vector by one element of another, which the kernel is written for."""
    return platform.machine() in ("aarch64", "arm64")


def _product(
    library: Any,
    x: mx.array,
    weight: mx.array,
    bias: mx.array | None,
    parties: Array | None = None,
    number: int = 0,
) -> mx.array | None:
    """x · weightᵀ + bias for a few rows, and what `parties` add to them; None where a BLAS should do it."""
    lines, size = weight.shape
    rows = x.size // size
    arrays = (x, weight) if bias is None else (x, weight, bias)
    if not 1 < rows <= MANY_ROWS or size % 4 or any(array.dtype != mx.float32 for array in arrays):
        return None
    mx.eval(x)
    weights = np.asarray(weight)
    if not weights.flags.c_contiguous:
        return None
    out = np.empty((*x.shape[:-1], lines), np.float32)
    added = None if bias is None else np.asarray(bias)
    view = np.ascontiguousarray(np.asarray(x))
    own = (None, 0, 0) if parties is None else (_at(parties), len(parties), number)
    if library.product(_at(view), _at(weights), _at(added), _at(out), rows, lines, size, *own):
        raise MemoryError
    return mx.array(out)


def _swiglu(library: Any, gate: mx.array, up: mx.array) -> mx.array:
    if gate.dtype != mx.float32 or up.dtype != mx.float32 or gate.shape != up.shape:
        result: mx.array = mlx_swiglu(gate, up)
        return result
    mx.eval(gate, up)
    first, second = np.ascontiguousarray(np.asarray(gate)), np.ascontiguousarray(np.asarray(up))
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
    q, k, v = np.asarray(queries), np.asarray(keys), np.asarray(values)
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
    library.softmax(_at(np.asarray(scores)), _at(seen), Sizes(b, h, t, n), Sizes(*lines), scale)
    return (scores @ values).reshape(b, h, t, -1)


def _mask_lines(mask: Any, queries: mx.array) -> tuple[Array | None, tuple[int, int]]:
    """A mask's bytes, and how far apart two rows' and two queries' lines are; no bytes for a causal one."""
    if mask is None or isinstance(mask, str):
        return None, (0, 0)
    rows, width = queries.shape[0], mask.shape[-1]
    seen = np.ascontiguousarray(np.asarray(mask)).reshape(-1, mask.shape[-2], width)
    by_row = seen.shape[1] * width if seen.shape[0] == rows and rows > 1 else 0
    return seen, (by_row, width if seen.shape[1] > 1 else 0)


def _strides(view: Array) -> tuple[int, ...]:
    return tuple(stride // 4 for stride in view.strides)


def _at(view: Array | None) -> int | None:
    return None if view is None else view.__array_interface__["data"][0]
