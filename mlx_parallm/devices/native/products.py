"""Matrix products of a few rows in C, with what rows' adapters add to them.

`native_layers` and `llama_blocks` multiply with these; `compute.patch` hands `low_rank_adder` and `adapted_products` to
the adapters.
"""

import ctypes
import functools
import platform
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.devices.native import kernels
from mlx_parallm.devices.native.pointers import Array, address_of, pointer
from mlx_parallm.host import numpy_view

ON_ARM = platform.machine() in ("aarch64", "arm64")
LEAST_ROWS = 2 if ON_ARM else 1  # for fewer a BLAS is faster


@functools.cache
def most_rows() -> int:
    """Returns for how many rows the kernel is as fast as a BLAS; 0 where the processor does not multiply a vector by
    one number cheaply, which it is written for."""
    library = kernels()
    return 0 if library is None else int(library.most_rows())


def has_lane_products() -> bool:
    return most_rows() > 0


def suits(rows: int) -> bool:
    return LEAST_ROWS <= rows <= most_rows()


class WeightAddresses:
    """The addresses of a layer's weights in memory."""

    __slots__ = ("bias", "bias_address", "out_features", "size", "usable", "views", "weight", "weight_address")

    def __init__(self, weight: mx.array, bias: mx.array | None) -> None:
        self.weight = weight
        self.bias = bias
        self.out_features, self.size = weight.shape
        arrays = [weight] if bias is None else [weight, bias]
        self.usable = self.size % 4 == 0 and all(array.dtype == mx.float32 for array in arrays)
        self.views = [numpy_view(array) for array in arrays] if self.usable else []
        self.usable = self.usable and all(view.flags.c_contiguous for view in self.views)
        self.weight_address, self.bias_address = [*map(address_of, self.views), 0, 0][:2]


def weight_addresses(layer: nn.Module) -> WeightAddresses | None:
    """Looked up once, and again when the layer has other arrays; None where they are no float32."""
    if "scales" in layer:
        return None
    known: WeightAddresses | None = layer.__dict__.get("_weight_addresses")
    weight = layer["weight"]
    bias = layer.get("bias")
    if known is None or known.weight is not weight or known.bias is not bias:
        known = WeightAddresses(weight, bias)
        object.__setattr__(layer, "_weight_addresses", known)
    return known if known.usable else None


# A layer's weights, the row_groups that add to it, its number among theirs.
AdaptedWeights = tuple[WeightAddresses, Array | None, int]


def few_row_products(library: Any, x: mx.array, layers: Sequence[AdaptedWeights | None]) -> list[mx.array] | None:
    """Computes the output of each layer for a few rows; None where a BLAS should do it."""
    shape = x.shape
    rows = x.size // shape[-1]
    usable = [layer for layer in layers if layer is not None]
    if not suits(rows) or x.dtype != mx.float32 or len(usable) < len(layers):
        return None
    mx.eval(x)
    outputs = products_of(library, numpy_view(x).reshape(rows, -1), usable)
    return [mx.array(out.reshape(*shape[:-1], -1)) for out in outputs]


def products_of(library: Any, x: Array, layers: Sequence[AdaptedWeights]) -> list[Array]:
    """x (M, K) · weightᵀ + bias of each layer, and what its row_groups add: (M, N) each."""
    x = np.ascontiguousarray(x)
    table: list[int] = []
    outputs = []
    for weights, row_groups, number in layers:
        out = np.empty((len(x), weights.out_features), np.float32)
        outputs.append(out)
        table += (weights.weight_address, weights.bias_address, address_of(out), weights.out_features)
        table += (0, 0, 0) if row_groups is None else (address_of(row_groups), len(row_groups), number)
    if library.products(pointer(x), *x.shape, (ctypes.c_int64 * len(table))(*table), len(outputs)):
        raise MemoryError
    return outputs


def low_rank_adder() -> Callable[..., list[mx.array] | None] | None:
    """Adds each row's own low-rank product to layers' outputs, in a decode step; None where there are no kernels."""
    library = kernels()
    return None if library is None else functools.partial(_add_low_rank, library)


def _add_low_rank(
    library: Any, x: mx.array, layers: Sequence[tuple[mx.array, int, int]], row_adapters: Any
) -> list[mx.array] | None:
    """Returns y (B, 1, N) + x (B, 1, K) · the row's a (rank, K) · its b (rank, N) for each layer.

    `row_adapters.row_groups(group)` says where a and b are in memory, and of which rows they are. The sum is written
    into each y itself, which nobody else has seen. None where MLX should do it.
    """
    if x.ndim != 3 or x.shape[1] != 1 or x.dtype != mx.float32:
        return None
    outputs = [numpy_view(y) for y, _, _ in layers]  # which evaluates them, and x
    if not all(view.dtype == np.float32 and view.flags.c_contiguous and view.flags.writeable for view in outputs):
        return None
    inputs = np.ascontiguousarray(numpy_view(x))
    for view, (_, group, number) in zip(outputs, layers, strict=True):
        row_groups = row_adapters.row_groups(group)
        sizes = len(row_groups), view.shape[2], inputs.shape[2], number
        if library.add_low_rank(pointer(inputs), pointer(view), pointer(row_groups), *sizes):
            raise MemoryError
    return [y for y, _, _ in layers]


def adapted_products() -> Callable[..., list[mx.array] | None] | None:
    """Products of layers of the same inputs, with each row's own low-rank ones added; None where there is no kernel."""
    library = kernels()
    return functools.partial(_adapted_products, library) if library is not None and has_lane_products() else None


def _adapted_products(
    library: Any, x: mx.array, layers: Sequence[tuple[nn.Module, int, int]], row_adapters: Any
) -> list[mx.array] | None:
    """x (B, T, size), each layer with its group and its number there. None where MLX should do it, or a BLAS."""
    if x.ndim != 3 or not suits(x.shape[0] * x.shape[1]):  # before row_groups are made of so many tokens
        return None
    adapted = [
        None
        if (weights := weight_addresses(layer)) is None
        else (weights, row_adapters.row_groups(group, x.shape[1]) if row_adapters.has(group) else None, number)
        for layer, group, number in layers
    ]
    return few_row_products(library, x, adapted)
