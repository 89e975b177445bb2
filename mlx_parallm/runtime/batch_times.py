"""How much a batch of predictions may hold so that rows beside it wait no longer than a given time, as recent batches
tell it. They wait for a part of it, where it can be paused.

Batches are grouped by their cost, each twice the one before. On a GPU those of all small costs take the same time, that
of launching the kernels; so the largest that is fast enough counts, not the mean speed.
"""

import math
from dataclasses import dataclass

FIRST_COST = 256  # of a batch, before it is known how long one takes
MAX_COST = 1 << 14
MAX_SECONDS = 0.25  # of a batch with all its parts: others wait for its end
MEAN_PART = 0.75  # of the longest part of a batch
# A batch may take at least this times what the fastest group takes, where smaller ones are not faster.
MIN_OVER_FASTEST = 1.25
WEIGHT_OF_NEWEST = 0.3  # in a group's moving averages
RECENT = 64  # batches within which a group was not seen: it is forgotten, and may be tried again


@dataclass(slots=True)
class CostGroup:
    """Batches of similar cost."""

    cost: float
    seconds: float
    parts: float  # between which a batch can be paused
    newest: int  # the number of its newest batch

    def add(self, cost: int, seconds: float, parts: int, number: int) -> None:
        self.cost += (cost - self.cost) * WEIGHT_OF_NEWEST
        self.seconds += (seconds - self.seconds) * WEIGHT_OF_NEWEST
        self.parts += (parts - self.parts) * WEIGHT_OF_NEWEST
        self.newest = number

    def excess(self, seconds: float) -> float:
        """How much too long a batch is whose parts should take so many seconds at most; up to 1, it is not."""
        part = self.seconds if self.parts < 2 else self.seconds / self.parts / MEAN_PART
        return max(part / max(1e-6, seconds), self.seconds / MAX_SECONDS)


class BatchTimes:
    def __init__(self) -> None:
        self._groups: dict[int, CostGroup] = {}  # by the number of bits of the cost
        self._tried: dict[int, int] = {}  # groups that were asked for: how many batches there had been
        self._count = 0

    def add(self, cost: int, seconds: float, parts: int = 1) -> None:
        self._count += 1
        seconds = max(1e-6, seconds)
        group = self._groups.get(cost.bit_length())
        if group is None:
            self._groups[cost.bit_length()] = CostGroup(cost, seconds, parts, self._count)
        else:
            group.add(cost, seconds, parts, self._count)
        self._groups = {key: one for key, one in self._groups.items() if one.newest > self._count - RECENT}

    def cost_within(self, seconds: float) -> int:
        """What the next batch may cost. Where all known ones take too long, one of half the cost is tried."""
        if not self._groups:
            return FIRST_COST
        excesses = {bits: one.excess(seconds) for bits, one in self._groups.items()}
        fastest = min(excesses, key=lambda bits: excesses[bits])
        if excesses[fastest] > 1 and self._worth_trying(fastest - 1, excesses):
            self._tried[fastest - 1] = self._count
            return math.ceil(self._groups[fastest].cost / 2)
        return self._largest_within(max(1.0, MIN_OVER_FASTEST * excesses[fastest]), excesses)

    @property
    def launch_cost(self) -> int:
        """Of the largest batch that takes about as long as the fastest."""
        seconds = {bits: one.seconds for bits, one in self._groups.items()}
        return self._largest_within(MIN_OVER_FASTEST * min(seconds.values()), seconds) if seconds else 0

    def _largest_within(self, limit: float, found: dict[int, float]) -> int:
        """The largest cost of a batch for which what was found is within the limit, as its group tells it."""
        costs = [self._groups[bits].cost * limit / value for bits, value in found.items() if value <= limit]
        return min(MAX_COST, math.ceil(max(costs)))

    def _worth_trying(self, bits: int, excesses: dict[int, float]) -> bool:
        """Whether batches of this group may be faster than those of the next, the fastest that is known: not if that
        one is little faster than its own double, or if inputs were too large for this group when it was tried."""
        if bits < 1 or bits in excesses or self._count - self._tried.get(bits, -RECENT) < RECENT:
            return False
        return bits + 2 not in excesses or excesses[bits + 2] >= MIN_OVER_FASTEST * excesses[bits + 1]
