"""Where cached blocks' keys and values lie: slabs, a few large arrays for all layers. Engine thread only.

A slab holds blocks of every layer whose keys and values have one shape, so that writing and reading take a handful of
operations however many blocks and layers there are. Slabs come in segments: memory grows with use and nothing is
copied when it does. With `bits`, blocks are kept quantised. `BlockPrefix` owns one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from mlx_parallm.devices.cuda_placing import collector
from mlx_parallm.host import to_numpy

SEGMENT_BYTES = 64 << 20
MAX_SEGMENTS = 16  # for the kernel that writes to all of them

Planes = list[mx.array]  # (blocks, sides, H, size, D); quantised: values, scales and biases
Host = list[Any]  # one block's planes as NumPy arrays of plain integers


@dataclass(frozen=True, slots=True)
class Packing:
    """The form in which blocks are kept: as they are, or quantised to `bits`."""

    bits: int | None = None
    group_size: int = 64

    def pack(self, x: mx.array) -> Planes:
        if self.bits is None:
            return [x]
        return list(mx.quantize(x, group_size=self.group_size, bits=self.bits))

    def unpack(self, planes: Planes, dtype: mx.Dtype) -> mx.array:
        if self.bits is None:
            return planes[0]
        values, scales, biases = planes
        return mx.dequantize(values, scales, biases, group_size=self.group_size, bits=self.bits).astype(dtype)


@dataclass(frozen=True, slots=True)
class Side:
    """The shape of one layer's keys, or of its values."""

    heads: int
    width: int
    dtype: mx.Dtype


class Blocks(Protocol):
    """Keys and values of cached blocks, by the numbers of their places."""

    @property
    def total(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def clear(self) -> None: ...
    def drop_from(self, block: int) -> None: ...
    def write(self, sides: Sequence[mx.array], row: int, numbers: Sequence[int], ids: Sequence[int]) -> None: ...
    def read(self, ids: Sequence[int], rows: int, length: int, capacity: int) -> list[mx.array]: ...
    def write_host(self, blocks: Sequence[Host], ids: Sequence[int]) -> None: ...
    def copies(self, ids: Sequence[int]) -> list[Planes]: ...
    def to_host(self, groups: Sequence[Planes]) -> list[Host]: ...
    def host_shapes(self) -> list[tuple[tuple[int, ...], str]]: ...


class BlockStore:
    def __init__(
        self,
        size: int,
        sides: Sequence[Side],
        packing: Packing,
        *,
        max_bytes: int,
        blocks: int | None = None,
        fused: bool = False,
        ahead: bool = True,
    ) -> None:
        """`sides`: each layer's keys, then its values. `blocks` or else `max_bytes` says how many blocks there are.

        `ahead`: nobody waits until something is copied. Where nothing runs ahead of the device, waiting costs nothing,
        and a segment that is still being read would be copied as a whole when it is written to.
        """
        self._size = size
        self._packing = packing
        self._start = mx.async_eval if ahead else mx.eval
        self._groups = groups_of(sides)
        self._like = [
            packing.pack(mx.zeros((1, len(members), side.heads, size, side.width), side.dtype))
            for side, members in self._groups.items()
        ]
        self.block_bytes = sum(plane.nbytes for planes in self._like for plane in planes)
        self.total = blocks or max(1, max_bytes // self.block_bytes)
        smallest = -(-self.total // MAX_SEGMENTS) if fused else 1
        self._per_segment = min(self.total, max(smallest, SEGMENT_BYTES // self.block_bytes))
        self._segment_count = segments = -(-self.total // self._per_segment)
        self._collectors = [
            collector(len(members), side.heads, side.width, size, side.dtype, segments) if fused else None
            for side, members in self._groups.items()
        ]
        self._segments: dict[int, list[Planes]] = {}  # by group

    @property
    def nbytes(self) -> int:
        return len(self._segments) * self._per_segment * self.block_bytes

    def clear(self) -> None:
        self._segments.clear()

    def drop_from(self, block: int) -> None:
        """Frees the segments that hold no block before this one."""
        for number in [number for number in self._segments if number * self._per_segment >= block]:
            del self._segments[number]

    def write(self, sides: Sequence[mx.array], row: int, numbers: Sequence[int], ids: Sequence[int]) -> None:
        """Copies blocks of one row of `sides` (B, H, T, D), given by their numbers in it, in ascending order."""
        for group, (side, members) in enumerate(self._groups.items()):
            buffers = [sides[i] for i in members]
            collect = self._collectors[group]
            if collect is None:
                self._put(group, self._packing.pack(self._collected(side, buffers, row, numbers)), ids)
            elif self._packing.bits is not None:
                blocks = mx.zeros((len(ids), len(members), side.heads, self._size, side.width), side.dtype)
                collect(
                    buffers, row, numbers, [blocks] * self._segment_count, [(0, place) for place in range(len(ids))]
                )
                self._put(group, self._packing.pack(blocks), ids)
            else:
                places = [divmod(id_, self._per_segment) for id_ in ids]
                used = {number: self._segment(number)[group][0] for number, _ in places}
                some = next(iter(used.values()))  # stands for those that are not written to
                collect(
                    buffers, row, numbers, [used.get(number, some) for number in range(self._segment_count)], places
                )

    def _collected(self, side: Side, group: list[mx.array], row: int, numbers: Sequence[int]) -> mx.array:
        """Blocks of one row: (blocks, sides, H, size, D)."""
        first = numbers[0]
        end = numbers[-1] + 1
        size = self._size
        cut = [array[row, :, first * size : end * size] for array in group]
        x = mx.stack(cut).reshape(len(group), side.heads, end - first, size, side.width).transpose(2, 0, 1, 3, 4)
        return x if len(numbers) == end - first else x[mx.array([number - first for number in numbers])]

    def read(self, ids: Sequence[int], rows: int, length: int, capacity: int) -> list[mx.array]:
        """The first `length` tokens of `rows` texts, equally many blocks of each: (rows, H, capacity, D) per side."""
        sides: dict[int, mx.array] = {}
        for group, (side, members) in enumerate(self._groups.items()):
            x = self._packing.unpack(self._get(group, ids), side.dtype)  # (rows * n, sides, H, size, D)
            x = x.reshape(rows, -1, *x.shape[1:]).transpose(2, 0, 3, 1, 4, 5)
            rest = mx.zeros((rows, side.heads, capacity - length, side.width), side.dtype)
            for i, member in enumerate(members):
                # Each in memory of its own, with room to grow: copied once, and written in place from then on.
                whole = x[i].reshape(rows, side.heads, -1, side.width)[:, :, :length]
                sides[member] = mx.concatenate([whole, rest], axis=2) if capacity > length else whole
        self._start(sides)  # before anything is written over the blocks
        return [sides[i] for i in range(len(sides))]

    def write_host(self, blocks: Sequence[Host], ids: Sequence[int]) -> None:
        """Puts back what `to_host` gave."""
        planes = iter([np.stack(plane) for plane in zip(*blocks, strict=True)])
        for group, like in enumerate(self._like):
            self._put(group, [mx.array(next(planes)).view(plane.dtype) for plane in like], ids)

    def copies(self, ids: Sequence[int]) -> list[Planes]:
        """Blocks as they are now, whatever is written over them next."""
        groups = [self._get(group, ids) for group in range(len(self._like))]
        self._start(groups)
        return groups

    def to_host(self, groups: Sequence[Planes]) -> list[Host]:
        """Returns the planes of each block of `copies`, on the host."""
        host = [to_numpy(plane.view(integer_of(plane))) for planes in groups for plane in planes]
        return [[plane[number] for plane in host] for number in range(len(host[0]))]

    def host_shapes(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and type of a block's planes, as `to_host` gives them."""
        planes = [plane for like in self._like for plane in like]
        return [(plane.shape[1:], f"uint{8 * plane.dtype.size}") for plane in planes]

    def _put(self, group: int, planes: Planes, ids: Sequence[int]) -> None:
        for number, chosen in self._by_segment(ids).items():
            slabs = self._segment(number)[group]
            for slab, plane in zip(slabs, planes, strict=True):
                for i, length in _runs(ids, chosen):  # slices are copied several times faster than scattered
                    place = ids[i] % self._per_segment
                    slab[place : place + length] = plane[i : i + length]
            # At once: what waits to be written would keep the rows' buffers from being reused.
            self._start(slabs)

    def _get(self, group: int, ids: Sequence[int]) -> Planes:
        """Copies, not slices: a slab that somebody looks into could not be written in place."""
        chosen = self._by_segment(ids)
        parts = [
            [slab[mx.array([ids[i] % self._per_segment for i in members])] for slab in self._segments[number][group]]
            for number, members in chosen.items()
        ]
        if len(parts) == 1:
            return parts[0]
        # Of the type of the other indices: another one would be another kernel, which CUDA builds at its first use.
        order = mx.array(np.argsort([i for members in chosen.values() for i in members]).astype(np.int32))
        return [mx.concatenate(list(planes))[order] for planes in zip(*parts, strict=True)]

    def _by_segment(self, ids: Sequence[int]) -> dict[int, list[int]]:
        """Places in `ids`, by the segment that holds the block."""
        groups: dict[int, list[int]] = {}
        for i, id_ in enumerate(ids):
            groups.setdefault(id_ // self._per_segment, []).append(i)
        return groups

    def _segment(self, number: int) -> list[Planes]:
        if number not in self._segments:
            self._segments[number] = [
                [mx.zeros((self._per_segment, *plane.shape[1:]), plane.dtype) for plane in planes]
                for planes in self._like
            ]
        return self._segments[number]


def groups_of(sides: Sequence[Side]) -> dict[Side, list[int]]:
    """Groups a model's sides by their shape: the numbers of those that have one."""
    return {side: [i for i, other in enumerate(sides) if other == side] for side in dict.fromkeys(sides)}


def _runs(ids: Sequence[int], chosen: Sequence[int]) -> list[tuple[int, int]]:
    """Finds where in `ids` each run of neighbours begins, and its length."""
    runs: list[tuple[int, int]] = []
    for i in chosen:
        if runs and sum(runs[-1]) == i and ids[i] == ids[i - 1] + 1:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((i, 1))
    return runs


def integer_of(x: mx.array) -> mx.Dtype:
    """NumPy has no bfloat16: bytes travel as integers of the same size."""
    return {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[x.dtype.size]
