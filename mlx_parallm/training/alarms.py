"""Watches over a policy that learns: whether its numbers give an alarm, and whether its rewards are the best so far.

A session asks after each update; what is watched is kept with its checkpoints. No MLX.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

RECENT = 5  # updates over which rewards are averaged


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarms:
    """What brings the last good version back; None: never."""

    kl: float | None = 10.0  # nats a token to the model without the adapter, more than that
    entropy: float | None = 1e-3  # nats a token, less than that
    reward_drop: float | None = 3.0  # of the best average, in deviations of the rewards


class PolicyMonitor:
    def __init__(self, alarms: Alarms) -> None:
        self.alarms = alarms
        self.best_reward = -np.inf  # the best average so far
        self.rewards: deque[float] = deque(maxlen=RECENT)
        self.deviations: deque[float] = deque(maxlen=RECENT)

    def alarm(self, metrics: Mapping[str, float]) -> str:
        """What is wrong with the policy that the trajectories of an update came from; empty: nothing."""
        limits = self.alarms
        if limits.kl is not None and metrics.get("kl", 0.0) > limits.kl:
            return f"its KL divergence to the model is {metrics['kl']:.3g}, over {limits.kl:g}"
        if limits.entropy is not None and metrics.get("entropy", np.inf) < limits.entropy:
            return f"its entropy is {metrics['entropy']:.3g}, under {limits.entropy:g}"
        if not np.isfinite(metrics["reward_mean"]):
            return ""
        self.rewards.append(metrics["reward_mean"])
        self.deviations.append(metrics["reward_std"])
        if limits.reward_drop is None or not self._is_full:
            return ""
        average, deviation = float(np.mean(self.rewards)), max(float(np.mean(self.deviations)), 1e-6)
        if self.best_reward - average > limits.reward_drop * deviation:
            return f"rewards have fallen from {self.best_reward:.3g} to {average:.3g}"
        return ""

    @property
    def _is_full(self) -> bool:
        return len(self.rewards) == RECENT

    def improves(self) -> bool:
        """Whether rewards are on average better than ever before; the first average says nothing."""
        average = float(np.mean(self.rewards)) if self._is_full else -np.inf
        better, first = average > self.best_reward, self.best_reward == -np.inf
        self.best_reward = max(self.best_reward, average)
        return better and not first

    def forget_recent(self) -> None:
        """After a rollback: the averages begin anew."""
        self.rewards.clear()
        self.deviations.clear()

    def reset(self) -> None:
        """For another policy: what was seen of the one before says nothing of it."""
        self.forget_recent()
        self.best_reward = -np.inf

    def restore(self, best_reward: float | None, rewards: list[float], deviations: list[float]) -> None:
        """As a checkpoint has it."""
        self.best_reward = -np.inf if best_reward is None else float(best_reward)
        self.rewards.extend(rewards)
        self.deviations.extend(deviations)
