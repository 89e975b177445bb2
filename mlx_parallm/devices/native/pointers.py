"""NumPy arrays as the C kernels take them: addresses, sizes and strides."""

import ctypes
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Sizes = ctypes.c_int64 * 12


def element_strides(view: Array) -> tuple[int, ...]:
    """Returns the strides of an array of float32, in elements."""
    return tuple(stride // 4 for stride in view.strides)


def pointer(view: Array | None) -> int | None:
    return None if view is None else address_of(view)


def address_of(view: Array) -> int:
    address: int = view.__array_interface__["data"][0]
    return address
