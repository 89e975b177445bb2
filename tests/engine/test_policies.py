"""Versions of an adapter on every token: rows that keep theirs, rows that follow, shares, pins, and many adapters."""

import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_parallm.devices.profile import DeviceProfile
from mlx_parallm.engine.rows import Row
from mlx_parallm.errors import ModelNotFoundError
from mlx_parallm.lora.adapter import Adapter, AdapterError
from mlx_parallm.lora.adapter_files import read_folder
from mlx_parallm.lora.layout import Layout
from mlx_parallm.lora.registry import KEPT_VERSIONS, MAX_PINNED
from mlx_parallm.sampling_params import SamplingParams
from mlx_parallm.types import AdapterRoute
from tests.engine.harness import Answer, Bare, Driver, bare_with, driver, logprob
from tests.engine.test_parity import GPU
from tests.tiny import tiny
from tests.unit.test_adapters import LIMIT, random_adapter, written

PROMPT = list(range(20, 60))
KINDS = ("few", "all", "dora")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Adapter]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: read_folder(written(folder, name), LIMIT)[0] for name in KINDS}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Bare]:
    folder = tmp_path_factory.mktemp("bare")
    return bare_with({name: written(folder, name) for name in KINDS})


@pytest.fixture(params=[None, GPU], ids=["cpu", "gpu"])
def running(request: pytest.FixtureRequest) -> Iterator[Driver]:
    with driver("llama", profile=request.param, max_batch_size=8, block_size=8, max_loras=2) as found:
        yield found
        found.settle()


def spans(answer: Answer) -> list[tuple[int, int]]:
    return [(span.first, span.version) for span in answer.last.spans]


def recomputed(kinds: list[tuple[int, Bare]], prompt: list[int], tokens: list[int]) -> list[float]:
    """The log-probabilities of tokens when each model computes its share of them, over one cache."""
    cache = make_prompt_cache(kinds[0][1].model.module)
    found: list[float] = []
    step = prompt
    for number, token in enumerate(tokens):
        model = next(bare for first, bare in reversed(kinds) if first <= number)
        logits = model.model.module(mx.array([step]), cache=cache)[0, -1].astype(mx.float32)
        found.append(logprob(logits, token))
        step = [token]
    return found


@pytest.mark.long
@pytest.mark.parametrize("prompt", [PROMPT, pytest.param(PROMPT[:9], marks=pytest.mark.slow)])
def test_a_row_that_follows_moves_on_and_says_where(
    running: Driver, adapters: dict[str, Adapter], bare: dict[str | None, Bare], prompt: list[int]
) -> None:
    engine = running.engine
    engine.adapters.publish("p", adapters["few"], "")
    options = {"max_tokens": 400, "ignore_eos": True, "stream": True, "logprobs": 0, "adapter": "p"}
    follower, other = (running.submit(prompt, **options, follow=follow)[1] for follow in (True, False))
    follower.wait_for_tokens(5)
    engine.adapters.publish("p", adapters["all"], "")
    follower.wait_for_tokens(len(follower.answers[0].tokens) + 5)
    engine.adapters.rollback("p")
    moved, stayed = follower.wait()[0], other.wait()[0]
    assert spans(stayed) == [(0, 1)]
    bare["few"].hold(
        prompt,
        stayed.tokens,
        recomputed([(0, bare["few"])], prompt, stayed.tokens),
        [s.logprob for s in stayed.logprobs],
    )
    found = spans(moved)
    assert [version for _, version in found] == [1, 2, 1]
    assert 5 <= found[1][0] < found[2][0] < 400
    kinds = [(first, bare["few" if version == 1 else "all"]) for first, version in found]
    expected = recomputed(kinds, prompt, moved.tokens)
    assert [s.logprob for s in moved.logprobs] == pytest.approx(expected, abs=5e-4)
    # What it computed is of two versions: nobody may find it in the prefix cache.
    running.settle()
    for version, kind in ((1, "few"), (2, "all")):
        again = running.ask(
            prompt + moved.tokens[:100], max_tokens=5, ignore_eos=True, adapter="p", adapter_version=version
        )
        assert again.tokens == bare[kind].greedy(prompt + moved.tokens[:100], 5, ignore_eos=True)[0]


@pytest.mark.long
def test_followers_wait_for_a_place(running: Driver, adapters: dict[str, Adapter]) -> None:
    """Two places, taken by two versions that stay: who follows moves when one of them has ended."""
    engine = running.engine
    engine.adapters.publish("p", adapters["few"], "")
    long = {"max_tokens": 500, "ignore_eos": True, "stream": True, "adapter": "p"}
    follower = running.submit(PROMPT, **long, follow=True)[1]
    first_id, first = running.submit(PROMPT, **long)
    first.wait_for_tokens(2)
    engine.adapters.publish("p", adapters["all"], "")
    second = running.submit(PROMPT[:20], **(long | {"max_tokens": 300}))[1]
    second.wait_for_tokens(2)
    engine.adapters.publish("p", adapters["dora"], "")
    count = len(follower.answers[0].tokens)
    follower.wait_for_tokens(count + 20)
    assert [span.version for span in follower.answers[0].deltas[-1].spans] == [1, 2]
    engine.cancel(first_id)
    follower.wait_for_tokens(len(follower.answers[0].tokens) + 20)
    assert [version for _, version in spans(follower.wait()[0])] == [1, 2, 3]
    second.wait()


def test_a_row_that_waits_begins_with_the_newest(adapters: dict[str, Adapter], bare: dict[str | None, Bare]) -> None:
    with driver("llama", max_batch_size=1, block_size=8) as running:
        engine = running.engine
        engine.adapters.publish("p", adapters["few"], "")
        busy = running.submit(PROMPT, max_tokens=200, ignore_eos=True, stream=True)[1]
        busy.wait_for_tokens(1)
        waiting = [
            running.submit(PROMPT, max_tokens=6, ignore_eos=True, adapter="p", follow=follow)[1]
            for follow in (True, False)
        ]
        engine.adapters.publish("p", adapters["all"], "")
        follows, stays = (pending.wait()[0] for pending in waiting)
        assert (spans(follows), spans(stays)) == ([(0, 2)], [(0, 1)])
        assert follows.tokens == bare["all"].greedy(PROMPT, 6, ignore_eos=True)[0]
        assert stays.tokens == bare["few"].greedy(PROMPT, 6, ignore_eos=True)[0]
        again = running.ask(PROMPT, max_tokens=2, adapter="p")
        assert again.deltas[0].cached_tokens >= 32, "its prompt is kept as the newest's"
        running.settle()


def test_shares_of_the_models_own_name(running: Driver, adapters: dict[str, Adapter]) -> None:
    engine, registry = running.engine, running.engine.adapters
    assert registry.route() is None
    engine.adapters.publish("p", adapters["few"], "")
    engine.adapters.publish("p", adapters["all"], "")
    engine.adapters.serve([AdapterRoute("p", 1, 0.75), AdapterRoute("p", None, 0.15), AdapterRoute(None, None, 0.1)])
    assert registry.policy_version == 1
    drawn = [version.number if (version := registry.route()) else 0 for _ in range(100)]
    assert [drawn.count(number) for number in (1, 2, 0)] == [75, 15, 10]
    with pytest.raises(AdapterError, match="own name serves"):
        engine.adapters.unload("p")
    with pytest.raises(ModelNotFoundError):
        engine.adapters.serve([AdapterRoute("p", 9, 1.0)])
    assert len(registry.routes) == 3
    for _ in range(KEPT_VERSIONS + 3):
        engine.adapters.publish("p", adapters["few"], "")
    assert registry.find("p", 1).number == 1  # served, so kept
    engine.adapters.serve([])
    engine.adapters.unload("p")
    assert registry.policy_version == 0


def test_pinned_versions_stay(running: Driver, adapters: dict[str, Adapter], bare: dict[str | None, Bare]) -> None:
    engine = running.engine
    engine.adapters.publish("p", adapters["all"], "")
    engine.adapters.pin("p", 1, True)
    for _ in range(KEPT_VERSIONS + 2):
        engine.adapters.publish("p", adapters["few"], "")
    answer = running.ask(PROMPT, max_tokens=5, ignore_eos=True, adapter="p", adapter_version=1)
    assert answer.tokens == bare["all"].greedy(PROMPT, 5, ignore_eos=True)[0]
    with pytest.raises(ModelNotFoundError):
        engine.adapters.find("p", 2)
    engine.adapters.pin("p", 1, False)
    with pytest.raises(ModelNotFoundError):
        engine.adapters.find("p", 1)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 8},
        {"temperature": 0.9, "top_p": 0.6, "repetition_penalty": 1.3},
        {"temperature": 0.0, "logit_bias": {7: 5.0}},
    ],
)
def test_processed_logprobs_are_those_of_the_draw(running: Driver, options: dict[str, object]) -> None:
    """Recomputed by hand from the bare model's logits; the raw ones beside them in one batch."""
    fixed = {"max_tokens": 12, "ignore_eos": True, "logprobs": 0, "seed": 5, **options}
    processed, raw = (
        running.submit(PROMPT, processed_logprobs=wanted, **fixed)[1].wait()[0] for wanted in (True, False)
    )
    assert processed.tokens == raw.tokens
    bare = tiny()
    full = PROMPT + processed.tokens
    logits = np.array(bare.module(mx.array([full]))[0].astype(mx.float32))
    for number, token in enumerate(processed.tokens):
        scores = logits[len(PROMPT) - 1 + number].astype(np.float64)
        assert raw.logprobs[number].logprob == pytest.approx(log_softmax(scores)[token], abs=1e-4)
        seen = list(set(full[: len(PROMPT) + number]))
        penalty = float(options.get("repetition_penalty", 1.0))  # type: ignore[arg-type]
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
        for biased, bias in options.get("logit_bias", {}).items():  # type: ignore[attr-defined]
            scores[biased] += bias
        scores /= options["temperature"] or 1.0  # type: ignore[operator]
        ordered = np.sort(scores)[::-1]
        kept = int(options.get("top_k", len(scores)))  # type: ignore[call-overload]
        shares = np.exp(log_softmax(ordered[:kept]))
        within = int(np.sum(np.cumsum(shares) - shares < options.get("top_p", 1.0)))
        scores[scores < ordered[within - 1]] = -np.inf
        assert processed.logprobs[number].logprob == pytest.approx(log_softmax(scores)[token], abs=2e-4)


def log_softmax(scores: "np.ndarray") -> "np.ndarray":
    top = scores.max()
    return np.asarray(scores - top - np.log(np.exp(scores - top).sum()))


@pytest.mark.slow
def test_the_token_that_ends_a_row_has_its_logprob(running: Driver) -> None:
    bare = Bare(tiny())
    tokens, logprobs = bare.greedy(PROMPT, 6, ignore_eos=True)
    answer = running.ask(PROMPT, max_tokens=10, stop_token_ids=(tokens[4],), logprobs=0)
    assert answer.tokens == tokens[: tokens.index(tokens[4])]
    assert answer.last.stop_token == tokens[4]
    assert answer.last.stop_logprob is not None
    assert answer.last.stop_logprob.logprob == pytest.approx(logprobs[tokens.index(tokens[4])], abs=1e-4)


@pytest.mark.slow
def test_followers_that_lose_their_place(adapters: dict[str, Adapter]) -> None:
    """With memory for some of the rows: all end, each token has one version, and they come in order."""
    prompts = [[10 + n, *PROMPT, *PROMPT[: 2 * n]] for n in range(12)]
    options = {"max_tokens": 330, "ignore_eos": True, "adapter": "p", "follow": True}
    with driver("llama", max_batch_size=12, block_size=8, max_loras=2) as running:
        running.engine.adapters.publish("p", adapters["few"], "")
        running.ask(PROMPT, **options)
        per_token = running.engine._parts.compute.runner.cache.bytes_per_token  # type: ignore[attr-defined]
    for profile in (None, GPU):
        limit = 6 * 256 * per_token
        with driver("llama", profile=profile, max_batch_size=12, block_size=8, kv_cache_memory=limit) as running:
            engine = running.engine
            engine.adapters.publish("p", adapters["few"], "")
            pending = [running.submit(prompt, **options)[1] for prompt in prompts]
            for kind in ("all", "few", "all"):
                enough = 300 * engine.adapters.find("p").number
                while engine.metrics.generated_tokens < enough and engine.failure is None:
                    time.sleep(0.01)
                engine.adapters.publish("p", adapters[kind], "")
            for one in pending:
                answer = one.wait()[0]
                assert len(answer.tokens) == 330
                firsts, versions = zip(*spans(answer), strict=True)
                assert list(firsts) == sorted(set(firsts))
                assert list(versions) == sorted(set(versions))
                assert firsts[0] == 0
            assert engine.metrics.preemptions > 0
            running.settle()


def test_a_row_forgets_what_it_asked_for() -> None:
    class Version:
        def __init__(self, number: int) -> None:
            self.number = number

    first, second, third = Version(1), Version(2), Version(3)
    row = Row([1], SamplingParams(), 0, 0, 50, frozenset())
    row.take_adapter(first)
    row.tokens, row.launched = [0] * 5, 7
    row.take_adapter(second)
    assert row.policies == [(0, first), (7, second)]
    row.rewind()
    assert row.policies == [(0, first), (5, second)]
    row.take_adapter(third)
    assert row.policies == [(0, first), (5, third)]
    row.launched = 9
    row.rewind()
    assert row.policies == [(0, first), (5, third)]


def test_a_follower_that_moves_while_the_ssd_is_read(adapters: dict[str, Adapter], tmp_path: Path) -> None:
    prompt = [number % 200 + 20 for number in range(600)]
    settings = {"block_size": 8, "ssd": True, "ssd_cache_dir": str(tmp_path)}
    for number in range(4):
        with driver("llama", **settings) as running:
            engine = running.engine
            engine.adapters.publish("p", adapters["few"], "")
            if number:
                assert engine.pause("keep", 10)
            pending = running.submit(prompt, max_tokens=3, ignore_eos=True, adapter="p", follow=True)[1]
            if number:
                engine.adapters.publish("p", adapters["all"], "")
                engine.resume()
            answer = pending.wait()[0]
            assert engine.failure is None
            assert spans(answer)[-1][1] == (2 if number else 1)
            running.settle()


def merged(adapter: Adapter) -> Bare:
    model = tiny()
    for path, layer in model.module.named_modules():
        if path in adapter.parts:
            part = adapter.parts[path]
            layer.weight = layer.weight + mx.array(part.b @ part.a)
    return Bare(model)


@pytest.mark.parametrize("profile", [None, GPU], ids=["cpu", "gpu"])
def test_a_version_that_was_replaced_leaves_the_device(profile: DeviceProfile | None) -> None:
    layout = Layout(tiny().module)
    adapters = [random_adapter(layout, ("q_proj", "v_proj"), seed, rank=4, size=0.2) for seed in range(8)]
    with driver("llama", profile=profile, max_loras=8) as running:
        registry, answers = running.engine.adapters, []
        for adapter in adapters[:6]:
            running.engine.adapters.publish("p", adapter, "")
            answers.append(running.submit(PROMPT, max_tokens=4, ignore_eos=True, adapter="p")[1].wait()[0].tokens)
            running.settle()
            assert registry.resident_bytes == registry.find("p").packed.nbytes
        again = running.ask(PROMPT, max_tokens=4, ignore_eos=True, adapter="p", adapter_version=4).tokens
        assert again == answers[3] == merged(adapters[3]).greedy(PROMPT, 4, ignore_eos=True)[0]
        held = running.submit(PROMPT, stream=True, max_tokens=24, ignore_eos=True, adapter="p")[1]
        held.wait_for_tokens(2)
        running.engine.adapters.publish("p", adapters[6], "")
        beside = running.ask(PROMPT, max_tokens=4, ignore_eos=True, adapter="p").tokens
        assert registry.resident_bytes == 2 * registry.find("p").packed.nbytes
        assert beside == merged(adapters[6]).greedy(PROMPT, 4, ignore_eos=True)[0]
        assert held.wait()[0].tokens == merged(adapters[5]).greedy(PROMPT, 24, ignore_eos=True)[0]
        running.settle()
        running.engine.adapters.publish("p", adapters[7], "")
        assert registry.resident_bytes == 0


def test_rewards_are_counted_for_the_version_that_answered(running: Driver, adapters: dict[str, Adapter]) -> None:
    registry = running.engine.adapters
    for name in ("few", "all"):
        registry.publish("p", adapters[name], "")
    for name, number, reward in (("p", 1, 1.0), ("p", 2, 0.25), (None, 0, 3.0), ("p", 2, 0.75), ("p", 9, 5.0)):
        registry.note_reward(name, number, reward)
    found = [*registry.versions("p"), registry.base]
    assert {one.number: (one.stats.rewards, one.stats.reward_mean) for one in found} == {
        1: (1, 1.0),
        2: (2, 0.5),
        0: (1, 3.0),
    }


@pytest.mark.long
def test_a_hundred_adapters_on_eight_places() -> None:
    layout = Layout(tiny().module)
    adapters = [random_adapter(layout, ("q_proj", "v_proj"), seed, rank=4, size=0.2) for seed in range(100)]
    with driver("llama", max_batch_size=16, max_loras=8, max_queue_size=300) as running:
        registry = running.engine.adapters
        for number, adapter in enumerate(adapters):
            running.engine.adapters.publish(f"a{number}", adapter, "")
        one = registry.find("a0").packed.nbytes
        order = [number for _ in range(2) for number in np.random.default_rng(0).permutation(100).tolist()]
        in_flight = [
            (number, running.submit(PROMPT[: 5 + number % 30], max_tokens=4, ignore_eos=True, adapter=f"a{number}")[1])
            for number in order
        ]
        for _, pending in in_flight:
            pending.wait()
            assert registry.resident_bytes <= 8 * one
        running.settle()
        assert registry.swaps >= 100
        for number, pending in in_flight[::5]:
            expected = merged(adapters[number]).greedy(PROMPT[: 5 + number % 30], 4, ignore_eos=True)[0]
            assert pending.answers[0].tokens == expected, number
        assert sum(version.requests for entry in registry for version in entry.versions.values()) == 200


def test_names_and_pins_are_bounded(adapters: dict[str, Adapter]) -> None:
    adapter = next(iter(adapters.values()))
    with driver("llama", max_cpu_loras=2) as running:
        registry = running.engine.adapters
        for name in ("one", "two"):
            registry.publish(name, adapter, "test")
        with pytest.raises(AdapterError, match="--max-cpu-loras allows: unload one first") as refused:
            registry.publish("three", adapter, "test")
        assert refused.value.code == "too_many_adapters"
        assert [entry.name for entry in registry] == ["one", "two"]
        for _ in range(MAX_PINNED):
            version = registry.publish("two", adapter, "test")
            registry.pin("two", version.number, True)
        newest = registry.publish("two", adapter, "test")
        with pytest.raises(AdapterError, match="pinned already"):
            registry.pin("two", newest.number, True)
        registry.pin("two", version.number, True)  # it is pinned already
        registry.pin("two", version.number, False)
        registry.pin("two", newest.number, True)
        registry.unload("one")
        registry.publish("three", adapter, "test")
        running.settle()
