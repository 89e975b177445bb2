"""The engine's accounts: what each step adds to the counters, and whether all that is held is held by somebody.

Engine thread only; the server reads the counters.
"""

import contextlib
from collections.abc import Iterator

import mlx.core as mx

from mlx_parallm.engine.compute.runner import Runner
from mlx_parallm.engine.compute.step import Step
from mlx_parallm.engine.live_requests import LiveRequests
from mlx_parallm.engine.scheduler import Scheduler
from mlx_parallm.kv.prefix import Prefix
from mlx_parallm.lora.registry import Registry
from mlx_parallm.metrics import EngineMetrics

RATE_SAMPLE_TOKENS = 64  # shorter pieces of prompt say little of how fast prompts are computed


class Accounts:
    def __init__(self, metrics: EngineMetrics, scheduler: Scheduler, runner: Runner, prefix: Prefix | None) -> None:
        self._metrics = metrics
        self._scheduler = scheduler
        self._runner = runner
        self._prefix = prefix

    def step(self, step: Step, seconds: float, waited: float) -> None:
        """One has been read, after so long a wait for it."""
        metrics = self._metrics
        kind = metrics.decode if step.kind == "decode" else metrics.prefill
        kind.count += 1
        kind.start_seconds += step.started_at - step.launched_at
        kind.wait_seconds += waited
        metrics.steps += 1
        metrics.step_seconds.observe(seconds)
        metrics.generated_tokens += len(step.rows) - step.repeated
        if step.kind == "decode":
            metrics.decode_rate.add(len(step.rows), seconds)
            if step.drafted is not None:
                metrics.drafted_tokens += step.drafted.count
                metrics.accepted_tokens += len(step.rows) - step.count
            metrics.count_decode(step.count, metrics.slots_total, any(row.streams for _, row, _ in step.rows))
        else:
            metrics.prompt_tokens += step.count
            metrics.prompt_rate.add(step.count, seconds)
            if step.count >= RATE_SAMPLE_TOKENS:
                self._scheduler.note_rate(step.count / max(seconds, 1e-6))
                if self._prefix is not None:
                    self._prefix.prompt_rate = self._scheduler.prompt_rate
        self.gauge()

    def gauge(self, served: bool = True) -> None:
        """`served`: what has run since the peak was forgotten was for those who are served, not other work."""
        metrics = self._metrics
        metrics.queue_depth = self._scheduler.queued
        metrics.running = len(self._scheduler.running)
        metrics.slots_free = self._runner.cache.free
        metrics.kv_bytes = self._runner.cache.nbytes
        if self._prefix is not None:
            metrics.prefix = self._prefix.metrics
            metrics.cached_tokens = self._prefix.metrics.hit_tokens
            if self._prefix.disk is not None:
                metrics.ssd = self._prefix.disk.metrics
        metrics.active_memory = mx.get_active_memory()
        metrics.spare_memory = mx.get_cache_memory()
        peak = mx.get_peak_memory()
        metrics.peak_memory = max(metrics.peak_memory, peak)
        if served:
            metrics.serving_peak_memory = max(metrics.serving_peak_memory, peak)

    @contextlib.contextmanager
    def background_work(self) -> Iterator[None]:
        """Other work: its memory is not serving's."""
        self.gauge()
        mx.reset_peak_memory()  # of the whole process: nowhere else than around such work
        try:
            yield
        finally:
            self.gauge(served=False)
            mx.reset_peak_memory()

    def imbalance(self, live: LiveRequests, adapters: Registry, in_flight: bool) -> AssertionError | None:
        """Returns the error of what does not add up between two steps, or None."""
        scheduler = self._scheduler
        cache = self._runner.cache
        try:
            self._runner.check_integrity()
            adapters.check_integrity()
            held = sum(version.rows for entry in adapters for version in entry.versions.values())
            assert not scheduler.idle or not held, f"adapters are held by {held} rows that are gone"
            if self._prefix is not None:
                self._prefix.check_integrity()
                self._prefix.gauge()
                held = self._prefix.metrics.blocks_referenced
                assert not scheduler.idle or not held, f"{held} blocks are held by nobody"
            assert len(scheduler.running) == self._metrics.slots_total - cache.free, "a place is lost or taken twice"
            known = {*scheduler.running, *(row for job in scheduler.jobs() for row in job.rows)}
            assert known == live.rows(), "a row is lost, or runs for nobody"
            assert not scheduler.idle or cache.positions == 0 or in_flight, "memory is held for nobody"
        except AssertionError as error:
            return error
        return None
