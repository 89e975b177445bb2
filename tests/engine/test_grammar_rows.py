"""Where an answer that a grammar binds ends, whatever else is asked of it."""

from dataclasses import replace

import pytest

from mlx_parallm.errors import GrammarError
from mlx_parallm.models.language import LanguageModel
from tests.engine.harness import as_served, driver, driver_of

PROMPT = [5, 9, 12]


def without_eos() -> LanguageModel:
    return replace(as_served("llama"), eos_token_ids=frozenset())


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 10}, {"ignore_eos": True, "min_tokens": 3}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_ends_with_its_grammar(options: dict[str, object], temperature: float) -> None:
    with driver("llama") as drive:
        a, b = drive.engine.model.tokenizer.encode("ab", add_special_tokens=False)
        answer = drive.ask(PROMPT, grammar='start: "abab"', max_tokens=20, temperature=temperature, seed=1, **options)
        assert answer.tokens == [a, b, a, b]
        assert answer.last.finish_reason == "stop"
        drive.settle()


def test_a_grammar_that_may_end_goes_on_while_it_must() -> None:
    with driver("llama") as drive:
        (a,) = drive.engine.model.tokenizer.encode("a", add_special_tokens=False)
        (eos,) = drive.engine.model.eos_token_ids
        bias = {eos: 100.0}  # the model wants to end as soon as it may
        short = drive.ask(PROMPT, grammar="start: /a{1,9}/", max_tokens=20, logit_bias=bias)
        assert (short.tokens, short.last.stop_token) == ([a], eos)
        longer = drive.ask(PROMPT, grammar="start: /a{1,9}/", max_tokens=20, logit_bias=bias, min_tokens=4)
        assert (longer.tokens, longer.last.stop_token) == ([a] * 4, eos)
        whole = drive.ask(PROMPT, grammar="start: /a{1,9}/", max_tokens=20, logit_bias=bias, ignore_eos=True)
        assert (whole.tokens, whole.last.finish_reason, whole.last.stop_token) == ([a] * 9, "stop", None)


def test_a_model_without_an_end_of_sequence_token() -> None:
    with driver_of(without_eos) as drive:
        a, b = drive.engine.model.tokenizer.encode("ab", add_special_tokens=False)
        assert drive.ask(PROMPT, grammar='start: "ab"', max_tokens=9).tokens == [a, b]
        assert len(drive.ask(PROMPT, min_tokens=4, max_tokens=9).tokens) == 9
        assert len(drive.ask(PROMPT, min_tokens=4, max_tokens=9, temperature=1.0, stop_token_ids=(7,)).tokens) >= 4


def test_a_grammar_that_fails_is_an_error() -> None:
    with driver("llama") as drive:
        _, pending = drive.submit(PROMPT, grammar="start: /[a-z]{40}/", max_tokens=40, stream=True)
        _, beside = drive.submit([7, 7], max_tokens=12, ignore_eos=True)
        pending.wait_for_tokens(3)

        def break_matcher() -> None:
            """As when a grammar goes over llguidance's limits while it is followed: it is in error from then on."""
            for row in drive.engine._parts.compute.scheduler.running:
                if row.matcher is not None:
                    row.matcher.consume_token(0)

        drive.engine._thread.run_between_steps(break_matcher)
        (answer,) = pending.wait()
        assert answer.last.finish_reason == "error"
        assert isinstance(answer.last.error, GrammarError)
        assert "grammar" in answer.last.error.message
        assert len(beside.wait()[0].tokens) == 12
        drive.settle()
