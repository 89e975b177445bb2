"""Blocks of one row out of the buffers of all layers, in one CUDA kernel in place of a copy per layer.

`store.BlockStore` asks for it when a row's blocks are kept, which happens at every request's end. `collector` tries the
kernel on small buffers first: where it can't be built, or gives anything else than what was there, it is not used.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

log = logging.getLogger(__name__)

Collector = Callable[[Sequence[mx.array], int, Sequence[int]], mx.array]
BYTES = 16  # that a thread copies at once
THREADS = 128

SOURCE = """
    const {type}* sides[{count}] = {{{names}}};
    const int piece = blockIdx.x * blockDim.x + threadIdx.x;  // of a block of one side
    constexpr int LINE = {size} * {width} / {vector};  // pieces of one head
    if (piece >= {heads} * LINE) return;
    const int side = blockIdx.y, block = blockIdx.z, head = piece / LINE;
    const int row = chosen[0], number = chosen[1 + block];
    const size_t line = (size_t(row) * {heads} + head) * s0_shape[2] + size_t(number) * {size};
    const int4* from = reinterpret_cast<const int4*>(sides[side] + line * {width});
    int4* to = reinterpret_cast<int4*>(out) + (size_t(block) * {count} + side) * {heads} * LINE;
    to[piece] = from[piece % LINE];
"""
TYPES = {mx.float32: "float", mx.float16: "__half", mx.bfloat16: "__nv_bfloat16"}


def collector(count: int, heads: int, width: int, size: int, dtype: mx.Dtype) -> Collector | None:
    """For `count` buffers (S, heads, C, width): blocks (n, count, heads, size, width) of a row, by their numbers."""
    vector = BYTES // dtype.size
    if width % vector or dtype not in TYPES:
        return None
    names = [f"s{number}" for number in range(count)]
    source = SOURCE.format(
        type=TYPES[dtype], count=count, names=", ".join(names), size=size, width=width, vector=vector, heads=heads
    )
    name = f"collect_{count}_{heads}_{width}_{size}_{dtype.size}"
    kernel: Any = mx.fast.cuda_kernel(name, [*names, "chosen"], ["out"], source)
    pieces = heads * size * width // vector

    def collect(sides: Sequence[mx.array], row: int, numbers: Sequence[int]) -> mx.array:
        (blocks,) = kernel(
            inputs=[*sides, mx.array([row, *numbers], mx.int32)],
            grid=(-(-pieces // THREADS) * THREADS, count, len(numbers)),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(len(numbers), count, heads, size, width)],
            output_dtypes=[dtype],
        )
        result: mx.array = blocks
        return result

    return collect if _right(collect, count, heads, width, size, dtype) else None


def _right(collect: Collector, count: int, heads: int, width: int, size: int, dtype: mx.Dtype) -> bool:
    """Whether it gives what it should, on buffers of a few blocks."""
    sides = [mx.random.normal((3, heads, 4 * size + 5, width)).astype(dtype) for _ in range(count)]
    row, numbers = 1, [0, 2, 3]
    try:
        found = collect(sides, row, numbers)
        same = all(
            mx.array_equal(found[i, s], side[row, :, number * size : (number + 1) * size]).item()
            for i, number in enumerate(numbers)
            for s, side in enumerate(sides)
        )
    except (RuntimeError, ValueError) as error:
        log.warning("a CUDA kernel of the prefix cache can't be used: %s", str(error)[:300])
        return False
    if not same:
        log.warning("a CUDA kernel of the prefix cache gives wrong blocks, and is not used")
    return same
