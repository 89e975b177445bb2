"""What happens after a fault of the device: everything computed is thrown away, and rows go back to the queue.

A fault may surface long after it happened, at any later evaluation, so no array that was computed in the meantime is
trusted: not the running rows' caches, not cached blocks, not adapters on the device. Rows keep the tokens that were
read before. The engine calls this on its thread; after too many faults in a short time it gives up.
"""

import time
from collections import deque
from collections.abc import Callable

from mlx_parallm.engine.live_requests import LiveRequests
from mlx_parallm.engine.rows import Job, Row
from mlx_parallm.engine.runner import Runner
from mlx_parallm.engine.scheduler import Scheduler
from mlx_parallm.kv.prefix import Prefix
from mlx_parallm.lora.registry import Registry
from mlx_parallm.models.device import give_memory_back

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


def discard_device_state(runner: Runner, adapters: Registry, prefix: Prefix | None) -> None:
    """Frees every array that was computed; what is needed again is uploaded or computed again."""
    runner.reset()
    adapters.reset_device()
    if prefix is not None:
        prefix.reset()
    give_memory_back()


def requeue(scheduler: Scheduler, book: LiveRequests, put_back: Callable[[Row], None]) -> int:
    """Puts every live row that had begun back into the queue, and says how many those are.

    Rows come from the book, which knows them all, also those that were between two places when the fault surfaced.
    """
    scheduler.running.clear()
    scheduler.partial = None
    for job in scheduler.waiting:
        _forget_progress(job)
    waiting = {row for job in scheduler.waiting for row in job.rows}
    begun = sorted((row for row in book.rows() if row not in waiting), key=lambda row: row.order)
    for row in begun:
        row.epoch += 1
        row.position = None
        put_back(row)
    return len(begun)


def _forget_progress(job: Job) -> None:
    job.computed = 0
    job.staged = job.stops = job.match = None
    for row in job.rows:
        row.prompt_logprobs = None if not row.tokens else row.prompt_logprobs
