"""CUDA kernels for layers of the same inputs, whose outputs lie side by side, and for what rows' adapters add to them.

A pass over few tokens is bound by the number of kernels that it starts. With MLX's operations an adapter costs five
per layer; here it is one for q, k and v together. A row without an adapter keeps its numbers to the bit, so that what
it computes does not depend on the adapters beside it. `hooks` and `fused_blocks` call them, once `kernel_check` has
found them right; `cuda_lora_source` has their text.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.devices import cuda_lora_source as cuda_source
from mlx_parallm.devices.cuda_lora_source import BYTES, MAX_RANK, WARPS
from mlx_parallm.lora.hooks import LayerOutput, LayerPlace
from mlx_parallm.lora.row_adapters import StackedLoRA

ENOUGH_BLOCKS = 128  # about as many as a large device runs side by side
# Tokens times rank: each token reads its own columns, which in longer prompts takes longer than to start MLX's kernels.
MOST_READ = 1 << 13
GATE_THREADS = 128
TYPES = (mx.float32, mx.float16, mx.bfloat16)


def add_adapters(x: mx.array, layers: Sequence[LayerOutput], row_adapters: StackedLoRA) -> list[mx.array] | None:
    """Returns y + x (B, T, size) · the row's own columns of a[number] · its own of b[number] for each layer.

    None where MLX's operations should do it.
    """
    sums = []
    for y, group, number in layers:
        total = add_side_by_side(x, y, [(group, number)], [y.shape[2]], row_adapters)
        if total is None:
            return None
        sums.append(total)
    return sums


def add_side_by_side(
    x: mx.array, y: mx.array, places: Sequence[LayerPlace], out_features: Sequence[int], row_adapters: StackedLoRA
) -> mx.array | None:
    """The same for layers whose outputs lie side by side in y (B, T, all out_features); not all need have adapters."""
    if not _suits(x, y, out_features, row_adapters):
        return None
    any_group = next(row_adapters.groups[group] for group, _ in places if row_adapters.has(group))
    sides = [row_adapters.groups.get(group, any_group) for group, _ in places]
    if any(side.dtype != x.dtype for a, b, _ in sides for side in (a, b)):
        return None
    firsts = [
        number * a.shape[1] if row_adapters.has(group) else -1
        for (group, number), (a, _, _) in zip(places, sides, strict=True)
    ]
    ends = np.cumsum(out_features).tolist()
    tokens = x.shape[0] * x.shape[1]
    shares = max(1, min(4, ENOUGH_BLOCKS // (len(places) * tokens)))
    threads = WARPS * 32
    outputs: list[mx.array] = _add_kernel(len(places))(
        inputs=[
            *(x, row_adapters.spans, _numbers(tuple(firsts)), _numbers(tuple(ends)), y),
            *(a for a, _, _ in sides),
            *(b for _, b, _ in sides),
        ],
        template=[("T", x.dtype)],
        grid=(threads * shares, len(places), tokens),
        threadgroup=(threads, 1, 1),
        output_shapes=[y.shape],
        output_dtypes=[y.dtype],
    )
    return outputs[0]


def gate(y: mx.array) -> mx.array | None:
    """swiglu of gate and up, side by side in y (B, 2 F): (B, F). None where MLX's operations should do it."""
    rows, both = y.shape
    width = both // 2
    if width * y.dtype.size % BYTES or y.dtype not in TYPES:
        return None
    blocks = -(-width // (GATE_THREADS * (BYTES // y.dtype.size)))
    outputs: list[mx.array] = _gate_kernel()(
        inputs=[y],
        template=[("T", y.dtype)],
        grid=(GATE_THREADS * blocks, rows, 1),
        threadgroup=(GATE_THREADS, 1, 1),
        output_shapes=[(rows, width)],
        output_dtypes=[y.dtype],
    )
    return outputs[0]


def _suits(x: mx.array, y: mx.array, out_features: Sequence[int], row_adapters: StackedLoRA) -> bool:
    if row_adapters.spans is None or row_adapters.max_rank > MAX_RANK or x.ndim != 3:
        return False
    if x.shape[1] > 1 and x.shape[0] * x.shape[1] * row_adapters.max_rank > MOST_READ:
        return False
    whole = all(count * x.dtype.size % BYTES == 0 for count in (x.shape[2], *out_features))
    return whole and x.dtype == y.dtype and x.dtype in TYPES


@functools.cache
def _numbers(numbers: tuple[int, ...]) -> mx.array:
    return mx.array(numbers, mx.int32)


@functools.cache
def _add_kernel(count: int) -> Any:
    names = ["x", "spans", "firsts", "ends", "y", *(f"{side}{i}" for side in "ab" for i in range(count))]
    source = cuda_source.ADD.format(cases=" ".join(cuda_source.CASE.format(i=i) for i in range(count)))
    return mx.fast.cuda_kernel(f"add_adapters_{count}", names, ["out"], source, cuda_source.HEADER)


@functools.cache
def _gate_kernel() -> Any:
    return mx.fast.cuda_kernel("gate_side_by_side", ["y"], ["out"], cuda_source.GATE, cuda_source.HEADER)


def log2_inv_freq(base: float, half: int) -> mx.array:
    """Returns the base-2 logarithms of RoPE's inverse frequencies, as MLX's own kernel has them."""
    share = np.arange(half, dtype=np.float32) / np.float32(half)
    return mx.array(-share * np.float32(math.log2(base)))
