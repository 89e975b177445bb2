"""The way of a request into the engine: checked and counted on the caller's thread, queued on the engine's."""

import threading
import time
from collections import Counter
from collections.abc import Sequence

from mlx_parallm.engine.admission import Admission
from mlx_parallm.engine.delivery import Recording
from mlx_parallm.engine.live_requests import LiveRequests
from mlx_parallm.engine.pause import IdleState
from mlx_parallm.engine.policies import Policies
from mlx_parallm.engine.prefix_lookup import PrefixLookup
from mlx_parallm.engine.rows import Job, Row
from mlx_parallm.engine.scheduler import Scheduler
from mlx_parallm.engine.ssd_transfers import SsdTransfers
from mlx_parallm.engine.thread import EngineThread
from mlx_parallm.errors import QueueFullError, UnavailableError
from mlx_parallm.lora.registry import Registry
from mlx_parallm.metrics import EngineMetrics
from mlx_parallm.types import OnDelta, Request


class Intake:
    def __init__(
        self,
        thread: EngineThread,
        admission: Admission,
        adapters: Registry,
        recording: Recording,
        live: LiveRequests,
        policies: Policies,
        lookup: PrefixLookup,
        scheduler: Scheduler,
        ssd_transfers: SsdTransfers | None,
        idle: IdleState,
        metrics: EngineMetrics,
        max_queue_size: int,
    ) -> None:
        self._thread = thread
        self._admission = admission
        self._adapters = adapters
        self._recording = recording
        self._live = live
        self._policies = policies
        self._lookup = lookup
        self._scheduler = scheduler
        self._ssd_transfers = ssd_transfers
        self._idle = idle
        self._metrics = metrics
        self._max_queue_size = max_queue_size
        self._pending: Counter[str | None] = Counter()  # requests in the inbox by their owner; None: rollouts
        self._pending_lock = threading.Lock()

    def check(self, request: Request) -> None:
        """Raises what is wrong with a request, and takes none."""
        self._admission.rows(request)

    def submit_all(self, requests: Sequence[Request], on_delta: OnDelta) -> None:
        """From any thread: takes all requests or raises."""
        if self._thread.closed is not None:
            raise UnavailableError(self._thread.closed)
        self._reserve(requests)
        try:
            accepted = [(request, self._rows(request)) for request in requests]
        except BaseException:
            self._release(requests)
            raise
        arrival = time.monotonic()

        def add_all() -> None:
            for request, rows in accepted:
                self._add(request, rows, arrival, on_delta)

        self._thread.inbox.put(add_all)

    def _rows(self, request: Request) -> list[Row]:
        rows = self._admission.rows(request)
        if request.adapter is not None:
            version = self._adapters.find(request.adapter, request.adapter_version)
            for row in rows:
                row.adapter = version
        for row in rows:
            # Training sees tokens alone. Where arms share the traffic, each may get rewards.
            row.recorded = request.images is None and self._recording.wants(request, self._adapters.traffic.compares)
        return rows

    def _reserve(self, requests: Sequence[Request]) -> None:
        """Rollouts have a queue of their own size. Where several keys wait, each has its part of the queue, whoever was
        there first."""
        count, owner = len(requests), _queue_of(requests[0])
        with self._pending_lock:
            waiting = Counter(self._pending)
            for job in list(self._scheduler.waiting):
                waiting[None if job.rollout else job.owner] += 1
            queued = waiting[None] if owner is None else waiting.total() - waiting[None]
            owners = len({owner, *(other for other, number in waiting.items() if number and other is not None)})
            share = 0 if owner is None or owners == 1 else self._max_queue_size // owners
            if queued + count > self._max_queue_size and waiting[owner] + count > share:
                self._metrics.requests_rejected += count
                raise QueueFullError(
                    f"{queued} requests are waiting already, and the queue has room for {self._max_queue_size}, "
                    f"not for {count} more: try again later"
                )
            self._pending[owner] += count

    def _add(self, request: Request, rows: list[Row], arrival: float, on_delta: OnDelta) -> None:
        """On the engine thread."""
        self._idle.leave()
        needed = self._live.add(request, rows, arrival, on_delta)
        if needed:
            self._policies.take(rows)
            job = Job(list(rows), request.prompt, request.priority, arrival)
            self._lookup.hash_blocks(job)
            self._scheduler.add(job)
            if self._ssd_transfers is not None:
                self._ssd_transfers.fetch(job)
        else:
            self._metrics.deduplicated += 1
        self._release([request])

    def _release(self, requests: Sequence[Request]) -> None:
        """They wait in the inbox no longer."""
        with self._pending_lock:
            self._pending[_queue_of(requests[0])] -= len(requests)


def _queue_of(request: Request) -> str | None:
    return None if request.rollout else request.owner
