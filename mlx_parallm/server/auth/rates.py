"""How much each key has used: requests and tokens within the last 60 seconds, and requests that run. `caller` asks.

The window slides: in no 60 seconds are more requests let in than the limit, wherever they begin. Time is cut into
tenths of a second, and a tenth leaves the window whole, so that a window holds 601 numbers however many requests come.
All of this runs on the event loop: between a look and the entry that follows from it nobody else comes.
"""

import math
import time
from collections import deque
from collections.abc import Callable

from mlx_parallm.errors import RateLimitError
from mlx_parallm.server.auth.keys import Key, KeyLimits

SECONDS = 60.0
STEP = 0.1
UNSTATED_SHARE = 8  # a response without max_tokens reserves at most 1/8 of the limit

Clock = Callable[[], float]


class SlidingWindow:
    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._steps: deque[tuple[int, int]] = deque()  # number of the step, amount; the oldest first
        self._used = 0

    @property
    def used(self) -> int:
        now = self._clock()
        while self._steps and self._end(self._steps[0][0]) <= now:
            self._used -= self._steps.popleft()[1]
        return self._used

    def add(self, amount: int) -> None:
        if amount <= 0:
            return
        step = math.floor(self._clock() / STEP)
        self._used += amount
        if self._steps and self._steps[-1][0] == step:
            amount += self._steps.pop()[1]
        self._steps.append((step, amount))

    def take_back(self, amount: int) -> None:
        """What was added last."""
        while amount > 0 and self._steps:
            step, added = self._steps.pop()
            taken = min(amount, added)
            amount = amount - taken
            self._used = self._used - taken
            if added > taken:
                self._steps.append((step, added - taken))

    def wait(self, amount: int, limit: int) -> float:
        """Seconds until so much more fits; infinite where it never does."""
        over = self.used + amount - limit
        if over <= 0:
            return 0.0
        for step, left in self._steps:
            over -= left
            if over <= 0:
                return self._end(step) - self._clock()
        return math.inf

    def reset(self) -> float:
        """Seconds until nothing is counted any more."""
        return self._end(self._steps[-1][0]) - self._clock() if self.used else 0.0

    @staticmethod
    def _end(step: int) -> float:
        """Returns when the whole of a step is so long ago that it is not counted."""
        return (step + 1) * STEP + SECONDS


class KeyUsage:
    """What one key has used and is using."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.requests = SlidingWindow(clock)
        self.tokens = SlidingWindow(clock)
        self.running = 0
        self.expected = 0  # tokens that responses may have which are being generated

    def admit(self, limits: KeyLimits) -> None:
        """Counts a request that begins; RateLimitError, and nothing is counted, where it may not."""
        if limits.concurrency is not None and self.running >= limits.concurrency:
            raise RateLimitError(
                f"this key runs {self.running} requests, and its limit is {limits.concurrency} at once: "
                "wait until one has ended"
            )
        _check(self.requests, 1, limits.requests_per_minute, "requests")
        _check(self.tokens, 0, limits.tokens_per_minute, "tokens")
        self.requests.add(1)
        self.running += 1

    def charge_prompt(self, tokens: int, limits: KeyLimits) -> None:
        """Charges a prompt's tokens before it is computed; raises RateLimitError where they do not fit."""
        _check(self.tokens, tokens, limits.tokens_per_minute, "tokens")
        self.tokens.add(tokens)

    def expect(self, tokens: int, stated: bool, limits: KeyLimits) -> int:
        """Reserves a completion's tokens before it is generated, and returns how many. Raises RateLimitError where
        those of others may use up the limit; its own may go over it."""
        limit = limits.tokens_per_minute
        if limit is None:
            return 0
        if self.expected and self.tokens.used + self.expected > limit:
            raise RateLimitError(
                f"this key has used {self.tokens.used} tokens within the last minute, and its running requests may use "
                f"{self.expected} more; its limit is {limit}: wait until one has ended, or send max_tokens with each"
            )
        expected = tokens if stated else min(tokens, max(1, limit // UNSTATED_SHARE))
        self.expected += expected
        return expected

    def reserve(self, tokens: int, limits: KeyLimits) -> int:
        """The same for responses that must fit, with all that is being generated. RateLimitError."""
        if limits.tokens_per_minute is None:
            return 0
        _check(self.tokens, self.expected + tokens, limits.tokens_per_minute, "tokens")
        self.expected += tokens
        return tokens

    def headers(self, limits: KeyLimits) -> dict[str, str]:
        """OpenAI's headers for each limit that there is."""
        told: dict[str, str] = {}
        for name, window, limit in (
            ("requests", self.requests, limits.requests_per_minute),
            ("tokens", self.tokens, limits.tokens_per_minute),
        ):
            if limit is not None:
                told[f"x-ratelimit-limit-{name}"] = str(limit)
                told[f"x-ratelimit-remaining-{name}"] = str(max(0, limit - window.used))
                told[f"x-ratelimit-reset-{name}"] = duration(window.reset())
        return told


def _check(window: SlidingWindow, amount: int, limit: int | None, what: str) -> None:
    if limit is None or window.used + max(amount, 1) <= limit:
        return
    seconds = window.wait(max(amount, 1), limit)
    if math.isinf(seconds):
        message = f"this request has {amount} {what}, more than this key may use in a minute: its limit is {limit}"
        raise RateLimitError(message, retry_after=math.ceil(SECONDS))
    asked = f", and this request has {amount}" if amount > 1 else ""
    raise RateLimitError(
        f"this key has used {window.used} {what} within the last minute{asked}; its limit is {limit}: "
        f"try again in {duration(seconds)}",
        retry_after=max(1, math.ceil(seconds)),
    )


def duration(seconds: float) -> str:
    """Formats a duration as OpenAI writes it: 120ms, 17.3s, 1m0s."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    minutes, milliseconds = divmod(milliseconds, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{milliseconds / 1000:g}s"


class RateLimits:
    """The usage of every key that has limits."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._usage: dict[tuple[str, bytes], KeyUsage] = {}

    def usage(self, key: Key) -> KeyUsage:
        return self._usage.setdefault((key.name, key.digest), KeyUsage(self._clock))
