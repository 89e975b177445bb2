"""Drafts never change an answer: with any drafts, right or wrong, each row gets the tokens that it gets without."""

import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_parallm.devices.device import this_device
from mlx_parallm.devices.profile import DeviceProfile
from mlx_parallm.doctor.selftest import random_adapter
from mlx_parallm.engine.speculative import speculation
from tests.engine.harness import Answer, Driver, driver
from tests.engine.test_parity import SAMPLED, prompt_of

TRACED = DeviceProfile(0, True, 64, max_padding=0.5, round_prompts=False, drafts=8)
EAGER = DeviceProfile(0, False, 64, max_padding=0.5, round_prompts=False, drafts=8)  # by MLX's own attention
AHEAD = DeviceProfile(2, True, 64, max_padding=0.5, round_prompts=True, match_step=16, min_match=16, drafts=8)
OWN = this_device().profile.speculating("copy")  # GPUs draft nothing by themselves
MODES = [("llama", OWN), ("qwen3", OWN), ("llama", TRACED), ("llama", EAGER), ("llama", AHEAD)]
IN_TEST_ALL = (("qwen3", OWN), ("llama", EAGER))


class Oracle:
    """Drafts what a row is going to say, with faults here and there."""

    known: dict[tuple[int, ...], list[int]] = {}

    def __init__(self, prompt: Sequence[int], most: int) -> None:
        self._known = self.known.get(tuple(prompt), [])
        self._random = random.Random(sum(prompt))

    def draft(self, generated: Sequence[int], limit: int) -> list[int]:
        draft = self._known[len(generated) :][: self._random.randint(0, limit)]
        if draft and self._random.random() < 0.4:
            draft[self._random.randrange(len(draft))] = self._random.randrange(3, 250)
        return draft

    def learn(self, drafted: int, accepted: int) -> None:
        assert 0 <= accepted <= drafted
        assert drafted


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(mode, id=f"{mode[0]}-{number}", marks=[pytest.mark.slow] if mode in IN_TEST_ALL else [])
        for number, mode in enumerate(MODES)
    ],
)
def running(request: pytest.FixtureRequest) -> Iterator[Driver]:
    kind, profile = request.param
    with driver(kind, profile=profile, max_batch_size=6, prefill_step_size=96) as running:
        yield running


def compared(running: Driver, requests: Sequence[tuple[list[int], dict[str, object]]]) -> list[tuple[Answer, Answer]]:
    """Each request's answer alone without drafts, and in a batch with them."""
    expected = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculation.Speculation, "draft", lambda self, rows: None)
        for prompt, options in requests:
            expected.append(running.submit(prompt, **options)[1].wait()[0])
            Oracle.known[tuple(prompt)] = expected[-1].tokens
        running.settle()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculation, "CopyDrafter", Oracle)
        pending = [running.submit(prompt, **options)[1] for prompt, options in requests]
        found = [one.wait()[0] for one in pending]
        running.settle()
    return list(zip(expected, found, strict=True))


def hold(pairs: Sequence[tuple[Answer, Answer]]) -> None:
    for one, other in pairs:
        assert other.tokens == one.tokens
        assert other.last.finish_reason == one.last.finish_reason
        assert other.last.stop_token == one.last.stop_token
        assert [s.logprob for s in other.logprobs] == pytest.approx([s.logprob for s in one.logprobs], abs=1e-4)


@pytest.mark.long
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trace=st.lists(SAMPLED, min_size=2, max_size=8), salt=st.integers(0, 1000))
def test_rows_with_drafts_equal_themselves_without(running: Driver, trace: list[dict], salt: int) -> None:
    requests = []
    for number, options in enumerate(trace):
        options |= {"n": 1, "max_tokens": 3 * options["max_tokens"], "prompt_logprobs": None}
        options["min_tokens"] = min(options["min_tokens"], options["max_tokens"])
        requests.append((prompt_of(3 + 7 * number, salt + number), options))
    hold(compared(running, requests))


def test_accepted_tokens_are_counted_and_save_steps(running: Driver) -> None:
    metrics = running.engine.metrics
    before = metrics.drafted_tokens, metrics.accepted_tokens, metrics.generated_tokens, metrics.steps
    hold(compared(running, [(prompt_of(9, 77), {"max_tokens": 60, "ignore_eos": True, "logprobs": 1})]))
    drafted, accepted, generated, steps = (
        now - then
        for now, then in zip(
            (metrics.drafted_tokens, metrics.accepted_tokens, metrics.generated_tokens, metrics.steps),
            before,
            strict=True,
        )
    )
    assert generated == 2 * 60
    assert 10 < accepted <= drafted
    assert steps == generated - accepted


def test_a_prefix_that_was_drafted_is_found_in_the_cache(running: Driver) -> None:
    prompt = prompt_of(40, 5)
    ((first, _),) = compared(running, [(prompt, {"max_tokens": 60, "ignore_eos": True})])
    longer = prompt + first.tokens + prompt_of(3, 6)
    ((one, other),) = compared(running, [(longer, {"max_tokens": 12, "ignore_eos": True, "logprobs": 0})])
    hold([(one, other)])
    assert other.deltas[0].cached_tokens >= 64
    apart = running.ask(longer, max_tokens=12, ignore_eos=True, logprobs=0, cache_salt="another")
    hold([(apart, other)])
    assert apart.deltas[0].cached_tokens == 0


def test_grammars_bind_what_is_drafted(running: Driver) -> None:
    grammar = "start: /[a-z]{3}( [a-z]{2,5}){4,9}/"
    requests = [
        (prompt_of(5 + number, number), {"grammar": grammar, "max_tokens": 40, "temperature": heat, "seed": number})
        for number, heat in enumerate((0.0, 1.0, 0.7, 1.0))
    ]
    requests.append((prompt_of(30, 9), {"max_tokens": 40, "ignore_eos": True}))
    hold(compared(running, requests))


def test_an_answer_ends_where_it_ends_without_drafts(running: Driver) -> None:
    whole = running.ask(prompt_of(12, 3), max_tokens=40, ignore_eos=True).tokens
    stops = [{"stop_token_ids": (token,)} for token in dict.fromkeys(whole[7:20])]
    hold(compared(running, [(prompt_of(12, 3), {"max_tokens": 40, **stop}) for stop in stops]))
    hold(compared(running, [(prompt_of(12, 3), {"max_tokens": count, "ignore_eos": True}) for count in range(1, 12)]))


def test_rows_of_several_adapters(running: Driver) -> None:
    adapters = running.engine.adapters
    for number in (1, 2):
        adapters.publish(f"drafts-{number}", random_adapter(adapters.targets, number), "test")
    try:
        names = ["drafts-1", None, "drafts-2", "drafts-1"]
        hold(
            compared(
                running,
                [
                    (prompt_of(20 + i, i), {"adapter": name, "max_tokens": 30, "ignore_eos": True, "logprobs": 0})
                    for i, name in enumerate(names)
                ],
            )
        )
    finally:
        for number in (1, 2):
            adapters.unload(f"drafts-{number}")
