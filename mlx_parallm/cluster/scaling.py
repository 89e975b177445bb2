"""How many replicas a machine should run, by the requests in flight. No Ray, no clock of its own."""

import math
from collections import deque

UP_SECONDS = 10.0  # for which more must have been needed


class Scaling:
    def __init__(self, least: int, most: int, requests_each: int, down_seconds: float) -> None:
        """`requests_each`: what one replica serves at the same time; more requests wait in a queue."""
        self._least = least
        self._most = most
        self._requests_each = requests_each
        self._down_seconds = down_seconds
        self._needed: deque[tuple[float, int]] = deque()  # seconds, replicas

    def wanted(self, in_flight: int, current: int, now: float) -> int:
        """To be asked every few seconds. More than `current` once that many were needed all the time for a while; fewer
        once that many were enough for a longer while."""
        needed = min(self._most, max(self._least, math.ceil(in_flight / self._requests_each)))
        self._needed.append((now, needed))
        oldest = now - max(UP_SECONDS, self._down_seconds)
        while len(self._needed) > 1 and self._needed[1][0] <= oldest:  # the first shows that the time has passed
            self._needed.popleft()
        up = min(self._within(UP_SECONDS, now), default=current)
        down = max(self._within(self._down_seconds, now), default=current)
        return up if up > current else min(current, down)

    def _within(self, seconds: float, now: float) -> list[int]:
        """What was needed within so many seconds; nothing while it has not looked for so long."""
        if self._needed[0][0] > now - seconds:
            return []
        return [needed for second, needed in self._needed if second >= now - seconds]
