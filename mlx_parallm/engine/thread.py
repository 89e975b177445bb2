"""The engine's thread as everybody else sees it: its inbox, whether it accepts requests, why it has failed, its end.

`StartingEngine` makes it; `Engine` hands things in from any thread; `EngineLoop` takes them out between two steps.
"""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeVar

from mlx_parallm.errors import ParallmError, UnavailableError

log = logging.getLogger(__name__)

T = TypeVar("T")
SHUTTING_DOWN = "the server is shutting down"
STUCK_SECONDS = 1.0  # for the thread of an engine that has failed: it may wait for another process that is gone


class EngineThread:
    def __init__(self, main: Callable[[], None]) -> None:
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # called between two steps
        self.closed: str | None = None  # why new requests are refused
        self.stopping = False
        self.failure: str | None = None  # why it has stopped for good
        self.on_failure: Callable[[str], None] | None = None
        self._thread = threading.Thread(target=main, name="engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def close(self, reason: str = SHUTTING_DOWN) -> None:
        """Refuses new requests from now on."""
        self.closed = self.closed or reason

    def stop(self) -> None:
        """Ends the thread after its current step, and waits for that."""
        self.close()
        self.stopping = True
        self.inbox.put(lambda: None)
        if self.is_alive:
            self._thread.join(None if self.failure is None else STUCK_SECONDS)

    def unavailable(self) -> UnavailableError:
        return UnavailableError(self.closed or "the engine has stopped")

    def run_between_steps(self, change: Callable[[], T]) -> T:
        """Has the engine thread do something between two steps, and returns or raises what comes of it."""
        future: Future[T] = Future()

        def answer() -> None:
            try:
                future.set_result(change())
            except ParallmError as error:  # a refusal, which is the caller's alone
                future.set_exception(error)
            except Exception as error:
                future.set_exception(error)
                raise

        self.inbox.put(answer)
        while True:
            try:
                return future.result(timeout=0.5)
            except FutureTimeout:
                if (not self.is_alive or self.failure is not None) and not future.done():
                    raise self.unavailable() from None

    def empty_inbox(self) -> None:
        """At the end, on the thread itself: requests and work that were handed in meanwhile must be told as well."""
        while not self.inbox.empty():
            try:
                self.inbox.get()()
            except Exception:  # it was about a model that no longer runs; the requests count
                log.debug("after the end", exc_info=True)
