"""The prefix cache as the engine sees it: what is known of a prompt's beginning, put into place and taken over.

`BlockPrefix` is for models in slots: blocks in slabs. The engine asks `match` before it plans a prompt, the runner
asks `fill` when it starts one and `commit` when its keys and values are there. Engine thread only.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_parallm.kv.blocks import BlockPool, Chain, Match, root_of
from mlx_parallm.kv.slots import PromptLayer
from mlx_parallm.kv.store import BlockStore
from mlx_parallm.metrics import PrefixMetrics


class BlockPrefix:
    def __init__(self, store: BlockStore, size: int, identity: str, min_match: int) -> None:
        self._store = store
        self._pool = BlockPool(store.total, size)
        self._size = size
        self._min_match = min_match  # fewer tokens are computed sooner than fetched
        self._identity = identity  # of the model, and of how its keys and values are kept
        self.metrics = PrefixMetrics(blocks_total=store.total)
        self.max_bytes = store.total * store.block_bytes

    def chain(self, tokens: Sequence[int], salt: str) -> Chain:
        return Chain(root_of(self._identity, salt), self._size).extend(tokens)

    def known(self, chain: Chain) -> int:
        """How many of a text's blocks are here."""
        return self._pool.longest(chain)

    def match(self, chain: Chain, tokens: Sequence[int]) -> Match:
        """Takes hold of the longest known beginning. The last token is always computed: its logits are needed."""
        match = self._pool.match(chain, tokens, len(tokens) - 1)
        if match.length < self._min_match:
            self._pool.release(match)
        return match

    def release(self, match: Match) -> None:
        self._pool.release(match)

    def admitted(self, match: Match) -> None:
        """Counts a prompt that begins now, with what was found of it."""
        self.metrics.lookups += 1
        self.metrics.hits += match.length > 0
        self.metrics.hit_tokens += match.length

    def fill(self, staged: list[PromptLayer], matches: Sequence[Match]) -> None:
        """Puts equally long beginnings into fresh prompt caches."""
        length, rows = matches[0].length, len(matches)
        if all(match.ids == matches[0].ids for match in matches):
            sides = self._store.read(matches[0].ids, 1, length)
            mx.async_eval(sides)  # before anything is written over the blocks
            sides = [mx.broadcast_to(side, (rows, *side.shape[1:])) for side in sides] if rows > 1 else sides
        else:
            sides = self._store.read([id_ for match in matches for id_ in match.ids], rows, length)
            mx.async_eval(sides)
        for layer, keys, values in zip(staged, sides[::2], sides[1::2], strict=True):
            layer.restore(keys, values, length)

    def commit(self, layers: Sequence[Any], row: int, chain: Chain, tokens: Sequence[int]) -> None:
        """Keeps the full blocks of `tokens`, whose keys and values a row of `layers` holds, that are not kept yet."""
        placed, _ = self._pool.commit(chain.extend(tokens), tokens)
        if placed:
            numbers, ids = [number for number, _ in placed], [id_ for _, id_ in placed]
            sides = [side for layer in layers for side in (layer.keys, layer.values)]
            self._store.write(sides, row, numbers, ids)
            self._pool.release(Match(ids))
            self.gauge()

    def flush(self) -> None:
        self._pool.flush()
        if not self._pool.cached:
            self._store.clear()
        self.gauge()

    def gauge(self) -> None:
        self.metrics.evictions = self._pool.evictions
        self.metrics.blocks_cached = self._pool.cached
        self.metrics.blocks_referenced = self._pool.referenced
        self.metrics.bytes = self._store.nbytes

    def check_integrity(self) -> None:
        self._pool.check_integrity()
