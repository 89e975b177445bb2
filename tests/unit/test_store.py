"""Blocks come out of the slabs as they went in, across segments, by way of the host, and quantised nearly so."""

import mlx.core as mx
import pytest

from mlx_parallm.kv import block_store as module
from mlx_parallm.kv.block_store import BlockStore, Packing, Side

SIZE = 4
SIDES = [Side(2, 32, mx.float32), Side(2, 64, mx.float32)] * 3  # keys and values of different width


def rows(count: int, tokens: int, dtype: mx.Dtype = mx.float32) -> list[mx.array]:
    mx.random.seed(7)
    return [mx.random.normal((count, side.heads, tokens, side.width)).astype(dtype) for side in SIDES]


def same(read: list[mx.array], sides: list[mx.array], row: int, length: int, within: float = 0.0) -> None:
    for one, other in zip(read, sides, strict=True):
        assert one.shape == (1, other.shape[1], length, other.shape[3])
        assert mx.abs(one[0] - other[row, :, :length]).max().item() <= within


@pytest.mark.parametrize("segment_bytes", [1, 64 << 10, 64 << 20])
def test_what_is_written_is_read(segment_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", segment_bytes)
    store = BlockStore(SIZE, SIDES, Packing(), max_bytes=1 << 30)
    sides = rows(3, 6 * SIZE + 2)
    places = {0: [7, 8, 9, 2, 1, 40], 2: [3, 100, 4, 5, 11, 10]}
    for row, ids in places.items():
        store.write(sides, row, range(6), ids)
    for row, ids in places.items():
        same(store.read(ids, 1, 6 * SIZE, 6 * SIZE), sides, row, 6 * SIZE)
        same(store.read(ids[:3], 1, 9, 9), sides, row, 9)
    both = store.read([*places[0][:2], *places[2][:2]], 2, 7, 7)
    roomy = store.read(places[0], 1, 10, 64)
    assert all(side.shape[2] == 64 for side in roomy)
    same([side[:, :, :10] for side in roomy], sides, 0, 10)
    for one, other in zip(both, sides, strict=True):
        assert mx.array_equal(one, mx.stack([other[0, :, :7], other[2, :, :7]]))
    store.write(sides, 1, [1, 4], [7, 40])  # some blocks of a row, over others
    same(store.read([7], 1, SIZE, SIZE), [side[:, :, SIZE:] for side in sides], 1, SIZE)
    same(store.read([40], 1, SIZE, SIZE), [side[:, :, 4 * SIZE :] for side in sides], 1, SIZE)
    same(store.read([8], 1, SIZE, SIZE), [side[:, :, SIZE:] for side in sides], 0, SIZE)


@pytest.mark.parametrize(("bits", "within"), [(None, 0.0), (8, 0.03), (4, 0.4)])
def test_by_way_of_the_host_and_quantised(bits: int | None, within: float) -> None:
    store = BlockStore(SIZE, SIDES, Packing(bits, 32), max_bytes=1 << 30)
    sides = rows(1, 3 * SIZE)
    store.write(sides, 0, range(3), [5, 6, 7])
    same(store.read([5, 6, 7], 1, 3 * SIZE, 3 * SIZE), sides, 0, 3 * SIZE, within)
    host = store.to_host(store.copies([5, 6, 7]))
    assert [(plane.shape, str(plane.dtype)) for plane in host[0]] == store.host_shapes()
    store.write_host(host, [20, 21, 22])
    for one, other in zip(store.read([20, 21, 22], 1, 12, 12), store.read([5, 6, 7], 1, 12, 12), strict=True):
        assert mx.array_equal(one, other)
    plain = BlockStore(SIZE, SIDES, Packing(), max_bytes=1 << 30).block_bytes
    assert store.block_bytes <= (plain if bits is None else plain * (bits / 32 + 0.1))
    store.clear()
    assert store.nbytes == 0


@pytest.mark.parametrize("read_first", [False, True])
def test_nothing_is_copied_but_the_blocks(read_first: bool) -> None:
    """While the device is busy, a segment that waits to be read would be copied by whoever writes to it."""
    store = BlockStore(SIZE, SIDES, Packing(), max_bytes=64 << 20, ahead=False)
    sides = rows(1, 3 * SIZE)
    store.write(sides, 0, range(3), [5, 6, 7])
    host = store.to_host(store.copies([5]))
    work = mx.random.normal((1500, 1500))
    mx.eval(sides, work)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    busy = [work @ work for _ in range(3)]
    mx.async_eval(busy)
    kept = store.read([5], 1, SIZE, SIZE) if read_first else store.copies([5])
    store.write_host(host, [20])
    mx.synchronize()
    assert mx.get_peak_memory() - before <= 4 * work.nbytes + 16 * store.block_bytes < 64 << 20
    same(store.read([20], 1, SIZE, SIZE), sides, 0, SIZE)
    del kept
