"""Matrix products by the BLAS that MLX uses, called without MLX in between."""

import ctypes
import functools
from collections.abc import Callable

import numpy as np

from mlx_parallm import blas
from mlx_parallm.devices.native.pointers import Array, address_of

# cblas.h's
ROW_MAJOR = 101
AS_IT_IS = 111
TRANSPOSED = 112


@functools.cache
def matrix_product() -> Callable[[Array, Array, Array], None]:
    """x (N, K), weights (M, K), out (N, M), which becomes x @ weights.T; all of them contiguous float32."""
    path = blas.loaded()
    if path is None:
        return _numpy_product
    sgemm = ctypes.CDLL(path).cblas_sgemm
    size = ctypes.c_int
    address = ctypes.c_void_p
    number = ctypes.c_float
    sgemm.argtypes = [*[size] * 6, number, address, size, address, size, number, address, size]
    sgemm.restype = None

    def product(x: Array, weights: Array, out: Array) -> None:
        (rows, inner) = x.shape
        columns = len(weights)
        first, second, result = map(address_of, (x, weights, out))
        order = (ROW_MAJOR, AS_IT_IS, TRANSPOSED)
        sgemm(*order, rows, columns, inner, 1.0, first, inner, second, inner, 0.0, result, columns)

    return product


def _numpy_product(x: Array, weights: Array, out: Array) -> None:
    np.matmul(x, weights.T, out=out)
