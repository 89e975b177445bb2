"""A pause between two steps: what runs stops, ends first or is cut off; nothing is lost, and answers are the same."""

import threading
import time

import pytest

from mlx_parallm.errors import RequestTimeoutError
from tests.engine.harness import Bare, driver
from tests.engine.test_parity import GPU
from tests.tiny import tiny

PROMPT = list(range(30, 60))
LONG = 300


@pytest.mark.long
@pytest.mark.parametrize("profile", [None, GPU], ids=["cpu", "gpu"])
def test_keep(profile: object) -> None:
    bare = Bare(tiny())
    with driver("llama", profile=profile) as running:
        first = running.submit(PROMPT, max_tokens=LONG, ignore_eos=True, stream=True)[1]
        first.wait_for_tokens(4)
        assert running.engine.pause("keep", 10)
        assert running.engine.paused
        seen = list(first.answers[0].tokens)
        second = running.submit(PROMPT[:9], max_tokens=5, ignore_eos=True, stream=True)[1]
        time.sleep(0.3)
        assert list(first.answers[0].tokens) == seen
        assert len(seen) < LONG
        assert not second.answers[0].tokens
        assert running.engine.pause("keep", 10)  # twice is as good
        running.engine.resume()
        assert not running.engine.paused
        assert first.wait()[0].tokens == bare.greedy(PROMPT, LONG, ignore_eos=True)[0]
        assert second.wait()[0].tokens == bare.greedy(PROMPT[:9], 5, ignore_eos=True)[0]
        running.settle()


@pytest.mark.long
def test_a_request_whose_time_is_over_during_a_pause_is_told_at_once() -> None:
    with driver("llama", max_batch_size=1) as running:
        first = running.submit(PROMPT, max_tokens=2000, ignore_eos=True, stream=True, timeout=1.0)[1]
        first.wait_for_tokens(2)
        assert running.engine.pause("keep", 10)
        queued = running.submit(PROMPT, max_tokens=4, ignore_eos=True, timeout=0.5)[1]
        patient = running.submit(PROMPT[:9], max_tokens=5, ignore_eos=True)[1]
        for pending in (first, queued):
            error = pending.wait()[0].last.error
            assert isinstance(error, RequestTimeoutError)
        assert running.engine.paused, "nobody has ended the pause"
        assert not patient.answers[0].deltas
        running.engine.resume()
        assert patient.wait()[0].tokens == Bare(tiny()).greedy(PROMPT[:9], 5, ignore_eos=True)[0]
        running.settle()


def test_wait() -> None:
    bare = Bare(tiny())
    with driver("llama") as running:
        first = running.submit(PROMPT, max_tokens=60, ignore_eos=True, stream=True)[1]
        first.wait_for_tokens(2)
        assert running.engine.pause("wait", 30)
        assert len(first.wait()[0].tokens) == 60
        second = running.submit(PROMPT, max_tokens=5, ignore_eos=True, stream=True)[1]
        time.sleep(0.2)
        assert not second.answers[0].tokens
        running.engine.resume()
        assert second.wait()[0].tokens == bare.greedy(PROMPT, 5, ignore_eos=True)[0]
        assert running.engine.pause("wait", 5)  # when nothing runs as well
        running.engine.resume()
        third = running.submit(PROMPT, max_tokens=2000, ignore_eos=True, stream=True)[1]
        third.wait_for_tokens(2)
        assert not running.engine.pause("wait", 0.05)  # it takes longer, and goes on
        assert not running.engine.paused
        assert running.engine.pause("abort", 5)
        assert third.wait()[0].last.finish_reason == "abort"


def test_abort() -> None:
    bare = Bare(tiny())
    with driver("llama", max_batch_size=1) as running:
        first = running.submit(PROMPT, max_tokens=LONG, ignore_eos=True, stream=True)[1]
        queued = running.submit(PROMPT, max_tokens=LONG, ignore_eos=True)[1]
        first.wait_for_tokens(4)
        assert running.engine.pause("abort", 10)
        answer = first.wait()[0]
        assert answer.last.finish_reason == "abort"
        assert answer.tokens == bare.greedy(PROMPT, len(answer.tokens), ignore_eos=True)[0]
        assert queued.wait()[0].last.finish_reason == "abort"
        running.engine.check_integrity()
        running.engine.resume()
        assert running.ask(PROMPT, max_tokens=5, ignore_eos=True).tokens == bare.greedy(PROMPT, 5, ignore_eos=True)[0]
        running.settle()


def test_a_pause_does_not_keep_the_server_from_ending() -> None:
    with driver("llama") as running:
        first = running.submit(PROMPT, max_tokens=40, ignore_eos=True, stream=True)[1]
        first.wait_for_tokens(2)
        running.engine.pause("keep", 10)
        ended = threading.Thread(target=running.engine.drain, args=(30,))
        ended.start()
        assert len(first.wait()[0].tokens) == 40
        ended.join(30)
        assert not ended.is_alive()


def test_a_pause_that_somebody_ends_before_it_began_returns() -> None:
    with driver("llama") as running:
        first = running.submit(PROMPT, max_tokens=1500, ignore_eos=True, stream=True)[1]
        first.wait_for_tokens(2)
        outcome: list[bool] = []
        waiting = threading.Thread(target=lambda: outcome.append(running.engine.pause("wait", 60)))
        waiting.start()
        time.sleep(0.1)
        running.engine.resume()
        waiting.join(5)
        assert outcome == [False]
        assert running.engine.pause("abort", 10)
