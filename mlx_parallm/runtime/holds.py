"""Which models requests use. The pool's lock is held by whoever calls."""

import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future

from mlx_parallm.runtime.entries import PoolEntry


class Holds:
    """What requests use, by the number that they release it with: another model may have the name by then."""

    def __init__(self) -> None:
        self._entries: dict[int, PoolEntry] = {}
        self._numbers = itertools.count(1)

    def begin(self, entry: PoolEntry, future: "Future[int]") -> None:
        """Hands a model over, unless its client has left."""
        if future.set_running_or_notify_cancel():
            hold = next(self._numbers)
            self._entries[hold] = entry
            entry.users += 1
            future.set_result(hold)

    def end(self, hold: int) -> PoolEntry:
        entry = self._entries.pop(hold)
        entry.users -= 1
        entry.used = time.monotonic()
        return entry


def pass_on(held: "Future[int]", release: Callable[[int], None], loaded: "Future[None]") -> None:
    """A load holds nothing: it is done, or has failed."""
    error = held.exception()
    if error is None:
        release(held.result())
    if not loaded.set_running_or_notify_cancel():
        return
    if error is None:
        loaded.set_result(None)
    else:
        loaded.set_exception(error)
