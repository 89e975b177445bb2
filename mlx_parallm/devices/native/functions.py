"""Attention and swiglu in C, for float32; anything else goes to MLX.

`classes` binds them to the names that mlx-lm's layers call; slots attend with `slot_attention`. These kernels have no
gradients, so a training tree is built from mlx-lm's own classes.
"""

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.activations import swiglu as mlx_swiglu
from mlx_lm.models.base import scaled_dot_product_attention as mlx_attention

from mlx_parallm.devices.native import kernels
from mlx_parallm.devices.native.pointers import Array, Sizes, element_strides, pointer
from mlx_parallm.devices.rebinding import attend_by_cache
from mlx_parallm.host import numpy_view

WIDE = 16  # of a head's elements, at a time
FEW_QUERIES = 4  # above, matrix products are faster


def swiglu(library: Any, gate: mx.array, up: mx.array) -> mx.array:
    if gate.dtype != mx.float32 or up.dtype != mx.float32 or gate.shape != up.shape:
        result: mx.array = mlx_swiglu(gate, up)
        return result
    mx.eval(gate, up)
    first = np.ascontiguousarray(numpy_view(gate))
    second = np.ascontiguousarray(numpy_view(up))
    out = np.empty(first.shape, np.float32)
    library.swiglu(pointer(first), pointer(second), pointer(out), first.size)
    return mx.array(out)


def attention(
    library: Any,
    queries: mx.array,  # (B, H, T, D)
    keys: mx.array,  # (B, K, N, D)
    values: mx.array,  # (B, K, N, V)
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    attended = attend_by_cache(queries, cache, scale, mask, sinks)
    if attended is not None:
        return attended
    plain = sinks is None and not hasattr(cache, "bits") and _is_plain_mask(mask, queries, keys)
    if not plain or any(array.dtype != mx.float32 for array in (queries, keys, values)):
        return mlx_attention(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
    if queries.shape[2] <= FEW_QUERIES:
        return _attend_few(library, queries, keys, values, scale, mask)
    return _attend_many(library, queries, keys, values, scale, mask)


def _is_plain_mask(mask: Any, queries: mx.array, keys: mx.array) -> bool:
    if mask is None:
        return queries.shape[2] == 1
    if isinstance(mask, str):
        return mask == "causal"
    return mask.dtype == mx.bool_ and mask.shape[-1] == keys.shape[2] and (mask.ndim == 2 or mask.shape[-3] == 1)


def _attend_few(library: Any, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any) -> mx.array:
    seen, mask_strides = _mask_bytes(mask, queries)
    mx.eval(queries, keys, values)
    q = numpy_view(queries)
    k = numpy_view(keys)
    v = numpy_view(values)
    (b, h, t, d) = q.shape
    (_, groups, n, width) = v.shape
    out = np.empty((b, t, h, width), np.float32)
    strides = Sizes(*element_strides(q)[:3], *element_strides(k)[:3], *element_strides(v)[:3], *mask_strides)
    sizes = Sizes(b, h, groups, t, n, d, width)
    if library.attend(pointer(q), pointer(k), pointer(v), pointer(seen), pointer(out), sizes, strides, scale):
        raise MemoryError
    return mx.array(out).transpose(0, 2, 1, 3)


def _attend_many(
    library: Any, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any
) -> mx.array:
    seen, mask_strides = _mask_bytes(mask, queries)
    b, h, t, d = queries.shape
    groups, n = keys.shape[1:3]
    grouped = queries.reshape(b, groups, -1, d)
    scores = grouped @ keys.swapaxes(-1, -2)  # (B, K, H / K * T, N)
    mx.eval(scores)
    library.softmax(pointer(numpy_view(scores)), pointer(seen), Sizes(b, h, t, n), Sizes(*mask_strides), scale)
    return (scores @ values).reshape(b, h, t, -1)


def _mask_bytes(mask: Any, queries: mx.array) -> tuple[Array | None, tuple[int, int]]:
    """A mask's bytes, and how far apart two rows' and two queries' are; no bytes for a causal one."""
    if mask is None or isinstance(mask, str):
        return None, (0, 0)
    rows = queries.shape[0]
    width = mask.shape[-1]
    seen = np.ascontiguousarray(numpy_view(mask)).reshape(-1, mask.shape[-2], width)
    by_row = seen.shape[1] * width if seen.shape[0] == rows and rows > 1 else 0
    return seen, (by_row, width if seen.shape[1] > 1 else 0)


def slot_attention() -> Callable[..., mx.array | None] | None:
    """Attention of one query a row over slots, which also puts the new tokens there; None where there is no kernel."""
    library = kernels()
    return None if library is None else functools.partial(_attend_slots, library)


def _attend_slots(
    library: Any,
    queries: mx.array,  # (B, H, 1, D)
    keys: mx.array,  # (S, K, C, D)
    values: mx.array,
    fresh: tuple[mx.array, mx.array],  # (B, K, 1, D)
    offsets: mx.array,  # (B,): tokens that each row has
    scale: float,
    slots: mx.array | None = None,  # (B,): in which each row is; None: in order
) -> mx.array | None:
    """(B, H, 1, D); None, and nothing written, where MLX should do it."""
    arrays = (queries, keys, values, *fresh)
    width = queries.shape[-1]
    if len(queries) > len(keys if slots is None else slots):  # some have no slot
        return None
    if width % WIDE or keys.shape != values.shape or any(array.dtype != mx.float32 for array in arrays):
        return None
    mx.eval(arrays)
    q, k, v, new_k, new_v = (numpy_view(array) for array in arrays)
    if not all(slots.flags.c_contiguous and slots.flags.writeable for slots in (k, v)):
        return None
    rows, heads = q.shape[:2]
    out = np.empty((rows, heads, 1, width), np.float32)
    sizes = Sizes(rows, heads, *k.shape[1:])
    strides = Sizes(*(stride for view in (q, new_k, new_v) for stride in element_strides(view)[:2]))
    lengths = numpy_view(offsets)
    places = None if slots is None else numpy_view(slots)
    if library.attend_slots(*map(pointer, (q, k, v, new_k, new_v, lengths, places, out)), sizes, strides, scale):
        raise MemoryError
    return mx.array(out)
