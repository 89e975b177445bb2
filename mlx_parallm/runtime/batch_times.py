"""How much a batch of predictions may hold so that it takes no longer than a given time, as recent batches tell it.

Batches are grouped by their cost, each twice the one before. On a GPU those of all small costs take the same time, that
of launching the kernels; so the largest that is fast enough counts, not the mean speed.
"""

import math
from dataclasses import dataclass

FIRST_COST = 256  # of a batch, before it is known how long one takes
MAX_COST = 1 << 14
# A batch may take at least this times what the fastest group takes, where smaller ones are not faster.
MIN_OVER_FASTEST = 1.25
WEIGHT_OF_NEWEST = 0.3  # in a group's moving averages
RECENT = 64  # batches within which a group was not seen: it is forgotten, and may be tried again


@dataclass(slots=True)
class CostGroup:
    """Batches of similar cost."""

    cost: float
    seconds: float
    newest: int  # the number of its newest batch

    def add(self, cost: int, seconds: float, number: int) -> None:
        self.cost += (cost - self.cost) * WEIGHT_OF_NEWEST
        self.seconds += (seconds - self.seconds) * WEIGHT_OF_NEWEST
        self.newest = number


class BatchTimes:
    def __init__(self) -> None:
        self._groups: dict[int, CostGroup] = {}  # by the number of bits of the cost
        self._tried: dict[int, int] = {}  # groups that were asked for: how many batches there had been
        self._count = 0

    def add(self, cost: int, seconds: float) -> None:
        self._count += 1
        seconds = max(1e-6, seconds)
        group = self._groups.get(cost.bit_length())
        if group is None:
            self._groups[cost.bit_length()] = CostGroup(cost, seconds, self._count)
        else:
            group.add(cost, seconds, self._count)
        self._groups = {key: one for key, one in self._groups.items() if one.newest > self._count - RECENT}

    def cost_within(self, seconds: float) -> int:
        """What the next batch may cost. Where all known ones take longer than this, one of half the cost is tried."""
        if not self._groups:
            return FIRST_COST
        fastest = min(self._groups, key=lambda bits: self._groups[bits].seconds)
        if self._groups[fastest].seconds > seconds and self._worth_trying(fastest - 1):
            self._tried[fastest - 1] = self._count
            return math.ceil(self._groups[fastest].cost / 2)
        return max(self.launch_cost, self._largest_within(seconds))

    @property
    def launch_cost(self) -> int:
        """Of the largest batch that takes about as long as the fastest."""
        if not self._groups:
            return 0
        return self._largest_within(MIN_OVER_FASTEST * min(one.seconds for one in self._groups.values()))

    def _largest_within(self, seconds: float) -> int:
        costs = [one.cost * seconds / one.seconds for one in self._groups.values() if one.seconds <= seconds]
        return min(MAX_COST, math.ceil(max(costs, default=0)))

    def _worth_trying(self, bits: int) -> bool:
        """Whether batches of this group may be faster than those of the next, the fastest that is known: not if that
        one is little faster than its own double, or if inputs were too large for this group when it was tried."""
        fastest, double = self._groups[bits + 1], self._groups.get(bits + 2)
        if bits < 1 or bits in self._groups or self._count - self._tried.get(bits, -RECENT) < RECENT:
            return False
        return double is None or double.seconds >= MIN_OVER_FASTEST * fastest.seconds
