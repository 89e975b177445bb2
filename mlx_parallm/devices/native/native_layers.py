"""Layers that call the C kernels. Anything that is not plain float32 goes to MLX, as it did before.

`classes` says which of a model's layers get them. These kernels have no gradients, so a training tree is built from
mlx-lm's own classes.
"""

import threading
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.devices.native.pointers import Array, Sizes, element_strides, pointer
from mlx_parallm.devices.native.products import few_row_products, weight_addresses
from mlx_parallm.host import numpy_view

FIRST_POSITIONS = 4096  # whose cosines and sines are computed at once


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
        self.kernels.rope(
            pointer(view), pointer(out), pointer(offsets), pointer(table), sizes, Sizes(*element_strides(view)[:3])
        )
        return mx.array(out)

    def rope_table(self, positions: int) -> Array:
        """(positions, dims): cosines, then sines, of each position's angles; grows by doubling."""
        table: Array | None = getattr(self, "_rope_table", None)
        if table is None or len(table) < positions:
            count = max(FIRST_POSITIONS, 1 << (positions - 1).bit_length())
            half = self.dims // 2
            base = np.float32(np.log(self.base))
            speeds = np.exp(-np.arange(half, dtype=np.float32) * (base / np.float32(half)))
            angles = np.arange(count, dtype=np.float32)[:, None] * speeds
            table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
            object.__setattr__(self, "_rope_table", table)
        return table


_last_offsets = threading.local()  # of all layers of a pass, which have one array: copied to the host once


def offsets_of(offset: Any, rows: int) -> tuple[Array, int]:
    """(rows,) and the largest."""
    if getattr(_last_offsets, "device", None) is not offset or len(_last_offsets.host[0]) != rows:
        offsets = np.ascontiguousarray(np.broadcast_to(_host_offsets(offset), (rows,)))
        _last_offsets.device, _last_offsets.host = offset, (offsets, int(offsets.max()))
    host: tuple[Array, int] = _last_offsets.host
    return host


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
        self.kernels.rms_norm(
            pointer(view), pointer(numpy_view(weight)), pointer(out), view.size // dims, dims, self.eps
        )
        return mx.array(out)


class Linear(nn.Linear):
    kernels: Any

    def __call__(self, x: mx.array) -> mx.array:
        weights = weight_addresses(self)
        products = None if weights is None else few_row_products(self.kernels, x, [(weights, None, 0)])
        if products is not None:
            return products[0]
        result: mx.array = super().__call__(x)
        return result


class Embedding(nn.Embedding):
    kernels: Any

    def as_linear(self, x: mx.array) -> mx.array:
        weights = weight_addresses(self)
        products = None if weights is None else few_row_products(self.kernels, x, [(weights, None, 0)])
        if products is not None:
            return products[0]
        result: mx.array = super().as_linear(x)
        return result
