"""Answers with the prefix cache equal the bare model's, over conversations that grow, branch and are evicted."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_parallm.engine.tuning import Tuning
from mlx_parallm.errors import ModelLoadError
from tests.engine.harness import Bare, Driver, driver
from tests.tiny import tiny

GPU = Tuning(ahead=2, compiled=True, view_step=64, max_padding=0.5, round_prompts=True, min_match=8)
MODES = [("llama", None, None), ("llama", None, 12), ("qwen3", None, 40), ("llama", GPU, None), ("llama", GPU, 12)]


@pytest.fixture(scope="module", params=MODES, ids=lambda m: f"{m[0]}{'-gpu' if m[1] else ''}-{m[2] or 'all'}")
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Driver, Bare]]:
    kind, tuning, blocks = request.param
    with driver(
        kind, tuning=tuning, max_batch_size=5, prefill_step_size=96, num_blocks=blocks, block_size=8
    ) as running:
        yield running, Bare(tiny(kind))


TURNS = st.lists(
    st.tuples(
        st.integers(0, 3),  # which conversation goes on
        st.booleans(),  # branch off from somewhere within it instead
        st.integers(1, 40),  # new tokens
        st.integers(1, 12),  # tokens to answer
        st.integers(1, 4),  # how many ask at once
    ),
    min_size=2,
    max_size=8,
)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=TURNS, seed=st.integers(0, 3))
def test_conversations_that_grow_and_branch(pair: tuple[Driver, Bare], turns: list, seed: int) -> None:
    running, bare = pair
    draw = random.Random(seed)
    histories: list[list[int]] = [[] for _ in range(4)]
    asked = []
    for which, branch, new, count, together in turns:
        history = histories[which]
        if branch and history:
            history = history[: draw.randrange(len(history))]
        prompts = [history + draw.choices(range(3, 250), k=new) for _ in range(together)]
        under_way = [running.submit(prompt, max_tokens=count, ignore_eos=True, logprobs=0)[1] for prompt in prompts]
        answers = [pending.wait()[0] for pending in under_way]
        asked += [(prompt, count, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        histories[which] = prompts[-1] + answers[-1].tokens
    running.settle()
    for prompt, count, answer in asked:
        tokens, logprobs = bare.greedy(prompt, count, ignore_eos=True)
        assert answer.tokens == tokens
        assert [scored.logprob for scored in answer.logprobs] == pytest.approx(logprobs, abs=1e-4)


PROMPT = list(range(10, 110))


def test_what_was_computed_is_not_computed_again() -> None:
    with driver("llama", max_batch_size=4) as running:
        first = running.ask(PROMPT, max_tokens=20, ignore_eos=True)
        assert first.deltas[0].cached_tokens == 0
        again = running.ask(PROMPT, max_tokens=20, ignore_eos=True)
        assert (again.tokens, again.deltas[0].cached_tokens) == (first.tokens, 99)
        turn = running.ask([*PROMPT, *first.tokens, 7, 8], max_tokens=2)
        assert turn.deltas[0].cached_tokens == 112  # seven blocks: the last answered tokens fill no block
        assert running.ask([*PROMPT[:37], 5, 5], max_tokens=2).deltas[0].cached_tokens == 37
        other = running.submit(PROMPT, max_tokens=2, cache_salt="tenant")[1].wait()[0]
        assert other.deltas[0].cached_tokens == 0
        scored = running.ask(PROMPT, max_tokens=2, prompt_logprobs=1)
        assert scored.deltas[0].cached_tokens == 0
        assert running.engine.metrics.cached_tokens == 99 + 112 + 37
        assert running.engine.flush_cache() > 0
        assert running.ask(PROMPT, max_tokens=2).deltas[0].cached_tokens == 0
        running.settle()


def test_a_running_row_shares_its_prompt() -> None:
    with driver("llama", max_batch_size=4) as running:
        _, slow = running.submit(PROMPT, max_tokens=300, ignore_eos=True, stream=True)
        slow.wait_for_tokens(3)
        beside = running.ask([*PROMPT, 9], max_tokens=2)
        assert beside.deltas[0].cached_tokens >= 96
        slow.wait()
        burst = [running.submit([*range(200, 100, -1), i], max_tokens=2)[1] for i in range(4)]
        cached = sorted(pending.wait()[0].deltas[0].cached_tokens for pending in burst)
        assert cached[0] == 0
        assert cached[1] >= 96  # the others waited for the first
        running.settle()


def test_blocks_that_can_not_be_quantised_are_refused_at_start() -> None:
    with pytest.raises(ModelLoadError, match="32 does not divide"), driver("llama", kv_bits=8, kv_group_size=32):
        raise AssertionError("it must not start")
