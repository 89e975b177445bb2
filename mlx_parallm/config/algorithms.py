"""The objectives of a policy's updates, as data: what each is made of. `training.rl.objectives` computes them.

A new objective is an entry here and, where it has a surrogate of its own, a function there. No MLX.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

RewardScaling = Literal["none", "group", "batch"]
SCALINGS: tuple[RewardScaling, ...] = ("none", "group", "batch")
CLIPPED = "clipped"


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What an objective is made of."""

    baseline: Literal["group", "others"]  # the mean of a group, or of its other members
    normalise: RewardScaling  # what advantages are divided by, unless the objective says otherwise
    ratio: Literal["token", "mean", "product"]  # of each token; of a completion, the mean or the sum of the logarithms
    aggregation: Literal["completions", "tokens", "constant"]  # what a sum over tokens is divided by
    surrogate: str  # among `training.rl.objectives.SURROGATES`


ALGORITHMS: Mapping[str, Algorithm] = {
    "grpo": Algorithm("group", "group", "token", "completions", CLIPPED),
    "dr_grpo": Algorithm("group", "none", "token", "constant", CLIPPED),
    "dapo": Algorithm("group", "group", "token", "tokens", CLIPPED),
    "bnpo": Algorithm("group", "group", "token", "tokens", CLIPPED),
    "gspo": Algorithm("group", "group", "mean", "completions", CLIPPED),
    "cispo": Algorithm("group", "group", "token", "tokens", "fixed"),
    "sapo": Algorithm("group", "group", "token", "completions", "soft"),
    "rloo": Algorithm("others", "none", "product", "completions", CLIPPED),
    "reinforce": Algorithm("group", "none", "product", "completions", "plain"),
}


def unscaled() -> list[str]:
    """The algorithms that leave rewards as they are behind their baseline."""
    return [name for name, one in ALGORITHMS.items() if one.normalise == "none"]
