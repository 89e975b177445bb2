"""The prefix cache of models whose state can't be cut into blocks: sliding windows, recurrent states.

A snapshot is a copy of all caches of a prompt at a block's boundary, found again by the hash of the text up to there.
While a prompt is computed, snapshots are taken at regular distances, at its last boundary, and where it parts from
texts seen before. The least recently used go first. The engine and the runner use it as they use `BlockPrefix`.
"""

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_parallm.host import to_numpy
from mlx_parallm.kv.block_pool import Chain, Match, root_of
from mlx_parallm.kv.block_store import Blocks, integer_of
from mlx_parallm.kv.disk import DiskTier
from mlx_parallm.kv.merged import copied, held_arrays
from mlx_parallm.kv.payload import Payload
from mlx_parallm.kv.prefix import KEEP_TOKENS
from mlx_parallm.metrics import PrefixMetrics

log = logging.getLogger(__name__)

MIN_DISTANCE = 64  # tokens between two snapshots of a prompt
MAX_SNAPSHOTS = 8  # of one prompt, at regular distances
MAX_ARRAYS = 100_000  # in all snapshots: Metal can't hold half a million buffers, however small
MAX_SEEN = 1 << 16  # boundaries of texts seen before


@dataclass(slots=True, eq=False, weakref_slot=True)
class Snapshot:
    caches: list[Any]
    length: int
    nbytes: int
    arrays: int  # how many it holds

    @classmethod
    def of(cls, caches: list[Any], length: int) -> "Snapshot":
        return cls(caches, length, sum(cache.nbytes for cache in caches), len(held_arrays(caches)))


class SnapshotPrefix:
    store: Blocks | None = None

    def __init__(
        self,
        make_cache: Callable[[], list[Any]],
        size: int,
        identity: str,
        max_bytes: int,
        min_match: int,
        disk: DiskTier | None = None,
    ) -> None:
        self._make_cache = make_cache
        self.block_size = size
        self._identity = identity
        self._min_match = min_match
        self._snapshots: OrderedDict[bytes, Snapshot] = OrderedDict()  # the longest unused first
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._down: OrderedDict[bytes, Snapshot] = OrderedDict()  # shall be on disk
        self.disk = disk
        self.prompt_rate = 0.0
        self.max_bytes = max_bytes
        self.metrics = PrefixMetrics()

    def wrap_store(self, wrap: Callable[[Blocks], Blocks]) -> None:
        """It has none."""

    def chain(self, tokens: Sequence[int], salt: str, adapter: str = "") -> Chain:
        return Chain(root_of(self._identity, salt, adapter), self.block_size).extend(tokens)

    def match(self, chain: Chain, tokens: Sequence[int]) -> Match:
        for number in range(self._last(tokens), 0, -1):
            snapshot = self._snapshots.get(chain.hashes[number - 1])
            if snapshot is not None and snapshot.length >= self._min_match:
                self._snapshots.move_to_end(chain.hashes[number - 1])
                return Match([], snapshot.length, snapshot)
        return Match()

    def release(self, match: Match) -> None:
        match.length = 0
        match.state = None

    def shorten(self, match: Match, length: int) -> None:
        if length < match.length:
            self.release(match)

    def known(self, chain: Chain) -> int:
        return len(chain.hashes)  # a running row has the state of its end alone

    def worth_keeping(self, tokens: Sequence[int]) -> bool:
        return False

    def commit(self, layers: Sequence[Any], row: int, chain: Chain, tokens: Sequence[int]) -> None:
        """A row's state is that of its end, which no other text shares."""

    def admitted(self, chain: Chain, match: Match) -> None:
        self.metrics.lookups += 1
        self.metrics.hits += match.length > 0
        self.metrics.hit_tokens += match.length
        if match.state is not None:
            self._keep(chain.hashes[match.length // self.block_size - 1], match.state)  # used twice: worth the disk

    def fill(self, staged: list[Any], matches: Sequence[Match]) -> list[Any]:
        return [copied(cache) for cache in matches[0].state.caches]

    def stops(self, chain: Chain, tokens: Sequence[int], start: int) -> list[int]:
        """Returns where to take snapshots of a prompt that is computed from `start` on."""
        parting = next((i for i, hash_ in enumerate(chain.hashes) if hash_ not in self._seen), len(chain.hashes))
        for hash_ in chain.hashes:
            self._seen[hash_] = None
            self._seen.move_to_end(hash_)
        while len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        last = self._last(tokens) * self.block_size
        distance = -(-max(MIN_DISTANCE, len(tokens) // MAX_SNAPSHOTS) // self.block_size) * self.block_size
        regular = range(distance, last - distance // 2, distance)
        wanted = {*regular, last, min(parting * self.block_size, last)}
        return sorted(stop for stop in wanted if stop > start and chain.hashes[stop // self.block_size - 1] not in self)

    def take(self, chain: Chain, caches: list[Any], length: int, of: int) -> object | None:
        kept = [copied(cache) for cache in caches]
        mx.async_eval(held_arrays(kept))
        hash_ = chain.hashes[length // self.block_size - 1]
        snapshot = Snapshot.of(kept, length)
        self._insert(hash_, snapshot)
        if of >= KEEP_TOKENS and length + self.block_size >= of:
            self._keep(hash_, snapshot)
        return self._snapshots.get(hash_)

    def __contains__(self, hash_: bytes) -> bool:
        return hash_ in self._snapshots

    def on_disk(self, chain: Chain, tokens: Sequence[int]) -> list[bytes]:
        if self.disk is None:
            return []
        for number in range(self._last(tokens), 0, -1):
            if chain.hashes[number - 1] in self:
                return []
            if chain.hashes[number - 1] in self.disk:
                return [chain.hashes[number - 1]]
        return []

    def adopt(self, chain: Chain, tokens: Sequence[int], hashes: Sequence[bytes], payloads: Sequence[Payload]) -> bool:
        for hash_, payload in zip(hashes, payloads, strict=False):
            length = (chain.hashes.index(hash_) + 1) * self.block_size
            try:
                caches = restored(payload, self._make_cache())
            except Exception as error:  # mlx-lm's caches take the state, and say what they will
                log.warning("a snapshot from the SSD can't be used: %r", error)
                assert self.disk is not None
                self.disk.metrics.damaged += 1
                continue
            self._insert(hash_, Snapshot.of(caches, length))
        return False  # there is only ever one to read

    @property
    def waiting_to_write(self) -> bool:
        return bool(self._down)

    @property
    def to_write(self) -> bool:
        if self.disk is None or not self._down:
            return False
        return next(iter(self._down.values())).nbytes <= self.disk.room

    def write_down(self) -> None:
        assert self.disk is not None
        hash_, snapshot = self._down.popitem(last=False)
        if hash_ not in self.disk and self._disk_pays(snapshot):
            self.disk.write(hash_, payload_of(snapshot.caches))

    def reset(self) -> None:
        self._snapshots.clear()
        self._seen.clear()
        self._down.clear()
        self.gauge()

    def flush(self) -> None:
        self.reset()
        if self.disk is not None:
            self.disk.flush()
        self.gauge()

    def gauge(self) -> None:
        self.metrics.snapshots = len(self._snapshots)
        self.metrics.bytes = sum(snapshot.nbytes for snapshot in self._snapshots.values())

    def check_integrity(self) -> None:
        assert self.metrics.bytes == sum(snapshot.nbytes for snapshot in self._snapshots.values())
        assert self.metrics.bytes <= self.max_bytes, "snapshots hold more than they may"

    def _last(self, tokens: Sequence[int]) -> int:
        """The last boundary before the last token."""
        return (len(tokens) - 1) // self.block_size

    def _insert(self, hash_: bytes, snapshot: Snapshot) -> None:
        self._snapshots[hash_] = snapshot
        self._snapshots.move_to_end(hash_)
        self._evict(snapshot)

    def set_max_bytes(self, max_bytes: int) -> None:
        """Holds no more than that from now on."""
        self.max_bytes = max_bytes
        self._evict(None)

    def _evict(self, newest: Snapshot | None) -> None:
        """The longest unused go, as many as must; all but `newest` to the disk, where there is one."""
        self.gauge()
        self._arrays = sum(one.arrays for one in self._snapshots.values())
        while self._snapshots and (self.metrics.bytes > self.max_bytes or self._arrays > MAX_ARRAYS):
            gone, old = self._snapshots.popitem(last=False)
            self.metrics.evictions += 1
            self.metrics.bytes -= old.nbytes
            self._arrays -= old.arrays
            self.metrics.snapshots -= 1
            if old is not newest:
                self._keep(gone, old)

    def _keep(self, hash_: bytes, snapshot: Snapshot) -> None:
        if self.disk is None or hash_ in self.disk or hash_ in self._down or not self._disk_pays(snapshot):
            return
        if sum(other.nbytes for other in self._down.values()) + snapshot.nbytes > self.max_bytes // 4:
            self.disk.metrics.dropped += 1
            return
        self._down[hash_] = snapshot

    def _disk_pays(self, snapshot: Snapshot) -> bool:
        """Returns whether to read a snapshot takes less time than to compute it."""
        assert self.disk is not None
        return self.prompt_rate * snapshot.nbytes <= self.disk.read_rate * snapshot.length


def can_be_restored(fresh: list[Any]) -> bool:
    """Returns whether caches of this kind can go to the SSD and come back."""
    try:
        restored(payload_of(fresh), fresh)
    except Exception as error:
        log.warning("snapshots of %s can't be kept on SSD: %r", sorted({type(c).__name__ for c in fresh}), error)
        return False
    return True


def payload_of(caches: list[Any]) -> Payload:
    arrays: list[mx.array] = []

    def outline(state: Any) -> Any:
        if isinstance(state, mx.array):
            arrays.append(state)
            return {"array": len(arrays) - 1, "dtype": str(state.dtype).removeprefix("mlx.core.")}
        if isinstance(state, (list, tuple)):
            return [outline(item) for item in state]
        assert state is None or isinstance(state, (int, float, str)), f"a cache holds a {type(state).__name__}"
        return state

    outlines = [[type(cache).__name__, outline(cache.state)] for cache in caches]
    return Payload([to_numpy(array.view(integer_of(array))) for array in arrays], json.dumps(outlines))


def restored(payload: Payload, fresh: list[Any]) -> list[Any]:
    """The caches that `payload_of` was given; `fresh` are new ones of the same model."""

    def state(outline: Any) -> Any:
        if isinstance(outline, dict):
            return mx.array(payload.arrays[outline["array"]]).view(getattr(mx, outline["dtype"]))
        return [state(item) for item in outline] if isinstance(outline, list) else outline

    outlines = json.loads(payload.note)
    assert [name for name, _ in outlines] == [type(cache).__name__ for cache in fresh]
    return [type(cache).from_state(state(outline)) for cache, (_, outline) in zip(fresh, outlines, strict=True)]
