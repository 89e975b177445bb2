"""The prefix cache as the engine sees it: what is known of a prompt's prefix, put into place and taken over.

`BlockPrefix` is for models in slots: blocks in slabs; `snapshots.SnapshotPrefix` is for the others. The engine asks
`match` before it plans a prompt, the runner asks `fill` when it starts one. Both may have a tier on SSD below them:
`on_disk` says what it has of a prompt, `adopt` takes over what it has read, `write_down` hands it what is worth
keeping. Engine thread only.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import mlx.core as mx

from mlx_parallm.kv.block_pool import Block, BlockPool, Chain, Match, root_of
from mlx_parallm.kv.block_store import Blocks, Host, Planes
from mlx_parallm.kv.disk import DiskTier
from mlx_parallm.kv.payload import Payload
from mlx_parallm.kv.prompt_layer import PromptLayer
from mlx_parallm.metrics import PrefixMetrics

KEEP_TOKENS = 256  # texts from this length on are worth the SSD
PIECE_BYTES = 64 << 20  # read from disk at once
BATCH_BYTES = 8 << 20  # handed to the disk's thread at once
MAX_RESCUED_BYTES = 64 << 20  # of evicted blocks that wait for that


class Prefix(Protocol):
    block_size: int  # tokens
    metrics: PrefixMetrics
    max_bytes: int
    prompt_rate: float  # prompt tokens a second, as measured; what is computed sooner than read need not be on disk

    @property
    def disk(self) -> DiskTier | None: ...

    @property
    def store(self) -> Blocks | None:
        """The store of blocks' keys and values; None: snapshots are kept."""
        ...

    def wrap_store(self, wrap: Callable[[Blocks], Blocks]) -> None:
        """Goes through another store to its own from now on, where it has one."""
        ...

    def chain(self, tokens: Sequence[int], salt: str, adapter: str = "") -> Chain: ...

    def match(self, chain: Chain, tokens: Sequence[int]) -> Match:
        """Takes hold of the longest known prefix. The last token is always computed: its logits are needed."""
        ...

    def release(self, match: Match) -> None: ...

    def shorten(self, match: Match, length: int) -> None:
        """Keeps hold of the first `length` tokens alone, or of none where it can't be cut."""
        ...

    def known(self, chain: Chain) -> int:
        """Returns how many of a text's blocks are here; all of them, where running rows can add none."""
        ...

    def worth_keeping(self, tokens: Sequence[int]) -> bool:
        """Returns whether a text that begins so would be matched, and can be kept before anybody asks."""
        ...

    def commit(self, layers: Sequence[Any], row: int, chain: Chain, tokens: Sequence[int]) -> None:
        """Keeps the blocks of `tokens`, whose keys and values a row of `layers` holds, that are not kept yet."""
        ...

    def stops(self, chain: Chain, tokens: Sequence[int], start: int) -> list[int]:
        """Returns where to pause a prompt that is computed from `start` on, for `take`."""
        ...

    def take(self, chain: Chain, caches: list[Any], length: int, of: int) -> object | None:
        """Keeps the state of a prompt of `of` tokens after its first `length`, and returns it; None: it is not kept."""
        ...

    def admitted(self, chain: Chain, match: Match) -> None:
        """Counts a prompt that begins now, with what was found of it."""
        ...

    def fill(self, staged: list[Any], matches: Sequence[Match]) -> list[Any]:
        """Fresh prompt caches with equally long prefixes in them."""
        ...

    def on_disk(self, chain: Chain, tokens: Sequence[int]) -> list[bytes]:
        """Returns what the disk has of a text beyond what is here: hashes to read next."""
        ...

    def adopt(self, chain: Chain, tokens: Sequence[int], hashes: Sequence[bytes], payloads: Sequence[Payload]) -> bool:
        """Takes over what was read; False when it did not help."""
        ...

    @property
    def waiting_to_write(self) -> bool:
        """Whether something waits to be handed to the disk."""
        ...

    @property
    def to_write(self) -> bool:
        """Whether something waits to be handed to the disk, and there is room for it."""
        ...

    def write_down(self) -> None:
        """Hands a little of what is worth keeping to the disk's thread."""
        ...

    def set_max_bytes(self, max_bytes: int) -> None:
        """Holds no more than that from now on; what is in use may stay until it is released."""
        ...

    def flush(self) -> None: ...

    def reset(self) -> None:
        """Throws away all that is in memory, because it may be damaged; what is on disk has its checksums."""
        ...

    def gauge(self) -> None: ...

    def check_integrity(self) -> None: ...


class BlockPrefix:
    def __init__(
        self,
        store: Blocks,
        size: int,
        identity: str,
        min_match: int,
        disk: DiskTier | None = None,
        match_step: int = 1,
    ) -> None:
        self.store = store
        self._match_step = match_step  # where new shapes cost more than tokens, prefixes are cut to few lengths
        self._pool = BlockPool(store.total, size)
        self.block_size = size
        self._min_match = min_match  # fewer tokens are computed sooner than fetched
        self._identity = identity  # of the model, and of how its keys and values are kept
        self._down: OrderedDict[bytes, None] = OrderedDict()  # blocks here that shall be on disk
        self._rescued: deque[tuple[list[bytes], list[Planes]]] = deque()  # copies of blocks on their way there
        self._batch = max(1, BATCH_BYTES // store.block_bytes)
        self.disk = disk
        self.prompt_rate = 0.0
        self.max_bytes = store.total * store.block_bytes
        self.metrics = PrefixMetrics(blocks_total=store.total)

    def wrap_store(self, wrap: Callable[[Blocks], Blocks]) -> None:
        self.store = wrap(self.store)

    def chain(self, tokens: Sequence[int], salt: str, adapter: str = "") -> Chain:
        return Chain(root_of(self._identity, salt, adapter), self.block_size).extend(tokens)

    def known(self, chain: Chain) -> int:
        """Returns how many of a text's blocks are here."""
        return self._pool.longest(chain)

    def match(self, chain: Chain, tokens: Sequence[int]) -> Match:
        limit = len(tokens) - 1
        match = self._pool.match(chain, tokens, limit)
        if match.length % self._match_step:
            shorter = match.length // self._match_step * self._match_step
            self._pool.release(match)
            match = self._pool.match(chain, tokens, shorter)
        if match.length < self._min_match:
            self._pool.release(match)
        return match

    def worth_keeping(self, tokens: Sequence[int]) -> bool:
        """Returns whether a text that begins so would be matched."""
        return len(tokens) >= self._min_match

    def release(self, match: Match) -> None:
        self._pool.release(match)

    def shorten(self, match: Match, length: int) -> None:
        """Keeps hold of the first `length` tokens alone."""
        kept = -(-length // self.block_size)
        self._pool.release(Match(match.ids[kept:]))
        match.ids = match.ids[:kept]
        match.length = length

    def stops(self, chain: Chain, tokens: Sequence[int], start: int) -> list[int]:
        return []  # blocks are kept when a row leaves

    def take(self, chain: Chain, caches: list[Any], length: int, of: int) -> object | None:
        raise AssertionError("blocks are kept of rows, not of prompts on their way")

    def admitted(self, chain: Chain, match: Match) -> None:
        self.metrics.lookups += 1
        self.metrics.hits += match.length > 0
        self.metrics.hit_tokens += match.length
        self._keep(self._pool[id_] for id_ in match.ids)  # used twice: worth the disk

    def fill(self, staged: list[PromptLayer], matches: Sequence[Match]) -> list[PromptLayer]:
        length = matches[0].length
        rows = len(matches)
        capacity = staged[0].capacity
        if all(match.ids == matches[0].ids for match in matches):
            sides = self.store.read(matches[0].ids, 1, length, capacity)
            sides = [mx.broadcast_to(side, (rows, *side.shape[1:])) for side in sides] if rows > 1 else sides
        else:
            sides = self.store.read([id_ for match in matches for id_ in match.ids], rows, length, capacity)
        for layer, keys, values in zip(staged, sides[::2], sides[1::2], strict=True):
            layer.restore(keys, values, length)
        return staged

    def commit(self, layers: Sequence[Any], row: int, chain: Chain, tokens: Sequence[int]) -> None:
        """Keeps the full blocks of `tokens`, whose keys and values a row of `layers` holds, that are not kept yet."""
        chain.extend(tokens)
        placed, gone = self._pool.commit(chain, tokens, range(len(chain.hashes)))
        sides = [side for layer in layers for side in (layer.keys, layer.values)]
        if (len(chain.hashes) + 1) * self.block_size <= sides[0].shape[2]:
            tail, gone_too = self._pool.commit_tail(chain, tokens)
            placed += [(len(chain.hashes), tail)] if tail is not None else []
            gone += gone_too
        if not placed:
            return
        self._rescue(gone)
        numbers = [number for number, _ in placed]
        ids = [id_ for _, id_ in placed]
        self.store.write(sides, row, numbers, ids)
        self._pool.release(Match(ids))
        self._pool.refresh(chain)
        if len(tokens) >= KEEP_TOKENS:
            self._keep(self._pool.by_hash(hash_) for hash_ in chain.hashes if hash_ in self._pool)
        self.gauge()

    def on_disk(self, chain: Chain, tokens: Sequence[int]) -> list[bytes]:
        if self.disk is None or not self._disk_pays():
            return []
        first = self._pool.longest(chain)
        last = min(len(chain.hashes), -(-(len(tokens) - 1) // self.block_size))
        piece = chain.hashes[first : min(last, first + max(1, PIECE_BYTES // self.store.block_bytes))]
        return piece[: next((i for i, hash_ in enumerate(piece) if hash_ not in self.disk), len(piece))]

    def adopt(self, chain: Chain, tokens: Sequence[int], hashes: Sequence[bytes], payloads: Sequence[Payload]) -> bool:
        first = chain.hashes.index(hashes[0])
        shapes = self.store.host_shapes()
        fitting = [[(a.shape, str(a.dtype)) for a in payload.arrays] == shapes for payload in payloads]
        blocks: list[Host] = [payload.arrays for payload in payloads[: [*fitting, False].index(False)]]
        placed, gone = self._pool.commit(chain, tokens, range(first, first + len(blocks)))
        self._rescue(gone)
        if placed:
            ids = [id_ for _, id_ in placed]
            self.store.write_host([blocks[number - first] for number, _ in placed], ids)
            self._pool.release(Match(ids))
            self._pool.refresh(chain)
        self.gauge()
        return bool(blocks) and self._pool.longest(chain) >= first + len(blocks)

    @property
    def waiting_to_write(self) -> bool:
        return bool(self._rescued or self._down)

    @property
    def to_write(self) -> bool:
        room = self.disk is not None and self.disk.room >= BATCH_BYTES + self.store.block_bytes
        return room and self.waiting_to_write

    def write_down(self) -> None:
        assert self.disk is not None
        if not self._disk_pays():  # any more: the first prompts are kept before it is known
            self._down.clear()
            self._rescued.clear()
        if self._rescued:
            hashes, groups = self._rescued.popleft()
            for hash_, block in zip(hashes, self.store.to_host(groups), strict=True):
                self.disk.write(hash_, Payload(block))
            return
        # Copied now and brought to the host at the next call, so that nobody waits for a device that runs behind.
        hashes = []
        while self._down and len(hashes) < self._batch:
            hash_, _ = self._down.popitem(last=False)
            if hash_ in self._pool and hash_ not in self.disk:
                hashes.append(hash_)
        self._copy([self._pool.by_hash(hash_) for hash_ in hashes])

    def reset(self) -> None:
        self._pool.clear()
        self._down.clear()
        self._rescued.clear()
        self.store.clear()
        self.gauge()

    def set_max_bytes(self, max_bytes: int) -> None:
        """Holds no more than that from now on, and never more than at first."""
        self.store.drop_from(self._pool.set_limit(max_bytes // self.store.block_bytes))
        self.max_bytes = self._pool.limit * self.store.block_bytes
        self.metrics.blocks_total = self._pool.limit
        self.gauge()

    def flush(self) -> None:
        self._pool.flush()
        self._down.clear()
        self._rescued.clear()
        if not self._pool.cached:
            self.store.clear()
        if self.disk is not None:
            self.disk.flush()
        self.gauge()

    def gauge(self) -> None:
        self.metrics.evictions = self._pool.evictions
        self.metrics.blocks_cached = self._pool.cached
        self.metrics.blocks_referenced = self._pool.referenced
        self.metrics.bytes = self.store.nbytes

    def check_integrity(self) -> None:
        self._pool.check_integrity()

    def _keep(self, blocks: Iterable[Block]) -> None:
        if self._disk_pays():
            self._down |= {block.hash: None for block in blocks if self._lasting(block)}

    def _disk_pays(self) -> bool:
        """Returns whether to read a block takes less time than to compute it."""
        if self.disk is None:
            return False
        return self.prompt_rate * self.store.block_bytes <= self.disk.read_rate * self.block_size

    def _lasting(self, block: Block) -> bool:
        """Returns whether a block should go to the disk: one that is full and not there."""
        return self.disk is not None and len(block.tokens) == self.block_size and block.hash not in self.disk

    def _rescue(self, gone: Sequence[Block]) -> None:
        """Copies evicted blocks before their places are written over, as long as the disk keeps up."""
        for block in gone:
            self._down.pop(block.hash, None)
        if self.disk is None or not gone or not self._disk_pays():
            return
        waiting = sum(len(hashes) for hashes, _ in self._rescued) * self.store.block_bytes
        room = (MAX_RESCUED_BYTES - waiting) // self.store.block_bytes
        lost = [block for block in gone if self._lasting(block)]
        self.disk.metrics.dropped += max(0, len(lost) - max(0, room))
        self._copy(lost[: max(0, room)])

    def _copy(self, blocks: Sequence[Block]) -> None:
        for start in range(0, len(blocks), self._batch):
            some = blocks[start : start + self._batch]
            groups = self.store.copies([block.id for block in some])
            self._rescued.append(([block.hash for block in some], groups))
