"""The engine's thread as everybody else sees it: its inbox, whether it accepts requests, why it has failed, its end.

`StartingEngine` makes it; `Engine` hands things in from any thread; `EngineLoop` takes them out between two steps.
"""

import atexit
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeVar

import mlx.core as mx

from mlx_parallm.errors import ParallmError, UnavailableError

log = logging.getLogger(__name__)

T = TypeVar("T")
SHUTTING_DOWN = "the server is shutting down"
STUCK_SECONDS = 1.0  # for the thread of an engine that has failed: it may wait for another process that is gone


class _Threads:
    """Threads that engines leave and later ones take over: MLX keeps an OS thread for each that has ever computed."""

    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        atexit.register(self._close)

    @property
    def busy(self) -> int:
        """The number of threads that an engine has, which may hold its weights."""
        with self._lock:
            return len(self._threads) - len(self._idle)

    def run(self, main: Callable[[], None]) -> None:
        with self._lock:
            work = self._idle.pop() if self._idle else self._another()
        work.put(main)

    def _another(self) -> "queue.SimpleQueue[Callable[[], None] | None]":
        work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        thread = threading.Thread(target=self._serve, args=(work,), name="engine", daemon=True)
        self._threads.append(thread)
        thread.start()
        return work

    def _serve(self, work: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
        while (main := work.get()) is not None:
            main()
            del main  # and the model with it
            with self._lock:
                self._idle.append(work)
        mx.clear_streams()

    def _close(self) -> None:
        """MLX aborts the process at exit when a thread leaves streams behind."""
        with self._lock:
            for work in self._idle:
                work.put(None)
            self._idle.clear()
        for thread in self._threads:
            thread.join(STUCK_SECONDS)


engine_threads = _Threads()


class EngineThread:
    def __init__(self, main: Callable[[], None]) -> None:
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # called between two steps
        self.closed: str | None = None  # why new requests are refused
        self.stopping = False
        self.failure: str | None = None  # why it has stopped for good
        self.on_failure: Callable[[str], None] | None = None
        self._main: Callable[[], None] | None = main
        self._ended: threading.Event | None = None  # None before the start

    @property
    def is_alive(self) -> bool:
        return self._ended is not None and not self._ended.is_set()

    def start(self) -> None:
        self._ended = threading.Event()
        engine_threads.run(self._run)

    def _run(self) -> None:
        assert self._main is not None
        assert self._ended is not None
        main = self._main
        self._main = None
        try:
            main()
        except BaseException:
            log.exception("the engine's thread has failed")
        finally:
            del main
            self._ended.set()

    def join(self, timeout: float | None = None) -> None:
        if self._ended is not None:
            self._ended.wait(timeout)

    def close(self, reason: str = SHUTTING_DOWN) -> None:
        """Refuses new requests from now on."""
        self.closed = self.closed or reason

    def stop(self) -> None:
        """Ends the thread after its current step, and waits for that."""
        self.close()
        self.stopping = True
        self.inbox.put(lambda: None)
        if self.is_alive:
            self.join(None if self.failure is None else STUCK_SECONDS)

    def unavailable(self) -> UnavailableError:
        return UnavailableError(self.closed or "the engine has stopped")

    def run_between_steps(self, change: Callable[[], T]) -> T:
        """Has the engine thread do something between two steps, and returns or raises what comes of it."""
        future: Future[T] = Future()

        def respond() -> None:
            try:
                future.set_result(change())
            except ParallmError as error:  # a refusal, which is the caller's alone
                future.set_exception(error)
            except Exception as error:
                future.set_exception(error)
                raise

        self.inbox.put(respond)
        while True:
            try:
                return future.result(timeout=0.5)
            except FutureTimeout:
                if (not self.is_alive or self.failure is not None) and not future.done():
                    raise self.unavailable() from None

    def empty_inbox(self) -> None:
        """Empties the inbox at the end, on the thread itself: what was handed in meanwhile must be told as well."""
        while not self.inbox.empty():
            try:
                self.inbox.get()()
            except Exception:  # it was about a model that no longer runs; the requests count
                log.debug("after the end", exc_info=True)
