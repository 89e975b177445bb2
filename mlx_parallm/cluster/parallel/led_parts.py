"""What rank 0 computes with, so that the other ranks do the same: `lead_parts`, and the prefix cache among them.

The index of the prefix cache is rank 0's; each rank keeps its part of the keys and values.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from mlx_parallm.cluster.parallel.leading import Leading, LedCache, LedForward, place_everywhere, staged_number
from mlx_parallm.engine.ranks import DeviceParts
from mlx_parallm.kv.batch import BatchCache
from mlx_parallm.kv.block_pool import Chain, Match
from mlx_parallm.kv.block_store import Blocks, Host, Planes
from mlx_parallm.kv.disk import DiskTier
from mlx_parallm.kv.payload import Payload
from mlx_parallm.kv.prefix import Prefix
from mlx_parallm.lora.layout import Layout
from mlx_parallm.metrics import PrefixMetrics


def lead_parts(parts: DeviceParts, layout: Layout, leading: Leading) -> DeviceParts:
    """Has what is done with these parts sent to the other ranks first."""
    leading.send("sizes", type(parts.cache).__name__, parts.cache.sizes)
    forward = LedForward(parts.forward, leading)
    prefix = parts.prefix
    if prefix is not None:
        led = LedSnapshots if prefix.store is None else LedBlocks
        prefix = led(prefix, parts.cache, leading)
    layout.around_place = partial(place_everywhere, leading)
    return DeviceParts(forward, LedCache(parts.cache, forward, leading), prefix, parts.tuned)


class LedPrefix:
    """Passes on all that the other ranks need not know of."""

    def __init__(self, prefix: Prefix, cache: BatchCache, leading: Leading) -> None:
        self._own = prefix
        self._cache = cache
        self._leading = leading
        self.block_size = prefix.block_size
        self.metrics: PrefixMetrics = prefix.metrics

    @property
    def disk(self) -> DiskTier | None:
        return self._own.disk

    @property
    def store(self) -> Blocks | None:
        return self._own.store

    @property
    def max_bytes(self) -> int:
        return self._own.max_bytes

    @max_bytes.setter
    def max_bytes(self, value: int) -> None:
        self._own.max_bytes = value

    @property
    def prompt_rate(self) -> float:
        return self._own.prompt_rate

    @prompt_rate.setter
    def prompt_rate(self, value: float) -> None:
        self._own.prompt_rate = value

    @property
    def waiting_to_write(self) -> bool:
        return self._own.waiting_to_write

    @property
    def to_write(self) -> bool:
        return self._own.to_write

    def wrap_store(self, wrap: Callable[[Blocks], Blocks]) -> None:
        self._own.wrap_store(wrap)

    def chain(self, tokens: Sequence[int], salt: str, adapter: str = "") -> Chain:
        return self._own.chain(tokens, salt, adapter)

    def match(self, chain: Chain, tokens: Sequence[int]) -> Match:
        return self._own.match(chain, tokens)

    def release(self, match: Match) -> None:
        self._own.release(match)

    def shorten(self, match: Match, length: int) -> None:
        self._own.shorten(match, length)

    def known(self, chain: Chain) -> int:
        return self._own.known(chain)

    def worth_keeping(self, tokens: Sequence[int]) -> bool:
        return self._own.worth_keeping(tokens)

    def commit(self, layers: Sequence[Any], row: int, chain: Chain, tokens: Sequence[int]) -> None:
        self._own.commit(layers, row, chain, tokens)

    def stops(self, chain: Chain, tokens: Sequence[int], start: int) -> list[int]:
        return self._own.stops(chain, tokens, start)

    def take(self, chain: Chain, caches: list[Any], length: int, of: int) -> object | None:
        return self._own.take(chain, caches, length, of)

    def admitted(self, chain: Chain, match: Match) -> None:
        self._own.admitted(chain, match)

    def fill(self, staged: list[Any], matches: Sequence[Match]) -> list[Any]:
        return self._own.fill(staged, matches)

    def on_disk(self, chain: Chain, tokens: Sequence[int]) -> list[bytes]:
        return self._own.on_disk(chain, tokens)

    def adopt(self, chain: Chain, tokens: Sequence[int], hashes: Sequence[bytes], payloads: Sequence[Payload]) -> bool:
        return self._own.adopt(chain, tokens, hashes, payloads)

    def write_down(self) -> None:
        self._own.write_down()

    def set_max_bytes(self, max_bytes: int) -> None:
        self._own.set_max_bytes(max_bytes)

    def flush(self) -> None:
        self._own.flush()

    def reset(self) -> None:
        self._own.reset()

    def gauge(self) -> None:
        self._own.gauge()

    def check_integrity(self) -> None:
        self._own.check_integrity()


class LedBlocks(LedPrefix):
    def __init__(self, prefix: Prefix, cache: BatchCache, leading: Leading) -> None:
        super().__init__(prefix, cache, leading)
        prefix.wrap_store(self._led_store)

    def _led_store(self, store: Blocks) -> Blocks:
        self._store = LedStore(store, self._leading)
        return self._store

    def fill(self, staged: list[Any], matches: Sequence[Match]) -> list[Any]:
        self._leading.send("fill", staged_number(staged), [match.ids for match in matches], matches[0].length)
        return self._own.fill(staged, matches)

    def commit(self, layers: Sequence[Any], row: int, chain: Chain, tokens: Sequence[int]) -> None:
        self._store.source = None if layers is self._cache.layers else staged_number(layers)
        self._own.commit(layers, row, chain, tokens)


class LedSnapshots(LedPrefix):
    def fill(self, staged: list[Any], matches: Sequence[Match]) -> list[Any]:
        restored = self._leading.stage(self._own.fill(staged, matches))
        self._leading.send("restore", restored.number, self._leading.number_of(matches[0].state))
        return restored

    def take(self, chain: Chain, caches: list[Any], length: int, of: int) -> object | None:
        snapshot = self._own.take(chain, caches, length, of)
        if snapshot is not None:
            self._leading.keep(snapshot, self._leading.new_number())
            self._leading.send("snapshot", self._leading.number_of(snapshot), staged_number(caches))
        return snapshot


class LedStore:
    """Blocks' keys and values, of which each rank keeps its part."""

    def __init__(self, store: Blocks, leading: Leading) -> None:
        self._own = store
        self._leading = leading
        self.source: int | None = None  # whose blocks are written: the running rows', or those of prompts by number

    @property
    def total(self) -> int:
        return self._own.total

    @property
    def block_bytes(self) -> int:
        return self._own.block_bytes

    @property
    def nbytes(self) -> int:
        return self._own.nbytes

    def clear(self) -> None:
        self._leading.send("blocks.clear")
        self._own.clear()

    def drop_from(self, block: int) -> None:
        self._leading.send("blocks.drop_from", block)
        self._own.drop_from(block)

    def write(self, sides: Sequence[mx.array], row: int, numbers: Sequence[int], ids: Sequence[int]) -> None:
        self._leading.send("keep", self.source, row, numbers, ids)
        self._own.write(sides, row, numbers, ids)

    def read(self, ids: Sequence[int], rows: int, length: int, capacity: int) -> list[mx.array]:
        return self._own.read(ids, rows, length, capacity)

    def write_host(self, blocks: Sequence[Host], ids: Sequence[int]) -> None:
        self._own.write_host(blocks, ids)

    def copies(self, ids: Sequence[int]) -> list[Planes]:
        return self._own.copies(ids)

    def to_host(self, groups: Sequence[Planes]) -> list[Host]:
        return self._own.to_host(groups)

    def host_shapes(self) -> list[tuple[tuple[int, ...], str]]:
        return self._own.host_shapes()
