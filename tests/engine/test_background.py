"""Work in short steps beside serving: shares of the time, failures, and the end of the engine."""

import time
from collections.abc import Generator
from concurrent.futures import Future

import pytest

from mlx_parallm.engine import background as module
from mlx_parallm.engine.background import Background
from mlx_parallm.errors import UnavailableError
from mlx_parallm.metrics import BackgroundMetrics
from tests.engine.harness import driver

PROMPT = list(range(20, 40))


def busy(steps: int, seconds: float) -> Generator[None, None, int]:
    for _ in range(steps):
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            continue
        yield
    return steps


@pytest.mark.long
def test_work_is_done_beside_requests_and_without() -> None:
    with driver("llama") as running:
        assert running.engine.work(busy(3, 0.001)).result(30) == 3
        alone = running.ask(PROMPT, max_tokens=30)
        future = running.engine.work(busy(200, 0.002))
        assert running.ask(PROMPT, max_tokens=30).tokens == alone.tokens
        assert future.result(30) == 200
        running.settle()
        assert running.engine.metrics.background.steps >= 203


@pytest.mark.long
@pytest.mark.parametrize("share", [0.3, 0.7, 0.9])
def test_serving_has_its_share_while_both_have_work(share: float) -> None:
    with driver("llama", inference_share=share) as running:
        future = running.engine.work(busy(10_000, 0.003))
        metrics = running.engine.metrics.background
        running.ask(PROMPT, max_tokens=400, ignore_eos=True)
        assert metrics.serving_share == pytest.approx(share, abs=0.05)
        assert not future.done()


def test_a_failure_is_the_works_own() -> None:
    def failing() -> Generator[None, None, None]:
        yield
        raise ValueError("too bad")

    with driver("llama") as running:
        future = running.engine.work(failing())
        with pytest.raises(ValueError, match="too bad"):
            future.result(30)
        assert len(running.ask(PROMPT).tokens) == 8


def test_work_ends_with_the_engine() -> None:
    with driver("llama") as running:
        future = running.engine.work(busy(1_000_000, 0.001))
    with pytest.raises(UnavailableError):
        future.result(5)
    with pytest.raises(UnavailableError):
        running.engine.work(busy(1, 0.001)).result(5)


def test_several_take_turns() -> None:
    order: list[str] = []

    def steps(name: str) -> Generator[None, None, None]:
        for _ in range(3):
            order.append(name)
            yield

    background = Background(0.5, BackgroundMetrics())
    background.add(steps("a"), Future())
    background.add(steps("b"), Future())
    while background.due(False):
        background.step(False)
    assert order == ["a", "b", "a", "b", "a", "b"]


def test_what_is_not_carried_over_leaves_one_step_a_turn() -> None:
    def steps() -> Generator[None, None, None]:
        while True:
            time.sleep(0.02)
            yield

    for carries_over, most in ((False, 1), (True, 2)):
        background = Background(0.5, BackgroundMetrics(), carries_over)
        background.add(steps(), Future())
        counts = []
        for _ in range(12):
            background.served(0.026, 1)
            again, count = background.due(True), 0
            while again:
                background.step(True)
                again, count = background.due_again(True), count + 1
            counts.append(count)
        assert max(counts) == most
        background.close()


def test_steps_are_shorter_where_turns_are_slower_beside_them() -> None:
    def steps() -> Generator[None, None, None]:
        while True:
            yield

    def slice_after(alone: float | None, beside: float, rows: int = 8) -> float:
        background = Background(0.5, BackgroundMetrics(), carries_over=False)
        if alone is not None:
            background.served(alone, 8)
        background.add(steps(), Future())
        for _ in range(30):
            background.served(beside, rows)
        background.step(True)
        background.close()
        return background.slice_seconds

    assert slice_after(0.010, 0.010) == pytest.approx(0.006)
    assert slice_after(0.010, 0.012) == pytest.approx(0.004, rel=0.01)  # 16 ms together
    assert slice_after(0.010, 0.020) == pytest.approx(0.004, rel=0.01)  # no less than a fifth
    assert slice_after(None, 0.010) == pytest.approx(0.006)
    assert slice_after(0.010, 0.040, rows=64) == pytest.approx(0.024, rel=0.01)  # unknown for so many rows


def test_steps_of_a_turn_take_no_longer_than_one_may() -> None:
    def steps() -> Generator[None, None, None]:
        while True:
            time.sleep(0.002)
            yield

    background = Background(0.5, BackgroundMetrics(), carries_over=False)
    background.served(0.010, 8)
    background.add(steps(), Future())
    counts = []
    for _ in range(10):
        background.served(0.015, 8)  # 16 ms together
        again, count = background.due(True), 0
        while again:
            background.step(True)
            again, count = background.due_again(True), count + 1
        counts.append(count)
    background.close()
    assert counts[-1] == 1, counts


def test_who_has_not_asked_for_long_does_not_get_it_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CREDIT", 0.03)
    background = Background(0.5, BackgroundMetrics())
    background.add(busy(1000, 0.01), Future())
    for _ in range(100):
        background.served(1.0, 1)
    count = 0
    while background.due(True) and count < 20:
        background.step(True)
        count += 1
    background.close()
    assert 1 <= count <= 4, "seconds that serving took long ago were paid out"


def test_drawn_logprobs_are_recorded_for_all() -> None:
    with driver("llama") as running:
        ended = {}
        running.engine.records_all = True
        running.engine.recorder = lambda request, index, row, _: ended.setdefault(request.id, (row, index))
        options = {"temperature": 0.7, "seed": 3, "max_tokens": 12, "ignore_eos": True}
        name, pending = running.submit(PROMPT, logprobs=0, processed_logprobs=True, **options)
        quiet, other = running.submit(PROMPT, **options)
        answer = pending.wait()[0]
        other.wait()
        running.settle()
        for one in (name, quiet):
            assert ended[one][0].sampled_logprobs == pytest.approx(
                [scored.logprob for scored in answer.logprobs], abs=1e-5
            )


def test_who_asks_at_the_last_moment_is_told() -> None:
    with driver("llama") as running:
        running.engine.work(busy(1, 0.5))
        time.sleep(0.1)
        late = running.engine.work(busy(1, 0.001))
    with pytest.raises(UnavailableError):
        late.result(5)


def test_a_cancelled_future_harms_nobody() -> None:
    with driver("llama") as running:
        long = running.engine.work(busy(1, 0.3))
        gone = running.engine.work(busy(3, 0.001))
        assert gone.cancel()
        assert long.result(10) == 1
        assert len(running.ask(PROMPT).tokens) == 8
        assert running.engine.failure is None
