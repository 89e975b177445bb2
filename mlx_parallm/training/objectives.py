"""What a policy is trained to do, as pure functions of log-probabilities, advantages and masks.

How they depart from the papers: the policy that sampled is the old policy, by the log-probabilities that its sampler
wrote down, so nothing is computed twice; and a sum over an update's trajectories is a sum over micro-batches, so every
token has its weight before the first of them is computed (`token_weights`).

- GRPO: advantages by group, divided by their deviation; each answer's tokens averaged, then answers.
- Dr. GRPO: neither division; tokens summed over a constant length, the longest that an answer was allowed.
- DAPO: GRPO's advantages, an upper clip of its own, all tokens averaged alike.
- GSPO: one ratio for an answer, the geometric mean of its tokens'.
- CISPO: the ratio is clipped on both sides, to 1 - clip_low and 1 + clip_high, and held fixed; every token keeps its
  gradient. TRL's clips above alone, at `epsilon_high` itself: that is clip_low = 1 and clip_high = epsilon_high - 1.
- RLOO: one ratio for an answer, the product of its tokens', clipped; the baseline is the mean of the others of the
  group; answers averaged. REINFORCE: the same without a clip, and the group's mean is the baseline. TRL's RLOO has the
  divergence to the reference in the reward; here it is a term of the loss, as in the others.

The logarithm of a product of ratios is held within ±20, so that no exponential overflows.
"""

from dataclasses import dataclass
from typing import Literal, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_parallm.config.training import Algorithm, Objective
from mlx_parallm.engine.sampling import log_sum_exp

Aggregation = Literal["answers", "tokens", "constant"]
Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

MAX_LOG_RATIO = 20.0  # of a whole answer
WHOLE = ("gspo", "rloo", "reinforce")  # one ratio for an answer
NORMALISED = ("grpo", "dapo", "gspo", "cispo")
AGGREGATION: dict[Algorithm, Aggregation] = {
    "grpo": "answers",
    "dr_grpo": "constant",
    "dapo": "tokens",
    "gspo": "answers",
    "cispo": "tokens",
    "rloo": "answers",
    "reinforce": "answers",
}
EPSILON = 1e-4  # added to a group's deviation


def advantages(rewards: Floats, groups: Integers, algorithm: Algorithm) -> Floats:
    """(N,), (N,) -> (N,): how much better each answer did than the others of its group. Equal rewards give zeros."""
    advantage = np.zeros(len(rewards), np.float32)
    for group in np.unique(groups):
        members = groups == group
        some = rewards[members].astype(np.float64)
        centred = some - some.mean()
        if algorithm == "rloo" and len(some) > 1:
            centred *= len(some) / (len(some) - 1)  # the mean of the others
        if algorithm in NORMALISED and len(some) > 1:
            centred /= some.std(ddof=1) + EPSILON
        advantage[members] = centred if np.ptp(some) > 0 else 0.0
    return advantage


def token_weights(lengths: Integers, algorithm: Algorithm, max_length: int) -> Floats:
    """(N,): what one token of each answer counts in the update. All together count one, but for Dr. GRPO's: there that
    is so only where every answer has `max_length` tokens."""
    lengths = np.maximum(lengths, 1)
    match AGGREGATION[algorithm]:
        case "answers":
            return (1.0 / (lengths * len(lengths))).astype(np.float32)
        case "tokens":
            return np.full(len(lengths), 1.0 / lengths.sum(), np.float32)
        case "constant":
            return np.full(len(lengths), 1.0 / (len(lengths) * max_length), np.float32)


def chosen_logprobs(logits: mx.array, tokens: mx.array, temperature: mx.array | float = 1.0) -> mx.array:
    """(B, T, V), (B, T) -> (B, T): log-probabilities of tokens as the sampler draws them at its temperature."""
    scaled = logits.astype(mx.float32)
    if not isinstance(temperature, float) or temperature != 1.0:
        scaled = scaled / temperature
    return cast(mx.array, _chosen(scaled, tokens))


@mx.custom_function
def _chosen(logits: mx.array, tokens: mx.array) -> mx.array:
    return mx.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0] - log_sum_exp(logits)


@_chosen.vjp
def _chosen_vjp(primals: tuple[mx.array, mx.array], cotangent: mx.array, output: mx.array) -> tuple[mx.array, mx.array]:
    """By hand: over a vocabulary, each array that gradients pass through is as large as all the rest of the model."""
    logits, tokens = primals
    places = tokens[..., None]
    total = mx.take_along_axis(logits, places, axis=-1) - output[..., None]
    gradient = mx.exp(logits - total) * -cotangent[..., None]
    own = mx.take_along_axis(gradient, places, axis=-1) + cotangent[..., None]
    return mx.put_along_axis(gradient, places, own, axis=-1), mx.zeros_like(tokens)


def entropy(logits: mx.array) -> mx.array:
    """(B, T, V) -> (B, T)"""
    logits = logits.astype(mx.float32)
    logprobs = logits - log_sum_exp(logits)[..., None]
    return -mx.sum(mx.exp(logprobs) * logprobs, axis=-1)


def divergence(new: mx.array, reference: mx.array) -> mx.array:
    """KL(new || reference) of each sampled token, by the estimator k3: never negative, and of low variance."""
    gap = reference - new
    return mx.exp(gap) - gap - 1.0


@dataclass(slots=True)
class Losses:
    """Of each token (B, T), before its weight; zero where the mask is."""

    policy: mx.array
    divergence: mx.array
    kept: mx.array  # the mask, less what is too far from the sampler
    clipped: mx.array  # where the clip took the gradient away


def losses(
    objective: Objective,
    new: mx.array,  # (B, T) log-probabilities of the policy that learns
    old: mx.array,  # (B, T) of the one that sampled
    advantage: mx.array,  # (B,)
    mask: mx.array,  # (B, T)
    reference: mx.array | None = None,  # (B, T)
) -> Losses:
    kept = mask * near(objective, mx.stop_gradient(new), old, mask)
    gap = (new - old) * mask
    if objective.algorithm in WHOLE:
        whole = mx.sum(gap, axis=1, keepdims=True)
        if objective.algorithm == "gspo":
            whole = whole / mx.maximum(mx.sum(mask, axis=1, keepdims=True), 1)
        gap = mx.broadcast_to(mx.clip(whole, -MAX_LOG_RATIO, MAX_LOG_RATIO), gap.shape)
    advantage = advantage[:, None]
    policy, clipped = _surrogate(objective, gap, new, advantage)
    apart = mx.zeros_like(policy) if reference is None else divergence(new, reference)
    return Losses(policy * kept, apart * kept, kept, clipped * kept)


def near(objective: Objective, new: mx.array, old: mx.array, mask: mx.array) -> mx.array:
    """(B, T): 0 for tokens and answers too far from the sampler for importance weights to mend."""
    gap = mx.abs(new - old) * mask
    keep = mx.ones_like(gap)
    if objective.token_limit is not None:
        keep = keep * (gap <= float(np.log(objective.token_limit)))
    if objective.answer_limit is not None:
        mean = mx.sum(gap, axis=1, keepdims=True) / mx.maximum(mx.sum(mask, axis=1, keepdims=True), 1)
        keep = keep * (mean <= float(np.log(objective.answer_limit)))
    return keep


def _surrogate(objective: Objective, gap: mx.array, new: mx.array, advantage: mx.array) -> tuple[mx.array, mx.array]:
    """Each token's loss, and whether the clip has taken its gradient."""
    ratio = mx.exp(gap)
    if not objective.clips:
        return -ratio * advantage, mx.zeros_like(ratio)
    bounded = mx.clip(ratio, 1 - objective.clip_low, 1 + objective.clip_high)
    if objective.algorithm == "cispo":
        return -mx.stop_gradient(bounded) * advantage * new, (bounded != ratio).astype(mx.float32)
    # The worse of the two: a token is held back only where it has gone too far the way that its advantage says.
    plain, held = -ratio * advantage, -bounded * advantage
    return mx.maximum(plain, held), ((held > plain) & (bounded != ratio)).astype(mx.float32)


def group_has_signal(rewards: Floats) -> bool:
    """Whether a group can teach anything: its rewards differ."""
    return len(rewards) > 1 and float(np.ptp(rewards)) > 0.0
