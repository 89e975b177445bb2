"""The embedded model's rows in a changing batch equal the bare model called by hand, with MLX's operations alone."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_parallm.models import loader
from mlx_parallm.models.language import LanguageModel
from tests.engine.harness import Bare, Driver, driver_of

SENTENCES = (
    "The capital of France is",
    "Once upon a time there was a small dragon who",
    "def fibonacci(n):\n    if n < 2:",
    "Water boils at",
    "Dear Sir or Madam, I am writing to",
    "1, 2, 3, 5, 8,",
)


def embedded() -> LanguageModel:
    return loader.load(None, name="SmolLM2", dtype="float32")


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Driver, Bare]]:
    bare = Bare(embedded())  # as mlx-lm has it: only the engine changes layers
    with driver_of(embedded, max_batch_size=4, prefill_step_size=16) as running:
        yield running, bare


REQUESTS = st.fixed_dictionaries(
    {
        "text": st.lists(st.sampled_from(SENTENCES), min_size=1, max_size=3),
        "max_tokens": st.integers(1, 6),
        "abort_after": st.sampled_from([None, None, None, 0, 2]),
        "seed": st.sampled_from([None, None, 7]),
    }
)


@pytest.mark.long
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trace=st.lists(REQUESTS, min_size=2, max_size=6))
def test_rows_equal_the_bare_model(pair: tuple[Driver, Bare], trace: list[dict]) -> None:
    running, bare = pair
    in_flight = []
    for item in trace:
        prompt = bare.model.tokenizer.encode(" ".join(item["text"]))
        sampling = {"temperature": 0.0} if item["seed"] is None else {"temperature": 0.9, "seed": item["seed"]}
        options = {"max_tokens": item["max_tokens"], "ignore_eos": True, "logprobs": 0, **sampling}
        request_id, pending = running.submit(prompt, stream=True, **options)
        in_flight.append((item, prompt, options, pending))
        if item["abort_after"] is not None:
            pending.wait_for_tokens(item["abort_after"])
            running.engine.cancel(request_id)
    kept = [entry for entry in in_flight if entry[0]["abort_after"] is None]
    answers = [pending.wait()[0] for *_, pending in kept]
    for (item, prompt, options, _), answer in zip(kept, answers, strict=True):
        logprobs = [scored.logprob for scored in answer.logprobs]
        if item["seed"] is None:
            tokens, expected = bare.greedy(prompt, item["max_tokens"], ignore_eos=True)
        else:
            alone = running.ask(prompt, **options)
            tokens, expected = alone.tokens, [scored.logprob for scored in alone.logprobs]
        assert answer.tokens == tokens
        assert logprobs == pytest.approx(expected, abs=1e-4)
    running.settle()
