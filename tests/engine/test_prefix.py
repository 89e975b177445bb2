"""Answers with the prefix cache equal the bare model's, over conversations that grow, branch and are evicted."""

import contextlib
import itertools
import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_parallm.devices.profile import DeviceProfile
from mlx_parallm.engine import prefix_lookup
from mlx_parallm.engine.compute.batching import (
    WARM_UP_TOKENS,
    chunk_shapes,
    prompt_shapes,
    warm_blocks,
    warm_prompt_shapes,
)
from mlx_parallm.errors import ModelLoadError
from mlx_parallm.kv import disk, prefix, snapshots
from mlx_parallm.kv.slots import CAPACITY_STEP, SlotCache
from mlx_parallm.models.forward import Forward
from tests.engine.harness import Answer, Bare, Driver, driver, driver_of
from tests.tiny import tiny

GPU = DeviceProfile(steps_in_flight=2, compiled=True, view_step=64, max_padding=0.5, round_prompts=True, min_match=8)
MODES: list[Any] = [("llama", None, None), ("llama", None, 12), ("llama", GPU, 12)]
MODES += [(kind, None, None) for kind in ("gemma3", "hybrid")]
SLOW_MODES: list[Any] = [("qwen3", None, 40), ("llama", GPU, None), ("mamba", None, None)]
SLOW_MODES += [("hybrid", GPU, None), ("qwen3_next", None, None)]
MODES += [pytest.param(mode, marks=pytest.mark.slow) for mode in SLOW_MODES]
OPTIONS = {"max_batch_size": 5, "prefill_step_size": 96, "block_size": 8}


@pytest.fixture(scope="module", autouse=True)
def short_texts_are_kept() -> Iterator[None]:
    """As if all these texts were long: they go to the SSD, and snapshots are taken often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix, "KEEP_TOKENS", 16)
        patch.setattr(snapshots, "KEEP_TOKENS", 16)
        patch.setattr(snapshots, "MIN_DISTANCE", 8)
        yield


@pytest.fixture(scope="module", params=MODES, ids=lambda m: f"{m[0]}{'-gpu' if m[1] else ''}-{m[2] or 'all'}")
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Driver, Bare]]:
    kind, profile, blocks = request.param
    with driver(kind, profile=profile, num_blocks=blocks, **OPTIONS) as running:
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


Asked = list[tuple[list[int], int, Answer]]


def talk(running: Driver, turns: list, histories: list[list[int]], draw: random.Random) -> Asked:
    """Plays turns of conversations, and returns what was asked and answered."""
    asked = []
    for which, branch, new, count, together in turns:
        history = histories[which]
        if branch and history:
            history = history[: draw.randrange(len(history))]
        prompts = [history + draw.choices(range(3, 250), k=new) for _ in range(together)]
        in_flight = [running.submit(prompt, max_tokens=count, ignore_eos=True, logprobs=0)[1] for prompt in prompts]
        answers = [pending.wait()[0] for pending in in_flight]
        asked += [(prompt, count, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        histories[which] = prompts[-1] + answers[-1].tokens
    running.settle()
    return asked


def hold(asked: Asked, bare: Bare) -> None:
    """Against the model called by hand."""
    for prompt, count, answer in asked:
        tokens, logprobs = bare.greedy(prompt, count, ignore_eos=True, answer=answer.tokens)
        assert answer.tokens == tokens
        bare.hold(prompt, tokens, logprobs, [scored.logprob for scored in answer.logprobs])


@pytest.mark.long
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=TURNS, seed=st.integers(0, 3))
def test_conversations_that_grow_and_branch(pair: tuple[Driver, Bare], turns: list, seed: int) -> None:
    running, bare = pair
    hold(talk(running, turns, [[] for _ in range(4)], random.Random(seed)), bare)


RESTARTED = [
    ("llama", None),
    ("hybrid", None),
    pytest.param("llama", 12, marks=pytest.mark.slow),
    *(pytest.param(kind, None, marks=pytest.mark.slow) for kind in ("gemma3", "qwen3_next", "mamba")),
]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "blocks"), RESTARTED)
def test_conversations_over_restarts_and_with_an_ssd(kind: str, blocks: int | None, tmp_path: Path) -> None:
    bare = Bare(tiny(kind))
    folders = itertools.count()

    @settings(max_examples=6, deadline=None)
    @given(lives=st.lists(TURNS, min_size=2, max_size=3), seed=st.integers(0, 3))
    def holds(lives: list, seed: int) -> None:
        options = {"num_blocks": blocks, "ssd": True, "ssd_cache_dir": str(tmp_path / str(next(folders)))}
        histories: list[list[int]] = [[] for _ in range(4)]
        draw = random.Random(seed)
        asked: Asked = []
        for turns in lives:
            with driver(kind, **OPTIONS, **options) as running:
                asked += talk(running, turns, histories, draw)
        hold(asked, bare)

    holds()


@pytest.mark.parametrize("kind", ["llama", "gemma3", "hybrid", "qwen3_next", "mamba"])
def test_a_prompt_is_known_after_a_restart(kind: str, tmp_path: Path) -> None:
    options = {"block_size": 8, "ssd": True, "ssd_cache_dir": str(tmp_path / "ssd")}
    with driver(kind, **options) as running:
        first = running.ask(PROMPT, max_tokens=10, ignore_eos=True)
        assert first.deltas[0].cached_tokens == 0
    assert (tmp_path / "ssd").stat().st_mode & 0o777 == 0o700
    with driver(kind, **options) as running:
        again = running.ask(PROMPT, max_tokens=10, ignore_eos=True)
        assert again.tokens == first.tokens
        assert again.deltas[0].cached_tokens >= 96
        assert running.engine.metrics.ssd.reads > 0
        assert running.engine.flush_cache() > 0
        assert not list((tmp_path / "ssd").rglob("*.safetensors"))
        assert running.ask(PROMPT, max_tokens=10).deltas[0].cached_tokens == 0
    with driver(kind, **options, dtype="float32", kv_bits=None) as running:
        assert running.ask(PROMPT, max_tokens=10).deltas[0].cached_tokens >= 96
    other = tiny(kind, seed=1)
    with driver_of(lambda: other, **options) as running:  # the same name and shapes, other weights
        assert running.ask(PROMPT, max_tokens=10).deltas[0].cached_tokens == 0


@pytest.mark.long
def test_a_disk_that_does_not_answer_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_lookup, "FETCH_SECONDS", 1.0)
    monkeypatch.setattr(prefix_lookup, "SAVE_SECONDS", 0.5)
    monkeypatch.setattr(disk, "STUCK_SECONDS", 0.3)
    with driver("llama", block_size=8, num_blocks=14, ssd=True, ssd_cache_dir=str(tmp_path)) as running:
        first = running.ask(PROMPT, max_tokens=4, ignore_eos=True)
        running.ask([*PROMPT[::-1]], max_tokens=4)  # takes the place of the first
        tier = running.engine._parts.compute.prefix.disk  # type: ignore[union-attr]
        assert tier is not None
        deadline = time.monotonic() + 20
        while tier.metrics.writes < 20 and time.monotonic() < deadline:
            time.sleep(0.05)
        for file in tmp_path.rglob("*.safetensors"):
            file.unlink()
            os.mkfifo(file)  # to open it waits for a writer, who never comes
        for _ in range(8):
            begin = time.monotonic()
            again = running.ask(PROMPT, max_tokens=4, ignore_eos=True)
            waited = time.monotonic() - begin
            assert again.tokens == first.tokens
            running.ask([*PROMPT[::-1]], max_tokens=4)
        assert tier.stuck
        assert waited < 0.9  # only the first waited for it
        assert running.engine._parts.ssd_transfers is not None
        assert not running.engine._parts.ssd_transfers._to_fetch
    for file in tmp_path.rglob("*.safetensors"):  # lets the thread go
        with contextlib.suppress(OSError):
            os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))


@pytest.mark.parametrize("kind", ["gemma3", "hybrid", "qwen3_next", "mamba"])
def test_models_that_can_not_be_cut_reuse_their_beginnings(kind: str) -> None:
    with driver(kind, max_batch_size=4, block_size=8) as running:
        running.ask(PROMPT, max_tokens=4)
        assert running.ask([*PROMPT[:70], 5, 5, 5], max_tokens=4).deltas[0].cached_tokens >= 48
        assert running.ask([*PROMPT, 9], max_tokens=4).deltas[0].cached_tokens >= 96
        assert running.ask(PROMPT, max_tokens=4, cache_salt="tenant").deltas[0].cached_tokens == 0
        assert running.engine.metrics.prefix.snapshots > 0
        running.settle()


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gemma3", "hybrid"))]
)
def test_rows_that_lose_their_place_go_on_as_if_nothing_had_happened(kind: str) -> None:
    prompts = [random.Random(seed).choices(range(3, 250), k=100 + 9 * seed) for seed in range(32)]
    options = {"max_tokens": 200, "ignore_eos": True, "temperature": 1.0, "seed": 5}

    def answers(running: Driver) -> list[list[int]]:
        pending = [running.submit(prompt, **options)[1] for prompt in prompts]
        return [one.wait()[0].tokens for one in pending]

    with driver(kind, max_batch_size=32, num_blocks=2000) as running:
        expected = answers(running)
        assert running.engine.metrics.preemptions == 0
        cache = running.engine._parts.compute.runner.cache
        per_token = cache.bytes_per_token if isinstance(cache, SlotCache) else cache._bytes_per_token
    with driver(kind, max_batch_size=32, num_blocks=2000, kv_cache_memory=int(10 * 512 * per_token)) as running:
        assert answers(running) == expected
        running.settle()
        metrics = running.engine.metrics
        assert metrics.preemptions > 0
        if kind == "llama":  # what was known of a row was not computed again
            assert metrics.prompt_tokens <= sum(map(len, prompts)) + 2 * metrics.preemptions


PROMPT = list(range(10, 110))


def test_what_was_computed_is_not_computed_again() -> None:
    with driver("llama", max_batch_size=4) as running:
        first = running.ask(PROMPT, max_tokens=20, ignore_eos=True)
        assert first.deltas[0].cached_tokens == 0
        again = running.ask(PROMPT, max_tokens=20, ignore_eos=True)
        assert (again.tokens, again.deltas[0].cached_tokens) == (first.tokens, 99)
        turn = running.ask([*PROMPT, *first.tokens, 7, 8], max_tokens=2)
        assert turn.deltas[0].cached_tokens == 119  # the last answered token was never computed
        assert running.ask([*PROMPT[:37], 5, 5], max_tokens=2).deltas[0].cached_tokens == 37
        other = running.submit(PROMPT, max_tokens=2, cache_salt="tenant")[1].wait()[0]
        assert other.deltas[0].cached_tokens == 0
        scored = running.ask(PROMPT, max_tokens=2, prompt_logprobs=1)
        assert scored.deltas[0].cached_tokens == 0
        assert running.engine.metrics.cached_tokens == 99 + 119 + 37
        assert running.engine.flush_cache() > 0
        assert running.ask(PROMPT, max_tokens=2).deltas[0].cached_tokens == 0
        running.settle()


def test_a_row_that_lost_its_place_tells_what_was_cached_when_it_began() -> None:
    with driver("llama") as running:
        cache = running.engine._parts.compute.runner.cache
        assert isinstance(cache, SlotCache)
        per_token = cache.bytes_per_token
    with driver("llama", num_blocks=100, kv_cache_memory=2 * CAPACITY_STEP * per_token) as running:
        running.ask(PROMPT[:40], max_tokens=2)
        prompts = [PROMPT[:40] + [number] * (CAPACITY_STEP - 60) for number in (5, 6)]
        both = [running.submit(prompt, max_tokens=40, ignore_eos=True)[1] for prompt in prompts]
        assert [pending.wait()[0].deltas[0].cached_tokens for pending in both] == [40, 40]
        assert running.engine.metrics.preemptions > 0
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


def test_beginnings_are_cut_to_few_lengths_where_shapes_are_dear() -> None:
    profile = replace(GPU, match_step=32, min_match=32)
    with driver("llama", profile=profile) as running:
        for length in (40, 70, 97, 130):
            prompt = [length % 50 + 3 + i % 7 for i in range(length)]
            first = running.ask(prompt, max_tokens=4, ignore_eos=True)
            again = running.ask(prompt, max_tokens=4, ignore_eos=True)
            assert again.tokens == first.tokens
            assert again.deltas[0].cached_tokens == (length - 1) // 32 * 32
        running.settle()


def test_prompt_shapes_are_warmed_up() -> None:
    """The passes that a GPU makes before it serves: each shape once, and nothing is left behind."""
    seen: list[tuple[tuple[int, ...], int]] = []
    with driver("llama", max_batch_size=4) as running:
        runner = running.engine._parts.compute.runner
        assert isinstance(runner.cache, SlotCache)

        class Watched(Forward):
            def at(self, tokens: mx.array, caches: list[Any], index: mx.array, choice: Any = None) -> mx.array:
                seen.append((tokens.shape, caches[0].capacity))
                return super().at(tokens, caches, index, choice)

        watched = Watched(running.engine.model.module)
        running.engine._thread.run_between_steps(
            lambda: warm_prompt_shapes(watched, runner.cache, prompt_shapes(4, 16))
        )
        running.settle()
        block_prefix = running.engine._parts.compute.prefix
        assert isinstance(block_prefix, prefix.BlockPrefix)
        running.engine._thread.run_between_steps(lambda: warm_blocks(watched, runner.cache, block_prefix, 16))  # type: ignore[arg-type]
        assert block_prefix.metrics.blocks_cached == 0
        assert block_prefix.metrics.bytes == 0
        running.settle()
    seen = seen[: len(seen) - 5]  # the last are those of the blocks
    assert len(seen) == len(set(seen)) > 20
    assert ((4, 16), 16) in seen
    assert ((2, 16), 128) in seen
    assert all(width % 16 == capacity % 16 == 0 for (_, width), capacity in seen)


def test_no_pass_of_the_warm_up_is_too_large() -> None:
    shapes = list(prompt_shapes(64, 256))
    assert max(count * width for count, _, _, width in shapes) == WARM_UP_TOKENS
    assert len(shapes) == len(set(shapes))
    assert {count for count, _, _, _ in shapes} == {1, 2, 4, 8, 16, 32}, "64 prompts are too many"
    assert all(known + width == total for _, total, known, width in shapes)


def test_chunks_are_warmed_up_one_after_another() -> None:
    shapes = list(chunk_shapes(512))
    assert len(shapes) == len(set(shapes)) == 19
    assert {(1, 640, 0, 512), (1, 640, 512, 128), (1, 2048, 1536, 512)} < set(shapes)
    assert all(count == 1 and known % 512 == 0 and width <= 512 for count, _, known, width in shapes)


@pytest.mark.long
def test_prompts_that_come_again_together_answer_the_same() -> None:
    """Beginnings of many lengths, shortened to share passes: waves of the same prompts, in other orders."""
    profile = replace(GPU, match_step=32, min_match=32, pass_tokens=128)
    chance = random.Random(1)
    prompts = [[chance.randrange(3, 280) for _ in range(chance.randrange(20, 400))] for _ in range(24)]
    with driver("llama", profile=profile, max_batch_size=12) as running:
        alone = [running.ask(prompt, max_tokens=12, ignore_eos=True).tokens for prompt in prompts]
        for _ in range(3):
            order = chance.sample(range(len(prompts)), len(prompts))
            wave = [(number, running.submit(prompts[number], max_tokens=12, ignore_eos=True)[1]) for number in order]
            for number, pending in wave:
                assert pending.wait()[0].tokens == alone[number]
        assert running.engine.metrics.prefix.hit_tokens > 1000
        assert running.engine.metrics.faults == 0
        running.settle()
