"""A thread that looks for idle models, for the pool: as often as is worth it, from the first time that it is woken."""

import threading
from collections.abc import Callable

MAX_SECONDS = 60.0  # between two looks


class IdleWatch:
    def __init__(self, changed: threading.Condition, look: Callable[[], float], closing: threading.Event) -> None:
        """`look` is called with the lock of `changed`, and says after how many seconds it is worth another look."""
        self._changed = changed
        self._look = look
        self._closing = closing
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """When something has changed that a look depends on."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._main, name="idle models", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _main(self) -> None:
        with self._changed:
            while not self._closing.is_set():
                self._changed.wait(min(MAX_SECONDS, self._look()))
