"""Copies between the buffers of all layers at once, as CUDA kernels that write in place.

MLX writes into an array's own memory only where nobody else holds it, and on a GPU the steps under way still do: a row
that joins, or whose blocks are kept, would have every layer's buffer copied, and one kernel started per layer. These
kernels take the buffers that they write to as inputs, so MLX thinks them constant. What keeps that right is the order
of the stream: each call is started on its own, after all that was started before it and before all that comes after.

`slots.SlotCache` places prompts with them and `store.BlockStore` keeps blocks. Both are tried at start on small
buffers: where a kernel can't be built, or does anything else than it should, MLX's operations are used.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

log = logging.getLogger(__name__)

Buffers = Sequence[mx.array]
Placer = Callable[[Buffers, Buffers, Sequence[tuple[int, int, int]]], None]
Collector = Callable[[Buffers, int, Sequence[int], Buffers, Sequence[tuple[int, int]]], None]
BYTES = 16  # that a thread copies at once
THREADS = 128
MAX_ARGUMENTS = 480  # pointers of 8 bytes, within the 4 KiB that a kernel takes
TYPES = {mx.float32: "float", mx.float16: "__half", mx.bfloat16: "__nv_bfloat16"}

PLACE = """
    const {type}* prompts[{count}] = {{{prompts}}};
    const {type}* slots[{count}] = {{{slots}}};
    const int side = blockIdx.y, piece = blockIdx.x * blockDim.x + threadIdx.x;
    const int source = chosen[3 * blockIdx.z], position = chosen[3 * blockIdx.z + 1];
    if (piece >= chosen[3 * blockIdx.z + 2] * PIECES) return;
    const int4* from = reinterpret_cast<const int4*>(prompts[side]);
    int4* to = reinterpret_cast<int4*>(const_cast<{type}*>(slots[side]));
    for (int head = 0; head < {heads}; ++head)
        to[(size_t(position) * {heads} + head) * a0_shape[2] * PIECES + piece] =
            from[(size_t(source) * {heads} + head) * b0_shape[2] * PIECES + piece];
"""
COLLECT = """
    const {type}* slots[{count}] = {{{slots}}};
    const {type}* slabs[{segments}] = {{{slabs}}};
    constexpr int LINE = {size} * PIECES;  // a block of one head
    const int side = blockIdx.y, piece = blockIdx.x * blockDim.x + threadIdx.x, head = piece / LINE;
    if (head >= {heads}) return;
    const int row = chosen[0], number = chosen[1 + 3 * blockIdx.z], place = chosen[3 + 3 * blockIdx.z];
    const int4* from = reinterpret_cast<const int4*>(slots[side]);
    int4* to = reinterpret_cast<int4*>(const_cast<{type}*>(slabs[chosen[2 + 3 * blockIdx.z]]));
    to[(size_t(place) * {count} + side) * {heads} * LINE + piece] =
        from[((size_t(row) * {heads} + head) * a0_shape[2] + size_t(number) * {size}) * PIECES + piece % LINE];
"""


def placer(count: int, heads: int, width: int, dtype: mx.Dtype) -> Placer | None:
    """Copies prompts out of `count` buffers (B, heads, T, width) into as many of (S, heads, C, width).

    What is copied: (row of the first, row of the second, tokens) for each prompt.
    """
    if not _possible(width, dtype, 2 * count):
        return None
    slots = _names("a", count)
    prompts = _names("b", count)
    source = PLACE.format(
        type=TYPES[dtype], count=count, heads=heads, slots=", ".join(slots), prompts=", ".join(prompts)
    )
    kernel = _kernel(f"place_{count}_{heads}", [*slots, *prompts, "chosen"], source, width, dtype)

    def place(prompts: Buffers, slots: Buffers, chosen: Sequence[tuple[int, int, int]]) -> None:
        longest = max(length for _, _, length in chosen)
        numbers = [number for one in chosen for number in one]
        kernel([*slots, *prompts], numbers, (longest * width * dtype.size // BYTES, count, len(chosen)))

    def right() -> bool:
        slots = [mx.random.normal((4, heads, 9, width)).astype(dtype) for _ in range(count)]
        prompts = [mx.random.normal((2, heads, 7, width)).astype(dtype) for _ in range(count)]
        expected = [slot + 0 for slot in slots]
        mx.eval(slots, expected)
        for target, prompt in zip(expected, prompts, strict=True):
            target[3, :, :5], target[1, :, :6] = prompt[1, :, :5], prompt[0, :, :6]
        place(prompts, slots, [(1, 3, 5), (0, 1, 6)])
        return all(mx.array_equal(slot, target).item() for slot, target in zip(slots, expected, strict=True))

    return place if _tried(right) else None


def collector(count: int, heads: int, width: int, size: int, dtype: mx.Dtype, segments: int) -> Collector | None:
    """Copies blocks of a row of `count` buffers (S, heads, C, width), by their numbers in it, into the `segments` of a
    slab, (blocks, count, heads, size, width) each: to (segment, place) for each block.
    """
    if not _possible(width, dtype, count + segments):
        return None
    slots = _names("a", count)
    slabs = _names("b", segments)
    source = COLLECT.format(
        type=TYPES[dtype],
        count=count,
        heads=heads,
        size=size,
        segments=segments,
        slots=", ".join(slots),
        slabs=", ".join(slabs),
    )
    kernel = _kernel(f"collect_{count}_{heads}_{size}_{segments}", [*slots, *slabs, "chosen"], source, width, dtype)

    def collect(
        slots: Buffers, row: int, numbers: Sequence[int], slabs: Buffers, places: Sequence[tuple[int, int]]
    ) -> None:
        chosen = [row, *(i for number, place in zip(numbers, places, strict=True) for i in (number, *place))]
        kernel([*slots, *slabs], chosen, (heads * size * width * dtype.size // BYTES, count, len(numbers)))

    def right() -> bool:
        slots = [mx.random.normal((3, heads, 4 * size + 5, width)).astype(dtype) for _ in range(count)]
        slabs = [mx.zeros((3, count, heads, size, width), dtype) for _ in range(segments)]
        numbers = [0, 2, 3]
        places = [(0, 2), (segments - 1, 0), (segments // 2, 1)]
        mx.eval(slots, slabs)
        collect(slots, 1, numbers, slabs, places)
        return all(
            mx.array_equal(slabs[segment][place, side], slot[1, :, number * size : (number + 1) * size]).item()
            for number, (segment, place) in zip(numbers, places, strict=True)
            for side, slot in enumerate(slots)
        )

    return collect if _tried(right) else None


def _possible(width: int, dtype: mx.Dtype, buffers: int) -> bool:
    return dtype in TYPES and width * dtype.size % BYTES == 0 and buffers <= MAX_ARGUMENTS


def _names(letter: str, count: int) -> list[str]:
    return [f"{letter}{number}" for number in range(count)]


def _kernel(name: str, inputs: list[str], source: str, width: int, dtype: mx.Dtype) -> Any:
    header = f"constexpr int PIECES = {width * dtype.size // BYTES};  // of one token\n"
    kernel: Any = mx.fast.cuda_kernel(f"{name}_{width}_{str(dtype).split('.')[-1]}", inputs, ["done"], source, header)

    def call(buffers: list[mx.array], chosen: list[int], grid: tuple[int, int, int]) -> None:
        mx.async_eval(  # on its own: MLX does not see what is written
            kernel(
                inputs=[*buffers, mx.array(chosen, mx.int32)],
                grid=(-(-grid[0] // THREADS) * THREADS, *grid[1:]),
                threadgroup=(THREADS, 1, 1),
                output_shapes=[(1,)],
                output_dtypes=[mx.int32],
            )
        )

    return call


def _tried(right: Callable[[], bool]) -> bool:
    try:
        same = right()
    except (RuntimeError, ValueError) as error:
        log.warning("a CUDA kernel of the key-value cache can't be used: %s", str(error)[:300])
        return False
    if not same:
        log.warning("a CUDA kernel of the key-value cache gives wrong results, and is not used")
    return same
