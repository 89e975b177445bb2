"""The monitor of a policy that learns: which rewards give an alarm, and what it forgets."""

from collections.abc import Iterable

import pytest

from mlx_parallm.config.training import Alarms
from mlx_parallm.errors import ConfigError
from mlx_parallm.training.rl.alarms import PolicyMonitor

CALM = (1.0, 0.9, 1.1, 1.0, 0.95)


def alarms(monitor: PolicyMonitor, rewards: Iterable[float], deviation: float = 0.1) -> list[int]:
    """The numbers of the updates that gave one; after each the session goes back, and the monitor forgets."""
    found = []
    for number, reward in enumerate(rewards):
        if monitor.alarm({"reward_mean": reward, "reward_std": deviation}):
            found.append(number)
            monitor.forget_rewards()
        monitor.improves()
    return found


def test_one_lucky_update_is_no_measure_of_those_behind_it() -> None:
    assert alarms(PolicyMonitor(Alarms()), [*CALM, 1000.0, *CALM * 8]) == []


def test_a_fall_gives_one_alarm_and_what_comes_then_is_compared_with_itself() -> None:
    """As after a change of scale, or of what is asked."""
    found = alarms(PolicyMonitor(Alarms()), [*(100 * reward for reward in CALM * 4), *CALM * 20], deviation=5.0)
    assert found == [22], "three of the last five are enough"
    assert alarms(PolicyMonitor(Alarms()), [*CALM * 2, *(reward - 2 for reward in CALM * 20)]) == [12]


def test_what_is_long_past_is_forgotten() -> None:
    slowly = [10.0] * 40 + [9.0] * 20 + [8.0] * 10
    assert alarms(PolicyMonitor(Alarms(reward_updates=5)), slowly, deviation=0.5) == []
    assert alarms(PolicyMonitor(Alarms(reward_updates=100)), slowly, deviation=0.5) == [62]


def test_another_level_begins_anew() -> None:
    monitor = PolicyMonitor(Alarms())
    assert alarms(monitor, CALM * 3) == []
    monitor.reset()
    assert alarms(monitor, [0.1] * 20) == []


def test_the_spread_is_that_between_updates_and_within_them() -> None:
    between = [1.0, 3.0, 2.0, 0.0, 1.5, 2.5, 0.5, 1.0]
    assert alarms(PolicyMonitor(Alarms()), [*between, *[-1.0] * 5], deviation=0.0) == []
    assert alarms(PolicyMonitor(Alarms()), [*[1.0] * 8, *[-1.0] * 5], deviation=1.0) == []
    assert alarms(PolicyMonitor(Alarms()), [*[1.0] * 8, *[-1.0] * 5], deviation=0.1) == [10]


@pytest.mark.parametrize("off", [0.0, None])
def test_each_may_be_turned_off(off: float | None) -> None:
    monitor = PolicyMonitor(Alarms(kl=off, entropy=off, reward_drop=off))
    assert alarms(monitor, [*[100.0] * 10, *[-100.0] * 10]) == []
    assert not monitor.alarm({"reward_mean": 0.0, "reward_std": 0.0, "kl": 1e3, "entropy": 0.0})


def test_limits_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="alarm_kl must not be negative"):
        Alarms(kl=-1.0)
    with pytest.raises(ConfigError, match="alarm_reward_updates must be at least 5"):
        Alarms(reward_updates=4)


def test_the_best_rewards_are_kept_through_an_alarm() -> None:
    monitor = PolicyMonitor(Alarms())
    alarms(monitor, [1.0] * 10)
    monitor.forget_rewards()
    alarms(monitor, [0.5] * 10)
    assert monitor.best_reward == 1.0
    alarms(monitor, [2.0] * 4)
    assert monitor.best_reward == 2.0
