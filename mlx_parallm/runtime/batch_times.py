"""How much a batch of predictions may hold so that it takes no longer than a given time, as recent batches tell it.

Batches are grouped by their cost, each twice the one before. On a GPU those of all small costs take the same time, that
of launching the kernels; so the largest that is fast enough counts, not the mean speed.
"""

import math
from dataclasses import dataclass

FIRST_COST = 256  # of a batch, before it is known how long one takes
MAX_COST = 1 << 14
# A batch may take at least this times what the fastest group takes: smaller ones are not faster.
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
        groups = self._groups.values()
        if not groups:
            return FIRST_COST
        seconds = max(seconds, MIN_OVER_FASTEST * min(one.seconds for one in groups))
        costs = [one.cost * seconds / one.seconds for one in groups if one.seconds <= seconds]
        return min(MAX_COST, math.ceil(max(costs)))
