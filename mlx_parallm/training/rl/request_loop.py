"""Learns from what a server is sent, step by step: an update whenever enough rewarded answers wait in the buffer.

`RLIntegratedServer` runs one on a thread where no task is named; `follower` does the same for servers without an end.
"""

import logging
import threading
import time
from collections.abc import Callable

from mlx_parallm.errors import ParallmError, UnavailableError
from mlx_parallm.training.rl.session import Session
from mlx_parallm.training.rl.task_loop import StepReport

log = logging.getLogger(__name__)

WAIT_SECONDS = 0.2  # between looks at whether it is to stop


class RequestLoop:
    def __init__(self, session: Session, ready: int, steps: int | None, on_step: Callable[[StepReport], None]) -> None:
        """`ready`: trajectories that make an update. `steps`: None: until it is stopped."""
        self._session = session
        self._ready = ready
        self._steps = steps
        self._on_step = on_step
        self._stopping = threading.Event()

    def stop(self) -> None:
        self._stopping.set()
        self._session.buffer.wake()

    def run(self) -> list[StepReport]:
        reports: list[StepReport] = []
        while not self._stopping.is_set() and (self._steps is None or len(reports) < self._steps):
            if not self._session.buffer.wait(self._ready, WAIT_SECONDS) or self._stopping.is_set():
                continue
            try:
                report = self._step(len(reports) + 1)
            except UnavailableError:
                break
            except ParallmError as error:  # the next may do better
                log.warning("an update from requests was not made: %s", error.message)
                continue
            reports.append(report)
            self._on_step(report)
        return reports

    def _step(self, step: int) -> StepReport:
        begun = time.perf_counter()
        report = self._session.update(at_most=self._ready)
        return StepReport(
            step=step,
            reward=report.outcome.metrics["reward_mean"],
            update_seconds=time.perf_counter() - begun,
            report=report,
        )
