"""How an update is cut into micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.config.algorithms import ALGORITHMS
from mlx_parallm.training.budget import ALONE, MIN_MICRO, Budget
from mlx_parallm.training.rl.batches import Batch, Micro, PaddedPrompts, Shape
from mlx_parallm.training.rl.trajectories import Trajectory
from tests.unit.reference_objectives import reference_advantages, reference_weights


def test_a_micro_batch_is_larger_while_nobody_waits() -> None:
    budget = Budget(0.1)
    assert [budget.tokens(busy) for busy in (True, False, True)] == [
        2 * MIN_MICRO,
        2 * ALONE * MIN_MICRO,
        2 * MIN_MICRO,
    ]


def batch(groups: Sequence[tuple[int, Sequence[int]]]) -> Batch:
    """Of groups by the lengths of their prompts and answers; a prompt's tokens are its number."""
    trajectories = [
        Trajectory([number] * prompt, [number] * answer, float(place), str(number))
        for number, (prompt, answers) in enumerate(groups, 1)
        for place, answer in enumerate(answers)
    ]
    return Batch.of(trajectories, "grpo", 512)


def cut(found: Batch, budget: int, several: bool = True) -> list[list[int]]:
    """The prompt of each answer of each micro-batch; every answer must be behind its own."""
    micros = list(found.micros(lambda: budget, several))
    assert sum(len(micro.completions) for micro in micros) == len(found.trajectories)
    assert sum(micro.weight.sum() for micro in micros) == pytest.approx(found.weight.sum())
    return [rows(micro) for micro in micros]


def rows(micro: Micro) -> list[int]:
    prompts = micro.prompts
    for line, length in enumerate(prompts.lengths):
        assert (prompts.tokens[line, :length] > 0).all()
        assert (prompts.tokens[line, length:] == 0).all()
    assert np.array_equal(prompts.tokens[prompts.behind, 0], micro.completions[:, 0])
    return micro.completions[:, 0].tolist()


def test_prompts_go_together_within_the_budget() -> None:
    found = batch([(10, (5, 5)), (10, (5, 5)), (10, (5, 5))])
    assert cut(found, 60) == [[1, 1, 2, 2, 3, 3]]
    assert cut(found, 59) == [[1, 1, 2, 2], [3, 3]]
    assert cut(found, 60, several=False) == [[1, 1], [2, 2], [3, 3]]
    assert cut(found, 15) == [[1], [1], [2], [2], [3], [3]]
    assert cut(found, 1) == [[1], [1], [2], [2], [3], [3]]


def test_the_rest_of_a_large_group_has_others_behind_it() -> None:
    assert cut(batch([(4, (5,) * 6), (4, (5, 5))]), 34) == [[1] * 6, [2, 2]]
    assert cut(batch([(4, (5,) * 6), (4, (5, 5))]), 33) == [[1] * 3, [1] * 3 + [2, 2]]


def test_prompts_and_answers_of_very_different_lengths_stay_apart() -> None:
    assert cut(batch([(10, (50, 50)), (20, (50, 50))]), 999) == [[1, 1, 2, 2]]
    assert cut(batch([(10, (50, 50)), (21, (50, 50))]), 999) == [[1, 1], [2, 2]]
    assert cut(batch([(10, (50, 50)), (10, (5, 5))]), 999) == [[1, 1], [2, 2]]
    assert cut(batch([(10, (50, 50)), (10, (35, 35))]), 999) == [[1, 1, 2, 2]]


def test_round_shapes_are_few_and_filled_up() -> None:
    shapes = set()
    for prompt in range(33, 60, 7):
        found = batch([(prompt, (9, 11)), (prompt + 2, (5, 60)), (prompt // 2 + 1, (40, 1))])
        (micro,) = found.micros(lambda: 8192, rounded=True)
        shapes.add((micro.prompts.tokens.shape, micro.completions.shape))
        behind = micro.prompts.behind[:6]
        assert np.array_equal(micro.prompts.tokens[behind, 0], micro.completions[:6, 0])
        assert (micro.prompts.lengths < micro.prompts.tokens.shape[1]).all()
        assert micro.mask.sum() == 126
        for filled in (micro.mask, micro.weight, micro.advantage):
            assert not filled[6:].any()
        assert micro.weight.sum() == pytest.approx(found.weight.sum())
    assert shapes == {((3, 64), (8, 64))}


def test_round_shapes_are_sorted_by_length() -> None:
    found = batch([(1500, (500, 400)), (40, (20, 20)), (1400, (500, 500)), (30, (20, 20))])
    micros = list(found.micros(lambda: 8192, rounded=True))
    assert [[row for row in micro.completions[:, 0].tolist() if row] for micro in micros] == [
        [4, 4, 2, 2],
        [3, 3, 1, 1],
    ]
    assert sum(micro.mask.sum() for micro in micros) == 1980


@pytest.mark.parametrize("limit", [100, 2048, 8192])
@pytest.mark.parametrize(
    "groups",
    [
        [(100, [2500] * 8)],
        [(100, [4096] * 8)],
        [(100, [8000])],
        [(60, [700] * 10), (900, [100] * 33)],
        [(1500, (500, 400)), (40, (20, 20)), (1400, (500, 500)), (30, (20, 20))],
        [(20 + number, [30 + number, 40]) for number in range(32)],
    ],
)
def test_round_shapes_keep_to_the_budget(groups: list[tuple[int, Sequence[int]]], limit: int) -> None:
    found = batch([(prompt, [*answers, 1]) for prompt, answers in groups])
    tokens = 0
    for micro in found.micros(lambda: limit, rounded=True):
        assert micro.tokens <= limit or np.count_nonzero(micro.weight) == 1
        tokens += micro.tokens
    alone = sum(prompt + len(answers) * max(answers) for prompt, answers in groups)
    if limit == 8192 and alone > 8192:
        assert tokens < 2.5 * alone


def test_the_first_answers_of_a_micro_batch() -> None:
    micro = next(batch([(7, (3, 2)), (9, (4, 4))]).micros(lambda: 999))
    assert micro.tokens == 2 * 8 + 4 * 4
    two, three = micro.first(2), micro.first(3)
    assert (two.prompts.tokens.shape, two.completions.shape) == ((1, 7), (2, 4))
    assert (three.prompts.tokens.shape, three.prompts.behind.tolist()) == ((2, 9), [0, 0, 1])
    assert rows(two) + rows(three) == [1, 1, 1, 1, 2]


@st.composite
def trajectories(draw: st.DrawFn) -> list[Trajectory]:
    """Of some groups with prompts of their own; the first token of each answer is its number."""
    found: list[Trajectory] = []
    for number in range(draw(st.integers(1, 4))):
        prompt = [100 + number] * draw(st.integers(1, 40))
        for _ in range(draw(st.integers(1, 5))):
            length = draw(st.integers(1, 30))
            random = np.random.default_rng(len(found))
            found.append(
                Trajectory(
                    prompt,
                    [1 + len(found)] * length,
                    draw(st.sampled_from([0.0, 0.5, 1.0])),
                    f"group {number}",
                    draw(st.none() | st.just(random.normal(-1, 0.3, length).tolist())),
                    draw(st.sampled_from([0.7, 1.0])),
                    mask=draw(st.none() | st.just((random.random(length) < 0.7).tolist())),
                    advantage=draw(st.none() | st.sampled_from([0.0, 2.5])),
                )
            )
    return found


def expected_batch(some: list[Trajectory], algorithm: str) -> dict[int, tuple[float, float]]:
    """The advantage and the weight of each answer that teaches something, by its number."""
    rewards, groups = [one.reward for one in some], [hash(one.group_id) for one in some]
    found = reference_advantages(rewards, groups, algorithm)
    by_group = {one.group_id: [other.reward for other in some if other.group_id == one.group_id] for one in some}
    taught = [
        place
        for place, one in enumerate(some)
        if one.advantage is not None or max(by_group[one.group_id]) > min(by_group[one.group_id])
    ]
    lengths = [sum(one.mask or [True] * len(one.completion_ids)) for one in some]
    weights = reference_weights(lengths, algorithm, 64)
    given = [found[place] if one.advantage is None else one.advantage for place, one in enumerate(some)]
    return {place: (given[place], weights[place]) for place in taught}


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    some=trajectories(),
    algorithm=st.sampled_from(["grpo", "dr_grpo", "dapo", "rloo"]),
    limit=st.integers(1, 400),
    several=st.booleans(),
    rounded=st.booleans(),
)
def test_however_it_is_cut_an_update_has_every_answer_once(
    some: list[Trajectory], algorithm: str, limit: int, several: bool, rounded: bool
) -> None:
    found = Batch.of(some, algorithm, 64)
    expected = expected_batch(some, algorithm)
    assert found.flat == len(some) - len(expected)
    seen: list[int] = []
    for micro in found.micros(lambda: limit, several, rounded):
        real = np.count_nonzero(micro.completions[:, 0])
        assert (micro.completions[real:] == 0).all()
        assert (micro.mask[real:] == 0).all()
        shape = Shape(*micro.prompts.tokens.shape, *micro.completions.shape)
        assert real == 1 or shape.tokens <= limit
        assert micro.learnt == int(micro.mask.sum())
        if not several and not rounded:
            assert len(micro.prompts.tokens) == 1
        for line in range(real):
            place = int(micro.completions[line, 0]) - 1
            seen.append(place)
            check_line(micro, line, some[place], *expected[place])
    assert sorted(seen) == sorted(expected)


def check_line(micro: Micro, line: int, one: Trajectory, advantage: float, weight: float) -> None:
    length = len(one.completion_ids)
    assert micro.completions[line].tolist() == [*one.completion_ids, *[0] * (micro.completions.shape[1] - length)]
    assert micro.mask[line, :length].tolist() == ([1.0] * length if one.mask is None else list(map(float, one.mask)))
    arrays = (micro.mask, micro.old, micro.known, micro.advantage, micro.weight, micro.temperature)
    assert {array.dtype for array in arrays} == {np.dtype(np.float32)}, "the device computes in no other"
    assert {micro.completions.dtype, micro.prompts.tokens.dtype} == {np.dtype(np.int64)}
    assert (micro.mask[line, length:] == 0).all()
    assert micro.known[line].tolist() == [float(one.logprobs is not None)]
    assert micro.old[line, :length].tolist() == pytest.approx(one.logprobs or [0.0] * length)
    assert micro.temperature[line].item() == pytest.approx(one.temperature)
    assert micro.advantage[line] == pytest.approx(advantage, rel=1e-5, abs=1e-6)
    assert micro.weight[line] == pytest.approx(weight, rel=1e-5)
    prompt = micro.prompts.behind[line]
    size = micro.prompts.lengths[prompt]
    assert micro.prompts.tokens[prompt, :size].tolist() == list(one.prompt_ids)
    assert (micro.prompts.tokens[prompt, size:] == 0).all()


def test_a_batch_of_equal_rewards_is_empty() -> None:
    found = Batch.of([Trajectory([1], [2], 1.0, "a"), Trajectory([1], [3], 1.0, "a")], "grpo", 8)
    assert (found.trajectories, found.flat, len(found.weight)) == ([], 2, 0)
    assert list(found.micros(lambda: 100)) == []


def test_flat_groups_count_in_the_weights_and_stay_where_they_have_a_divergence() -> None:
    some = [Trajectory([1], [2] * (2 + n), float(n % 2), "differs") for n in range(2)]
    some += [Trajectory([1], [3] * 5, 1.0, "flat") for _ in range(2)]
    for algorithm in list(ALGORITHMS):
        gone, kept = (Batch.of(some, algorithm, 64, keep_flat=stays) for stays in (False, True))
        assert gone.trajectories == some[:2]
        assert kept.trajectories == some
        assert (gone.flat, kept.flat) == (2, 2)
        assert kept.advantage[2:].tolist() == [0.0, 0.0]
        assert gone.advantage.tolist() == kept.advantage[:2].tolist()
        assert gone.weight.tolist() == kept.weight[:2].tolist()
        assert kept.weight.tolist() == pytest.approx(reference_weights([2, 3, 5, 5], algorithm, 64))


def test_dr_grpo_divides_by_what_an_answer_was_allowed() -> None:
    @dataclass
    class Limited:
        """A trajectory that knows how long it could have been."""

        completion_ids: list[int]
        reward: float
        max_tokens: int | None
        prompt_ids: Sequence[int] = (1,)
        group_id: str = "a"
        advantage: float | None = None
        mask: None = None

    def weights(*limits: int | None, max_length: int | None = None) -> list[float]:
        some = [Limited([5] * (n + 1), float(n), limit) for n, limit in enumerate(limits)]
        return Batch.of(some, "dr_grpo", max_length).weight.tolist()  # type: ignore[arg-type]

    assert weights(10, 40) == pytest.approx([1 / 80] * 2)
    assert weights(None, None) == pytest.approx([1 / 4] * 2)  # unknown: the longest answer's own length
    assert weights(10, 40, max_length=16) == pytest.approx([1 / 32] * 2)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (Shape(1, 1, 1, 1), Shape(1, 32, 8, 32)),
        (Shape(1, 31, 8, 32), Shape(1, 32, 8, 32)),
        (Shape(1, 32, 9, 33), Shape(1, 64, 16, 64)),
        (Shape(3, 95, 17, 65), Shape(3, 96, 24, 96)),
        (Shape(5, 200, 8, 129), Shape(6, 256, 8, 192)),
        (Shape(7, 200, 3, 600), Shape(8, 256, 3, 768)),
        (Shape(1, 40, 3, 256), Shape(1, 64, 4, 256)),
        (Shape(1, 40, 1, 300), Shape(1, 64, 1, 384)),
    ],
)
def test_shapes_are_rounded_up_to_few(shape: Shape, expected: Shape) -> None:
    assert shape.rounded() == expected
    assert shape.rounded().tokens >= shape.tokens
    assert expected.tokens == expected.prompts * expected.prompt + expected.completions * expected.completion


def test_padded_prompts_are_filled_up_with_what_nobody_reads() -> None:
    found = PaddedPrompts.of([[5, 6, 7], [8]], [2, 1], Shape(3, 4, 5, 0))
    assert found.tokens.tolist() == [[5, 6, 7, 0], [8, 0, 0, 0], [0, 0, 0, 0]]
    assert (found.lengths.tolist(), found.behind.tolist()) == ([3, 1, 1], [0, 0, 1, 0, 0])
    plain = PaddedPrompts.of([[5, 6, 7], [8]], [2, 1])
    assert (plain.tokens.shape, plain.behind.tolist()) == ((2, 3), [0, 0, 1])
