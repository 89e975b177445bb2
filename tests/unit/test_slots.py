"""Slots of running rows: their buffers grow ahead of need, and never past the bytes that they may hold."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from mlx_parallm.kv.merged import MergedCache, SerialCache
from mlx_parallm.kv.slot_layer import SlotMethod
from mlx_parallm.kv.slots import CAPACITY_STEP, SlotCache

HEADS, WIDTH = 2, 8
ROW_BYTES = CAPACITY_STEP * 2 * HEADS * WIDTH * 4  # of a row of one step's length: keys and values of one layer


def cache_of(rows: int, max_slots: int = 16) -> SlotCache:
    """Room for so many rows of a step's length. It knows what a token takes, as every cache does that serves."""
    cache = SlotCache(1, max_slots, rows * ROW_BYTES, SlotMethod(view_step=32))
    [place] = join(cache, 5)
    cache.leave(place)
    cache.compact(0)
    assert (cache.nbytes, cache.bytes_per_token) == (0, ROW_BYTES // CAPACITY_STEP)
    return cache


def join(cache: SlotCache, *lengths: int) -> list[int]:
    staged = cache.stage(len(lengths), max(lengths))
    state = mx.ones((len(lengths), HEADS, max(lengths), WIDTH))
    staged[0].update_and_fetch(state, state)
    return cache.join(staged, list(enumerate(lengths)))


def decode(cache: SlotCache, lengths: Sequence[int]) -> None:
    def forward(tokens: mx.array, layers: list[object], context: object = None) -> mx.array:
        return mx.zeros((*tokens.shape, 3))

    assert cache.decode(forward, mx.zeros((len(lengths),), mx.int32), lengths).shape == (len(lengths), 3)


@pytest.mark.parametrize(("rows", "steps"), [(8, 3), (3, 3), (2, 2)])
def test_a_long_row_gets_room_ahead_as_far_as_there_is_some(rows: int, steps: int) -> None:
    cache = cache_of(rows)
    join(cache, 2 * CAPACITY_STEP - 10)  # a quarter more is the third step
    assert cache.nbytes == steps * ROW_BYTES
    cache.check_integrity()


@pytest.mark.parametrize(("rows", "steps"), [(16, 3), (5, 2), (4, 2)])
def test_rows_that_grow_stay_within_the_limit(rows: int, steps: int) -> None:
    cache = cache_of(rows)
    join(cache, 9, 7)
    assert cache.nbytes == 2 * ROW_BYTES
    assert cache.fits(2, 2 * CAPACITY_STEP)
    decode(cache, [2 * CAPACITY_STEP - 10, 7])
    assert cache.nbytes == 2 * steps * ROW_BYTES <= cache.max_bytes


@pytest.mark.parametrize(("rows", "slots"), [(16, 8), (8, 8), (7, 2), (2, 2)])
def test_slots_for_rows_to_come_are_made_where_they_fit(rows: int, slots: int) -> None:
    cache = cache_of(rows)
    cache.expect(7)
    join(cache, 9, 7)
    assert cache.positions == slots
    assert cache.nbytes == slots * ROW_BYTES <= cache.max_bytes
    cache.check_integrity()


def test_attention_reads_whole_steps_and_no_row_is_cut() -> None:
    cache = cache_of(16)
    join(cache, 5)
    read: list[int] = []

    def forward(tokens: mx.array, layers: list[Any], context: object = None) -> mx.array:
        fresh = mx.zeros((len(tokens), HEADS, 1, WIDTH))
        read.append(layers[0].update_and_fetch(fresh, fresh)[0].shape[2])
        return mx.zeros((*tokens.shape, 3))

    lengths = [31, 32, 255, 256, 383, 511, 512]
    for length in lengths:
        cache.decode(forward, mx.zeros((1,), mx.int32), [length])
    assert read == [-(-(length + 1) // 32) * 32 for length in lengths]


@pytest.mark.parametrize("kind", [MergedCache, SerialCache])
def test_rows_of_mlx_lms_caches_fit_to_the_byte(kind: type[MergedCache] | type[SerialCache]) -> None:
    cache = kind(lambda: [KVCache()], 16, 1 << 30)
    [staged] = cache.stage(1, 256)
    staged.update_and_fetch(mx.ones((1, HEADS, 256, WIDTH)), mx.ones((1, HEADS, 256, WIDTH)))
    cache.join([staged], [(0, 256)])
    assert (cache.smallest_bytes, cache.nbytes) == (ROW_BYTES, ROW_BYTES)
    cache.max_bytes = 4 * ROW_BYTES
    assert cache.fits(4, 256)
    assert cache.fits(2, 512)
    assert not cache.fits(2, 513)
    assert not cache.fits(5, 10), "no row is smaller than the smallest"
    assert [cache.max_length(rows) for rows in (1, 2, 4, 5)] == [1024, 512, 256, 0]
    assert cache.free == 15
    cache.leave(0)
    assert cache.free == 16
    with pytest.raises(AssertionError, match="free already"):
        cache.leave(0)
    assert (cache.compact(0), cache.nbytes, cache.positions) == ([], 0, 0)


def test_layers_with_a_window_see_each_rows_last_tokens() -> None:
    cache = cache_of(16)
    join(cache, 9, 5)
    seen: list[Any] = []

    def forward(tokens: mx.array, layers: list[Any], context: object = None) -> mx.array:
        seen.extend(layers[0].make_mask(1, window_size=size)[:, 0, 0].tolist() for size in (None, 3, 100))
        return mx.zeros((*tokens.shape, 3))

    lengths = [9, 5]
    cache.decode(forward, mx.zeros((2,), mx.int32), lengths)
    for mask, size in zip(seen, (100, 3, 100), strict=True):
        places = [[place for place, visible in enumerate(row) if visible] for row in mask]
        assert places == [list(range(max(0, length + 1 - size), length + 1)) for length in lengths]


def test_holes_are_closed_after_a_while_and_at_once_where_it_grows() -> None:
    cache = cache_of(16)
    places = join(cache, 5, 6, 7, 8)
    for place in places[:3]:
        cache.leave(place)
    assert [cache.compact(9) for _ in range(7)] == [None] * 7, "the next request may fill them"
    kept = cache.compact(9)
    assert kept is not None
    assert (kept[0], cache.positions) == (places[3], len(kept))
    assert cache.positions < 4
    join(cache, *[5] * 7)
    for place in range(1, 8):
        cache.leave(place)
    assert cache.compact(CAPACITY_STEP + 1) is not None, "a larger buffer would copy the holes too"
    cache.check_integrity()


def test_the_smallest_row_takes_a_step() -> None:
    found = cache_of(16).smallest_bytes
    assert (found, type(found)) == (ROW_BYTES, int), "a flag is to be told with it"
