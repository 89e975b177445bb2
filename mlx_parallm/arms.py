"""What is known of the completions of each adapter that shares a model's traffic, and which of them is the better. No
MLX.

The rule of a split that decides by itself: as soon as every arm has `min_rewards` rewards, and the mean reward of one
is above each other's with `confidence` (one-sided, Welch's statistic, normal distribution), it gets all traffic.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import NormalDist
from typing import Any

from mlx_parallm.metrics import counter, gauge

MIN_REWARDS = 30
CONFIDENCE = 0.95


@dataclass(slots=True)
class ArmStats:
    """The statistics of one arm: its completions that have ended, and the rewards that they got."""

    ended: int = counter("Completions that have ended, by adapter version", name="adapter_answers")
    seconds: float = counter(
        "Seconds from the submission of those to their end", name="adapter_answer_seconds", seconds=True
    )
    rewards: int = counter("Rewards of completions, by adapter version")
    reward_mean: float = gauge("Mean reward, by adapter version", join="mean", whole=False)
    squares: float = 0.0  # sum of squared differences from the mean

    def add_reward(self, reward: float) -> None:
        self.rewards += 1
        difference = reward - self.reward_mean
        self.reward_mean += difference / self.rewards
        self.squares += difference * (reward - self.reward_mean)

    def add_end(self, seconds: float) -> None:
        self.ended += 1
        self.seconds += seconds

    @property
    def seconds_mean(self) -> float:
        return self.seconds / self.ended if self.ended else 0.0

    @property
    def error(self) -> float:
        """The squared standard error of the mean."""
        return self.squares / max(1, self.rewards - 1) / max(1, self.rewards)


@dataclass(slots=True)
class AutoSplit:
    """A split of the traffic that ends with the better arm."""

    min_rewards: int = MIN_REWARDS
    confidence: float = CONFIDENCE
    arms: dict[str, ArmStats] = field(default_factory=dict)  # by label, since the split began

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> "AutoSplit":
        arms = {str(label): ArmStats(**stats) for label, stats in fields["arms"].items()}
        return cls(int(fields["min_rewards"]), float(fields["confidence"]), arms)

    def winner(self) -> str | None:
        """The arm that has proven better than all others; None: not yet."""
        if len(self.arms) < 2 or any(stats.rewards < self.min_rewards for stats in self.arms.values()):
            return None
        best, *others = sorted(self.arms, key=lambda label: -self.arms[label].reward_mean)
        needed = NormalDist().inv_cdf(self.confidence)
        return best if all(_score(self.arms[best], self.arms[other]) >= needed for other in others) else None


@dataclass(frozen=True, slots=True)
class Decision:
    """What a split has come to."""

    winner: str
    split: AutoSplit

    def facts(self) -> dict[str, Any]:
        """Returns what the log and the audit log say of the decision."""
        arms = {
            label: {"rewards": stats.rewards, "reward_mean": round(stats.reward_mean, 6)}
            for label, stats in self.split.arms.items()
        }
        return {"winner": self.winner, "confidence": self.split.confidence, "arms": arms}


def _score(better: ArmStats, other: ArmStats) -> float:
    """Returns how many standard errors the means are apart."""
    difference = better.reward_mean - other.reward_mean
    error = math.sqrt(max(0.0, better.error + other.error))
    if error:
        return difference / error
    return math.copysign(math.inf, difference) if difference else 0.0
