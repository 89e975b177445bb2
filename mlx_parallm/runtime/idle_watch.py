"""Has models leave memory that nobody has asked for in a while. A thread looks for them, as often as is worth it."""

import threading
import time
from collections.abc import Callable, Iterable

from mlx_parallm.runtime.entries import PoolEntry

MAX_SECONDS = 60.0  # between two looks


class IdleWatch:
    def __init__(
        self,
        changed: threading.Condition,
        closing: threading.Event,
        entries: Iterable[PoolEntry],
        seconds: float | None,
        may_leave: Callable[[PoolEntry], bool],
        leave: Callable[[PoolEntry], None],
    ) -> None:
        """`changed` has the lock of the entries, with which `may_leave` and `leave` are called. `seconds`: after which
        models leave that say nothing else; None: never."""
        self._changed = changed
        self._closing = closing
        self._entries = entries
        self._seconds = seconds
        self._may_leave = may_leave
        self._leave = leave
        self._thread: threading.Thread | None = None

    def seconds_of(self, entry: PoolEntry) -> float | None:
        """After how many it leaves; None: never."""
        return entry.keep_alive if entry.keep_alive is not None else self._seconds

    def wake(self) -> None:
        """When it has changed how long a model stays; the first time that any leaves at all."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._main, name="idle models", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _main(self) -> None:
        with self._changed:
            while not self._closing.is_set():
                self._changed.wait(self._look())

    def _look(self) -> float:
        """Seconds until it is worth another look."""
        waits = [MAX_SECONDS]
        for entry in self._entries:
            patience = self.seconds_of(entry)
            if patience is None or entry.users or not self._may_leave(entry):
                continue
            left = entry.used + patience - time.monotonic()
            if left > 0:
                waits.append(left)
            else:
                self._leave(entry)
        return min(waits)
