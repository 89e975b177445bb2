"""What happens after a fault: everything computed is thrown away, rows go back to the queue; too many end the engine.

A fault may surface long after it happened, at any later evaluation, so no array that was computed in the meantime is
trusted: not the running rows' caches, not cached blocks, not adapters on the device. Rows keep the tokens that were
read before. The loop calls this on the engine thread. When the engine dies, open requests are told first, then
whoever set `on_failure`; later requests are refused with the reason.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from mlx_parallm.devices.freed_memory import give_memory_back
from mlx_parallm.engine.compute.runner import Runner
from mlx_parallm.engine.delivery import Delivery, Outbox
from mlx_parallm.engine.live_requests import LiveRequests
from mlx_parallm.engine.pipeline import StepPipeline
from mlx_parallm.engine.prefix_lookup import PrefixLookup
from mlx_parallm.engine.ranks import Ranks
from mlx_parallm.engine.rows import Job, Row
from mlx_parallm.engine.scheduler import Scheduler
from mlx_parallm.engine.thread import EngineThread
from mlx_parallm.errors import UnavailableError
from mlx_parallm.kv.block_pool import Chain
from mlx_parallm.kv.prefix import Prefix
from mlx_parallm.lora.registry import Registry
from mlx_parallm.metrics import EngineMetrics

log = logging.getLogger(__name__)


class Preemption:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        lookup: PrefixLookup,
        metrics: EngineMetrics,
        starts_over: bool = False,
    ) -> None:
        """`starts_over`: rows without a place are computed again from their prompt on, token by token, since a prompt's
        pass would give other numbers."""
        self._starts_over = starts_over
        self._scheduler = scheduler
        self._runner = runner
        self._lookup = lookup
        self._metrics = metrics

    def make_room(self) -> None:
        """When the rows' next tokens would not fit, the last in line gives up its place and is computed again later.
        So do rollouts that hold more places than they may while requests wait."""
        running = self._scheduler.running
        while len(running) > 1 and not self._runner.cache.fits(len(running), max(row.length for row in running) + 1):
            self._preempt(self._scheduler.victim())
        for row in self._scheduler.displaced():
            self._preempt(row)

    def _preempt(self, row: Row) -> None:
        self._scheduler.running.remove(row)
        self._runner.leave(row)
        self.requeue(row)
        self._metrics.preemptions += 1

    def requeue(self, row: Row) -> None:
        """A row without a place waits for one; what it has generated becomes part of its prompt, or is computed
        again."""
        row.rewind()
        if not row.tokens:
            row.prompt_logprobs = None  # they are computed again
        tokens = row.prompt + row.tokens
        if self._starts_over and len(row.policies) < 2:  # by one adapter, or none, from the first token on
            row.start_over()
            tokens = row.prompt
        job = Job([row], tokens, row.priority, row.readers[0].arrival)
        if row.chain is not None:
            job.chain = Chain(row.chain.root, row.chain.size, list(row.chain.hashes)).extend(job.content)
        else:  # it had moved to another adapter: all of it is computed anew, with that one alone
            self._lookup.hash_blocks(job)
        self._scheduler.requeue(job, row)


MAX_FAULTS = 3
FAULT_WINDOW_SECONDS = 60.0


class FaultCounter:
    """Counts faults within a sliding window."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: deque[float] = deque(maxlen=MAX_FAULTS)

    def add(self) -> bool:
        """Counts one more; True when there have been too many to go on."""
        self._times.append(self._clock())
        return len(self._times) == MAX_FAULTS and self._times[-1] - self._times[0] <= FAULT_WINDOW_SECONDS


@dataclass(eq=False, repr=False)
class Recovery:
    thread: EngineThread
    scheduler: Scheduler
    pipeline: StepPipeline
    preemption: Preemption
    live: LiveRequests
    delivery: Delivery
    outbox: Outbox
    runner: Runner
    adapters: Registry
    prefix: Prefix | None
    metrics: EngineMetrics
    ranks: Ranks | None = None
    _faults: FaultCounter = field(default_factory=lambda: FaultCounter(), init=False)
    _dying: threading.Lock = field(default_factory=threading.Lock, init=False)

    def recover(self, error: Exception) -> None:
        """Puts rows back into the queue after a fault, and the step is tried again, unless there were too many."""
        self.metrics.faults += 1
        if self.ranks is not None:  # which are out of step, in the middle of a pass
            raise self.ranks.cause_of(error)
        if self._faults.add():
            log.critical("%d faults within %g seconds: the engine gives up", MAX_FAULTS, FAULT_WINDOW_SECONDS)
            raise error
        log.error("a step has failed; its rows are computed again: %s", error, exc_info=error)
        self._discard_device_state()
        for row in self.live.rows():
            if row.finish_reason is not None:  # its end was read, and not sent yet
                self.delivery.send(row)
        count = self._requeue_all()
        log.warning("%d rows go on from the tokens that they have", count)
        self.outbox.flush()

    def shut_down(self) -> None:
        """Tells open requests that the engine stops."""
        self.thread.empty_inbox()
        self.delivery.fail_all(self.thread.unavailable())

    def die(self, error: BaseException) -> None:
        """Tells everyone that the engine has failed for good. On another thread, too, where the engine's is stuck."""
        with self._dying:
            thread = self.thread
            if thread.failure is not None:
                return
            log.critical("the engine has died", exc_info=error)
            thread.failure = f"{type(error).__name__}: {error}"
            thread.closed = f"the engine has died: {thread.failure}"
            thread.empty_inbox()
            self.delivery.fail_all(UnavailableError(thread.closed))
            if thread.on_failure is not None:
                thread.on_failure(thread.failure)

    def _discard_device_state(self) -> None:
        """Frees every array that was computed; what is needed again is uploaded or computed again."""
        self.pipeline.in_flight.clear()
        self.runner.reset()
        self.adapters.reset_device()
        if self.prefix is not None:
            self.prefix.reset()
        give_memory_back()

    def _requeue_all(self) -> int:
        """Requeues every live row that had begun, and says how many those are.

        Rows come from the live requests, which know also those that were between two places when the fault surfaced.
        """
        scheduler = self.scheduler
        scheduler.running.clear()
        scheduler.partial = None
        for job in scheduler.waiting:
            _forget_progress(job)
        waiting = {row for job in scheduler.waiting for row in job.rows}
        begun = sorted((row for row in self.live.rows() if row not in waiting), key=lambda row: row.order)
        for row in begun:
            row.epoch += 1
            row.position = None
            self.preemption.requeue(row)
        return len(begun)


def _forget_progress(job: Job) -> None:
    job.computed = 0
    job.staged = job.stops = job.match = None
    job.features.clear()
    for row in job.rows:
        row.prompt_logprobs = None if not row.tokens else row.prompt_logprobs
