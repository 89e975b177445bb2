"""Tensors that are the same everywhere: goldens keep their names and shapes, not their numbers."""

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt


def random_tensors(shapes: Mapping[str, Sequence[int]]) -> dict[str, npt.NDArray[np.float32]]:
    """Large enough that every part of a model matters; norms and biases are no ones and zeros."""
    return {name: _tensor(name, tuple(shape)) for name, shape in shapes.items()}


def _tensor(name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    random = np.random.RandomState(zlib.crc32(name.encode()))  # its streams never change
    values = random.standard_normal(shape)
    if len(shape) == 1:
        values = values * 0.1 + (1.0 if "norm" in name.lower() or "_ln" in name else 0.0) * (not name.endswith("bias"))
    elif "embedding" not in name:
        values *= 1.5 * shape[-1] ** -0.5
    return values.astype(np.float32)
