"""Rows that lose their place go back to the queue, and go on later from the tokens that they have. Engine thread only.

The loop has room made before each step; recovery requeues every row after a fault.
"""

from mlx_parallm.engine.prefix_lookup import PrefixLookup
from mlx_parallm.engine.rows import Job, Row
from mlx_parallm.engine.runner import Runner
from mlx_parallm.engine.scheduler import Scheduler
from mlx_parallm.kv.block_pool import Chain
from mlx_parallm.metrics import EngineMetrics


class Preemption:
    def __init__(self, scheduler: Scheduler, runner: Runner, lookup: PrefixLookup, metrics: EngineMetrics) -> None:
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
        """A row without a place waits for one; what it has generated becomes part of its prompt."""
        row.rewind()
        if not row.tokens:
            row.prompt_logprobs = None  # they are computed again
        job = Job([row], row.prompt + row.tokens, row.priority, row.readers[0].arrival)
        if row.chain is not None:
            job.chain = Chain(row.chain.root, row.chain.size, list(row.chain.hashes)).extend(job.content)
        else:  # it had moved to another adapter: all of it is computed anew, with that one alone
            self._lookup.hash_blocks(job)
        self._scheduler.requeue(job, row)
