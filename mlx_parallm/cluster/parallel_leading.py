"""What rank 0 does with its part of a model, told to the other ranks as it is done. Engine thread only.

The scheduler, the runner and the sampler know nothing of it: what they call on the forward pass, the rows' caches, the
prefix cache and the adapters is sent as plain values, and then done. Objects that live on every rank have numbers; when
one is freed here, the others are told.
"""

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlx_parallm.cluster.parallel_channel import Array, Message
from mlx_parallm.engine.ranks import DeviceParts
from mlx_parallm.host import to_numpy
from mlx_parallm.kv.batch import RowContext
from mlx_parallm.kv.blocks import Chain, Match
from mlx_parallm.kv.prefix import BlockPrefix, Prefix
from mlx_parallm.kv.slots import SlotCache
from mlx_parallm.kv.snapshots import SnapshotPrefix
from mlx_parallm.lora.layout import Layout, PackedAdapter
from mlx_parallm.lora.rows import GroupedLoRA, Resident
from mlx_parallm.models.forward import Forward

ROW_METHODS = ("expect", "leave", "compact", "reset")  # of the running rows' cache, sent as they are called
STORE_METHODS = ("clear", "drop_from")  # of the blocks' keys and values


class Staged(list[Any]):
    """The caches of prompts under way, which all ranks know by a number."""

    number = 0


class Leading:
    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._freed: deque[int] = deque()

    def send(self, name: str, *values: Any, arrays: Sequence[Array] = ()) -> None:
        freed = [self._freed.popleft() for _ in range(len(self._freed))]
        if freed:
            self._send(Message("free", (freed,)))
        self._send(Message(name, values, tuple(arrays)))

    def new_number(self) -> int:
        return next(self._numbers)

    def stage(self, caches: list[Any]) -> Staged:
        staged = Staged(caches)
        staged.number = self.new_number()
        self._follow(staged, staged.number)
        return staged

    def keep(self, thing: Any, number: int) -> None:
        self._known[thing] = number
        self._follow(thing, number)

    def number_of(self, thing: Any) -> int:
        return self._known[thing]

    def adapters_of(self, context: Any) -> list[int | None] | None:
        """The rows' adapters by their numbers."""
        if context is None:
            return None
        assert isinstance(context, GroupedLoRA), "a group serves adapters, and no images"
        return [None if row is None else self.number_of(row) for row in context.rows]

    def _follow(self, thing: Any, number: int) -> None:
        weakref.finalize(thing, self._freed.append, number).atexit = False


def lead_parts(parts: DeviceParts, layout: Layout, leading: Leading) -> DeviceParts:
    """Has what is done with these parts sent to the other ranks first."""
    cache, forward = parts.cache, LedForward.of(parts.forward, leading)
    per_token = cache.bytes_per_token if isinstance(cache, SlotCache) else 0
    leading.send("sizes", type(cache).__name__, per_token, cache.max_bytes)
    _lead_cache(cache, forward, leading)
    _lead_prefix(parts.prefix, cache, leading)
    _lead_adapters(layout, leading)
    return DeviceParts(forward, parts.cache, parts.prefix)


class LedForward(Forward):
    """Forward passes over prompts; those of decode steps belong to the cache's `decode`."""

    leading: Leading

    @classmethod
    def of(cls, forward: Forward, leading: Leading) -> "LedForward":
        led = cls.__new__(cls)
        led.__dict__.update(vars(forward))
        led.leading = leading
        return led

    def __call__(self, tokens: mx.array, caches: list[Any], context: Any = None) -> mx.array:
        self._tell(tokens, caches, None, context)
        return super().__call__(tokens, caches, context)

    def at(self, tokens: mx.array, caches: list[Any], index: mx.array, context: Any = None) -> mx.array:
        if self._cut is None:
            return super().at(tokens, caches, index, context)  # which calls the one above
        self._tell(tokens, caches, to_numpy(index).tolist(), context)
        return super().at(tokens, caches, index, context)

    def decode(self, tokens: mx.array, caches: list[Any], context: Any = None) -> mx.array:
        """A pass that the other ranks know of."""
        return super().__call__(tokens, caches, context)

    def _tell(self, tokens: mx.array, caches: list[Any], index: list[int] | None, context: Any) -> None:
        assert isinstance(caches, Staged)
        adapters = self.leading.adapters_of(context)
        self.leading.send("prompt", caches.number, index, adapters, arrays=[to_numpy(tokens)])


def _lead_cache(cache: Any, forward: LedForward, leading: Leading) -> None:
    plain_stage, plain_join, plain_decode = cache.stage, cache.join, cache.decode

    def stage(rows: int, capacity: int) -> Staged:
        staged = leading.stage(plain_stage(rows, capacity))
        leading.send("stage", staged.number, rows, capacity)
        return staged

    def join(staged: Staged, prompts: Sequence[tuple[int, int]]) -> list[int]:
        leading.send("join", staged.number, prompts)
        positions: list[int] = plain_join(staged, prompts)
        return positions

    def decode(_: Any, tokens: mx.array, lengths: Sequence[int], context: RowContext | None = None) -> mx.array:
        leading.send("decode", lengths, leading.adapters_of(context), arrays=[to_numpy(tokens)])
        logits: mx.array = plain_decode(forward.decode, tokens, lengths, context)
        return logits

    cache.stage, cache.join, cache.decode = stage, join, decode
    for name in ROW_METHODS:
        setattr(cache, name, _led(leading, f"rows.{name}", getattr(cache, name)))


def _lead_prefix(prefix: Prefix | None, cache: Any, leading: Leading) -> None:
    if isinstance(prefix, SnapshotPrefix):
        _lead_snapshots(prefix, leading)
    elif isinstance(prefix, BlockPrefix):
        _lead_blocks(prefix, cache, leading)


def _lead_blocks(prefix: Any, cache: Any, leading: Leading) -> None:
    """The index of the blocks is rank 0's; each rank keeps their keys and values."""
    store = prefix.store
    plain_fill, plain_commit, plain_write = prefix.fill, prefix.commit, store.write
    source: list[int | None] = [None]  # whose blocks are written: the running rows', or those of prompts by number

    def fill(staged: Staged, matches: Sequence[Match]) -> list[Any]:
        leading.send("fill", staged.number, [match.ids for match in matches], matches[0].length)
        filled: list[Any] = plain_fill(staged, matches)
        return filled

    def commit(layers: Sequence[Any], row: int, chain: Chain, tokens: Sequence[int]) -> None:
        source[0] = None if layers is cache.layers else layers.number  # type: ignore[attr-defined]
        plain_commit(layers, row, chain, tokens)

    def write(sides: Sequence[mx.array], row: int, numbers: Sequence[int], ids: Sequence[int]) -> None:
        leading.send("keep", source[0], row, numbers, ids)
        plain_write(sides, row, numbers, ids)

    prefix.fill, prefix.commit, store.write = fill, commit, write
    for name in STORE_METHODS:
        setattr(store, name, _led(leading, f"blocks.{name}", getattr(store, name)))


def _lead_snapshots(prefix: Any, leading: Leading) -> None:
    plain_fill, plain_take = prefix.fill, prefix.take

    def fill(staged: Staged, matches: Sequence[Match]) -> list[Any]:
        restored = leading.stage(plain_fill(staged, matches))
        leading.send("restore", restored.number, leading.number_of(matches[0].state))
        return restored

    def take(chain: Chain, caches: Staged, length: int, of: int) -> None:
        plain_take(chain, caches, length, of)
        snapshot = prefix.held(chain.hashes[length // chain.size - 1])
        if snapshot is not None:
            leading.keep(snapshot, leading.new_number())
            leading.send("snapshot", leading.number_of(snapshot), caches.number)

    prefix.fill, prefix.take = fill, take


def _lead_adapters(layout: Any, leading: Leading) -> None:
    """Every rank gets an adapter whole, and packs the part that is its own."""
    plain_place = layout.place

    def place(packed: PackedAdapter) -> Resident:
        assert packed.whole is not None
        parts, number = packed.whole.parts, leading.new_number()
        arrays = [array for part in parts.values() for array in (part.a, part.b, part.m) if array is not None]
        leading.send("adapter", number, [(path, part.m is not None) for path, part in parts.items()], arrays=arrays)
        resident: Resident = plain_place(packed)
        leading.keep(resident, number)
        return resident

    layout.place = place


def _led(leading: Leading, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(*values: Any) -> Any:
        leading.send(name, *values)
        return plain(*values)

    return call
