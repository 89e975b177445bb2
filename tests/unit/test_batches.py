"""How an update is cut into micro-batches."""

from collections.abc import Sequence

import numpy as np
import pytest

from mlx_parallm.training.batches import Batch, Micro
from mlx_parallm.training.trajectories import Trajectory


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
    assert sum(len(micro.answers) for micro in micros) == len(found.trajectories)
    assert sum(micro.weight.sum() for micro in micros) == pytest.approx(found.weight.sum())
    return [rows(micro) for micro in micros]


def rows(micro: Micro) -> list[int]:
    prompts = micro.prompts
    for line, length in enumerate(prompts.lengths):
        assert (prompts.tokens[line, :length] > 0).all()
        assert (prompts.tokens[line, length:] == 0).all()
    assert np.array_equal(prompts.tokens[prompts.behind, 0], micro.answers[:, 0])
    return micro.answers[:, 0].tolist()


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
        shapes.add((micro.prompts.tokens.shape, micro.answers.shape))
        behind = micro.prompts.behind[:6]
        assert np.array_equal(micro.prompts.tokens[behind, 0], micro.answers[:6, 0])
        assert (micro.prompts.lengths < micro.prompts.tokens.shape[1]).all()
        assert micro.mask.sum() == 126
        for filled in (micro.mask, micro.weight, micro.advantage):
            assert not filled[6:].any()
        assert micro.weight.sum() == pytest.approx(found.weight.sum())
    assert shapes == {((3, 64), (8, 64))}


def test_round_shapes_are_sorted_by_length() -> None:
    found = batch([(1500, (500, 400)), (40, (20, 20)), (1400, (500, 500)), (30, (20, 20))])
    micros = list(found.micros(lambda: 8192, rounded=True))
    assert [[row for row in micro.answers[:, 0].tolist() if row] for micro in micros] == [[4, 4, 2, 2], [3, 3, 1, 1]]
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
    assert (two.prompts.tokens.shape, two.answers.shape) == ((1, 7), (2, 4))
    assert (three.prompts.tokens.shape, three.prompts.behind.tolist()) == ((2, 9), [0, 0, 1])
    assert rows(two) + rows(three) == [1, 1, 1, 1, 2]
