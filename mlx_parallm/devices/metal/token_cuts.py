"""The least logit that top-k, then top-p, keep: by MLX's operations, or by a kernel that sorts nothing.

MLX sorts the whole vocabulary for either, on Metal for `argpartition` too.
"""

import functools
from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlx_parallm.devices.metal import kernels
from mlx_parallm.devices.metal.check import is_worth_using
from mlx_parallm.devices.metal.kernels import SMALLEST

# Rows that are tried: top-p, above 1 for all; top-k, 0 for all; how fast logits fall, by the logarithm of their ranks.
TRIED = ((0.9, 0, 2.0), (2.0, 20, 1.5), (0.5, 40, 1.5), (0.95, 0, 2.0))


class CutKernel(Protocol):
    def __call__(self, logits: mx.array, limits: mx.array) -> mx.array:
        """Logits (C, V), `cut_limits` of as many rows -> (C, 1)."""
        ...


def least_kept(logits: mx.array, top_p: mx.array, top_k: mx.array) -> mx.array:
    """Finds it by MLX's operations: (C, V), (C, 1), (C, 1) -> (C, 1)."""
    ordered = -mx.sort(-logits, axis=-1)
    inside = mx.arange(ordered.shape[-1]) < top_k
    probs = mx.softmax(mx.where(inside, ordered, -mx.inf), axis=-1)
    before = mx.cumsum(probs, axis=-1) - probs
    kept = mx.sum(inside & (before < top_p), axis=-1, keepdims=True)
    return mx.take_along_axis(ordered, mx.maximum(kept, 1) - 1, axis=-1)


def cut_limits(top_p: Sequence[float], top_k: Sequence[int]) -> mx.array:
    """(C or more, 2): what a kernel takes."""
    limits = np.zeros((max(len(top_p), SMALLEST // 2), 2), np.float32)
    limits[: len(top_p)] = np.stack([top_p, top_k], axis=1)
    return mx.array(limits)


@functools.cache
def cut_kernel(vocab_size: int) -> CutKernel | None:
    """None where MLX's operations are faster, or there is no Metal."""
    random = np.random.default_rng(0)
    ranks = np.log1p(np.arange(vocab_size, dtype=np.float32))
    logits = mx.array(np.stack([random.permutation(-falling * ranks) for *_, falling in TRIED]))
    top_p = [share for share, _, _ in TRIED]
    top_k = [count or vocab_size for _, count, _ in TRIED]
    limits = cut_limits(top_p, top_k)
    columns = mx.array(top_p)[:, None], mx.array(top_k)[:, None]

    def by_kernel() -> list[mx.array]:
        return [kernels.least_kept(logits, limits)]

    def by_operations() -> list[mx.array]:
        return [least_kept(logits, *columns)]

    return kernels.least_kept if is_worth_using("top-k and top-p", by_kernel, by_operations) else None
