"""Models that predict: the inputs of all clients wait in one queue, and leave it in batches of similar length. Each
batch begins with another client's input, so that one who sends much does not keep the others waiting.

A batch takes about as long as a decode step of the rows that run beside it, so that these keep their pace; with nobody
beside it, it is larger. The pool makes a `LocalPredictor` of each loaded model; the server calls `predict`.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import Any, Protocol, TypeVar

import mlx.core as mx

from mlx_parallm.engine.background import IDLE_SLICE
from mlx_parallm.errors import QueueFullError, RequestTimeoutError, UnavailableError
from mlx_parallm.metrics import PredictorMetrics
from mlx_parallm.models.kinds import Predictor
from mlx_parallm.runtime.policy_weights import roll_back, update_weights
from mlx_parallm.signature import WeightsVersion
from mlx_parallm.steps import LazySteps, Steps
from mlx_parallm.types import PredictorInfo

FIRST_COST = 256  # of a batch, before it is known how long one takes
MAX_COST = 1 << 14
MAX_SECONDS = 0.25  # of a batch with all its parts: others wait for its end
MEAN_PART = 0.75  # of the longest part of a batch
# A batch may take at least this times what the fastest group takes, where smaller ones are not faster.
MIN_OVER_FASTEST = 1.25
WEIGHT_OF_NEWEST = 0.3  # in a group's moving averages
RECENT = 64  # batches within which a group was not seen: it is forgotten, and may be tried again


@dataclass(slots=True)
class CostGroup:
    """Batches of similar cost."""

    cost: float
    seconds: float
    parts: float  # between which a batch can be paused
    newest: int  # the number of its newest batch

    def add(self, cost: int, seconds: float, parts: int, number: int) -> None:
        self.cost += (cost - self.cost) * WEIGHT_OF_NEWEST
        self.seconds += (seconds - self.seconds) * WEIGHT_OF_NEWEST
        self.parts += (parts - self.parts) * WEIGHT_OF_NEWEST
        self.newest = number

    def excess(self, seconds: float) -> float:
        """Returns how many times too long a batch is whose parts should take so many seconds; up to 1, it is not."""
        part = self.seconds if self.parts < 2 else self.seconds / self.parts / MEAN_PART
        return max(part / max(1e-6, seconds), self.seconds / MAX_SECONDS)


class BatchTimes:
    def __init__(self) -> None:
        self._groups: dict[int, CostGroup] = {}  # by the number of bits of the cost
        self._tried: dict[int, int] = {}  # groups that were asked for: how many batches there had been
        self._count = 0

    def add(self, cost: int, seconds: float, parts: int = 1) -> None:
        self._count += 1
        seconds = max(1e-6, seconds)
        group = self._groups.get(cost.bit_length())
        if group is None:
            self._groups[cost.bit_length()] = CostGroup(cost, seconds, parts, self._count)
        else:
            group.add(cost, seconds, parts, self._count)
        self._groups = {key: one for key, one in self._groups.items() if one.newest > self._count - RECENT}

    def cost_within(self, seconds: float) -> int:
        """Returns what the next batch may cost. Where all known ones take too long, one of half the cost is tried."""
        if not self._groups:
            return FIRST_COST
        excesses = {bits: one.excess(seconds) for bits, one in self._groups.items()}
        fastest = min(excesses, key=lambda bits: excesses[bits])
        if excesses[fastest] > 1 and self._worth_trying(fastest - 1, excesses):
            self._tried[fastest - 1] = self._count
            return math.ceil(self._groups[fastest].cost / 2)
        return self._largest_within(max(1.0, MIN_OVER_FASTEST * excesses[fastest]), excesses)

    @property
    def launch_cost(self) -> int:
        """The cost of the largest batch that takes about as long as the fastest."""
        seconds = {bits: one.seconds for bits, one in self._groups.items()}
        return self._largest_within(MIN_OVER_FASTEST * min(seconds.values()), seconds) if seconds else 0

    def _largest_within(self, limit: float, found: dict[int, float]) -> int:
        """The largest cost of a batch for which what was found is within the limit, as its group tells it."""
        costs = [self._groups[bits].cost * limit / value for bits, value in found.items() if value <= limit]
        return min(MAX_COST, math.ceil(max(costs)))

    def _worth_trying(self, bits: int, excesses: dict[int, float]) -> bool:
        """Returns whether batches of this group may be faster than those of the next, the fastest that is known: not if
        that one is little faster than its own double, or if inputs were too large for this group when it was tried."""
        if bits < 1 or bits in excesses or self._count - self._tried.get(bits, -RECENT) < RECENT:
            return False
        return bits + 2 not in excesses or excesses[bits + 2] >= MIN_OVER_FASTEST * excesses[bits + 1]


T = TypeVar("T")
WINDOW = 512  # inputs among which those of similar cost are looked for
MAX_PADDING = 1.25  # cost of a batch with its padding, to that without
FREE_COST = 64  # of a batch so small that its padding does not matter; more where launching kernels dominates


class PredictionHost(Protocol):
    """A thread on which models predict, in steps between those of other work."""

    @property
    def slice_seconds(self) -> float:
        """The seconds that the step that runs now should take."""
        ...

    def predict(self, steps: "Steps[None]") -> "Future[None]": ...
    def run(self, work: Callable[[], T]) -> T: ...


@dataclass(slots=True, eq=False)
class Call:
    """The inputs of one client, and what has come of them so far."""

    results: list[Any]
    left: int
    deadline: float
    future: "Future[list[Any]]" = field(default_factory=Future)
    waiting: "deque[Input]" = field(default_factory=deque)

    def fail(self, error: BaseException) -> None:
        try:
            self.future.set_exception(error)
        except InvalidStateError:  # it has failed already, or its client has left
            return

    def put(self, index: int, result: Any) -> None:
        self.results[index] = result
        self.left -= 1
        if self.left == 0 and not self.future.done():
            try:
                self.future.set_result(self.results)
            except InvalidStateError:
                return


@dataclass(slots=True, eq=False)
class Input:
    call: Call
    index: int
    value: Any
    cost: int
    alone: bool = False  # a batch that it was in has failed


class PacedBatch:
    """Runs a batch in as many steps of the host as it needs, where it can be paused."""

    def __init__(self, host: PredictionHost) -> None:
        self._host = host
        self.seconds = 0.0  # that the batch has taken, without its pauses
        self.parts = 1

    def run(self, steps: "LazySteps[T]") -> "Steps[T]":
        used = longest = 0.0  # of the host's step; of a part of the batch
        while True:
            begun = time.perf_counter()
            try:
                lazy = next(steps)
            except StopIteration as end:
                self.seconds += time.perf_counter() - begun
                found: T = end.value
                return found
            if lazy is not None and self._host.slice_seconds < IDLE_SLICE:
                mx.eval(lazy)
            seconds = time.perf_counter() - begun
            self.parts += 1
            self.seconds, used, longest = self.seconds + seconds, used + seconds, max(longest, seconds)
            if used + longest > self._host.slice_seconds:
                yield
                used = 0.0


class LocalPredictor:
    """A model of this process that predicts. `predict` may be called from any thread."""

    def __init__(self, predictor: Predictor, host: PredictionHost, max_queue_size: int) -> None:
        self.predictor = predictor
        self._host = host
        self.metrics = PredictorMetrics()
        self._max_queue_size = max_queue_size
        self._lock = threading.RLock()  # futures call back while it is held
        self._ended_one = threading.Condition(self._lock)
        self._calls: dict[Call, None] = {}  # that have not ended, the one whose turn is next first
        self._closed: str | None = None  # why new calls are refused
        self._running = False  # steps of ours are on the host
        self._times = BatchTimes()

    @property
    def info(self) -> PredictorInfo:
        return self.predictor.info

    @property
    def tokenizer(self) -> Any:
        return self.predictor.tokenizer

    @property
    def idle(self) -> bool:
        with self._lock:
            return not self._calls

    def predict(self, inputs: Sequence[Any], timeout: float | None = None) -> "Future[list[Any]]":
        """An output for each input. Cancelling the future takes those that still wait out of the queue."""
        call = Call([None] * len(inputs), len(inputs), time.monotonic() + (timeout or math.inf))
        if not inputs:
            call.future.set_result([])
            return call.future
        cost = self.predictor.cost
        entries = [Input(call, index, value, cost(value)) for index, value in enumerate(inputs)]
        with self._lock:
            if self._closed is not None:
                raise UnavailableError(self._closed)
            if len(self._calls) >= self._max_queue_size:
                raise QueueFullError(f"{len(self._calls)} requests wait for this model; try again later")
            self._calls[call] = None
            self.metrics.requests += 1
            self.metrics.waiting = len(self._calls)
        call.future.add_done_callback(lambda _: self._forget(call))
        with self._lock:
            call.waiting.extend(entries)
            if not self._running:
                self._start()
        return call.future

    def drain(self, timeout: float, reason: str) -> bool:
        """Refuses new calls, for this reason, and waits until the others have ended."""
        with self._lock:
            self._closed = reason
            return self._ended_one.wait_for(lambda: not self._calls, timeout)

    def stop(self) -> None:
        """Cuts off the calls that have not ended; a batch that runs does so for nothing."""
        with self._lock:
            calls = list(self._calls)
            reason = self._closed or "the model has stopped"
        for call in calls:
            call.fail(UnavailableError(reason))

    def move(self, host: PredictionHost) -> None:
        """Predicts on another thread from the next batch on."""
        with self._lock:
            self._host = host

    def update(self, name: str, data: bytes, number: int | None = None) -> WeightsVersion:
        return update_weights(name, self.predictor, self._host.run, data, number)

    def rollback(self, name: str, number: int | None = None) -> WeightsVersion:
        return roll_back(name, self.predictor, self._host.run, number)

    def _forget(self, call: Call) -> None:
        with self._lock:
            self._calls.pop(call, None)
            self.metrics.waiting = len(self._calls)
            self._ended_one.notify_all()

    def _start(self) -> None:
        self._running = True
        host = self._host
        host.predict(self._steps(host)).add_done_callback(lambda steps: self._ended(steps, host))

    def _ended(self, steps: "Future[None]", host: PredictionHost) -> None:
        """Goes on at another host after a move. Has the host stopped, or is our own code wrong, it fails all calls:
        nobody may wait for ever."""
        error = steps.exception()
        with self._lock:
            if self._running and self._host is not host:
                self._start()
                return
        if error is None:
            return
        with self._lock:
            calls = list(self._calls)
            self._running = False
        for call in calls:
            call.fail(error if isinstance(error, UnavailableError) else UnavailableError(f"the model failed: {error}"))

    # The host's thread from here on.

    def _steps(self, host: PredictionHost) -> "Steps[None]":
        while self._host is host and (batch := self._take(host.slice_seconds)):
            try:
                yield from self._run(batch, host)
            except GeneratorExit:  # the host ends in the middle of a batch; the next one begins it anew
                self._put_back(batch)
                raise
            yield

    def _take(self, seconds: float) -> list[Input]:
        """An input of the call whose turn it is, and others of similar cost, as many as fit into the time."""
        with self._lock:
            window = self._window()
            if not window:
                self._running = False
                return []
            first = window[0]
            others = [one for one in window if not one.alone]
            budget = self._times.cost_within(seconds)
            free = max(FREE_COST, self._times.launch_cost)
            batch = [first] if first.alone else _similar(first, others, budget, free)
            for one in batch:
                one.call.waiting.remove(one)
            if first.call in self._calls:  # all others have their turn before it has its next
                self._calls[first.call] = self._calls.pop(first.call)
        return batch

    def _window(self) -> list[Input]:
        """The first inputs of every call that has some, in turn, without those whose time is up."""
        now = time.monotonic()
        for call in list(self._calls):
            if call.deadline < now:
                call.fail(RequestTimeoutError("the request took longer than the server allows"))
        queues = [call.waiting for call in self._calls if call.waiting and not call.future.done()]
        share = max(1, WINDOW // max(1, len(queues)))
        rounds = zip_longest(*(islice(queue, share) for queue in queues))
        return [one for several in rounds for one in several if one is not None][:WINDOW]

    def _put_back(self, batch: list[Input]) -> None:
        with self._lock:
            for one in reversed(batch):
                one.call.waiting.appendleft(one)

    def _run(self, batch: list[Input], host: PredictionHost) -> "Steps[None]":
        paced = PacedBatch(host)
        try:
            results = yield from paced.run(self.predictor.steps([one.value for one in batch]))
            assert len(results) == len(batch), f"{len(results)} outputs for {len(batch)} inputs"
        except Exception as error:  # of one input perhaps, which the others must not pay for
            if len(batch) == 1:
                self.metrics.failures += 1
                batch[0].call.fail(error)
                return
            for one in batch:
                one.alone = True
            self._put_back(batch)
            return
        seconds = paced.seconds
        self.metrics.batches, self.metrics.inputs = self.metrics.batches + 1, self.metrics.inputs + len(batch)
        self.metrics.seconds += seconds
        self._times.add(max(one.cost for one in batch) * len(batch), seconds, paced.parts)
        for one, result in zip(batch, results, strict=True):
            one.call.put(one.index, result)


def _similar(first: Input, window: Sequence[Input], budget: int, free: int) -> list[Input]:
    """`first` and the nearest to it in cost. Padded to the longest, they cost at most `budget`, with little padding
    unless they cost at most `free`."""
    batch: list[Input] = []
    longest = total = 0
    for one in sorted(window, key=lambda one: abs(one.cost - first.cost)):  # stable: those that wait longest come first
        longest = max(longest, one.cost)
        total = total + one.cost
        padded = longest * (len(batch) + 1)
        if batch and (padded > budget or padded > max(free, total * MAX_PADDING)):
            break
        batch.append(one)
    return batch
