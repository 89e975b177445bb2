"""The prefix cache's book: which block of tokens is where, who uses it, which goes first. No MLX.

A block is `size` tokens of some text with all that came before it: its hash covers its tokens and the hash of the
block before, back to a root that names the model, the adapter and its version, and the tenant's salt; in place of a
token that stands for an image it covers a number made of the image's digest. So equal hashes mean equal keys and
values. A block that nobody uses stays cached until its place is needed; the least recently used goes first, a text's
end before its prefix. `BlockPrefix` owns one; the engine thread alone calls it.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Any

NEAREST = 16  # siblings looked at for the longest common prefix
DIGEST = 16


def root_of(*seeds: str | int) -> bytes:
    """The hash that a chain starts from: whatever, beside the tokens, decides the keys and values."""
    return blake2b(repr(seeds).encode(), digest_size=DIGEST).digest()


@dataclass(slots=True)
class Chain:
    """The hashes of a text's full blocks, in order."""

    root: bytes
    size: int
    hashes: list[bytes] = field(default_factory=list)

    def extend(self, tokens: Sequence[int]) -> "Chain":
        """Goes on to the last full block of `tokens`, whose prefix the chain has covered already."""
        for start in range(len(self.hashes) * self.size, len(tokens) - self.size + 1, self.size):
            self.hashes.append(self.following(tokens[start : start + self.size]))
        return self

    def following(self, tokens: Sequence[int]) -> bytes:
        """The hash of a block of `tokens` after all the chain's."""
        return blake2b(self.before(len(self.hashes)) + _bytes_of(tokens), digest_size=DIGEST).digest()

    def before(self, number: int) -> bytes:
        return self.hashes[number - 1] if number else self.root

    def common(self, other: "Chain") -> int:
        """Returns how many blocks the two have in common."""
        pairs = zip(self.hashes, other.hashes, strict=False)
        return next((i for i, (one, two) in enumerate(pairs) if one != two), min(len(self.hashes), len(other.hashes)))


def _bytes_of(tokens: Sequence[int]) -> bytes:
    try:
        return array("i", tokens).tobytes()
    except OverflowError:  # where images stand: numbers that no token has
        return repr(tuple(tokens)).encode()


@dataclass(slots=True)
class Block:
    id: int
    hash: bytes
    parent: bytes
    tokens: tuple[int, ...]
    refs: int = 0


@dataclass(slots=True)
class Match:
    """Blocks found for the prefix of a prompt, held until they are released."""

    ids: list[int] = field(default_factory=list)
    length: int = 0  # tokens, at most what the blocks hold
    state: Any = None  # in place of blocks, a snapshot of a model's caches


class BlockPool:
    def __init__(self, total: int, size: int) -> None:
        self.total = total
        self.limit = total  # places that may be used: the first ones
        self.size = size
        self.evictions = 0
        self._free = list(range(total - 1, -1, -1))
        self._blocks: dict[int, Block] = {}  # those with content
        self._unused: OrderedDict[int, None] = OrderedDict()  # with content and without users, oldest first
        self._by_hash: dict[bytes, int] = {}
        self._children: dict[bytes, dict[int, None]] = {}  # by the hash before them, the newest last

    @property
    def cached(self) -> int:
        return len(self._blocks)

    @property
    def referenced(self) -> int:
        return len(self._blocks) - len(self._unused)

    def __contains__(self, hash_: bytes) -> bool:
        return hash_ in self._by_hash

    def __getitem__(self, block_id: int) -> Block:
        return self._blocks[block_id]

    def by_hash(self, hash_: bytes) -> Block:
        return self._blocks[self._by_hash[hash_]]

    def match(self, chain: Chain, tokens: Sequence[int], limit: int) -> Match:
        """Takes hold of the longest known prefix of `tokens`, of at most `limit` tokens."""
        ids = []
        for hash_ in chain.hashes[: -(-limit // self.size)]:
            if hash_ not in self._by_hash:
                break
            ids.append(self._by_hash[hash_])
        length = min(len(ids) * self.size, limit)
        if length < limit:
            rest = tokens[length : min(limit, length + self.size)]
            nearest, shared = self._nearest(chain.before(len(ids)), rest)
            if shared:
                ids.append(nearest)
                length += shared
        for id_ in ids:
            self._hold(id_)
        return Match(ids, length)

    def longest(self, chain: Chain) -> int:
        """Returns how many blocks of a chain are here, without taking hold of them."""
        return next((i for i, hash_ in enumerate(chain.hashes) if hash_ not in self._by_hash), len(chain.hashes))

    def release(self, match: Match) -> None:
        for id_ in reversed(match.ids):  # the end of a text becomes the older
            block = self._blocks[id_]
            block.refs -= 1
            assert block.refs >= 0, f"block {id_} is released twice"
            if not block.refs:
                self._unused[id_] = None
                if id_ >= self.limit:
                    self._forget(id_)
        match.ids = []
        match.length = 0

    def commit(
        self, chain: Chain, tokens: Sequence[int], numbers: Iterable[int]
    ) -> tuple[list[tuple[int, int]], list[Block]]:
        """Gives places to those of a chain's blocks that have none, and holds them: write them, then release them.

        Returns (block number, id) of each, and the blocks that went to make room: their content is there until the
        new is written.
        """
        placed: list[tuple[int, int]] = []
        gone: list[Block] = []
        kept = set(chain.hashes)
        for number in numbers:
            hash_ = chain.hashes[number]
            if hash_ in self._by_hash:
                continue
            start = number * self.size
            content = tuple(tokens[start : start + self.size])
            id_ = self._place_for(chain.before(number), content, gone, kept)
            if id_ is None:
                break
            self._enter(Block(id_, hash_, chain.before(number), content, refs=1))
            placed.append((number, id_))
        return placed, gone

    def commit_tail(self, chain: Chain, tokens: Sequence[int]) -> tuple[int | None, list[Block]]:
        """The same for the tokens after a chain's last full block: a block that is not full, found by its tokens."""
        content = tuple(tokens[len(chain.hashes) * self.size :])
        hash_ = chain.following(content)
        parent = chain.before(len(chain.hashes))
        gone: list[Block] = []
        known = hash_ in self._by_hash or self._nearest(parent, content)[1] == len(content)
        if not content or known or (chain.hashes and parent not in self._by_hash):
            return None, gone
        id_ = self._place_for(parent, content, gone, set(chain.hashes))
        if id_ is not None:
            self._enter(Block(id_, hash_, parent, content, refs=1))
        return id_, gone

    def refresh(self, chain: Chain) -> None:
        """A text was used: its blocks become the newest, its prefix the newest of them."""
        for hash_ in reversed(chain.hashes):
            if hash_ in self._by_hash and self._by_hash[hash_] in self._unused:
                self._unused.move_to_end(self._by_hash[hash_])

    def clear(self) -> None:
        """Forgets all blocks; nobody may use one any more."""
        self._free = list(range(self.limit - 1, -1, -1))
        self._blocks.clear()
        self._unused.clear()
        self._by_hash.clear()
        self._children.clear()

    def flush(self) -> None:
        """Forgets all blocks that nobody uses."""
        for id_ in list(self._unused):
            self._forget(id_)
            self._free.append(id_)

    def set_limit(self, limit: int) -> int:
        """Uses only the first `limit` places from now on, and forgets what nobody uses in the others.

        Returns how many places are in use: what is beyond the limit and still held goes when it is released.
        """
        self.limit = min(self.total, max(1, limit))
        for id_ in [id_ for id_ in self._unused if id_ >= self.limit]:
            self._forget(id_)
        self._free = [id_ for id_ in range(self.limit - 1, -1, -1) if id_ not in self._blocks]
        return max(self.limit, max(self._blocks, default=-1) + 1)

    def check_integrity(self) -> None:
        beyond = sum(id_ >= self.limit for id_ in self._blocks)
        assert len(self._free) + len(self._blocks) - beyond == self.limit, "a block is lost"
        assert not set(self._free) & set(self._blocks), "a block is both free and cached"
        for id_, block in self._blocks.items():
            assert self._by_hash.get(block.hash) == id_, "a block can't be found by its hash"
            assert (block.refs == 0) == (id_ in self._unused), "a block's users are miscounted"
        assert len(self._by_hash) == len(self._blocks) == sum(map(len, self._children.values()))

    def _hold(self, id_: int) -> None:
        block = self._blocks[id_]
        block.refs += 1
        self._unused.pop(id_, None)

    def _nearest(self, parent: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        """The block after `parent` that begins most like `tokens`, and how many they share."""
        best = (-1, 0)
        for id_ in self._newest(parent):
            known = self._blocks[id_].tokens
            pairs = zip(known, tokens, strict=False)
            shared = next((i for i, (one, two) in enumerate(pairs) if one != two), min(len(known), len(tokens)))
            if shared > best[1]:
                best = (id_, shared)
        return best

    def _enter(self, block: Block) -> None:
        self._blocks[block.id] = block
        self._by_hash[block.hash] = block.id
        self._children.setdefault(block.parent, {})[block.id] = None

    def _place_for(self, parent: bytes, tokens: tuple[int, ...], gone: list[Block], kept: set[bytes]) -> int | None:
        """A place for a new block: that of one which was not full and which `tokens` go on from, if there is one."""
        for id_ in self._newest(parent):
            known = self._blocks[id_].tokens
            if len(known) < len(tokens) and id_ in self._unused and tokens[: len(known)] == known:
                self._forget(id_)
                return id_
        return self._place(gone, kept)

    def _place(self, gone: list[Block], kept: set[bytes]) -> int | None:
        if self._free:
            return self._free.pop()
        for id_ in self._unused:
            if self._blocks[id_].hash not in kept:  # a text does not push out its own prefix
                gone.append(self._forget(id_))
                self.evictions += 1
                return id_
        return None

    def _forget(self, id_: int) -> Block:
        del self._unused[id_]
        block = self._blocks.pop(id_)
        del self._by_hash[block.hash]
        siblings = self._children[block.parent]
        del siblings[id_]
        if not siblings:
            del self._children[block.parent]
        return block

    def _newest(self, parent: bytes) -> Iterable[int]:
        """A few of the blocks after `parent`: thousands of texts may begin alike."""
        return islice(reversed(self._children.get(parent, {})), NEAREST)
