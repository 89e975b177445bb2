"""The sampler against a reference in plain NumPy: what can be drawn, with what probability, and how often it is."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mlx_parallm.engine.compute.sampling import History, Sampled, Sampler, SamplingKernels, log_sum_exp, scores_of
from mlx_parallm.engine.rows import Row
from mlx_parallm.sampling_params import SamplingParams
from mlx_parallm.types import TokenLogprob
from tests.unit.reference_sampler import Context, Reference, reference

Array = npt.NDArray[Any]
Batch = tuple[Array, list[Row | None], list[Context | None]]
checked = settings(max_examples=120, deadline=None, derandomize=True, database=None)


def row(params: SamplingParams, context: Context = Context(), *, seed: int = 0, recorded: bool = False) -> Row:  # noqa: B008
    made = Row(
        list(context.prompt), params, 0, seed, 99, context.stop_ids, tokens=list(context.generated), recorded=recorded
    )
    made.launched = len(context.generated)
    made.matcher = object() if context.allowed is not None else None
    return made


def packed(masks: Sequence[Sequence[bool] | None], size: int) -> mx.array | None:
    """Bit masks as llguidance writes them; of rows without a grammar, all ones."""
    if all(mask is None for mask in masks):
        return None
    words = np.zeros((len(masks), -(-size // 32)), np.uint32)
    for line, mask in zip(words, masks, strict=True):
        for token in range(size):
            if mask is None or mask[token]:
                line[token // 32] |= np.uint32(1 << (token % 32))
    return mx.array(words)


def sample(logits: Array, rows: Sequence[Row | None], masks: Sequence[Sequence[bool] | None]) -> Sampled:
    sampler = Sampler(rows, logits.shape[1])
    history = History(rows) if sampler.penalized else None
    numbers = [one.launched if one else 0 for one in rows]
    return sampler(mx.array(logits), numbers, history, packed(masks, logits.shape[1]))


@st.composite
def contexts(draw: st.DrawFn, size: int) -> Context:
    tokens = st.integers(0, size - 1)
    allowed = draw(st.none() | st.lists(st.booleans(), min_size=size, max_size=size))
    stop_ids = frozenset(draw(st.sets(tokens, max_size=2)))
    if allowed is not None:
        allowed[draw(tokens.filter(lambda token: token not in stop_ids))] = True  # something is left
    return Context(
        tuple(draw(st.lists(tokens, max_size=6))), tuple(draw(st.lists(tokens, max_size=6))), stop_ids, allowed
    )


@st.composite
def parameters(draw: st.DrawFn, size: int) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.4, 1.0, 1.7])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.01])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 5, size, size + 7])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.02, 0.3])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.7, -1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.9, -0.3])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.8])),
        logit_bias=draw(st.dictionaries(st.integers(0, size - 1), st.sampled_from([-3.0, 0.5, 4.0]), max_size=3)),
        min_tokens=draw(st.integers(0, 4)),
        logprobs=size,
        processed_logprobs=draw(st.booleans()),
    )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    size = draw(st.sampled_from([7, 33, 64, 96]))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = draw(st.integers(1, 4))
    places = [draw(st.none() | contexts(size)) if place else draw(contexts(size)) for place in range(count)]
    rows = [
        None if context is None else row(draw(parameters(size)), context, seed=int(numbers.integers(2**32)))
        for context in places
    ]
    for one in rows:
        if one is not None:
            one.recorded = draw(st.booleans())
    spread = draw(st.sampled_from([0.3, 3.0]))
    return numbers.normal(0, spread, (count, size)).astype(np.float32), rows, places


def close(found: float, expected: float) -> bool:
    return found == expected if np.isinf(expected) else abs(found - expected) < 1e-4


def check(token: int, scores: TokenLogprob, params: SamplingParams, expected: Reference) -> None:
    """One row of a batch."""
    assert np.isfinite(expected.processed[token])
    if params.greedy:
        assert token == int(np.argmax(expected.processed))
    shown = expected.processed if params.processed_logprobs else expected.raw
    listed = dict(scores.top)
    assert sorted(listed) == list(range(len(shown)))
    assert all(close(listed[place], value) for place, value in enumerate(shown))
    assert [value for _, value in scores.top] == sorted(listed.values(), reverse=True)
    assert (scores.token, scores.rank) == (token, 1 + int((shown > shown[token]).sum()))
    assert close(scores.logprob, shown[token])


@pytest.mark.long
@checked
@given(batch=batches())
def test_any_batch_is_sampled_as_the_reference_says(batch: Batch) -> None:
    logits, rows, places = batch
    found = [
        reference(line, one.sampling, context) if one and context else None
        for line, one, context in zip(logits, rows, places, strict=True)
    ]
    assume(all(one is None or one.margin > 1e-5 for one in found))
    sampled = sample(logits, rows, [context.allowed if context else None for context in places])
    tokens = sampled.tokens.tolist()
    assert sampled.scores is not None
    asked = [place for place, one in enumerate(rows) if one]
    scores = sampled.scores.on_host([tokens[place] for place in asked])
    for place, score in zip(asked, scores, strict=True):
        one, expected = rows[place], found[place]
        assert one is not None
        assert expected is not None
        check(tokens[place], score, one.sampling, expected)
        if sampled.sampled_logprobs is not None:
            assert close(sampled.sampled_logprobs.tolist()[place], expected.drawn[tokens[place]])
    assert (sampled.sampled_logprobs is not None) == any(one.recorded for one in rows if one)


def in_c(logits: mx.array, heats: Array, keys: Array, scored: bool) -> tuple[mx.array, mx.array | None]:
    """What the kernel does (tests/unit/test_native.py), by MLX's own operations."""
    scaled = logits / mx.array(np.where(heats > 0, heats, 1.0).astype(np.float32))[:, None]
    noise = mx.vmap(lambda key: mx.random.gumbel((logits.shape[1],), key=key))(mx.array(keys))
    tokens = mx.argmax(mx.where(mx.array(heats)[:, None] > 0, scaled + noise, scaled), axis=-1).astype(mx.int32)
    scores = mx.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0] - mx.logsumexp(scaled, axis=-1)
    return tokens, scores if scored else None


@pytest.mark.parametrize("recorded", [False, True])
def test_the_kernel_and_mlx_draw_the_same(recorded: bool) -> None:
    logits = 3 * mx.random.normal((6, 50), key=mx.random.key(3))
    heats = [0.0, 0.5, 1.0, 2.0, 1.0]
    rows = [
        row(
            SamplingParams(temperature=heat, logprobs=3, processed_logprobs=bool(place % 2)),
            seed=2**32 - 1 - place,
            recorded=recorded,
        )
        for place, heat in enumerate(heats)
    ]
    numbers = [0, 3, 2**31 - 1, 7, 7, 0]
    plain = Sampler([*rows, None], 50)(logits, numbers)
    kernel = Sampler([*rows, None], 50, SamplingKernels(in_c))(logits, numbers)
    assert kernel.tokens.tolist() == plain.tokens.tolist()
    assert len(kernel.arrays()) == 5 + recorded
    assert (kernel.sampled_logprobs is None) == (plain.sampled_logprobs is None) == (not recorded)
    for one, other in zip(kernel.arrays(), plain.arrays(), strict=True):
        assert np.allclose(np.array(one), np.array(other), atol=1e-5)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.5),
        SamplingParams(top_k=3),
        SamplingParams(min_p=0.1),
        SamplingParams(logit_bias={1: 2.0}),
        SamplingParams(presence_penalty=0.1),
        SamplingParams(min_tokens=2, stop_token_ids=(3,)),
    ],
)
def test_the_kernel_is_not_asked_for_what_it_does_not_know(params: SamplingParams) -> None:
    def refuse(*anything: Any) -> tuple[mx.array, mx.array | None]:
        raise AssertionError("the kernel was asked")

    bound = row(params, Context(stop_ids=frozenset(params.stop_token_ids)))
    sampler = Sampler([row(SamplingParams()), bound], 8, SamplingKernels(refuse))
    sampler(mx.zeros((2, 8)), [0, 0], History(sampler.rows))
    grammar = row(SamplingParams(), Context(allowed=[True] * 8))
    Sampler([grammar], 8, SamplingKernels(refuse))(mx.zeros((1, 8)), [0], None, packed([[True] * 8], 8))
    with pytest.raises(AssertionError, match="was asked"):
        Sampler([row(SamplingParams())], 8, SamplingKernels(refuse))(mx.zeros((1, 8)), [0])


def draws(params: SamplingParams, seeds: Sequence[int], numbers: Sequence[int], logits: Array) -> list[int]:
    """A batch whose rows have the same logits."""
    sampler = Sampler([row(params, seed=seed) for seed in seeds], len(logits))
    found: list[int] = sampler(mx.array(np.tile(logits, (len(seeds), 1))), numbers).tokens.tolist()
    return found


FLAT = np.zeros(5000, np.float32)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.99)])
def test_draws_depend_on_the_seed_and_the_number_of_the_token_alone(params: SamplingParams) -> None:
    seeds, numbers = [5, 5, 6, 6, 2**32 - 1], [0, 1, 0, 1, 0]
    found = draws(params, seeds, numbers, FLAT)
    assert len(set(found)) == 5, "of 5000 tokens alike, five draws meet once in five hundred times"
    assert draws(params, seeds[::-1], numbers[::-1], FLAT) == found[::-1]
    assert [draws(params, [seed], [number], FLAT)[0] for seed, number in zip(seeds, numbers, strict=True)] == found
    assert draws(params, [5] * 3, [4] * 3, FLAT) == draws(params, [5], [4], FLAT) * 3


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6, top_p=0.9),
        SamplingParams(temperature=1.5, top_k=4),
        SamplingParams(min_p=0.2, logit_bias={7: 2.0}),
    ],
)
@pytest.mark.parametrize("varied", ["seeds", "numbers"])
def test_frequencies_fit_the_reference(params: SamplingParams, varied: str) -> None:
    count = 6000
    logits = np.array([0.0, 1.0, -1.0, 0.5, 2.0, -3.0, 0.25, -0.5], np.float32)
    seeds = list(range(1000, 1000 + count)) if varied == "seeds" else [77] * count
    numbers = list(range(count)) if varied == "numbers" else [3] * count
    found = np.bincount(draws(params, seeds, numbers, logits), minlength=len(logits))
    expected = count * np.exp(reference(logits, params, Context()).processed)
    possible = expected > 0
    assert not found[~possible].any()
    statistic = ((found - expected)[possible] ** 2 / expected[possible]).sum()
    assert statistic < 35, "chi-square with at most 7 degrees of freedom: one time in 100,000"


def test_greedy_rows_beside_random_ones_take_the_likeliest() -> None:
    logits = np.random.default_rng(1).normal(0, 1, (3, 40)).astype(np.float32)
    greedy = [SamplingParams(temperature=0.0, top_p=0.1), SamplingParams(top_k=1, temperature=3.0)]
    rows = [row(greedy[0]), row(SamplingParams(temperature=3.0)), row(greedy[1])]
    tokens = sample(logits, rows, [None] * 3).tokens.tolist()
    assert [tokens[0], tokens[2]] == [int(logits[0].argmax()), int(logits[2].argmax())]


def test_a_top_k_of_one_leaves_the_likeliest() -> None:
    logits = np.linspace(0.0, 0.5, 40, dtype=np.float32)
    assert set(draws(SamplingParams(temperature=1.7, top_k=1), range(30), [0] * 30, logits)) == {39}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_recorded_rows_have_their_logprobs_where_nobody_asks_for_any(temperature: float) -> None:
    logits = np.random.default_rng(1).normal(0, 3, (2, 50)).astype(np.float32)
    params = SamplingParams(temperature=temperature, top_p=0.8)
    found = sample(logits, [row(params, seed=3, recorded=True), row(params, seed=4)], [None, None])
    assert found.scores is None
    assert found.sampled_logprobs is not None
    whole = reference(logits[0], replace(params, top_p=1.0), Context())  # what a trainer can compute: before any cut
    assert close(float(found.sampled_logprobs[0].item()), whole.processed[int(found.tokens[0].item())])


def test_a_token_at_the_edge_of_min_p_and_of_top_p() -> None:
    """Exactly a quarter of the likeliest is enough; a sum of exactly p is reached."""
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32)).astype(np.float32)
    kept = sample(logits[None], [row(SamplingParams(min_p=0.2499, logprobs=4, processed_logprobs=True))], [None])
    assert kept.scores is not None
    assert np.isfinite(np.array(kept.scores.top_logprobs)).sum() == 4
    for top_p, count in ((0.49, 1), (0.51, 2), (0.74, 2), (0.76, 4)):  # two that are alike are kept or cut together
        kept = sample(logits[None], [row(SamplingParams(top_p=top_p, logprobs=4, processed_logprobs=True))], [None])
        assert kept.scores is not None
        assert np.isfinite(np.array(kept.scores.top_logprobs)).sum() == count


def test_a_top_k_without_a_top_p_keeps_k_tokens_however_rare() -> None:
    """The sum of the likelier ones' probabilities is rounded to 1 before it comes to the last of them."""
    logits = np.array([0.0, -9.0, -20.0, -25.0, -30.0], np.float32)
    params = SamplingParams(top_k=4, logprobs=5, processed_logprobs=True)
    found = sample(logits[None], [row(params)], [None]).scores
    assert found is not None
    listed = dict(zip(np.array(found.top_tokens)[0].tolist(), np.array(found.top_logprobs)[0].tolist(), strict=True))
    assert [close(listed[token], logits[token] - np.log(1 + np.exp(-9.0))) for token in range(4)] == [True] * 4
    assert listed[4] == -np.inf


def test_each_cut_is_made_of_what_the_cut_before_it_has_left() -> None:
    """Top-p counts the probabilities of the top k alone, and of what min-p has kept."""
    logits = np.log(np.array([0.2, 0.15, 0.1, *[0.055] * 10], np.float32) * np.linspace(1, 0.99, 13, dtype=np.float32))
    for params, count in (
        (SamplingParams(top_k=3, top_p=0.5), 2),  # 0.44 and 0.33 of the three; of all, 0.2, 0.15 and 0.1
        (SamplingParams(min_p=0.4, top_p=0.5), 2),
        (SamplingParams(top_p=0.5), 4),
        (SamplingParams(min_p=0.4, top_k=2, top_p=0.9), 2),
    ):
        one = row(replace(params, logprobs=13, processed_logprobs=True))
        kept = sample(logits[None], [one], [None]).scores
        assert kept is not None
        expected = reference(logits, params, Context()).processed
        assert np.isfinite(np.array(kept.top_logprobs)).sum() == np.isfinite(expected).sum() == count


def test_a_step_without_random_rows_needs_no_numbers() -> None:
    plain = SamplingParams(temperature=0.0)
    assert not Sampler([row(plain), None], 8).counts_tokens
    assert Sampler([row(plain), row(SamplingParams())], 8).counts_tokens
    early = SamplingParams(temperature=0.0, min_tokens=1)
    assert Sampler([row(early, Context(stop_ids=frozenset({1})))], 8).counts_tokens


def test_scores_are_as_many_as_the_widest_row_asks_for() -> None:
    logits = np.random.default_rng(2).normal(0, 1, (4, 10)).astype(np.float32)
    rows = [row(SamplingParams(logprobs=wanted)) for wanted in (2, None, 0, 5)]
    sampler = Sampler(rows, 10)
    assert sampler.logprob_rows == [0, 2, 3]
    scores = sampler(mx.array(logits), [0] * 4).scores
    assert scores is not None
    assert scores.top_tokens.shape == (3, 5)
    for line, place in zip(scores.top_tokens.tolist(), sampler.logprob_rows, strict=True):
        assert sorted(line) == sorted(np.argsort(-logits[place])[:5].tolist())
    alone = Sampler([row(SamplingParams(logprobs=0))], 10)(mx.array(logits[:1]), [0]).scores
    assert alone is not None
    assert (alone.top_tokens.shape, alone.top_logprobs.shape) == ((1, 0), (1, 0))
    without = Sampler([row(SamplingParams())], 10)(mx.array(logits[:1]), [0])
    assert (without.scores, len(without.arrays())) == (None, 1)


def test_more_likeliest_tokens_than_the_vocabulary_has() -> None:
    scores = scores_of(mx.array([[0.0, 2.0, 1.0]]), mx.array([2]), 20)
    (one,) = scores.on_host([2])
    assert ([token for token, _ in one.top], one.rank) == ([1, 2, 0], 2)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 96, 512, 1000, 1024, 1536, 4096])
def test_log_sum_exp_in_pieces(size: int) -> None:
    logits = np.random.default_rng(size).normal(0, 4, (2, 3, size)).astype(np.float32)
    expected = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    assert np.abs(np.array(log_sum_exp(mx.array(logits))) - expected).max() < 1e-5


def counted(prompt: Sequence[int], generated: Sequence[int], size: int) -> tuple[list[int], list[bool]]:
    return [list(generated).count(token) for token in range(size)], [
        token in (*prompt, *generated) for token in range(size)
    ]


def assert_history(history: History, expected: Sequence[tuple[Sequence[int], Sequence[int]]], size: int) -> None:
    counts, seen = (array.tolist() for array in history.counts(size))
    for place, (prompt, generated) in enumerate(expected):
        assert (counts[place], seen[place]) == counted(prompt, generated, size)


def test_history_counts_what_the_host_knows_and_what_the_device_adds() -> None:
    params = SamplingParams(presence_penalty=1.0)
    rows = [row(params, Context((1, 1, 2), (3,))), None, row(params, Context((4,), ()))]
    history = History(rows)
    assert_history(history, [((1, 1, 2), (3,)), ((), ()), ((4,), ())], 9)
    history.append(mx.array([3, 0, 5]))
    history.append(mx.array([7, 0, 8]), mx.array([False, False, True]))
    assert_history(history, [((1, 1, 2), (3, 3)), ((), (0,)), ((4,), (5, 8))], 9)


def test_history_grows_beyond_what_it_reserved() -> None:
    history = History([row(SamplingParams(presence_penalty=1.0), Context((1,), ()))])
    for number in range(700):
        history.append(mx.array([number % 3 + 2]))
        if number % 200 == 0:
            mx.eval(history.tokens)
    assert_history(history, [((1,), [number % 3 + 2 for number in range(700)])], 6)


def test_history_adopts_rows_that_stay_and_the_unread_token_of_those_that_join() -> None:
    params = SamplingParams(presence_penalty=1.0)
    first, second, third, fourth = (row(params, Context((place, 8), ())) for place in range(1, 5))
    old_rows = [first, second]
    old = History(old_rows)
    for tokens in ([5, 6], [6, 6], [6, 7]):
        old.append(mx.array(tokens))
    third.launched = 1  # its first token is on the device, and not read
    fourth.launched, fourth.tokens = 1, [3]
    rows = [fourth, second, None, third]
    new = History(rows)
    new.adopt(rows, old, old_rows, mx.array([2, 9, 2, 7]))
    assert_history(new, [((4, 8), (3,)), ((2, 8), (6, 6, 7)), ((), ()), ((3, 8), (7,))], 10)
    new.append(mx.array([1, 1, 1, 1]))
    assert_history(new, [((4, 8), (3, 1)), ((2, 8), (6, 6, 7, 1)), ((), (1,)), ((3, 8), (7, 1))], 10)


def test_history_that_adopts_a_longer_one_has_room_for_it() -> None:
    params = SamplingParams(presence_penalty=1.0)
    stays, short = row(params, Context((1,), ())), row(params, Context((2,), ()))
    old = History([stays])
    for _ in range(600):
        old.append(mx.array([3]))
    rows = [short, stays]
    new = History(rows)
    new.adopt(rows, old, [stays], mx.array([0, 0]))
    new.append(mx.array([4, 5]))
    assert_history(new, [((2,), (4,)), ((1,), (*[3] * 600, 5))], 6)


def test_a_history_without_a_forerunner() -> None:
    joins = row(SamplingParams(presence_penalty=1.0), Context((1,), ()))
    joins.launched = 1
    history = History([joins])
    history.adopt([joins], None, [], mx.array([4]))
    assert_history(history, [((1,), (4,))], 6)
