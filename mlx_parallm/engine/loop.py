"""The engine thread's loop: owns the order of things within a turn. `StartingEngine` runs it once all parts are built.

A turn is: run what is in the inbox, plan, start what was planned, read what is done, hand all events over at once.
"""

import queue
import time

import mlx.core as mx

from mlx_parallm.engine.build import EngineParts
from mlx_parallm.engine.delivery import DEADLINE_CHECK_SECONDS
from mlx_parallm.engine.thread import STUCK_SECONDS

IDLE_CACHE_SECONDS = 2.0  # for which an idle engine keeps freed memory: fresh memory costs more than it seems


class EngineLoop:
    def __init__(self, parts: EngineParts) -> None:
        self._thread = parts.base.thread
        self._inbox = parts.base.thread.inbox
        self._allocator_cache = parts.base.allocator_cache
        self._live = parts.base.live
        self._policies = parts.policies
        self._scheduler = parts.compute.scheduler
        self._preemption = parts.preemption
        self._runner = parts.compute.runner
        self._pipeline = parts.pipeline
        self._speculation = parts.compute.speculation
        self._delivery = parts.delivery
        self._outbox = parts.base.outbox
        self._predictions = parts.base.predictions
        self._backgrounds = (parts.base.predictions, parts.base.background)
        self._accounts = parts.accounts
        self._idle = parts.idle
        self._pause = parts.pause
        self._ssd_transfers = parts.ssd_transfers
        self._recovery = parts.recovery

    def run(self) -> None:
        """Serves until the engine is stopped or dies."""
        try:
            while not self._thread.stopping:
                try:
                    self._turn()
                except Exception as error:
                    self._recovery.recover(error)
            self._recovery.shut_down()
            if self._ssd_transfers is not None:
                self._ssd_transfers.save()
        except BaseException as error:
            self._recovery.die(error)
        finally:
            self._release_waiting()

    def abandon(self, error: Exception) -> None:
        """Ends the engine from another thread: a rank is gone, and a pass that its thread waits for may never end."""

        def fail() -> None:
            raise error

        self._inbox.put(fail)
        deadline = time.monotonic() + STUCK_SECONDS
        while self._thread.failure is None and time.monotonic() < deadline:
            time.sleep(0.02)
        self._recovery.die(error)  # which it does once
        self._release_waiting()

    def _release_waiting(self) -> None:
        for background in self._backgrounds:
            background.close()
        self._idle.end()
        self._pause.release_waiting()

    def _turn(self) -> None:
        self._read_inbox()
        if self._thread.stopping:
            return
        self._allocator_cache.trim()
        self._delivery.expire()
        if self._pause.active:
            self._pipeline.finish_all()
            self._run_due(serving=False)  # nobody is served, so nobody waits for it
            return
        scheduler = self._scheduler
        in_flight = self._pipeline.in_flight
        begun = time.perf_counter()
        serving = not scheduler.idle or bool(in_flight)
        self._policies.follow()
        self._preemption.make_room()
        if not self._start_steps() and in_flight:
            self._pipeline.finish_next()
        if self._predictions.waiting:
            # In every turn, also in those without a step of theirs: one left in flight would deliver its tokens late.
            self._pipeline.finish_all()
        elif not in_flight:
            # While a step is in flight, events wait until the next is being started: the interpreter is free then.
            self._outbox.flush()
        if serving:
            for background in self._backgrounds:
                background.served(time.perf_counter() - begun, len(scheduler.running))
        self._run_background()
        if not scheduler.admitting and not scheduler.running and not scheduler.partial:
            self._pause.enter()

    def _start_steps(self) -> bool:
        """Starts what is planned now; False when that is nothing."""
        if self._pipeline.in_flight and self._speculation.awaits(self._scheduler.running):
            self._pipeline.finish_all()
        plan = self._scheduler.plan()
        if plan.decode:
            self._pipeline.add(self._runner.decode(plan.decode, self._speculation.draft(plan.decode)))
        for work in plan.prefills:
            self._runner.cache.expect(len(self._live.rows()))
            self._pipeline.add(self._runner.prefill(work))
        return bool(plan)

    def _run_background(self) -> None:
        serving = not self._scheduler.idle
        if not any(background.due(serving) for background in self._backgrounds):
            return
        self._pipeline.finish_all()  # tokens are delivered before rows wait for other work
        if not serving and not self._idle.reached:
            self._idle.enter()
        self._run_due(serving)
        self._pipeline.read_at = time.perf_counter()

    def _run_due(self, serving: bool) -> None:
        """A step of each that is due; while rows wait for it, more of them, if they are short: what it has earned."""
        for background in self._backgrounds:
            again = background.due(serving)
            while again:
                with self._accounts.background_work():
                    background.step(serving)
                again = background.due_again(serving)

    def _read_inbox(self) -> None:
        """Does what was handed in; sleeps while there is nothing else to do."""
        scheduler = self._scheduler
        busy = self._pipeline.in_flight or any(one.waiting for one in self._backgrounds)
        if self._pause.active and not busy:
            try:
                self._inbox.get(timeout=DEADLINE_CHECK_SECONDS if len(self._live) else None)()
            except queue.Empty:
                return
        elif not busy and scheduler.idle and scheduler.admitting:
            if self._inbox.empty():
                self._idle.enter()
            self._await_work()
        elif not busy and scheduler.only_waiting:
            try:
                self._inbox.get(timeout=scheduler.seconds_until_admission() + 0.001)()
            except queue.Empty:
                return
        elif self._ssd_transfers is not None:
            self._ssd_transfers.write_some()
        while not self._inbox.empty():
            self._inbox.get()()

    def _await_work(self) -> None:
        """Sleeps until something is handed in, and meanwhile brings what is worth keeping to the SSD."""
        if self._ssd_transfers is not None:
            self._ssd_transfers.write_while(self._inbox.empty)
        try:
            self._inbox.get(timeout=IDLE_CACHE_SECONDS)()
        except queue.Empty:
            mx.clear_cache()
            self._inbox.get()()
