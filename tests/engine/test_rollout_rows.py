"""Rollouts beside requests: they leave room, resume, and come out as if they had been alone; keys share the queue."""

import threading
import time
from concurrent.futures import Future

import pytest

from mlx_parallm.errors import ContextLengthError, QueueFullError, RequestTimeoutError, UnavailableError
from mlx_parallm.sampling_params import SamplingParams
from mlx_parallm.training.rl.records import Record
from mlx_parallm.training.rl.rollouts import RolloutClient, Rollouts
from mlx_parallm.training.storage.ledger import Ledger
from mlx_parallm.types import Request
from tests.engine.harness import Driver, Pending, driver

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16], [17, 18]]
LONG = SamplingParams(temperature=0.9, max_tokens=400, ignore_eos=True)


def rollouts_of(running: Driver, max_rows: int) -> Rollouts:
    ledger = Ledger()
    running.engine.recorder = ledger
    return Rollouts(running.engine, ledger, max_rows)


def answers(groups: list[list[Record]]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    return [(record.completion_ids, record.logprobs) for group in groups for record in group]


class Drawing(threading.Thread):
    """A rollout on a thread of its own."""

    def __init__(self, rollouts: Rollouts, client: RolloutClient | None = None, prompts: list[list[int]] = PROMPTS):
        super().__init__(daemon=True)
        self._rollouts, self._client, self._prompts = rollouts, client, prompts
        self.groups: list[list[Record]] = []
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.groups = self._rollouts.sample(self._prompts, LONG, adapter=None, seed=1, client=self._client)
        except Exception as error:
            self.error = error


def wait_for_rows(running: Driver, count: int) -> None:
    scheduler = running.engine._parts.compute.scheduler
    for _ in range(2000):
        if len(scheduler.running) == count and all(row.tokens for row in scheduler.running):
            return
        threading.Event().wait(0.005)
    raise AssertionError(f"{len(scheduler.running)} rows run")


def test_a_request_takes_a_place_at_once_and_rollouts_come_out_the_same() -> None:
    with driver("llama", max_batch_size=4, block_size=8) as running:
        rollouts = rollouts_of(running, 4)
        alone = answers(rollouts.sample(PROMPTS, LONG, adapter=None, seed=1))
        preemptions = running.engine.metrics.preemptions
        drawing = Drawing(rollouts)
        wait_for_rows(running, 4)
        asked = [running.submit([3, 4, 5, number], max_tokens=3, ignore_eos=True)[1] for number in range(3)]
        for pending in asked:
            assert len(pending.wait()[0].tokens) == 3
        assert drawing.is_alive()  # none of them waited for a rollout to end
        drawing.join(60)
        assert running.engine.metrics.preemptions - preemptions >= 3
        assert [tokens for tokens, _ in answers(drawing.groups)] == [tokens for tokens, _ in alone]
        for (_, found), (_, expected) in zip(answers(drawing.groups), alone, strict=True):
            assert found == pytest.approx(expected, abs=1e-4)
        running.settle()


def test_rollouts_keep_their_part_while_requests_wait() -> None:
    """At a share of 0.5 two of four places, though more requests wait than there are places."""
    with driver("llama", max_batch_size=4, inference_share=0.5) as running:
        drawing = Drawing(rollouts_of(running, 4))
        wait_for_rows(running, 4)
        asked = [running.submit([3, number], max_tokens=40, ignore_eos=True)[1] for number in range(8)]
        scheduler, seen = running.engine._parts.compute.scheduler, set()
        while not all(pending.done.is_set() for pending in asked):
            if sum(not job.rollout for job in list(scheduler.waiting)) > 1:
                seen.add(sum(row.rollout for row in list(scheduler.running)))
            threading.Event().wait(0.001)
        assert min(seen) == 2
        drawing.join(60)
        assert not drawing.error
        running.settle()


def test_a_rollout_ends_with_its_client() -> None:
    with driver("llama", max_batch_size=4) as running:
        left: Future[None] = Future()
        drawing = Drawing(rollouts_of(running, 4), RolloutClient("ada", None, left))
        wait_for_rows(running, 4)
        left.set_result(None)
        drawing.join(5)
        assert isinstance(drawing.error, UnavailableError)
        running.settle()


def test_a_rollout_has_a_time_limit() -> None:
    with driver("llama", max_batch_size=1) as running:
        drawing = Drawing(rollouts_of(running, 1), RolloutClient("ada", 0.3), PROMPTS * 20)
        drawing.join(5)
        assert isinstance(drawing.error, RequestTimeoutError)
        assert "longer than 0.3 seconds" in str(drawing.error)
        running.settle()


def test_rollouts_fill_a_queue_of_their_own() -> None:
    with driver("llama", max_batch_size=1, max_queue_size=2) as running:
        rollouts = rollouts_of(running, 1)
        blocker, first = running.submit([3], max_tokens=2000, ignore_eos=True, stream=True)
        first.wait_for_tokens(1)
        drawings = [Drawing(rollouts, RolloutClient("ada", None, Future()), [[5, number]]) for number in range(2)]
        scheduler = running.engine._parts.compute.scheduler
        deadline = time.monotonic() + 30
        while scheduler.queued < 2 and time.monotonic() < deadline:
            threading.Event().wait(0.005)
        with pytest.raises(QueueFullError):
            rollouts.sample(PROMPTS[:1], LONG, adapter=None, client=RolloutClient("ada"))
        _, pending = running.submit([4], max_tokens=2, ignore_eos=True)  # requests are not refused
        running.engine.cancel(blocker)
        assert len(pending.wait()[0].tokens) == 2
        for drawing in drawings:
            drawing.join(60)
            assert drawing.groups
        running.settle()


def submit(running: Driver, name: str, owner: str) -> Pending:
    pending = Pending(1)
    sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    running.engine.submit(Request(name, [3, 4], sampling, owner=owner), pending.on_delta)
    return pending


def test_a_key_that_fills_the_queue_leaves_others_their_part() -> None:
    with driver("llama", max_batch_size=1, max_queue_size=8) as running:
        blocker, first = running.submit([3], max_tokens=2000, ignore_eos=True, stream=True)
        first.wait_for_tokens(1)
        greedy = [submit(running, f"a{number}", "ada") for number in range(8)]
        with pytest.raises(QueueFullError):
            submit(running, "a8", "ada")
        others = [submit(running, f"b{number}", "bob") for number in range(4)]  # half of the queue is bob's
        with pytest.raises(QueueFullError):
            submit(running, "b4", "bob")
        running.engine.cancel(blocker)
        for pending in (*greedy, *others):
            pending.wait()
        running.settle()


def test_a_prompt_that_is_too_long_is_known_before_it_is_drawn_from() -> None:
    with driver("llama", max_batch_size=4, block_size=8) as running:
        rollouts = rollouts_of(running, 4)
        longest = running.engine.model.context_length
        rollouts.check_prompt([5] * (longest - 1), 2)
        with pytest.raises(ContextLengthError):
            rollouts.check_prompt([5] * longest, 2)
        with pytest.raises(ContextLengthError):
            rollouts.sample([[5] * longest], LONG, adapter=None)
