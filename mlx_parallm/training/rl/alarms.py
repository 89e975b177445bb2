"""Watches over a policy that learns: whether its numbers give an alarm, and whether its rewards are the best so far.

A session asks after each update; what is watched is kept with its checkpoints. Rewards are compared robustly, by
medians and median deviations, so that one update says little: the last few with those before them. No MLX.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from mlx_parallm.config.training import MIN_COMPARED, Alarms

RECENT = MIN_COMPARED  # updates whose rewards are looked at together
NORMAL = 1.4826  # the standard deviation of a normal distribution, in median deviations


class PolicyMonitor:
    def __init__(self, alarms: Alarms) -> None:
        self.alarms = alarms
        self.best_reward = -np.inf  # the best recent median so far
        kept = RECENT + alarms.reward_updates
        self.rewards: deque[float] = deque(maxlen=kept)  # of each update, the mean …
        self.deviations: deque[float] = deque(maxlen=kept)  # … and the standard deviation

    def alarm(self, metrics: Mapping[str, float]) -> str:
        """Returns what is wrong with the policy that the trajectories of an update came from; empty: nothing."""
        limits = self.alarms
        if limits.kl and metrics.get("kl", 0.0) > limits.kl:
            return f"its KL divergence to the reference is {metrics['kl']:.3g}, over {limits.kl:g}"
        if limits.entropy and metrics.get("entropy", np.inf) < limits.entropy:
            return f"its entropy is {metrics['entropy']:.3g}, under {limits.entropy:g}"
        if not np.isfinite(metrics["reward_mean"]):
            return ""
        self.rewards.append(metrics["reward_mean"])
        self.deviations.append(metrics["reward_std"])
        return self._fall(limits.reward_drop) if limits.reward_drop else ""

    def _fall(self, limit: float) -> str:
        """Returns how far rewards have fallen below those of the updates before, where that is too far."""
        earlier = list(self.rewards)[:-RECENT]
        if len(earlier) < RECENT:
            return ""
        before = float(np.median(earlier))
        now = self._recent
        spread = max(NORMAL * _median_deviation(earlier), float(np.median(self.deviations)), 1e-6)
        if before - now <= limit * spread:
            return ""
        return f"rewards have fallen from {before:.3g} to {now:.3g}, over {limit:g} times their spread of {spread:.3g}"

    @property
    def _recent(self) -> float:
        """The median of the last rewards; less than any number while there are too few."""
        recent = list(self.rewards)[-RECENT:]
        return float(np.median(recent)) if len(recent) == RECENT else -np.inf

    def improves(self) -> bool:
        """Returns whether recent rewards are better than ever before; the first ones say nothing."""
        recent = self._recent
        best = self.best_reward
        self.best_reward = max(best, recent)
        return recent > best > -np.inf

    def forget_rewards(self) -> None:
        """Forgets the rewards from before an alarm: none is compared with, so the same fall gives no second alarm."""
        self.rewards.clear()
        self.deviations.clear()

    def reset(self) -> None:
        """Begins anew for another policy, or other problems: what was seen before says nothing of it."""
        self.forget_rewards()
        self.best_reward = -np.inf

    def restore(self, best_reward: float | None, rewards: list[float], deviations: list[float]) -> None:
        """Restores what was seen, as a checkpoint has it."""
        self.best_reward = -np.inf if best_reward is None else float(best_reward)
        self.rewards.extend(rewards)
        self.deviations.extend(deviations)


def _median_deviation(values: Sequence[float]) -> float:
    return float(np.median(np.abs(np.array(values) - np.median(values))))
