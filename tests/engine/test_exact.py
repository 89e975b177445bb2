"""Exact in 16 bits: a request gets the same tokens and log-probabilities, to the bit, whatever runs beside it."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_parallm.config import ServeConfig
from mlx_parallm.devices.device import this_device
from mlx_parallm.devices.profile import CHUNK, DeviceProfile
from mlx_parallm.devices.tuning import TuningFiles
from mlx_parallm.doctor.selftest import random_adapter
from mlx_parallm.engine.compute import exactness as exactness_module
from mlx_parallm.engine.compute import tuned, tuner
from mlx_parallm.engine.compute.batching import slot_cache
from mlx_parallm.engine.compute.exactness import Exactness
from mlx_parallm.engine.compute.patch import let_caches_attend, patch_layers
from mlx_parallm.errors import ConfigError
from mlx_parallm.kv.slots import SlotCache
from mlx_parallm.models.forward import Forward
from mlx_parallm.models.language import LanguageModel
from tests.engine.harness import Answer, Driver, driver_of
from tests.engine.test_parity import prompt_of
from tests.tiny import tiny

ROWS = 8
SIZE = 32  # of a chunk
TRACED = DeviceProfile(2, True, 64, max_padding=0.5, round_prompts=False)
ROUNDED = replace(TRACED, round_prompts=True)
EAGER = replace(TRACED, steps_in_flight=0, compiled=False)
MODES = [
    pytest.param(("llama", TRACED), id="traced"),
    pytest.param(("llama", EAGER), id="eager", marks=pytest.mark.slow),
    pytest.param(("qwen3", TRACED), id="qwen3", marks=pytest.mark.slow),
    pytest.param(("llama", ROUNDED), id="rounded", marks=pytest.mark.slow),
]
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "top_p": 0.9, "seed": 3},
    {"temperature": 0.9, "top_k": 20, "seed": 11},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"min_tokens": 6, "logit_bias": {5: 2.0}},
]


class RowLinear(nn.Linear):
    """A linear layer whose numbers depend on how many rows it is given, as a GPU's do in 16 bits: here by far more than
    a rounding, so that nothing is equal by chance."""

    def __call__(self, x: mx.array) -> mx.array:
        rows = x.size // x.shape[-1]
        y: mx.array = super().__call__(x)
        return y * (1 + (rows % 97) / 512)


def by_rows(kind: str) -> LanguageModel:
    model = tiny(kind, dtype=mx.float16)
    for _, layer in model.module.named_modules():
        if type(layer) is nn.Linear:
            layer.__class__ = RowLinear
    return model


def test_without_it_answers_depend_on_what_runs_beside_them() -> None:
    with driver_of(lambda: by_rows("llama"), profile=TRACED, max_batch_size=6) as running:
        expected = alone(running, "alone")
        pending = [
            running.submit(p, cache_salt=f"beside-{n}", **o)[1] for n, (p, o) in enumerate(requests(adapters=False))
        ]
        assert any(one.tokens != other.wait()[0].tokens for one, other in zip(expected, pending, strict=True))


@pytest.fixture(scope="module", params=MODES)
def running(request: pytest.FixtureRequest) -> Iterator[Driver]:
    kind, profile = request.param

    options = {"max_batch_size": 6, "block_size": 16, "prefill_step_size": 96, "max_loras": 4}
    with driver_of(lambda: by_rows(kind), profile=profile.exactly((ROWS,), SIZE), **options) as running:
        assert isinstance(running.engine._parts.compute.runner.cache, SlotCache)
        adapters = running.engine.adapters
        for number in (1, 2):
            adapters.publish(f"a{number}", random_adapter(adapters.targets, number), "test")
        yield running


def requests(count: int = 8, adapters: bool = True) -> list[tuple[list[int], dict[str, Any]]]:
    found = []
    for number in range(count):
        options = SAMPLINGS[number % len(SAMPLINGS)] | {"max_tokens": 16 + number, "ignore_eos": True, "logprobs": 2}
        adapter = (None, "a1", None, "a2")[number % 4] if adapters else None
        found.append((prompt_of(3 + 17 * number, number), options | ({} if adapter is None else {"adapter": adapter})))
    return found


def same(one: Answer, other: Answer) -> None:
    assert other.tokens == one.tokens
    assert [(s.logprob, s.top) for s in other.logprobs] == [(s.logprob, s.top) for s in one.logprobs]


def alone(running: Driver, salt: str) -> list[Answer]:
    found = []
    adapters = bool(running.engine.adapters.names)
    for number, (prompt, options) in enumerate(requests(adapters=adapters)):
        found.append(running.ask(prompt, cache_salt=f"{salt}-{number}", **options))
        running.settle()
    return found


def test_alone_and_together_in_any_order(running: Driver) -> None:
    expected = alone(running, "alone")
    for order in range(3):
        numbered = list(enumerate(requests()))
        random.Random(order).shuffle(numbered)
        pending = [
            (number, running.submit(prompt, cache_salt=f"order-{order}-{number}", **options)[1])
            for number, (prompt, options) in numbered
        ]
        for number, one in pending:
            same(expected[number], one.wait()[0])
    running.settle()


def test_with_the_prompt_cached_and_not(running: Driver) -> None:
    expected = alone(running, "cold")
    hits = running.engine.metrics.cached_tokens
    for _ in range(2):  # from the cache, and while others run
        pending = [running.submit(p, cache_salt=f"cold-{n}", **o)[1] for n, (p, o) in enumerate(requests())]
        for one, other in zip(expected, pending, strict=True):
            same(one, other.wait()[0])
    assert running.engine.metrics.cached_tokens > hits
    running.settle()


def test_a_conversation_goes_on_from_what_its_prompts_have_computed(running: Driver) -> None:
    """What steps have computed of a completion is no prompt's: it is computed again, in a prompt's shapes."""
    prompt = prompt_of(70, 3)
    text = [*prompt, *running.ask(prompt, max_tokens=40, ignore_eos=True, cache_salt="chat").tokens, 7, 8, 9]
    options = {"max_tokens": 20, "ignore_eos": True, "logprobs": 0}
    fresh = running.ask(text, cache_salt="fresh", **options)
    later = running.ask(text, cache_salt="chat", **options)
    assert later.deltas[0].cached_tokens == 2 * SIZE
    same(fresh, later)


def test_rows_that_lose_their_place_have_the_same_tokens(running: Driver) -> None:
    expected = alone(running, "stay")
    before = running.engine.metrics.preemptions, running.engine.metrics.generated_tokens
    parts = running.engine._parts
    pending = [running.submit(p, cache_salt=f"leave-{n}", **o)[1] for n, (p, o) in enumerate(requests())]
    preempted = 0
    while not all(one.done.is_set() for one in pending):
        for one in pending:
            one.done.wait(0.02)

        def lose_one() -> None:
            rows = [row for row in parts.compute.scheduler.running if row.launched > 3]
            if rows and not parts.pipeline.in_flight:
                parts.preemption._preempt(rows[-1])

        if preempted < 12:
            preempted += 1
            parts.base.thread.run_between_steps(lambda: (parts.pipeline.finish_all(), lose_one()))
    metrics = running.engine.metrics
    assert metrics.preemptions > before[0]
    running.settle()
    assert metrics.generated_tokens == before[1] + sum(len(one.tokens) for one in expected), "no token is counted twice"
    for one, other in zip(expected, pending, strict=True):
        found = other.wait()[0]
        same(one, found)
        assert found.last.finish_reason == one.last.finish_reason
    running.settle()


def test_grammars_and_scored_prompts(running: Driver) -> None:
    prompt = prompt_of(50, 4)
    options = {"max_tokens": 12, "ignore_eos": True, "logprobs": 0, "prompt_logprobs": 1}
    first = running.ask(prompt, cache_salt="scored", **options)
    others = [running.submit(prompt_of(20, n), max_tokens=30, ignore_eos=True)[1] for n in range(4)]
    again = running.ask(prompt, cache_salt="scored again", **options)
    same(first, again)
    assert again.deltas[0].prompt_logprobs == first.deltas[0].prompt_logprobs
    plain = running.ask(prompt, cache_salt="scored", max_tokens=12, ignore_eos=True)
    assert plain.deltas[0].cached_tokens == SIZE
    assert plain.tokens == running.ask(prompt, cache_salt="plain", max_tokens=12, ignore_eos=True).tokens
    for one in others:
        one.wait()
    running.settle()


def exactness(dtype: mx.Dtype = mx.float16, rows: int = 6) -> Exactness:
    model = tiny(dtype=dtype)
    let_caches_attend(model.module)
    layout = patch_layers(model.module, TRACED, None)
    cache = slot_cache(len(model.module.layers), rows, 1 << 28, TRACED)
    return Exactness(Forward(model.module, layout.active), cache, model.vocab_size)


@pytest.mark.skipif(this_device().kind != "cpu", reason="what is found depends on the device")
def test_numbers_of_rows_are_proven() -> None:
    proof = exactness()
    assert proof.rows(always=True) == (8,)
    assert proof.cost > 0


def test_rows_that_differ_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SlotCache.decode

    def decode(self: SlotCache, forward: Any, tokens: mx.array, lengths: list[int], context: Any = None) -> mx.array:
        logits = original(self, forward, tokens, lengths, context)
        return logits + 1e-3 * sum(length > 5 for length in lengths)  # by what runs beside it

    monkeypatch.setattr(SlotCache, "decode", decode)
    assert exactness().rows(always=True) == ()


def test_a_device_that_takes_too_long_is_left_alone_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness_module, "SECONDS", 0.0)
    monkeypatch.setattr(Exactness, "_cost", lambda self, rows: 1.0)
    assert exactness().rows(always=False) == ()
    assert exactness().rows(always=True) == (8,)


def test_a_cost_beyond_5_percent_is_left_out_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Exactness, "_cost", lambda self, rows: 1.2)
    monkeypatch.setattr(Exactness, "_equal_steps", lambda self: (8,))
    assert exactness().rows(always=False) == ()
    assert exactness().rows(always=True) == (8,)


@pytest.mark.parametrize(
    ("exact", "dtype", "found", "rows"),
    [
        ("auto", mx.float16, (8,), (8,)),
        ("always", mx.float16, (8,), (8,)),
        ("off", mx.float16, (8,), ()),
        ("auto", mx.float32, (8,), ()),
        ("always", mx.float32, (8,), ()),
        ("auto", mx.float16, (), ()),
        ("always", mx.float16, (), None),
    ],
)
def test_what_is_proven_is_kept_and_used(
    exact: str,
    dtype: mx.Dtype,
    found: tuple[int, ...],
    rows: tuple[int, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    monkeypatch.setattr(tuner, "SECONDS", 0.0)
    monkeypatch.setattr(tuned.Exactness, "rows", lambda self, always: found)
    config = ServeConfig.of(exact=exact, ssd=False, prefill_step_size=200)
    model = tiny(dtype=dtype)
    layout = patch_layers(model.module, TRACED, None)
    for _ in range(2):  # measured, and from what was kept
        cache = slot_cache(len(model.module.layers), 6, 1 << 28, TRACED)
        tune = tuned.tuned_by(config, TuningFiles(tmp_path))
        profile = tune(model, Forward(model.module, layout.active), cache, TRACED).profile
        if rows is None:
            with pytest.raises(ConfigError, match="--dtype float32"):
                tuned.check_exact(model, config, profile)
            continue
        tuned.check_exact(model, config, profile)
        assert profile.exact_rows == cache.method.pass_rows == rows
        assert profile.chunk == (192 if rows else 0)
    assert tuned.chunk_of(ServeConfig.of()) == CHUNK


@pytest.mark.parametrize(
    ("flags", "named"), [({"kv_bits": 8}, "--kv-bits"), ({"speculation": "copy"}, "--speculation")]
)
def test_flags_that_exclude_it_are_named(flags: dict[str, Any], named: str) -> None:
    model = tiny(dtype=mx.float16)
    assert not tuned.can_be_exact(model, ServeConfig.of(**flags))
    tuned.check_exact(model, ServeConfig.of(**flags), TRACED)
    with pytest.raises(ConfigError, match=f"{named}.* exclude each other"):
        tuned.check_exact(model, ServeConfig.of(exact="always", **flags), TRACED)
    tuned.check_exact(tiny(), ServeConfig.of(exact="always", **flags), TRACED)
