"""Which of several adapters is the better, by a rule that is stated: enough rewards, and enough confidence."""

import json
import random

import pytest

from mlx_parallm.arms import ArmStats, AutoSplit, Decision
from mlx_parallm.lora.traffic import Traffic
from mlx_parallm.types import AdapterRoute


def split(**rewards: list[float]) -> AutoSplit:
    found = AutoSplit(min_rewards=10, confidence=0.95, arms={name: ArmStats() for name in rewards})
    for name, some in rewards.items():
        for reward in some:
            found.arms[name].add_reward(reward)
    return found


def test_means_and_errors_are_those_of_all_rewards() -> None:
    rng = random.Random(1)
    rewards = [rng.gauss(3, 2) for _ in range(500)]
    stats = split(a=rewards).arms["a"]
    mean = sum(rewards) / 500
    assert stats.reward_mean == pytest.approx(mean)
    assert stats.error == pytest.approx(sum((one - mean) ** 2 for one in rewards) / 499 / 500)


@pytest.mark.parametrize(
    ("rewards", "winner"),
    [
        ({"a": [1.0] * 10, "b": [0.0] * 9}, None),  # too few
        ({"a": [1.0] * 10, "b": [0.0] * 10}, "a"),
        ({"a": [0.0, 1.0] * 10, "b": [0.0, 1.0] * 10}, None),
        ({"a": [1.0] * 10, "b": [1.0] * 10}, None),
        ({"a": [0.0, 1.0] * 20, "b": [0.3, 1.3] * 20}, "b"),
        ({"a": [0.0, 1.0] * 5, "b": [0.3, 1.3] * 5}, None),  # not sure enough
        ({"a": [0.0] * 10, "b": [0.5] * 10, "c": [1.0] * 10}, "c"),
        ({"a": [0.0] * 10, "b": [1.0] * 10, "c": [1.0] * 10}, None),  # two are equally good
        ({"a": [1.0] * 99}, None),
    ],
)
def test_the_rule(rewards: dict[str, list[float]], winner: str | None) -> None:
    assert split(**rewards).winner() == winner


def test_a_rule_errs_no_more_often_than_its_confidence_allows() -> None:
    """Of equal arms, one look: about one in twenty for each side."""
    rng, wrong = random.Random(7), 0
    for _ in range(2000):
        wrong += split(a=[rng.random() for _ in range(30)], b=[rng.random() for _ in range(30)]).winner() is not None
    assert 0.06 < wrong / 2000 < 0.14


def test_it_survives_a_file() -> None:
    found = split(a=[1.0, 2.0], b=[3.0])
    assert AutoSplit.of_json(json.loads(json.dumps(found.to_json()))) == found


def test_traffic_goes_to_the_better_arm_once() -> None:
    served: list[list[str]] = []
    decisions: list[Decision] = []

    def serve(routes: object) -> None:
        served.append([route.label for route in routes])  # type: ignore[attr-defined]
        traffic.set_routes(routes)  # type: ignore[arg-type]

    traffic = Traffic(serve)
    traffic.on_decision = decisions.append
    routes = [AdapterRoute("p", 1, 0.5), AdapterRoute("p", 2, 0.3), AdapterRoute(None, None, 0.2)]
    traffic.serve(routes, AutoSplit(min_rewards=5))
    for _ in range(5):
        traffic.note_reward(None, ("p", "p@1"), 1.0)
        traffic.note_reward(None, ("p", "p@2"), 2.0)
        traffic.note_reward(None, ("q", "q@2"), 99.0)  # no arm
        traffic.note_reward(None, ("base",), 0.0)
    assert served == [["p@1", "p@2", "base"], ["p@2"]]
    assert [one.winner for one in decisions] == ["p@2"]
    assert decisions[0].facts()["arms"]["p@1"] == {"rewards": 5, "reward_mean": 1.0}
    assert (traffic.auto, traffic.by_rule) == (None, True)
    traffic.note_reward(None, ("p", "p@1"), 100.0)
    assert len(served) == 2
    traffic.serve(routes, None)
    assert not traffic.by_rule


def test_a_choice_that_fails_leaves_the_rule() -> None:
    def serve(routes: object) -> None:
        if routes == []:
            raise ValueError("no")
        traffic.set_routes(routes)  # type: ignore[arg-type]

    traffic = Traffic(serve)
    auto = AutoSplit(min_rewards=5)
    traffic.serve([AdapterRoute("a", None, 0.5), AdapterRoute("b", None, 0.5)], auto)
    with pytest.raises(ValueError, match="no"):
        traffic.serve([], None)
    assert traffic.auto is auto
    assert traffic.by_rule


def test_a_decision_about_a_split_that_is_gone_changes_nothing() -> None:
    served: list[object] = []

    def serve(routes: object) -> None:
        served.append(routes)
        traffic.set_routes(routes)  # type: ignore[arg-type]

    traffic = Traffic(serve)
    traffic.serve([AdapterRoute("a", None, 0.5), AdapterRoute("b", None, 0.5)], AutoSplit(min_rewards=5))
    chosen = [AdapterRoute("c", None, 1.0)]
    # Between the reward that decides and what it changes, somebody chooses.
    traffic.on_reward = lambda: traffic.serve(chosen, None) if traffic.auto is None and len(served) == 1 else None
    for _ in range(5):
        traffic.note_reward(None, ("a@1", "a"), 1.0)
        traffic.note_reward(None, ("b@1", "b"), 0.0)
    assert served[1:] == [chosen]
    assert traffic.routes == chosen
