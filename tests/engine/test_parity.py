"""Batched answers equal single-row answers, token for token, whatever else is in the batch and whoever leaves it."""

import random
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_parallm.devices.profile import DeviceProfile
from tests.engine.harness import Bare, Driver, driver
from tests.tiny import tiny

KINDS = ["llama", "qwen3", "gemma3", "hybrid", "qwen3_next", "mamba"]
# As on a GPU: steps overlap, are traced, and prompts are padded to round shapes.
GPU = DeviceProfile(2, True, 64, max_padding=0.5, round_prompts=True, match_step=16, min_match=16, pass_tokens=48)
MODES: list[object] = [(kind, None) for kind in KINDS[:-2]] + [("llama", GPU)]
SLOW_MODES = [(kind, None) for kind in KINDS[-2:]] + [("gemma3", GPU), ("hybrid", GPU)]
MODES += [pytest.param(mode, marks=pytest.mark.slow) for mode in SLOW_MODES]


@pytest.fixture(scope="module", params=MODES, ids=lambda mode: f"{mode[0]}{'-gpu' if mode[1] else ''}")
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Driver, Bare]]:
    kind, profile = request.param
    with driver(kind, profile=profile, max_batch_size=6, prefill_step_size=96) as running:
        yield running, Bare(tiny(kind))


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 250), k=length)


REQUESTS = st.fixed_dictionaries(
    {
        "length": st.integers(1, 120),
        "prompt_seed": st.integers(0, 50),
        "max_tokens": st.integers(1, 24),
        "pause": st.sampled_from([0.0, 0.0, 0.002, 0.01]),
        "abort_after": st.sampled_from([None, None, None, 0, 1, 5]),
        "stream": st.booleans(),
        "ignore_eos": st.booleans(),
    }
)


@pytest.mark.long
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trace=st.lists(REQUESTS, min_size=1, max_size=14))
def test_greedy_rows_of_a_changing_batch_equal_the_bare_model(pair: tuple[Driver, Bare], trace: list[dict]) -> None:
    running, bare = pair
    in_flight = []
    for item in trace:
        prompt = prompt_of(item["length"], item["prompt_seed"])
        options = {"max_tokens": item["max_tokens"], "ignore_eos": item["ignore_eos"], "logprobs": 2}
        request_id, pending = running.submit(prompt, stream=item["stream"], **options)
        in_flight.append((item, prompt, request_id, pending))
        time.sleep(item["pause"])
        if item["abort_after"] is not None and item["stream"]:
            pending.wait_for_tokens(item["abort_after"])
            running.engine.cancel(request_id)
    kept = [entry for entry in in_flight if entry[0]["abort_after"] is None or not entry[0]["stream"]]
    answers = [pending.wait()[0] for *_, pending in kept]
    running.settle()  # the bare model below has MLX to itself
    for (item, prompt, *_), answer in zip(kept, answers, strict=True):
        tokens, logprobs = bare.greedy(prompt, item["max_tokens"], ignore_eos=item["ignore_eos"], answer=answer.tokens)
        assert answer.tokens == tokens
        bare.hold(prompt, tokens, logprobs, [scored.logprob for scored in answer.logprobs])
        assert answer.last.finish_reason == ("length" if len(tokens) == item["max_tokens"] else "stop")


SAMPLED = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.3]),
        "top_p": st.sampled_from([1.0, 0.9, 0.5]),
        "top_k": st.sampled_from([0, 1, 20]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "seed": st.integers(0, 5),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "min_tokens": st.sampled_from([0, 6]),
        "n": st.sampled_from([1, 1, 3]),
        "logprobs": st.sampled_from([None, 0, 3]),
        "prompt_logprobs": st.sampled_from([None, None, 2]),
        "logit_bias": st.sampled_from([{}, {17: 4.0, 40: -100.0}]),
        "max_tokens": st.integers(1, 12),
    }
)


@pytest.mark.long
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trace=st.lists(st.tuples(SAMPLED, st.integers(1, 70)), min_size=2, max_size=8))
def test_every_sampled_row_equals_itself_alone(pair: tuple[Driver, Bare], trace: list[tuple[dict, int]]) -> None:
    running, _ = pair
    for options, _ in trace:
        options["min_tokens"] = min(options["min_tokens"], options["max_tokens"])
    together = [running.submit(prompt_of(length, length), **options)[1] for options, length in trace]
    answers = [pending.wait() for pending in together]
    for (options, length), batched in zip(trace, answers, strict=True):
        alone = running.submit(prompt_of(length, length), **options)[1].wait()
        for one, other in zip(batched, alone, strict=True):
            assert one.tokens == other.tokens
            assert [s.logprob for s in one.logprobs] == pytest.approx([s.logprob for s in other.logprobs], abs=1e-4)
            if options["prompt_logprobs"] is not None:
                scored = [[s.logprob for s in (a.deltas[0].prompt_logprobs or [])[1:] if s] for a in (one, other)]
                assert len(scored[0]) == length - 1
                assert scored[0] == pytest.approx(scored[1], abs=1e-4)
    running.settle()
