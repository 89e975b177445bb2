"""Batches of predictions: inputs of several clients together, by similar cost; nobody pays for another's mistake."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, wait
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm.errors import InvalidRequestError, QueueFullError, RequestTimeoutError, UnavailableError
from mlx_parallm.models.kinds import Predictor
from mlx_parallm.runtime.loading import PredictThread
from mlx_parallm.runtime.predicting import (
    FIRST_COST,
    IDLE_SLICE,
    MAX_COST,
    RECENT,
    BatchTimes,
    LocalPredictor,
    PacedBatch,
)
from mlx_parallm.steps import LazySteps, Steps
from mlx_parallm.types import PredictorInfo


class Lengths(Predictor):
    """The length of a text; it remembers its batches, and may be held up."""

    info = PredictorInfo(kind="lengths")

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.gate = threading.Event()
        self.gate.set()

    def cost(self, item: str) -> int:
        return len(item)

    def predict(self, batch: Sequence[Any]) -> list[Any]:
        self.gate.wait(10)
        self.batches.append(list(batch))
        if "bad" in batch:
            raise InvalidRequestError("this one is bad", param="input")
        return [len(item) for item in batch]


@pytest.fixture
def host() -> Iterator[PredictThread]:
    host = PredictThread()
    yield host
    host.stop()


@pytest.fixture
def lengths() -> Lengths:
    return Lengths()


@pytest.fixture
def model(host: PredictThread, lengths: Lengths) -> LocalPredictor:
    return LocalPredictor(lengths, host, max_queue_size=4)


def held_up(model: LocalPredictor, lengths: Lengths) -> Any:
    """A call that the model is busy with, so that others wait."""
    lengths.gate.clear()
    first = model.predict(["first"])
    while any(call.waiting for call in model._calls):
        time.sleep(0.001)
    return first


def test_outputs_come_in_the_order_of_inputs(model: LocalPredictor) -> None:
    texts = ["x" * (index * 7 % 40 + 1) for index in range(200)]
    assert model.predict(texts).result(10) == [len(text) for text in texts]
    assert model.predict([]).result(10) == []
    assert model.idle


def test_calls_that_wait_are_batched_by_length(model: LocalPredictor, lengths: Lengths) -> None:
    first = held_up(model, lengths)
    calls = [model.predict(["a" * 100, "b"]), model.predict(["c" * 101, "d" * 2])]
    lengths.gate.set()
    assert [call.result(10) for call in (first, *calls)] == [[5], [100, 1], [101, 2]]
    assert lengths.batches[1] == ["a" * 100, "c" * 101], "the first of those that wait, and the nearest in length"
    assert lengths.batches[2] == ["d" * 2, "b"], "then the other call has its turn"


def test_one_who_sends_much_does_not_keep_others_waiting(model: LocalPredictor, lengths: Lengths) -> None:
    first, much = held_up(model, lengths), model.predict(["m" * 4000] * 50)
    little = model.predict(["l"])
    lengths.gate.set()
    assert (first.result(10), much.result(10), little.result(10)) == ([5], [4000] * 50, [1])
    assert lengths.batches.index(["l"]) <= 2


def test_a_model_that_is_stopped_cuts_off_what_has_not_ended(model: LocalPredictor, lengths: Lengths) -> None:
    first, waiting = held_up(model, lengths), model.predict(["waits"])
    assert not model.drain(0.02, "'model' was unloaded")
    with pytest.raises(UnavailableError, match="'model' was unloaded"):
        model.predict(["late"])
    model.stop()
    for call in (first, waiting):
        with pytest.raises(UnavailableError, match="'model' was unloaded"):
            call.result(10)
    lengths.gate.set()
    assert model.idle


def test_draining_waits_for_what_runs(model: LocalPredictor, lengths: Lengths) -> None:
    first, waiting = held_up(model, lengths), model.predict(["waits"])
    threading.Timer(0.05, lengths.gate.set).start()
    assert model.drain(10, "no more")
    assert (first.result(0), waiting.result(0)) == ([5], [5])


def test_a_batch_that_fails_is_tried_input_by_input(model: LocalPredictor, lengths: Lengths) -> None:
    first = held_up(model, lengths)
    bad, good = model.predict(["bad"]), model.predict(["one", "two"])
    lengths.gate.set()
    assert first.result(10) == [5]
    assert good.result(10) == [3, 3]
    with pytest.raises(InvalidRequestError, match="this one is bad"):
        bad.result(10)
    assert model.predict(["again"]).result(10) == [5], "what failed has harmed nobody"
    assert model.idle


def test_the_queue_has_an_end(model: LocalPredictor, lengths: Lengths) -> None:
    calls = [held_up(model, lengths), *(model.predict(["x"]) for _ in range(3))]
    with pytest.raises(QueueFullError, match="4 requests wait"):
        model.predict(["one too many"])
    lengths.gate.set()
    wait(calls, 10)
    assert model.predict(["x"]).result(10) == [1]


def test_what_its_client_has_left_is_not_computed(model: LocalPredictor, lengths: Lengths) -> None:
    first, left = held_up(model, lengths), model.predict(["left"])
    assert left.cancel()
    lengths.gate.set()
    assert first.result(10) == [5]
    assert model.predict(["stays"]).result(10) == [5]
    with pytest.raises(CancelledError):
        left.result(10)
    assert ["left"] not in lengths.batches
    assert model.idle


def test_a_call_waits_no_longer_than_it_may(model: LocalPredictor, lengths: Lengths) -> None:
    first, late = held_up(model, lengths), model.predict(["late"], timeout=0.01)
    time.sleep(0.02)
    lengths.gate.set()
    assert first.result(10) == [5]
    with pytest.raises(RequestTimeoutError):
        late.result(10)


def test_a_host_that_stops_leaves_nobody_waiting(model: LocalPredictor, lengths: Lengths, host: PredictThread) -> None:
    first, waiting = held_up(model, lengths), model.predict(["waits"])
    threading.Timer(0.05, lengths.gate.set).start()
    host.stop()
    for call in (first, waiting):
        assert isinstance(call.exception(10), UnavailableError | None)
    with pytest.raises(UnavailableError):
        model.predict(["too late"]).result(10)


def test_a_batch_is_as_long_as_the_step_may_take(model: LocalPredictor, lengths: Lengths) -> None:
    model._times.add(4, 0.1)  # ten of cost one in a quarter of a second
    lengths.gate.clear()
    calls = [model.predict(["x"]) for _ in range(4)]
    lengths.gate.set()
    wait(calls, 10)
    assert all(len(batch) <= 10 for batch in lengths.batches)


class Impatient(PredictThread):
    slice_seconds = 0.001


class SlowToLaunch(Lengths):
    """As on a GPU, where launching the kernels takes longer than a step may, whatever the batch."""

    def predict(self, batch: Sequence[Any]) -> list[Any]:
        time.sleep(0.004)
        return super().predict(batch)


def test_batches_grow_where_their_time_does_not() -> None:
    host, lengths = Impatient(), SlowToLaunch()
    try:
        model = LocalPredictor(lengths, host, max_queue_size=4)
        model._times.add(1, 0.004)
        assert model.predict(["x"] * 2000).result(30) == [1] * 2000
    finally:
        host.stop()
    assert max(map(len, lengths.batches)) >= 32
    assert len(lengths.batches) < 400


class Layers(Lengths):
    """Takes long over a single input, and can be paused."""

    def steps(self, batch: Sequence[Any]) -> Steps[list[Any]]:
        for _ in range(6):
            time.sleep(0.004)
            yield
        return self.predict(batch)


def test_a_long_input_takes_several_steps() -> None:
    host = Impatient()
    try:
        model = LocalPredictor(Layers(), host, max_queue_size=4)
        assert model.predict(["long"]).result(10) == [4]
        assert model.predict(["x", "yy"]).result(10) == [1, 2]
        assert host.metrics.steps >= 10
        assert host._background.metrics.seconds < 1
        [group] = [one for one in model._times._groups.values() if round(one.cost) == 4]
        assert 0.024 <= group.seconds < 0.2
    finally:
        host.stop()


class LazyLayers(Lengths):
    def steps(self, batch: Sequence[Any]) -> LazySteps[list[Any]]:
        x = mx.ones((600, 600))
        for _ in range(5):
            x = (x @ mx.ones((600, 600))) / 600
            yield x
        return [int(x[0, 0].item()) * found for found in self.predict(batch)]


@pytest.mark.parametrize(("kind", "fewest", "most"), [(Impatient, 5, 9), (PredictThread, 1, 3)])
def test_lazy_parts_are_computed_one_by_one_only_where_somebody_waits(
    kind: type[PredictThread], fewest: int, most: int
) -> None:
    host = kind()
    try:
        model = LocalPredictor(LazyLayers(), host, max_queue_size=4)
        assert model.predict(["xx"]).result(10) == [2]
        assert fewest <= host.metrics.steps <= most
    finally:
        host.stop()


def test_a_batch_that_its_host_did_not_finish_is_begun_anew() -> None:
    first, second = Impatient(), Impatient()
    try:
        model = LocalPredictor(Layers(), first, max_queue_size=4)
        calls = [model.predict(["long", "one"]), model.predict(["other"])]
        time.sleep(0.01)
        model.move(second)
        first.stop()
        assert [call.result(10) for call in calls] == [[4, 3], [5]]
    finally:
        second.stop()


def test_a_batch_that_compiled_kernels_does_not_shrink_the_next() -> None:
    times = BatchTimes()
    assert times.cost_within(0.01) == FIRST_COST
    for _ in range(10):
        times.add(1000, 0.01)
    assert times.cost_within(0.02) == 2000
    times.add(2000, 8.0)
    times.add(10, 0.009)  # a small one, as few others waited
    assert times.cost_within(0.02) == 2000
    assert times.cost_within(1e9) == MAX_COST


def test_the_largest_batch_that_is_fast_enough_counts() -> None:
    """On a GPU: two milliseconds for launching kernels, and one for two thousand tokens."""
    times, cost = BatchTimes(), 50
    for _ in range(100):
        times.add(cost, 0.002 + cost / 2e6)
        times.add(60, 0.00203)  # others come one by one
        cost = times.cost_within(0.001)
    assert 800 < cost < 1200, "a quarter longer than the shortest"
    assert times.cost_within(0.004) > 1500


@pytest.mark.parametrize("launching", [0.002, 0.0])
def test_large_batches_shrink_when_rows_come(launching: float) -> None:
    """The large ones of an idle server are all that is known at first."""

    def seconds(cost: int) -> float:
        return launching + cost / 1e6

    times = BatchTimes()
    for _ in range(RECENT):
        times.add(MAX_COST, seconds(MAX_COST))
    costs = []
    for _ in range(RECENT):
        costs.append(times.cost_within(0.001))
        times.add(costs[-1], seconds(costs[-1]))
    assert max(costs[8:]) < 4000, "after a few batches"
    assert seconds(costs[-1]) <= max(0.0011, 1.75 * launching)


def test_a_batch_may_take_longer_where_it_can_be_paused() -> None:
    whole, paused = BatchTimes(), BatchTimes()
    for _ in range(20):
        whole.add(1000, 0.01)
        paused.add(1000, 0.01, parts=10)
    assert whole.cost_within(0.02) == 2000
    assert paused.cost_within(0.002) == pytest.approx(1500, rel=0.01), "the longest part takes longer than the mean"
    assert paused.cost_within(10.0) == MAX_COST
    for _ in range(20):
        paused.add(1000, 0.2, parts=10)
    assert paused.cost_within(10.0) == pytest.approx(1250, rel=0.01), "others wait for its end"


def test_smaller_batches_are_not_tried_for_ever_where_inputs_are_large() -> None:
    times, asked = BatchTimes(), []
    for _ in range(RECENT):
        asked.append(times.cost_within(0.001))
        times.add(max(250, asked[-1]), 0.002 + max(250, asked[-1]) / 1e6)  # no input costs less
    assert sum(cost < 250 for cost in asked) == 1
    assert asked[-1] > 500


def test_batches_shrink_where_they_have_become_slower() -> None:
    times = BatchTimes()
    for seconds in [0.01] * 20 + [0.02] * 20:
        times.add(1000, seconds)
    assert times.cost_within(0.04) == pytest.approx(2000, rel=0.01)


def test_a_size_that_was_slow_once_is_tried_again() -> None:
    times = BatchTimes()
    times.add(2000, 8.0)
    for _ in range(RECENT):
        times.add(1000, 0.01)
    assert times.cost_within(10.0) == MAX_COST
    assert 2000 not in [round(one.cost) for one in times._groups.values()]


def test_a_batch_has_a_part_more_than_it_has_pauses() -> None:
    def three() -> LazySteps[str]:
        yield None
        yield None
        return "done"

    paced = PacedBatch(SimpleNamespace(slice_seconds=IDLE_SLICE))  # type: ignore[arg-type]
    run = paced.run(three())
    with pytest.raises(StopIteration) as ended:
        next(run)
    assert (ended.value.value, paced.parts) == ("done", 3)
