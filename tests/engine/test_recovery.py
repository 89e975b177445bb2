"""After a fault of the device rows are computed again and answer as if nothing had happened; after three, the end."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm.devices.device import this_device
from mlx_parallm.engine.recovery import FaultCounter
from mlx_parallm.models.language import LanguageModel
from tests.engine.harness import Bare, Driver, as_served, driver_of
from tests.tiny import tiny

PROMPTS = [[5, 9, 12, 7], [8, 8, 3], list(range(3, 60)), [11, 4, 19, 22, 30, 41]]


class Saboteur:
    """Makes passes through a model fail as a GPU's do: their computation raises when it is evaluated, not before."""

    def __init__(self) -> None:
        self.faults = 0
        self.seen = 0

    def poison(self, logits: mx.array) -> mx.array:
        self.seen += 1
        if not self.faults:
            return logits
        self.faults -= 1
        return logits + 0 * mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu).sum()


def sabotage(model: LanguageModel, saboteur: Saboteur) -> LanguageModel:
    plain = type(model.module)

    class Sabotaged(plain):  # type: ignore[valid-type, misc]
        def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
            return saboteur.poison(super().__call__(*args, **kwargs))

    model.module.__class__ = Sabotaged
    return model


@contextmanager
def faulty(kind: str = "llama", **config: object) -> Iterator[tuple[Driver, Saboteur]]:
    saboteur = Saboteur()
    profile = replace(this_device().profile, compiled=False)  # a traced step does not call the module again
    with driver_of(lambda: sabotage(as_served(kind), saboteur), profile=profile, **config) as drive:
        yield drive, saboteur


@pytest.mark.long
@pytest.mark.parametrize("kind", ["llama", "hybrid", "gemma3"])
def test_rows_go_on_after_a_fault(kind: str) -> None:
    with faulty(kind) as (drive, saboteur):
        in_flight = [drive.submit(prompt, max_tokens=24, ignore_eos=True, stream=True)[1] for prompt in PROMPTS]
        in_flight[0].wait_for_tokens(6)
        saboteur.faults = 1
        answers = [pending.wait()[0] for pending in in_flight]
        assert drive.engine.metrics.faults == 1
        again = [drive.ask(prompt, max_tokens=24, ignore_eos=True) for prompt in PROMPTS]
        drive.settle()
    bare = Bare(tiny(kind))
    for prompt, answer, repeated in zip(PROMPTS, answers, again, strict=True):
        expected = bare.greedy(prompt, 24, ignore_eos=True)[0]
        assert answer.tokens == expected
        assert repeated.tokens == expected
        assert answer.last.finish_reason == "length"


def test_a_fault_in_a_prompt_with_its_logprobs_and_choices() -> None:
    with faulty() as (drive, saboteur):
        options: dict[str, object] = dict(max_tokens=6, n=3, seed=3, temperature=1.0, prompt_logprobs=1, logprobs=1)
        expected = drive.submit(PROMPTS[2], **options)[1].wait()
        saboteur.faults = 1
        found = drive.submit(PROMPTS[2], **options)[1].wait()
        assert drive.engine.metrics.faults == 1
        assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
        for before, after in zip(expected, found, strict=True):
            assert len(after.deltas[0].prompt_logprobs or []) == len(PROMPTS[2])
            assert [one.logprob for one in after.logprobs] == pytest.approx(
                [one.logprob for one in before.logprobs], abs=1e-4
            )
        drive.settle()


def test_a_grammar_goes_on_after_a_fault() -> None:
    with faulty() as (drive, saboteur):
        options: dict[str, object] = dict(max_tokens=12, grammar="start: /(ab|cd){4}/", stream=True)
        expected = drive.ask(PROMPTS[0], **options).tokens
        _, pending = drive.submit(PROMPTS[0], **options)
        pending.wait_for_tokens(3)
        saboteur.faults = 1
        assert pending.wait()[0].tokens == expected


def test_nothing_computed_before_a_fault_is_found_in_the_cache() -> None:
    with faulty() as (drive, saboteur):
        first = drive.ask(PROMPTS[2], max_tokens=4)
        other = drive.ask(list(range(60, 120)), max_tokens=4)
        assert drive.ask(PROMPTS[2], max_tokens=4).deltas[0].cached_tokens > 0
        saboteur.faults = 1
        assert drive.ask(PROMPTS[2], max_tokens=4).tokens == first.tokens
        assert drive.engine.metrics.faults == 1
        again = drive.ask(list(range(60, 120)), max_tokens=4)  # the fault was in another request
        assert (again.tokens, again.deltas[0].cached_tokens) == (other.tokens, 0)
        assert drive.ask(list(range(60, 120)), max_tokens=4).deltas[0].cached_tokens > 0
        drive.engine.check_integrity()


def test_three_faults_in_a_minute_end_the_engine() -> None:
    told = threading.Event()
    with faulty() as (drive, saboteur):
        drive.engine.on_failure = lambda reason: told.set()
        saboteur.faults = 1000
        answer = drive.ask(PROMPTS[0])
        assert answer.last.finish_reason == "error"
        assert told.wait(10)
        assert drive.engine.failure is not None
        assert "LU factorization" in drive.engine.failure


def test_a_change_that_fails_reaches_who_asked_for_it() -> None:
    with faulty() as (drive, _):

        def fail() -> None:
            raise RuntimeError("no such luck")

        with pytest.raises(RuntimeError, match="no such luck"):
            drive.engine._thread.run_between_steps(fail)
        assert drive.ask(PROMPTS[0]).last.finish_reason in ("stop", "length")


def test_faults_far_apart_are_forgiven() -> None:
    now = [0.0]
    counter = FaultCounter(lambda: now[0])
    verdicts = []
    for now[0] in (0.0, 30.0, 61.0, 90.0, 91.0, 200.0):
        verdicts.append(counter.add())
    assert verdicts == [False, False, False, True, True, False]
