"""Which replica answers a request: the one whose cache has most of its prompt, unless that one has too much to do.

The front asks `AffinityRouter.choose` and tells it what was sent where; replicas report what they hold, so that a front
that has just started, or one of several, knows it too. What a replica holds is a bounded set of hashes, each of which
names the prefix of a prompt up to some place (`prompts.py` makes them); the longest unused are forgotten first, as
in the replica's own cache. Sets of replicas are the bits of an integer, so that a choice among a hundred costs a
look-up for each hash and a few operations on integers. No Ray, no MLX: benchmarks/cluster_simulation.py runs it alone.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

CAPACITY = 16384  # hashes kept of each replica
LOAD_COST = 64  # characters of a cached prompt that a request in flight weighs up
ADAPTER_BONUS = 1024  # characters that an adapter on the device is worth
# a replica has too much to do beyond FACTOR × the mean load + SLACK
OVERLOAD_FACTOR = 1.25
OVERLOAD_SLACK = 4
OVERLOADED = 1 << 40  # more than any prompt is worth


@dataclass(frozen=True, slots=True)
class PromptPrefix:
    """The prefixes of a prompt: `hashes[i]` names its first `lengths[i]` characters, and what else decides them."""

    hashes: Sequence[int] = ()
    lengths: Sequence[int] = ()


@dataclass(slots=True)
class ReplicaDigest:
    """What the router knows of a replica."""

    name: str
    bit: int
    capacity: int = CAPACITY
    load: int = 0  # requests in flight
    hashes: OrderedDict[int, None] = field(default_factory=OrderedDict)  # the longest unused first
    adapters: OrderedDict[str, None] = field(default_factory=OrderedDict)


class AffinityRouter:
    def __init__(
        self,
        capacity: int = CAPACITY,
        adapters: int = 8,  # that fit onto a replica's device
        load_cost: int = LOAD_COST,
        overload_factor: float = OVERLOAD_FACTOR,
        overload_slack: int = OVERLOAD_SLACK,
    ) -> None:
        self._capacity = capacity
        self._adapters = adapters
        self._load_cost = load_cost
        self._factor = overload_factor
        self._slack = overload_slack
        self._replicas: dict[str, ReplicaDigest] = {}
        self._by_bit: dict[int, ReplicaDigest] = {}
        self._all = 0
        self._total_load = 0
        self._turn = 1  # the bit after the one that was chosen last
        self._holders: dict[int, int] = {}  # by hash
        self._resident: dict[str, int] = {}  # by adapter
        self._levels: list[int] = [0]  # replicas by their load

    @property
    def names(self) -> list[str]:
        return list(self._replicas)

    @property
    def hashes(self) -> int:
        """Different ones that are known, of all replicas."""
        return len(self._holders)

    def load(self, name: str) -> int:
        return self._replicas[name].load

    def add(self, name: str) -> None:
        bit = 1
        while bit & self._all:
            bit <<= 1
        self._replicas[name] = self._by_bit[bit] = ReplicaDigest(name, bit, self._capacity)
        self._all |= bit
        self._levels[0] |= bit

    def remove(self, name: str) -> None:
        replica = self._replicas.pop(name)
        self.clear(replica)
        del self._by_bit[replica.bit]
        self._all &= ~replica.bit
        self._levels[replica.load] &= ~replica.bit
        self._total_load -= replica.load

    def clear(self, replica: ReplicaDigest | str) -> None:
        """Forgets what a replica holds: its cache is empty."""
        replica = self._replicas[replica] if isinstance(replica, str) else replica
        for hash_ in replica.hashes:
            _drop(self._holders, hash_, replica.bit)
        for adapter in replica.adapters:
            _drop(self._resident, adapter, replica.bit)
        replica.hashes.clear()
        replica.adapters.clear()

    def choose(self, prefix: PromptPrefix, adapter: str | None = None, avoid: Collection[str] = ()) -> str | None:
        """The replica for a prompt; None where there is none but those to avoid."""
        allowed = self._all
        for name in avoid:
            if name in self._replicas:
                allowed &= ~self._replicas[name].bit
        if not allowed:
            return None
        limit = self._slack + self._factor * self._total_load / len(self._replicas)
        resident = self._resident.get(adapter, 0) if adapter else 0
        best = 0
        best_score = float("-inf")
        for mask, length in self._matches(prefix, allowed):
            for part, worth in ((mask & resident, length + ADAPTER_BONUS), (mask & ~resident, length)):
                if part:
                    bits, load = self._least_loaded(part)
                    score = worth - self._load_cost * load - (OVERLOADED if load > limit else 0)
                    if score > best_score:
                        best = bits
                        best_score = score
        return self._by_bit[self._next(best)].name

    def note(self, name: str, prefix: PromptPrefix, adapter: str | None = None) -> None:
        """A replica has, or is about to have, a prompt in its cache and an adapter on its device."""
        self.hold(name, reversed(prefix.hashes))  # the end of a text becomes the older
        replica = self._replicas.get(name)
        if adapter and replica is not None:
            replica.adapters[adapter] = None
            replica.adapters.move_to_end(adapter)
            self._resident[adapter] = self._resident.get(adapter, 0) | replica.bit
            while len(replica.adapters) > self._adapters:
                _drop(self._resident, replica.adapters.popitem(last=False)[0], replica.bit)

    def hold(self, name: str, hashes: Iterable[int]) -> None:
        """A replica has these, the longest unused first."""
        replica = self._replicas.get(name)
        if replica is None:
            return
        for hash_ in hashes:
            replica.hashes[hash_] = None
            replica.hashes.move_to_end(hash_)
            self._holders[hash_] = self._holders.get(hash_, 0) | replica.bit
        while len(replica.hashes) > replica.capacity:
            _drop(self._holders, replica.hashes.popitem(last=False)[0], replica.bit)

    def begin(self, name: str) -> None:
        """A request is on its way to a replica."""
        self._change_load(name, 1)

    def end(self, name: str) -> None:
        self._change_load(name, -1)

    def _change_load(self, name: str, change: int) -> None:
        replica = self._replicas.get(name)
        if replica is None:  # it has gone meanwhile
            return
        self._levels[replica.load] &= ~replica.bit
        replica.load = max(0, replica.load + change)
        while len(self._levels) <= replica.load:
            self._levels.append(0)
        self._levels[replica.load] |= replica.bit
        self._total_load = max(0, self._total_load + change)

    def _matches(self, prefix: PromptPrefix, allowed: int) -> Iterator[tuple[int, int]]:
        """Disjoint sets of replicas, each with how much of the prompt its members have."""
        holding = allowed
        length = 0
        for hash_, here in zip(prefix.hashes, prefix.lengths, strict=True):
            further = holding & self._holders.get(hash_, 0)
            if further != holding:
                yield holding & ~further, length
            if not further:
                return
            holding = further
            length = here
        yield holding, length

    def _least_loaded(self, mask: int) -> tuple[int, int]:
        """Those of a set that have least to do, and how much that is."""
        for load, level in enumerate(self._levels):
            if level & mask:
                return level & mask, load
        raise AssertionError("a replica without a load")

    def _next(self, mask: int) -> int:
        """One of equals, each in turn."""
        later = mask & -self._turn  # at this bit or above
        chosen = (later or mask) & -(later or mask)
        self._turn = chosen << 1
        return chosen


def _drop(masks: dict, key: object, bit: int) -> None:  # type: ignore[type-arg]
    rest = masks[key] & ~bit
    if rest:
        masks[key] = rest
    else:
        del masks[key]
