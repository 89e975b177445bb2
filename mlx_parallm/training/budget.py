"""How many tokens a micro-batch may have: by how long the last ones took, and by the memory at hand.

Trainers ask before each micro-batch and report what it took. Engine thread only, but for `longest_text`.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.devices.machine_memory import room_at_hand

# tokens
MIN_MICRO = 32
MAX_MICRO = 8192
TOO_LONG = 0.67  # of the time that a micro-batch should take, over the time it took
ALONE = 4  # times longer may a micro-batch take while nobody is served


@dataclass(slots=True)
class Pace:
    """How many tokens make a micro-batch of the wanted length."""

    seconds: float
    fixed: int
    least: int = MIN_MICRO
    tokens: int = 2 * MIN_MICRO

    def budget(self, room: int = MAX_MICRO) -> int:
        """`room`: for so many there is memory."""
        return self.fixed or min(self.tokens, room)

    def note(self, tokens: int, seconds: float) -> None:
        """A micro-batch that took far too long makes the next smaller; one that was full and quick, larger: twice at
        most."""
        factor = self.seconds / max(seconds, 1e-6)
        if factor < TOO_LONG or (factor > 1 and 2 * tokens >= self.tokens):
            self.tokens = int(min(MAX_MICRO, max(self.least, self.tokens * min(2.0, max(0.5, factor)))))


@dataclass(frozen=True, slots=True, order=True)
class MemoryUse:
    """The bytes that a micro-batch took, and its tokens."""

    nbytes: int
    tokens: int


class Budget:
    def __init__(
        self,
        seconds: float,
        fixed: int = 0,
        *,
        least: int = MIN_MICRO,
        at_hand: Callable[[], int] | None = None,
        score_bytes: int = 0,
    ) -> None:
        """`seconds` that a micro-batch should take while somebody waits; `fixed`: it has always so many tokens;
        `at_hand`: bytes that it may take; `score_bytes`: of a token and another that it attends to."""
        self._score_bytes = score_bytes
        self._at_hand = at_hand or room_at_hand
        self._paces = {
            busy: Pace(times * seconds, fixed, least, 2 * times * least) for busy, times in ((True, 1), (False, ALONE))
        }
        self._pace = self._paces[True]
        self.largest = MemoryUse(0, 0)  # the most memory that a micro-batch has taken

    def tokens(self, busy: bool) -> int:
        """`busy`: somebody waits meanwhile."""
        self._pace = self._paces[busy]
        largest = self.largest
        if largest.nbytes <= 0:
            return self._pace.budget(MAX_MICRO)
        return self._pace.budget(max(1, int(self._at_hand() * largest.tokens / largest.nbytes)))

    def room(self, length: int) -> int:
        """Returns for how many tokens there is memory, where the longest text has so many: one text at least."""
        if not self._score_bytes:
            return MAX_MICRO
        return max(length, self._at_hand() // (self._score_bytes * max(1, length)))

    def longest_text(self) -> int | None:
        """Returns how many tokens a text may have at most; None where memory does not grow with its square."""
        return math.isqrt(max(0, self._at_hand()) // self._score_bytes) if self._score_bytes else None

    def run(self, tokens: int, work: Callable[[], None], timed: bool = True) -> int:
        """Does the work of a micro-batch and notes what it took; returns the bytes. `timed`: its time tells how many
        tokens to take next."""
        begun = time.perf_counter()
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        work()
        nbytes = int(mx.get_peak_memory()) - held
        self.largest = max(self.largest, MemoryUse(nbytes, tokens))
        if timed:
            self._pace.note(tokens, time.perf_counter() - begun)
        return nbytes
