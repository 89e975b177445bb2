"""Recurrent state of policies that is kept on the server, by model and session. `/v1/rl/act` takes it and puts it back.

A session that was not used for long goes, and the least recently used go when there are too many or they hold too much.
One request at a time may have a session: which of two came first would be chance.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlx_parallm.errors import ConflictError
from mlx_parallm.tensors import Array

SECONDS = 3600.0  # that an unused session is kept
MAX_SESSIONS = 1 << 16
MAX_BYTES = 256 << 20

Key = tuple[str, str]  # model, session
SessionState = Mapping[str, Array]  # (rows, …) by the name of the input


@dataclass(slots=True)
class Kept:
    state: SessionState
    used: float
    bytes: int


class HiddenStateStore:
    def __init__(
        self,
        seconds: float = SECONDS,
        most: int = MAX_SESSIONS,
        most_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._most = most
        self._most_bytes = most_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: OrderedDict[Key, Kept] = OrderedDict()  # the longest unused first
        self._busy: set[Key] = set()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, model: str, sessions: Sequence[str]) -> list[SessionState | None]:
        """The state of each, None of one that is new; nobody else gets them until `release`. ConflictError."""
        keys = [(model, session) for session in sessions]
        with self._lock:
            self._expire()
            for key in keys:
                if key in self._busy:
                    raise ConflictError(
                        f"another request of session {key[1]!r:.100} is running: wait for its response",
                        param="session_id",
                        code="session_busy",
                    )
            self._busy.update(keys)
            return [kept.state if (kept := self._kept.get(key)) else None for key in keys]

    def put(self, model: str, states: Mapping[str, SessionState]) -> None:
        """What the sessions are to go on with. They must have been taken."""
        now = self._clock()
        with self._lock:
            for session, state in states.items():
                self._remove((model, session))
                size = sum(array.nbytes for array in state.values())
                self._kept[model, session] = Kept(state, now, size)
                self._bytes += size
            while self._kept and (len(self._kept) > self._most or self._bytes > self._most_bytes):
                self._remove(next(iter(self._kept)))

    def release(self, model: str, sessions: Sequence[str]) -> None:
        with self._lock:
            self._busy.difference_update((model, session) for session in sessions)

    def _expire(self) -> None:
        oldest = self._clock() - self._seconds
        while self._kept:
            key, kept = next(iter(self._kept.items()))
            if kept.used >= oldest:
                return
            self._remove(key)

    def _remove(self, key: Key) -> None:
        if (kept := self._kept.pop(key, None)) is not None:
            self._bytes -= kept.bytes
