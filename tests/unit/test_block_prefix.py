"""The prefix cache on its way to the SSD: what is flushed or may be damaged does not get there."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from mlx_parallm.engine.prefix_lookup import WRITE_SECONDS, SsdTransfers
from mlx_parallm.kv.block_pool import Chain
from mlx_parallm.kv.block_store import BlockStore, Packing, Side
from mlx_parallm.kv.disk import DiskTier
from mlx_parallm.kv.prefix import KEEP_TOKENS, BlockPrefix
from mlx_parallm.kv.snapshots import Snapshot, SnapshotPrefix

SIZE = 32
SIDE = Side(2, 8, mx.float32)
TOKENS = list(range(KEEP_TOKENS))  # long enough to be kept
FORGET = [BlockPrefix.flush, BlockPrefix.reset]


@dataclass
class Layer:
    keys: mx.array
    values: mx.array


@pytest.fixture
def prefix(tmp_path: Path) -> Iterator[BlockPrefix]:
    disk = DiskTier(tmp_path, "model", 1 << 30, 86400.0)
    disk.start()
    yield BlockPrefix(BlockStore(SIZE, [SIDE, SIDE], Packing(), max_bytes=1 << 24), SIZE, "model", 1, disk)
    disk.close(10)


def kept(prefix: BlockPrefix) -> Chain:
    """A text whose blocks wait for the SSD."""
    state = mx.random.normal((1, SIDE.heads, len(TOKENS), SIDE.width))
    chain = prefix.chain(TOKENS, "")
    prefix.commit([Layer(state, state)], 0, chain, TOKENS)
    assert prefix.waiting_to_write
    return chain


def written(prefix: BlockPrefix) -> int:
    """Hands over all that waits, and says how many files there are then."""
    assert prefix.disk is not None
    while prefix.waiting_to_write:
        prefix.write_down()
    assert prefix.disk.settle(10)
    return prefix.disk.metrics.files


def test_long_texts_get_to_the_ssd(prefix: BlockPrefix) -> None:
    kept(prefix)
    assert written(prefix) == len(TOKENS) // SIZE


@pytest.mark.parametrize("forget", FORGET)
def test_blocks_that_are_forgotten_are_not_written(prefix: BlockPrefix, forget: Callable[[BlockPrefix], None]) -> None:
    chain = kept(prefix)
    match = prefix.match(chain, TOKENS)  # in use: a flush leaves them where they are
    forget(prefix)
    assert not prefix.waiting_to_write
    assert written(prefix) == 0
    if forget is BlockPrefix.flush:
        prefix.release(match)


@pytest.mark.parametrize("forget", FORGET)
def test_copies_that_are_forgotten_are_not_written(prefix: BlockPrefix, forget: Callable[[BlockPrefix], None]) -> None:
    kept(prefix)
    prefix.write_down()  # copied now, brought to the host by the next call
    assert prefix.waiting_to_write
    forget(prefix)
    assert not prefix.waiting_to_write
    assert written(prefix) == 0


@pytest.mark.parametrize("forget", [SnapshotPrefix.flush, SnapshotPrefix.reset])
def test_snapshots_that_are_forgotten_are_not_written(tmp_path: Path, forget: Callable[[SnapshotPrefix], None]) -> None:
    disk = DiskTier(tmp_path, "model", 1 << 30, 86400.0)
    prefix = SnapshotPrefix(lambda: [KVCache()], SIZE, "model", 1 << 24, 1, disk)
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 2, len(TOKENS), 8)), mx.ones((1, 2, len(TOKENS), 8)))
    prefix.take(prefix.chain(TOKENS, ""), [cache], len(TOKENS), len(TOKENS))
    assert prefix.waiting_to_write
    forget(prefix)
    assert not prefix.waiting_to_write


def test_snapshots_stay_as_long_as_they_fit_to_the_byte() -> None:
    prefix = SnapshotPrefix(lambda: [KVCache()], SIZE, "model", 1 << 24, 1)
    texts = [[number, *TOKENS[1:]] for number in (1, 2)]
    for text in texts:
        cache = KVCache()
        cache.update_and_fetch(mx.ones((1, 2, len(text), 8)), mx.ones((1, 2, len(text), 8)))
        prefix.take(prefix.chain(text, ""), [cache], len(text) // SIZE * SIZE, len(text))
    prefix.set_max_bytes(prefix.metrics.bytes)
    assert (prefix.metrics.snapshots, prefix.metrics.evictions) == (2, 0)
    prefix.set_max_bytes(prefix.metrics.bytes - 1)
    assert (prefix.metrics.snapshots, prefix.metrics.evictions) == (1, 1)
    found = [prefix.match(prefix.chain(text, ""), [*text, 7]).length for text in texts]
    assert found == [0, len(TOKENS) // SIZE * SIZE], "the longest unused goes"


@pytest.mark.parametrize(
    ("tokens", "length", "kept"),
    [
        (KEEP_TOKENS, KEEP_TOKENS, True),
        (KEEP_TOKENS + 5, KEEP_TOKENS, True),
        (KEEP_TOKENS, KEEP_TOKENS - SIZE, True),
        (KEEP_TOKENS, KEEP_TOKENS - 2 * SIZE, False),  # on its way: nobody may ever come back to it
        (KEEP_TOKENS - SIZE, KEEP_TOKENS - SIZE, False),  # computed again as quickly as read
    ],
)
def test_snapshots_of_the_ends_of_long_texts_get_to_the_ssd(
    tmp_path: Path, tokens: int, length: int, kept: bool
) -> None:
    prefix = SnapshotPrefix(
        lambda: [KVCache()], SIZE, "model", 1 << 24, 1, DiskTier(tmp_path, "model", 1 << 30, 86400.0)
    )
    text, cache = list(range(tokens)), KVCache()
    cache.update_and_fetch(mx.ones((1, 2, length, 8)), mx.ones((1, 2, length, 8)))
    prefix.take(prefix.chain(text, ""), [cache], length, tokens)
    assert prefix.waiting_to_write == kept


def test_what_waits_for_the_ssd_takes_a_quarter_of_the_memory(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, "model", 1 << 30, 86400.0)
    for spare, kept in ((0, True), (-4, False)):
        prefix = SnapshotPrefix(lambda: [KVCache()], SIZE, "model", 1 << 24, 1, disk)
        cache = KVCache()
        cache.update_and_fetch(mx.ones((1, 2, len(TOKENS), 8)), mx.ones((1, 2, len(TOKENS), 8)))
        prefix.set_max_bytes(4 * cache.nbytes + spare)
        dropped = disk.metrics.dropped
        prefix.take(prefix.chain(TOKENS, ""), [cache], len(TOKENS), len(TOKENS))
        assert (prefix.waiting_to_write, disk.metrics.dropped - dropped) == (kept, not kept)


def test_a_snapshot_is_taken_where_a_text_leaves_one_that_was_seen_before() -> None:
    prefix = SnapshotPrefix(lambda: [KVCache()], SIZE, "model", 1 << 24, 1)
    begin = list(range(SIZE))  # what two conversations have in common
    texts = [begin + [number] * (2 * SIZE + 1) for number in (100, 200)]
    stops = [prefix.stops(prefix.chain(text, ""), text, 0) for text in texts]
    assert SIZE not in stops[0]
    assert stops[1] == sorted({*stops[0], SIZE})


def test_what_is_computed_sooner_than_read_does_not_get_to_the_ssd(prefix: BlockPrefix) -> None:
    assert prefix.disk is not None
    state = mx.random.normal((1, SIDE.heads, len(TOKENS), SIDE.width))
    waiting = []
    for number, factor in enumerate((1.01, 1.0)):
        prefix.prompt_rate = factor * prefix.disk.read_rate * SIZE / prefix.store.block_bytes
        text = [number + 1, *TOKENS[1:]]
        prefix.commit([Layer(state, state)], 0, prefix.chain(text, ""), text)
        waiting.append(prefix.waiting_to_write)
    assert waiting == [False, True]


def test_a_snapshot_is_held_and_gets_to_the_ssd(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, "model", 1 << 30, 86400.0)
    disk.start()
    prefix = SnapshotPrefix(lambda: [KVCache()], SIZE, "model", 1 << 24, 1, disk)
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 2, len(TOKENS), 8)), mx.ones((1, 2, len(TOKENS), 8)))
    chain = prefix.chain(TOKENS, "")
    snapshot = prefix.take(chain, [cache], len(TOKENS), len(TOKENS))
    assert isinstance(snapshot, Snapshot)
    assert (snapshot.length, chain.hashes[-1] in prefix, chain.hashes[0] in prefix) == (len(TOKENS), True, False)
    while prefix.waiting_to_write:
        prefix.write_down()
    assert disk.settle(10)
    assert disk.metrics.files == 1
    disk.close(10)


def test_while_rows_run_the_ssd_gets_a_little_at_times(prefix: BlockPrefix, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prefix.disk is not None
    kept(prefix)
    transfers = SsdTransfers(prefix, prefix.disk, None, lambda call: call())  # type: ignore[arg-type]
    handed_over: list[float] = []
    write_down = prefix.write_down
    monkeypatch.setattr(prefix, "write_down", lambda: (handed_over.append(time.monotonic()), write_down()))
    begun = time.monotonic()  # before the pause is reckoned from, however late `write_down` comes
    transfers.write_some()
    assert len(handed_over) == 1
    deadline = time.monotonic() + 10
    while len(handed_over) < 2 and prefix.to_write and time.monotonic() < deadline:
        transfers.write_some()
    assert all(later - begun > WRITE_SECONDS for later in handed_over[1:])
