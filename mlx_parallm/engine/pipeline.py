"""Steps that were started and not read, and what is done when they are read. Engine thread only.

On a GPU steps are started before those before them are read; the CPU backend runs a step while it is being started,
so there each is read at once.
"""

import logging
import time
from collections import deque

from mlx_parallm.engine.accounts import Accounts
from mlx_parallm.engine.compute.runner import Runner
from mlx_parallm.engine.compute.step import Step, Token
from mlx_parallm.engine.delivery import Delivery, Outbox
from mlx_parallm.engine.scheduler import Scheduler
from mlx_parallm.errors import GrammarError, UnprocessableError
from mlx_parallm.metrics import EngineMetrics

log = logging.getLogger(__name__)

SLOW_STEP_SECONDS = 1.0  # worth a line in the log
NOT_FINITE = "the model's logits are not numbers: its weights, or its adapter's, are damaged or too large"


class StepPipeline:
    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        accounts: Accounts,
        delivery: Delivery,
        outbox: Outbox,
        metrics: EngineMetrics,
        max_in_flight: int,
    ) -> None:
        self.in_flight: deque[Step] = deque()  # the oldest first
        self.read_at = 0.0  # when the device was last known to be free: a step takes its time from then on
        self._runner = runner
        self._scheduler = scheduler
        self._accounts = accounts
        self._delivery = delivery
        self._outbox = outbox
        self._metrics = metrics
        self._max_in_flight = max_in_flight
        self._admissions = 0

    def add(self, step: Step) -> None:
        """Takes note of a step just started, and reads those that are far enough behind it."""
        step.started_at = time.perf_counter()
        if step.kind == "prefill":
            for _, row, _ in step.rows:
                self._admissions += 1
                row.order = self._admissions
                self._scheduler.running.append(row)
        self.in_flight.append(step)
        # A grammar must see each token before it can allow the next; drafts decide how far their rows have come.
        at_once = step.drafted is not None or any(row.matcher is not None for row in self._scheduler.running)
        ahead = 0 if at_once else self._max_in_flight
        while len(self.in_flight) > ahead:
            self.finish_next()

    def finish_all(self) -> None:
        """Reads all that is in flight, and hands its events over."""
        while self.in_flight:
            self.finish_next()
        self._outbox.flush()

    def finish_next(self) -> None:
        """Reads the oldest step; its rows accept their tokens."""
        step = self.in_flight.popleft()
        asked = time.perf_counter()
        tokens = self._runner.read(step)
        now = time.perf_counter()
        self._accounts.step(step, now - max(step.launched_at, self.read_at), now - asked)
        if now - step.launched_at > SLOW_STEP_SECONDS:
            _log_slow(step, now)
        self.read_at = now
        self._accept(tokens)

    def _accept(self, tokens: list[Token]) -> None:
        for item in tokens:
            row = item.row
            if row.finish_reason is not None:
                continue
            if not item.valid:
                self._delivery.fail(row, UnprocessableError(NOT_FINITE, code="not_finite"))
                continue
            if row.repeated:  # it lost its place, and has this one
                row.repeated -= 1
                continue
            if not row.tokens:
                row.begun = row.begun or time.perf_counter()
                self._metrics.time_to_first_token.observe(time.monotonic() - row.readers[0].arrival)
            if row.matcher is not None and (problem := row.follow_grammar(item.token)):
                self._delivery.fail(row, GrammarError(f"the grammar can't be followed any further: {problem}"))
                continue
            row.accept(item.token, item.logprob, item.sampled_logprob)
            self._delivery.send(row)


def _log_slow(step: Step, now: float) -> None:
    log.debug(
        "a %s of %d %s took %.2f s, %.2f of them to start",
        step.kind,
        step.count,
        step.shape,
        now - step.launched_at,
        step.started_at - step.launched_at,
    )
