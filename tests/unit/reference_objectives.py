"""What each algorithm's loss is, in plain NumPy and float64: the reference for `training.objectives`.

Loops over answers and tokens, with gradients worked out by hand. The definitions are those of the papers with the
departures that the docstring of `objectives` names: the policy that sampled is the old one, and the deviation of a
group is that of a sample, with 1e-4 added. GSPO, RLOO and REINFORCE have one ratio for an answer, the first the
geometric mean of its tokens', the others their product.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlx_parallm.training.objectives import Objective

Doubles = npt.NDArray[np.float64]


def reference_advantages(rewards: Sequence[float], groups: Sequence[int], algorithm: str) -> list[float]:
    found = []
    for place, reward in enumerate(rewards):
        group = [other for other, name in zip(rewards, groups, strict=True) if name == groups[place]]
        if max(group) == min(group):
            found.append(0.0)
            continue
        mean = sum(group) / len(group)
        if algorithm in ("dr_grpo", "reinforce"):
            found.append(reward - mean)
        elif algorithm == "rloo":
            found.append(reward - (sum(group) - reward) / (len(group) - 1))
        else:
            deviation = math.sqrt(sum((other - mean) ** 2 for other in group) / (len(group) - 1))
            found.append((reward - mean) / (deviation + 1e-4))
    return found


def reference_weights(lengths: Sequence[int], algorithm: str, max_length: int) -> list[float]:
    """Of one token of each answer."""
    lengths = [max(length, 1) for length in lengths]
    if algorithm in ("dapo", "cispo"):  # all tokens alike
        return [1 / sum(lengths)] * len(lengths)
    if algorithm == "dr_grpo":  # over a constant length
        return [1 / (max_length * len(lengths))] * len(lengths)
    return [1 / length / len(lengths) for length in lengths]  # tokens of an answer, then answers


@dataclass
class ReferenceLoss:
    """Of a batch (N, T)."""

    value: float
    gradient: Doubles  # by the new log-probabilities
    kept: Doubles
    clipped: Doubles
    margin: float  # how far the nearest ratio is from a limit


def reference_loss(
    objective: Objective,
    new: Doubles,
    old: Doubles,
    advantage: Sequence[float],
    mask: Doubles,
    weight: Sequence[float],
    reference: Doubles | None,
) -> ReferenceLoss:
    found = ReferenceLoss(0.0, np.zeros_like(new), np.zeros_like(new), np.zeros_like(new), math.inf)
    for answer in range(len(new)):
        _add_answer(found, objective, answer, new, old, advantage[answer], mask, weight[answer], reference)
    return found


def _add_answer(
    found: ReferenceLoss,
    objective: Objective,
    answer: int,
    new: Doubles,
    old: Doubles,
    advantage: float,
    mask: Doubles,
    weight: float,
    reference: Doubles | None,
) -> None:
    places = [place for place in range(new.shape[1]) if mask[answer, place]]
    if not places:
        return
    ratios = {place: math.exp(new[answer, place] - old[answer, place]) for place in places}
    kept = _near(found, objective, ratios)
    product = math.prod(ratios.values())
    whole = {"gspo": product ** (1 / len(ratios)), "rloo": product, "reinforce": product}.get(objective.algorithm)
    for place in kept:
        found.kept[answer, place] = 1.0
        ratio = ratios[place] if whole is None else whole
        loss, slope, clipped = _token(found, objective, ratio, new[answer, place], advantage)
        found.value += weight * loss
        found.clipped[answer, place] = clipped
        if whole is not None:  # each token has its part in the ratio of all
            for other in places:
                part = 1 / len(places) if objective.algorithm == "gspo" else 1.0
                found.gradient[answer, other] += weight * slope * part
        else:
            found.gradient[answer, place] += weight * slope
        if reference is not None:
            gap = reference[answer, place] - new[answer, place]
            found.value += weight * objective.beta * (math.exp(gap) - gap - 1)
            found.gradient[answer, place] += weight * objective.beta * (1 - math.exp(gap))


def _near(found: ReferenceLoss, objective: Objective, ratios: dict[int, float]) -> list[int]:
    """Tokens that are near enough to the sampler, of an answer that is."""
    distances = {place: max(ratio, 1 / ratio) for place, ratio in ratios.items()}
    mean = math.prod(distances.values()) ** (1 / len(distances))
    if objective.answer_limit is not None:
        found.margin = min(found.margin, abs(mean - objective.answer_limit))
        if mean > objective.answer_limit:
            return []
    if objective.token_limit is None:
        return list(ratios)
    found.margin = min(found.margin, *(abs(distance - objective.token_limit) for distance in distances.values()))
    return [place for place, distance in distances.items() if distance <= objective.token_limit]


def _token(
    found: ReferenceLoss, objective: Objective, ratio: float, logprob: float, advantage: float
) -> tuple[float, float, bool]:
    """Loss, its slope by the logarithm of the ratio, and whether it is clipped."""
    if objective.algorithm == "reinforce":
        return -ratio * advantage, -ratio * advantage, False
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    found.margin = min(found.margin, abs(ratio - low), abs(ratio - high))
    bounded = min(max(ratio, low), high)
    if objective.algorithm == "cispo":
        return -bounded * advantage * logprob, -bounded * advantage, bounded != ratio
    if (advantage > 0 and ratio > high) or (advantage < 0 and ratio < low):
        return -bounded * advantage, 0.0, True
    return -ratio * advantage, -ratio * advantage, False
