"""What readers of rows are sent, and how their requests end: with a completion, an error, or cut off from outside.

`Delivery` collects the events of a step in the `Outbox`, which hands them over all at once: timed by the loop, and by
the runner when it is about to wait. Engine thread only.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from mlx_parallm.engine.compute.runner import Runner
from mlx_parallm.engine.live_requests import LiveRequests
from mlx_parallm.engine.policies import Policies
from mlx_parallm.engine.rows import Reader, Row
from mlx_parallm.engine.scheduler import Scheduler
from mlx_parallm.errors import ParallmError, RequestTimeoutError
from mlx_parallm.metrics import EngineMetrics
from mlx_parallm.types import Delta, OnDelta, Request

DEADLINE_CHECK_SECONDS = 0.1

StepEvents = list[tuple[OnDelta, Delta]]
Recorder = Callable[[Request, int, Row, int | None], None]


def deliver(events: StepEvents) -> None:
    """The simplest `dispatch`: hands each delta to its handler, on the engine thread."""
    for on_delta, delta in events:
        on_delta(delta)


class Outbox:
    """Events that have not been handed over; `dispatch` takes those of a step."""

    def __init__(self, dispatch: Callable[[StepEvents], None]) -> None:
        self.events: StepEvents = []
        self._dispatch = dispatch

    def flush(self) -> None:
        if self.events:
            events = self.events
            self.events = []
            self._dispatch(events)


@dataclass(slots=True)
class Recording:
    """Who is told of choices that have ended, for training; any thread sets it."""

    recorder: Recorder | None = None  # is told of every recorded choice that has ended
    records_all: bool = False  # else only what asks for it

    def wants(self, request: Request, compared: bool = False) -> bool:
        """`compared`: adapters that share the traffic are compared by rewards."""
        return self.recorder is not None and (self.records_all or request.record or compared)


class Delivery:
    def __init__(
        self,
        outbox: Outbox,
        live: LiveRequests,
        scheduler: Scheduler,
        runner: Runner,
        policies: Policies,
        recording: Recording,
        metrics: EngineMetrics,
    ) -> None:
        self._outbox = outbox
        self._live = live
        self._scheduler = scheduler
        self._runner = runner
        self._policies = policies
        self._recording = recording
        self._metrics = metrics
        self._next_deadline_check = 0.0

    def send(self, row: Row) -> None:
        """Sends what a row has to those who read along, and to all when it has ended."""
        for reader in list(row.readers):
            if row.finish_reason is not None or reader.eager:
                self._outbox.events.append((reader.on_delta, row.delta_for(reader)))
            if row.finish_reason is not None:
                self._end(row, reader, row.finish_reason)

    def fail(self, row: Row, error: ParallmError) -> None:
        """Ends a row with what it has and an error."""
        for reader in list(row.readers):
            delta = row.delta_for(reader)
            delta.finish_reason = "error"
            delta.error = error
            self._outbox.events.append((reader.on_delta, delta))
            self._end(row, reader, "error")

    def abort_all(self) -> None:
        """Ends every request with what it has."""
        for request in self._live.requests():
            for row, reader in self._live.entries(request.id):
                delta = row.delta_for(reader)
                delta.finish_reason = "abort"
                self._outbox.events.append((reader.on_delta, delta))
                self._end(row, reader, "abort")

    def cancel(
        self, request_id: str, index: int | None, error: ParallmError | None = None, visible: int | None = None
    ) -> None:
        """Ends choices from outside: a client left, a stop string was found, time ran out."""
        for row, reader in self._live.entries(request_id, index):
            if error is not None:
                self._outbox.events.append((reader.on_delta, _failed(reader, error)))
            reader.visible = visible
            self._end(row, reader, "error" if error else "abort")

    def expire(self) -> None:
        """Ends requests whose time is over; looks now and then, however often it is called."""
        now = time.monotonic()
        if now < self._next_deadline_check:
            return
        self._next_deadline_check = now + DEADLINE_CHECK_SECONDS
        for request in self._live.overdue(now):
            message = f"the request took longer than {request.timeout:g} seconds"
            self.cancel(request.id, None, RequestTimeoutError(message))

    def fail_all(self, error: ParallmError) -> None:
        """Tells every reader of the engine's end, and leaves rows and caches as they are."""
        for request in self._live.requests():
            for row, reader in self._live.entries(request.id):
                self._outbox.events.append((reader.on_delta, _failed(reader, error)))
                self._live.remove(row, reader)
        self._outbox.flush()

    def _end(self, row: Row, reader: Reader, reason: str) -> None:
        self._live.remove(row, reader)
        recorder = self._recording.recorder
        if recorder is not None and row.recorded and reason != "error":
            recorder(reader.request, reader.index, row, reader.visible)
        if not self._live.entries(reader.request.id):
            self._metrics.count_finish(reason)
            self._metrics.request_seconds.observe(time.monotonic() - reader.arrival)
            self._policies.registry.count_end(row.adapter, time.monotonic() - reader.arrival)
        if not row.readers:
            row.finish_reason = row.finish_reason or "abort"
            self._scheduler.remove(row)
            self._runner.leave(row)
            self._policies.release(row)


def _failed(reader: Reader, error: ParallmError) -> Delta:
    return Delta(reader.request.id, reader.index, finish_reason="error", error=error)
