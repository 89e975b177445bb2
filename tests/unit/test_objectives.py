"""Objectives against numbers worked out by hand, a reference in plain NumPy, and TRL's."""

import itertools
import json
import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mlx_parallm.config.algorithms import ALGORITHMS
from mlx_parallm.errors import ConfigError
from mlx_parallm.training.rl.objectives import (
    Objective,
    advantages,
    chosen_logprobs,
    divergence,
    entropy,
    group_has_signal,
    losses,
    token_weights,
)
from tests.unit.reference_objectives import (
    reference_advantages,
    reference_entropy,
    reference_loss,
    reference_weights,
)

REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 5.0, 5.0], np.float32)
GROUPS = np.array([0, 0, 0, 0, 1, 1])


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        # Of the first group: mean 0.5, deviation of a sample sqrt(4 * 0.25 / 3) = 0.57735; the second is all the same.
        ("grpo", [0.5 / 0.57745, -0.5 / 0.57745, -0.5 / 0.57745, 0.5 / 0.57745, 0, 0]),
        ("dr_grpo", [0.5, -0.5, -0.5, 0.5, 0, 0]),
        ("rloo", [1 - 1 / 3, -2 / 3, -2 / 3, 1 - 1 / 3, 0, 0]),  # the others' mean: 1/3 and 2/3
        ("reinforce", [0.5, -0.5, -0.5, 0.5, 0, 0]),
    ],
)
def test_advantages(algorithm: str, expected: list[float]) -> None:
    assert advantages(REWARDS, GROUPS, algorithm).tolist() == pytest.approx(expected, abs=1e-5)


def test_a_group_of_one_or_of_equals_teaches_nothing() -> None:
    for algorithm in ("grpo", "rloo", "reinforce"):
        assert advantages(np.array([3.0], np.float32), np.array([0]), algorithm).tolist() == [0.0]
    assert not group_has_signal(np.array([3.0], np.float32))
    assert not group_has_signal(np.array([3.0, 3.0], np.float32))
    assert group_has_signal(np.array([3.0, 3.5], np.float32))


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("grpo", [1 / 8, 1 / 4]),  # two answers of 4 and 2 tokens: each answer counts a half
        ("dapo", [1 / 6, 1 / 6]),
        ("dr_grpo", [1 / 20, 1 / 20]),  # two answers that could have 10 tokens each
    ],
)
def test_token_weights(algorithm: str, expected: list[float]) -> None:
    assert token_weights(np.array([4, 2]), algorithm, 10).tolist() == pytest.approx(expected)


# Ratio, advantage, and by hand: the loss, its derivative by the new log-probability, whether the clip (0.2, 0.28) bit.
TABLE = [
    (1.0, 1.0, -1.0, -1.0, 0),
    (1.1, 1.0, -1.1, -1.1, 0),
    (1.5, 1.0, -1.28, 0.0, 1),  # good, and already likelier than allowed: nothing more to gain
    (0.5, 1.0, -0.5, -0.5, 0),  # good, and less likely: all of it counts
    (1.0, -1.0, 1.0, 1.0, 0),
    (0.9, -1.0, 0.9, 0.9, 0),
    (0.5, -1.0, 0.8, 0.0, 1),  # bad, and less likely already
    (1.5, -1.0, 1.5, 1.5, 0),  # bad, and likelier: the pessimistic side has no bound
    (3.0, -2.0, 6.0, 6.0, 0),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "slope", "clipped"), TABLE)
def test_the_pessimistic_clip(ratio: float, advantage: float, loss: float, slope: float, clipped: int) -> None:
    objective = Objective("dapo", clip_low=0.2, clip_high=0.28)
    old, mask = mx.array([[-1.0]]), mx.array([[1.0]])

    def of(new: mx.array) -> mx.array:
        return losses(objective, new, old, mx.array([advantage]), mask).policy.sum()

    new = old + math.log(ratio)
    found, gradient = mx.value_and_grad(of)(new)
    assert found.item() == pytest.approx(loss, abs=1e-5)
    assert gradient.item() == pytest.approx(slope, abs=1e-5)
    assert losses(objective, new, old, mx.array([advantage]), mask).clipped.item() == clipped


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    objective = Objective("cispo", clip_low=0.2, clip_high=0.28)
    old, mask = mx.array([[-1.0, -1.0]]), mx.array([[1.0, 1.0]])

    def of(new: mx.array) -> mx.array:
        return losses(objective, new, old, mx.array([2.0]), mask).policy.sum()

    gradient = mx.grad(of)(old + mx.log(mx.array([[3.0, 0.5]])))
    assert gradient.tolist()[0] == pytest.approx([-1.28 * 2, -0.8 * 2], abs=1e-5)


def test_gspo_has_one_ratio_for_an_answer() -> None:
    objective = Objective("gspo", clip_low=0.2, clip_high=0.2)
    old = mx.array([[-1.0, -2.0, -3.0]])
    mask = mx.array([[1.0, 1.0, 0.0]])  # the last is padding
    new = old + mx.log(mx.array([[1.44, 1.0, 9.0]]))  # the geometric mean of the first two is 1.2
    found = losses(objective, new, old, mx.array([-1.0]), mask)
    assert found.policy.tolist()[0] == pytest.approx([1.2, 1.2, 0.0], abs=1e-5)


@pytest.mark.parametrize(("algorithm", "expected"), [("rloo", 1.2), ("reinforce", 1.5)])
def test_rloo_and_reinforce_have_the_product_of_an_answer_s_ratios(algorithm: str, expected: float) -> None:
    old, mask = mx.array([[-1.0, -2.0, -3.0]]), mx.array([[1.0, 1.0, 0.0]])
    new = old + mx.log(mx.array([[3.0, 0.5, 9.0]]))  # of the first two 1.5, which the clip holds at 1.2
    found = losses(Objective(algorithm), new, old, mx.array([1.0]), mask)
    assert found.policy.tolist()[0] == pytest.approx([-expected, -expected, 0.0], abs=1e-5)
    weights = token_weights(np.array([2]), algorithm, 10)
    assert (found.policy * mx.array(weights)[:, None]).sum().item() == pytest.approx(-expected, abs=1e-5)


def test_rloo_is_the_policy_gradient() -> None:
    """At the policy that sampled, the gradient by a token's log-probability is minus its advantage."""
    old, mask = mx.array([[-1.0, -2.0]]), mx.array([[1.0, 0.0]])

    def of(new: mx.array) -> mx.array:
        return losses(Objective("rloo"), new, old, mx.array([0.7]), mask).policy.sum()

    assert mx.grad(of)(old).tolist()[0] == pytest.approx([-0.7, 0.0])


def test_what_is_too_far_from_the_sampler_is_left_out() -> None:
    old = mx.zeros((3, 2))
    new = mx.log(mx.array([[1.0, 1.0], [1.0, 5.0], [2.5, 2.5]]))
    mask, advantage = mx.ones((3, 2)), mx.ones((3,))
    tokens = losses(Objective("grpo", token_limit=3.0), new, old, advantage, mask).kept
    assert tokens.tolist() == [[1, 1], [1, 0], [1, 1]]
    answers = losses(Objective("grpo", answer_limit=2.3), new, old, advantage, mask).kept
    assert answers.tolist() == [[1, 1], [1, 1], [0, 0]]  # mean ratios 1, sqrt(5) = 2.236 and 2.5


def test_what_is_at_the_limit_is_kept() -> None:
    old, new = mx.zeros((1, 1)), mx.array([[float(np.float32(np.log(2.0)))]])
    for objective in (Objective("grpo", token_limit=2.0), Objective("grpo", answer_limit=2.0)):
        assert losses(objective, new, old, mx.ones((1,)), mx.ones((1, 1))).kept.item() == 1


def test_divergence_and_logprobs() -> None:
    found = divergence(mx.array([-1.0, -1.0]), mx.array([-1.0, -2.0]))
    assert found.tolist() == pytest.approx([0.0, math.exp(-1) + 1 - 1], abs=1e-6)
    logits = mx.log(mx.array([[[0.5, 0.25, 0.25]]]))
    assert chosen_logprobs(logits, mx.array([[1]])).item() == pytest.approx(math.log(0.25), abs=1e-6)
    at_half = chosen_logprobs(logits, mx.array([[0]]), 0.5)  # probabilities squared: 4/6, 1/6, 1/6
    assert at_half.item() == pytest.approx(math.log(4 / 6), abs=1e-6)
    by_row = chosen_logprobs(logits, mx.array([[0]]), mx.array([[[0.5]]]))
    assert by_row.item() == pytest.approx(math.log(4 / 6), abs=1e-6)
    at_two = chosen_logprobs(2 * logits, mx.array([[0]]), 2.0)
    assert at_two.item() == pytest.approx(math.log(0.5), abs=1e-6)
    assert entropy(logits).item() == pytest.approx(1.5 * math.log(2), abs=1e-6)
    of_hundred = np.random.default_rng(0).normal(0, 3, 100)
    assert entropy(mx.array(of_hundred.astype(np.float32))).item() == pytest.approx(
        reference_entropy(of_hundred), rel=1e-5
    )
    shifted = mx.concatenate([logits + 3.0, mx.zeros((1, 1, 3)) - 7.0])  # no log-probabilities: they sum up to more
    assert entropy(shifted)[:, 0].tolist() == pytest.approx([1.5 * math.log(2), math.log(3)], abs=1e-5)
    reference = losses(
        Objective("grpo", beta=0.1),
        mx.array([[-1.0, -1.0]]),
        mx.array([[-1.0, -1.0]]),
        mx.array([0.0]),
        mx.array([[1.0, 0.0]]),
        mx.array([[-2.0, -5.0]]),
    )
    assert reference.divergence.tolist()[0] == pytest.approx([math.exp(-1), 0.0], abs=1e-6)


TRL = json.loads((Path(__file__).parents[1] / "golden" / "trl.json").read_text())


@pytest.mark.parametrize("name", list(TRL["cases"]))
def test_trl_gives_the_same_loss_and_gradient(name: str) -> None:
    """Numbers of TRL's own `_compute_loss` (tests/golden/make_trl.py)."""
    case = TRL["cases"][name]
    settings = case["settings"]
    sequence = settings.get("importance_sampling_level") == "sequence"
    algorithm = "gspo" if sequence else settings["loss_type"]
    low, high = settings.get("epsilon_low", 0.2), settings.get("epsilon_high", 0.2)
    if algorithm == "cispo":  # TRL's clips above alone, at the bound itself
        low, high = 1.0, high - 1
    objective = Objective(algorithm, clip_low=low, clip_high=high, beta=settings.get("beta", 0.0))
    mask = np.array(TRL["mask"], np.float32)
    found = np.array(TRL["advantages"]["grpo"], np.float32)
    weight = mx.array(token_weights(mask.sum(1).astype(np.int64), algorithm, TRL["max_length"]))[:, None]
    old, reference = mx.array(TRL["old"]), mx.array(TRL["reference"])

    def loss(new: mx.array) -> mx.array:
        one = losses(objective, new, old, mx.array(found), mx.array(mask), reference)
        return ((one.policy + objective.beta * one.divergence) * weight).sum()

    value, gradient = mx.value_and_grad(loss)(mx.array(TRL["new"]))
    assert value.item() == pytest.approx(case["loss"], abs=1e-5)
    assert np.allclose(np.array(gradient), np.array(case["gradient"]), atol=1e-5)


@pytest.mark.parametrize("algorithm", list(TRL["advantages"]))
def test_trl_gives_the_same_advantages(algorithm: str) -> None:
    """Those that TRL's whole trainers come to (tests/golden/make_trl.py)."""
    found = advantages(np.array(TRL["rewards"], np.float32), np.array([0, 0, 0, 1, 1, 1]), algorithm)
    assert found.tolist() == pytest.approx(TRL["advantages"][algorithm], abs=1e-5)


def test_every_algorithm_is_compared_with_trl() -> None:
    """But for the last two, which were added without TRL at hand: the reference says what they are."""
    compared = {case["settings"]["loss_type"] for case in TRL["cases"].values()}
    assert compared | {"gspo", "bnpo", "sapo"} == set(ALGORITHMS)


def test_an_answer_s_ratio_does_not_overflow() -> None:
    old, mask = mx.zeros((1, 40)), mx.ones((1, 40))
    for algorithm in ("rloo", "reinforce"):
        found = losses(Objective(algorithm, dual_clip=0), old + 5.0, old, mx.array([-1.0]), mask)
        assert found.policy.tolist()[0] == pytest.approx([math.exp(20.0)] * 40, rel=1e-5)


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_a_huge_ratio_gives_numbers_and_gradients_that_are_finite(algorithm: str) -> None:
    objective = Objective(algorithm, beta=0.1)
    old, mask = mx.array([[-1.0, -100.0, -1.0]] * 2), mx.ones((2, 3))
    new = mx.array([[-1.0, -0.1, -200.0]] * 2)  # e^99.9 and e^-199

    def of(new: mx.array) -> mx.array:
        found = losses(objective, new, old, mx.array([1.0, -1.0]), mask, new - 300.0)
        return (found.policy + objective.beta * found.divergence).sum()

    value, gradient = mx.value_and_grad(of)(new)
    assert math.isfinite(value.item())
    assert bool(mx.isfinite(gradient).all())


def test_a_bad_answer_that_is_far_too_likely_is_held() -> None:
    objective = Objective("grpo", dual_clip=4.0)
    old, mask = mx.array([[-5.0, -5.0]]), mx.ones((1, 2))
    new = old + mx.log(mx.array([[3.0, 9.0]]))
    found = losses(objective, new, old, mx.array([-2.0]), mask)
    assert found.policy.tolist()[0] == pytest.approx([6.0, 8.0])
    assert found.clipped.tolist() == [[0, 1]]
    with pytest.raises(ConfigError, match="dual_clip must be above 1"):
        Objective("grpo", dual_clip=1.1)


@pytest.mark.parametrize("size", [7, 96])
def test_gradients_of_logprobs_are_those_of_the_plain_formula(size: int) -> None:
    mx.random.seed(size)
    logits = 3 * mx.random.normal((2, 5, size))
    tokens = mx.random.randint(0, size, (2, 5))
    weights = mx.random.normal((2, 5))

    def plain(logits: mx.array) -> mx.array:
        chosen = mx.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
        return mx.sum(weights * (chosen - mx.logsumexp(logits, axis=-1)))

    expected = mx.grad(plain)(logits)
    found = mx.grad(lambda logits: mx.sum(weights * chosen_logprobs(logits, tokens)))(logits)
    assert mx.abs(found - expected).max().item() < 2e-6
    half = mx.grad(lambda logits: mx.sum(weights * chosen_logprobs(logits, tokens, 0.5)))(logits / 2)
    assert mx.abs(half - 2 * expected).max().item() < 1e-5


checked = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@checked
@given(
    answers=st.lists(
        st.tuples(st.sampled_from([-1.0, 0.0, 0.25, 1.0, 3.5]), st.integers(0, 3)), min_size=1, max_size=9
    ),
)
def test_advantages_are_those_of_the_reference(answers: list[tuple[float, int]]) -> None:
    rewards, groups = zip(*answers, strict=True)
    for algorithm, scaling in itertools.product(ALGORITHMS, (None, "none", "group", "batch")):
        found = advantages(np.array(rewards, np.float32), np.array(groups, np.int64), algorithm, scaling)
        assert found.dtype == np.float32
        expected = reference_advantages(rewards, groups, algorithm, scaling)
        assert found.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@checked
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    max_length=st.integers(1, 64),
)
def test_token_weights_are_those_of_the_reference(lengths: list[int], max_length: int) -> None:
    for algorithm in ALGORITHMS:
        found = token_weights(np.array(lengths, np.int64), algorithm, max_length)
        assert found.dtype == np.float32
        assert found.tolist() == pytest.approx(reference_weights(lengths, algorithm, max_length), rel=1e-5)


objectives = st.builds(
    Objective,
    st.sampled_from(list(ALGORITHMS)),
    clip_low=st.sampled_from([0.1, 0.2, 0.5]),
    clip_high=st.sampled_from([0.1, 0.28, 1.0]),
    beta=st.sampled_from([0.0, 0.05, 1.0]),
    token_limit=st.sampled_from([None, None, 1.5, 3.0]),
    answer_limit=st.sampled_from([None, None, 1.3, 2.0]),
    dual_clip=st.sampled_from([0.0, 2.1, 3.0, 10.0]),
    kl_estimator=st.sampled_from(["k1", "k2", "k3"]),
    importance_cap=st.sampled_from([None, None, 1.1, 2.0]),
    sapo_temperature_pos=st.sampled_from([1.0, 2.0]),
)


@settings(checked, max_examples=200)
@given(objective=objectives, seed=st.integers(0, 2**32 - 1), shape=st.tuples(st.integers(1, 4), st.integers(1, 6)))
def test_losses_and_gradients_are_those_of_the_reference(
    objective: Objective, seed: int, shape: tuple[int, int]
) -> None:
    random = np.random.default_rng(seed)
    old = -random.exponential(1.5, shape)
    new = old + random.normal(0, 0.5, shape)
    other = new + random.normal(0, 0.5, shape)
    advantage = random.normal(0, 1, shape[0])
    mask = (random.random(shape) < 0.8).astype(np.float64)
    weight = random.random(shape[0])
    reference = other if objective.beta else None
    proximal = new + random.normal(0, 0.3, shape) if seed % 2 else None
    expected = reference_loss(objective, new, old, advantage.tolist(), mask, weight.tolist(), reference, proximal)
    assume(expected.margin > 1e-4)

    def loss(new: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        found = losses(
            objective,
            new,
            mx.array(old.astype(np.float32)),
            mx.array(advantage.astype(np.float32)),
            mx.array(mask.astype(np.float32)),
            None if reference is None else mx.array(reference.astype(np.float32)),
            None if proximal is None else mx.array(proximal.astype(np.float32)),
        )
        scaled = (found.policy + objective.beta * found.divergence) * mx.array(weight.astype(np.float32))[:, None]
        return scaled.sum(), found.kept, found.clipped

    (value, kept, clipped), gradient = mx.value_and_grad(loss)(mx.array(new.astype(np.float32)))
    assert value.item() == pytest.approx(expected.value, rel=1e-4, abs=1e-5)
    assert np.allclose(np.array(gradient), expected.gradient, rtol=1e-4, atol=1e-5)
    assert np.array_equal(np.array(kept), expected.kept)
    assert np.array_equal(np.array(clipped), expected.clipped)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_reference_s_gradients_are_its_finite_differences(algorithm: str) -> None:
    """Where the clip is fixed (CISPO), of the loss with the ratio held."""
    random = np.random.default_rng(4)
    old = -random.exponential(1.5, (3, 4))
    new, other = old + random.normal(0, 0.5, (3, 4)), old + random.normal(0, 0.5, (3, 4))
    arguments = (old, [1.0, -0.5, 2.0], np.ones((3, 4)), [0.5, 1.0, 0.2], other)
    objective = Objective(algorithm, beta=0.3)
    found = reference_loss(objective, new, *arguments)
    for place in np.ndindex(3, 4):
        step = np.zeros((3, 4))
        step[place] = 1e-6
        held = step if algorithm == "cispo" else 0.0  # old moves along, so that the ratio stays
        above = reference_loss(objective, new + step, old + held, *arguments[1:]).value
        below = reference_loss(objective, new - step, old - held, *arguments[1:]).value
        assert (above - below) / 2e-6 == pytest.approx(found.gradient[place], abs=1e-5)
