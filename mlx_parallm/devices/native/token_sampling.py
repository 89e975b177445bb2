"""Samples a step's tokens on the CPU in C, where MLX would write noise for every token of the vocabulary into memory.

The tokens are those that MLX's operations would sample. `compute.sampling` asks for it; other devices don't.
"""

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.devices.native import kernels
from mlx_parallm.devices.native.pointers import Array, pointer
from mlx_parallm.host import numpy_view

# logits (R, V), temperatures (R,) float32, keys (R, 2) uint32, whether their log-probabilities at the temperature are
# wanted -> tokens (R,) int32, those (R,)
SampleKernel = Callable[[mx.array, Array, Array, bool], tuple[mx.array, mx.array | None]]


def sample_kernel() -> SampleKernel | None:
    """None where there are no kernels."""
    library = kernels()
    return None if library is None else functools.partial(_sample, library)


def _sample(
    library: Any, logits: mx.array, temperatures: Array, keys: Array, scored: bool
) -> tuple[mx.array, mx.array | None]:
    view = np.ascontiguousarray(numpy_view(logits))  # which evaluates them
    tokens = np.empty(len(view), np.int32)
    scores = np.empty(len(view), np.float32) if scored else None
    library.draw(pointer(view), pointer(temperatures), pointer(keys), pointer(tokens), pointer(scores), *view.shape)
    return mx.array(tokens), None if scores is None else mx.array(scores)
