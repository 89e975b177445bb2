"""The requests that ended last, for the dashboard: when, where, which model, how many tokens, how long. Never a text.

`middleware.RequestLog` notes each at its end; the service leaves a way to its summary in its state.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from starlette.types import Scope

from mlx_parallm.server.http.request_state import state_of

MAX_REQUESTS = 500
READING = frozenset({"GET", "HEAD", "OPTIONS"})  # what open dashboards and probes ask for would push all else out


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentRequest:
    # Microseconds since the epoch, so that those of several servers can be told apart.
    number: Annotated[int, Field(description="Larger than that of any request which ended before it")]
    time: Annotated[float, Field(description="When it ended, in seconds since the epoch")]
    request_id: str
    method: str
    path: str
    status: int
    outcome: Annotated[str | None, Field(description="Of a stream that was cut off, or whose client left")]
    key: Annotated[str | None, Field(description="The name of the key it came with")]
    seconds: float
    first_token_seconds: Annotated[float | None, Field(description="Of a stream: from its arrival to the first token")]
    model: str | None
    adapter: Annotated[str | None, Field(description="name@version")]
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None


class RecentRequests:
    """Event loop only."""

    def __init__(self, most: int = MAX_REQUESTS) -> None:
        self._requests: deque[RecentRequest] = deque(maxlen=most)  # the oldest first
        self._last = 0  # number

    def note(self, scope: Scope, status: int, started: float) -> None:
        """One that began at `started`, by time.perf_counter, and has ended now."""
        if scope["method"] in READING:
            return
        state = state_of(scope)
        self._last = max(self._last + 1, time.time_ns() // 1000)
        answer = None if state.summary is None else state.summary()
        first = None if answer is None else answer.first_token_at
        self._requests.append(
            RecentRequest(
                number=self._last,
                time=time.time(),
                request_id=state.id,
                method=scope["method"],
                path=scope["path"][:200],
                status=status,
                outcome=state.outcome,
                key=state.key_name,
                seconds=time.perf_counter() - started,
                first_token_seconds=None if first is None else first - started,
                model=None if answer is None else answer.model,
                adapter=None if answer is None else answer.adapter,
                prompt_tokens=None if answer is None else answer.prompt_tokens,
                cached_tokens=None if answer is None else answer.cached_tokens,
                completion_tokens=None if answer is None else answer.completion_tokens,
            )
        )

    def latest(self, count: int, after: int = 0) -> Sequence[RecentRequest]:
        """Returns at most so many requests that ended after the one of this number, the newest first."""
        found = [one for one in reversed(self._requests) if one.number > after]
        return found[: max(0, count)]
