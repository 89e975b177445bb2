"""How many replicas a machine should run, by the requests in flight. No Ray, no clock of its own."""

import math
from collections import deque

UP_SECONDS = 10.0  # for which more replicas must have been needed before they are added


class Scaling:
    def __init__(self, least: int, most: int, requests_each: int, down_seconds: float) -> None:
        """`requests_each`: what one replica serves at the same time; more requests wait in a queue."""
        self._least = least
        self._most = most
        self._requests_each = requests_each
        self._down_seconds = down_seconds
        self._needed: deque[tuple[float, int]] = deque()  # when, and how many replicas were needed

    def wanted(self, in_flight: int, current: int, now: float) -> int:
        """Returns how many there should be; called every few seconds. More than `current` when more were needed
        throughout `UP_SECONDS`; fewer when fewer were enough throughout `down_seconds`."""
        needed = min(self._most, max(self._least, math.ceil(in_flight / self._requests_each)))
        self._needed.append((now, needed))
        oldest = now - max(UP_SECONDS, self._down_seconds)
        while len(self._needed) > 1 and self._needed[1][0] <= oldest:  # the first shows that the time has passed
            self._needed.popleft()
        up = min(self._within(UP_SECONDS, now), default=current)
        down = max(self._within(self._down_seconds, now), default=current)
        return up if up > current else min(current, down)

    def _within(self, seconds: float, now: float) -> list[int]:
        """Returns what was needed at each call of the last `seconds`; empty before calls go back that far."""
        if self._needed[0][0] > now - seconds:
            return []
        return [needed for second, needed in self._needed if second >= now - seconds]
