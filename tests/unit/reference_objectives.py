"""What each algorithm's loss is, in plain NumPy and float64: the reference for `training.rl.objectives`.

Loops over answers and tokens, with gradients worked out by hand. The definitions are those of the papers with the
departures that the docstring of `objectives` names: the policy that sampled is the old one, and the deviation of a
group is that of a sample, with 1e-4 added. GSPO, RLOO and REINFORCE have one ratio for an answer, the first the
geometric mean of its tokens', the others their product. Logarithms of ratios are held within ±20.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlx_parallm.training.rl.objectives import Objective

Doubles = npt.NDArray[np.float64]


def _deviation(values: Sequence[float]) -> float:
    """Of a sample, with a little added; one value has none to divide by."""
    if len(values) < 2:
        return 1.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1)) + 1e-4


def reference_advantages(
    rewards: Sequence[float], groups: Sequence[int], algorithm: str, scaling: str | None = None
) -> list[float]:
    scaling = scaling or ("none" if algorithm in ("dr_grpo", "rloo", "reinforce") else "group")
    found = []
    for place, reward in enumerate(rewards):
        group = [other for other, name in zip(rewards, groups, strict=True) if name == groups[place]]
        if max(group) == min(group):
            found.append(0.0)
            continue
        baseline = sum(group) / len(group)
        if algorithm == "rloo":
            baseline = (sum(group) - reward) / (len(group) - 1)
        divisor = {"none": 1.0, "group": _deviation(group), "batch": _deviation(rewards)}[scaling]
        found.append((reward - baseline) / divisor)
    return found


def reference_weights(lengths: Sequence[int], algorithm: str, max_length: int) -> list[float]:
    """Of one token of each answer."""
    if algorithm in ("dapo", "bnpo", "cispo"):  # all tokens alike
        return [1 / max(1, sum(lengths))] * len(lengths)
    lengths = [max(length, 1) for length in lengths]
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
    proximal: Doubles | None = None,
) -> ReferenceLoss:
    """`proximal`: of the policy as the update began, for truncated importance sampling."""
    found = ReferenceLoss(0.0, np.zeros_like(new), np.zeros_like(new), np.zeros_like(new), math.inf)
    for answer in range(len(new)):
        _add_answer(found, objective, answer, new, old, advantage[answer], mask, weight[answer], reference, proximal)
    return found


def reference_divergence(estimator: str, new: float, reference: float) -> tuple[float, float]:
    """An estimate of KL(new || reference) from one token, and its slope by the new log-probability."""
    gap = reference - new
    if estimator == "k1":
        return -gap, 1.0
    if estimator == "k2":
        return gap**2 / 2, -gap
    return math.exp(gap) - gap - 1, 1 - math.exp(gap)


def reference_entropy(logits: Doubles) -> float:
    """Of one distribution, in nats."""
    shifted = np.exp(logits - logits.max())
    chances = shifted / shifted.sum()
    return -float(sum(chance * math.log(chance) for chance in chances if chance > 0))


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
    proximal: Doubles | None,
) -> None:
    places = [place for place in range(new.shape[1]) if mask[answer, place]]
    if not places:
        return
    kept = _near(found, objective, {place: math.exp(new[answer, place] - old[answer, place]) for place in places})
    start, correction = old, dict.fromkeys(places, 1.0)
    if objective.importance_cap:
        start = new if proximal is None else proximal
        for place in places:
            far = math.exp(start[answer, place] - old[answer, place])
            found.margin = min(found.margin, abs(far - objective.importance_cap))
            correction[place] = min(far, objective.importance_cap)
    gaps = {place: new[answer, place] - start[answer, place] for place in places}
    part = {"gspo": 1 / len(places), "rloo": 1.0, "reinforce": 1.0}.get(objective.algorithm)
    for place in kept:
        found.kept[answer, place] = 1.0
        gap = gaps[place] if part is None else part * sum(gaps.values())
        inside = abs(gap) < 20
        found.margin = min(found.margin, abs(abs(gap) - 20))
        ratio = math.exp(max(-20.0, min(20.0, gap)))
        loss, slope, clipped = _token(found, objective, ratio, new[answer, place], advantage)
        found.value += weight * loss * correction[place]
        found.clipped[answer, place] = clipped
        moves = weight * slope * correction[place] * (inside or objective.algorithm == "cispo")
        for other in [place] if part is None else places:  # each token has its part in the ratio of all
            found.gradient[answer, other] += moves * (part or 1.0)
        if reference is not None:
            kl, kl_slope = reference_divergence(objective.kl_estimator, new[answer, place], reference[answer, place])
            found.value += weight * objective.beta * kl
            found.gradient[answer, place] += weight * objective.beta * kl_slope


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
    if objective.algorithm == "sapo":
        temperature = objective.sapo_temperature_pos if advantage > 0 else objective.sapo_temperature_neg
        gate = 1 / (1 + math.exp(-temperature * (ratio - 1)))
        return -gate * 4 / temperature * advantage, -gate * (1 - gate) * 4 * ratio * advantage, False
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    found.margin = min(found.margin, abs(ratio - low), abs(ratio - high))
    bounded = min(max(ratio, low), high)
    if objective.algorithm == "cispo":
        return -bounded * advantage * logprob, -bounded * advantage, bounded != ratio
    if (advantage > 0 and ratio > high) or (advantage < 0 and ratio < low):
        return -bounded * advantage, 0.0, True
    if objective.dual_clip:
        found.margin = min(found.margin, abs(ratio - objective.dual_clip))
        if advantage < 0 and ratio > objective.dual_clip:
            return -objective.dual_clip * advantage, 0.0, True
    return -ratio * advantage, -ratio * advantage, False
