"""Work that shares the engine's time with generating, in short steps: training, and models that predict. The engine
knows no more of either than that.

Serving has its share of the time while both have work; either takes all when the other has none. The account is kept in
seconds: serving earns the other side its part, and a step is paid for after it has run.
"""

import time
from collections import deque
from concurrent.futures import Future
from typing import Any, TypeVar

from mlx_parallm.errors import UnavailableError
from mlx_parallm.metrics import BackgroundMetrics
from mlx_parallm.steps import Steps

T = TypeVar("T")
MAX_CREDIT = 1.0  # seconds: who has not asked for long does not get it all at once
IDLE_SLICE = 0.25  # seconds of a step that nobody waits for; somebody may come
# What a step may take while rows are served, as a part of a turn of serving: the next token then comes well within
# twice its time. The minimum is for turns that are much slower beside our steps than without them.
SERVING_SLICE = 0.6
MIN_SERVING_SLICE = 0.2
WEIGHT_OF_NEWEST = 0.2  # in the moving average of a turn


class Background:
    """All but the metrics belongs to the engine thread."""

    def __init__(self, serving_share: float, metrics: BackgroundMetrics, carries_over: bool = True) -> None:
        """`carries_over`: time that a turn has earned and not used is added to the next turn's. Without it, no turn
        gives more time to this work than it has earned itself, nor several steps that take longer than one of them
        should, so that tokens come at an even pace."""
        self._share = serving_share
        self._carries_over = carries_over
        self._credit = 0.0
        self._tasks: deque[tuple[Steps[Any], Future[Any]]] = deque()
        self._closed = False
        self._last = 0.0  # seconds of the newest step
        self._spent = 0.0  # seconds of all steps since the newest turn of serving
        self._turn = 0.0  # seconds that serving takes between two of our steps
        self._turns_alone: dict[int, float] = {}  # the same with no work of ours waiting, by the bits of the row count
        self._row_bits = 0
        self.slice_seconds = IDLE_SLICE  # that the step which runs now should take, for work that can choose
        self.metrics = metrics

    @property
    def waiting(self) -> bool:
        return bool(self._tasks)

    def add(self, steps: Steps[T], future: "Future[T]") -> None:
        if self._closed:
            future.set_exception(UnavailableError("the engine has stopped"))
        elif future.set_running_or_notify_cancel():  # from here on nobody can cancel it
            self._tasks.append((steps, future))

    def served(self, seconds: float, rows: int) -> None:
        """A turn of serving so many rows has taken so long."""
        self._turn, self._row_bits, self._spent = _average(self._turn, seconds), rows.bit_length(), 0.0
        if not self._tasks:
            self._turns_alone[self._row_bits] = _average(self._turns_alone.get(self._row_bits, 0.0), seconds)
        else:
            self.metrics.serving_seconds += seconds
            earned = seconds * (1 - self._share) / self._share
            self._credit = min(MAX_CREDIT if self._carries_over else earned, self._credit + earned)

    def due(self, serving: bool) -> bool:
        """Returns whether to run a step now; `serving`: there is also somebody to serve."""
        return bool(self._tasks) and (not serving or self._credit > 0)

    def due_again(self, serving: bool) -> bool:
        """Returns whether to run another step in the same turn: the time left must be enough for one like the last."""
        return serving and self.due(serving) and self._time_left() > self._last

    def step(self, serving: bool) -> None:
        """Runs one step of the work that has waited longest."""
        steps, future = self._tasks.popleft()
        self.slice_seconds = min(IDLE_SLICE, self._serving_slice(), self._time_left()) if serving else IDLE_SLICE
        begun = time.perf_counter()
        try:
            next(steps)
        except StopIteration as end:
            future.set_result(end.value)
        except Exception as error:  # the work has failed, not the engine
            future.set_exception(error)
        else:
            self._tasks.append((steps, future))
        seconds = self._last = time.perf_counter() - begun
        self.metrics.steps += 1
        self.metrics.seconds += seconds
        if serving:
            self._credit -= seconds
            self._spent += seconds
            self.metrics.contended_seconds += seconds
            self.metrics.longest_stall = max(self.metrics.longest_stall, seconds)

    def _time_left(self) -> float:
        """Seconds that steps may still take in this turn."""
        return self._credit if self._carries_over else min(self._credit, self._serving_slice() - self._spent)

    def _serving_slice(self) -> float:
        """Turn and step together may take 1 + SERVING_SLICE times what a turn takes alone: the pipeline is drained for
        our steps, which makes turns longer."""
        alone = self._turns_alone.get(self._row_bits, self._turn)
        room = alone * (1 + SERVING_SLICE) - self._turn
        return min(max(room, self._turn * MIN_SERVING_SLICE), self._turn * SERVING_SLICE)

    def close(self) -> None:
        self._closed = True
        while self._tasks:
            steps, future = self._tasks.popleft()
            steps.close()
            future.set_exception(UnavailableError("the engine has stopped"))


def _average(before: float, newest: float) -> float:
    """A moving average; 0 before the first."""
    return before + (newest - before) * (WEIGHT_OF_NEWEST if before else 1.0)
