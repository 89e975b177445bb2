"""What a policy is trained to do, as pure functions of log-probabilities, advantages and masks.

How they depart from the papers: the policy that sampled is the old policy, by the log-probabilities that its sampler
wrote down, so nothing is computed twice; and a sum over an update's trajectories is a sum over micro-batches, so every
token has its weight before the first of them is computed (`token_weights`). `config.algorithms` says in a line what
each algorithm is made of:

- GRPO: advantages by group, divided by their deviation; each completion's tokens averaged, then answers.
- Dr. GRPO: neither division; tokens summed over a constant length, the longest that a completion was allowed.
- DAPO: GRPO's advantages, an upper clip of its own, all tokens averaged alike. BNPO: the same here, where the batch of
  which it averages the tokens is that of an optimiser step; TRL's is one process's micro-batch.
- GSPO: one ratio for a completion, the geometric mean of its tokens'.
- CISPO: the ratio is clipped on both sides, to 1 - clip_low and 1 + clip_high, and held fixed; every token keeps its
  gradient. TRL's clips above alone, at `epsilon_high` itself: that is clip_low = 1 and clip_high = epsilon_high - 1.
- SAPO: in place of the clip, a soft gate: a sigmoid of the ratio, with a temperature for each sign of the advantage.
- RLOO: one ratio for a completion, the product of its tokens', clipped; the baseline is the mean of the others of the
  group; completions averaged. REINFORCE: the same without a clip, and the group's mean is the baseline. TRL's RLOO has
  the divergence to the reference in the reward (`kl_in_reward`); here it is a term of the loss, as in the others.

The logarithm of a ratio, of a token's and of a completion's, is held within ±20, so that no exponential overflows, and
what a bad completion's ratio counts is bounded (`dual_clip`): a huge one teaches little, and spoils no update.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_parallm.config.algorithms import ALGORITHMS, CLIPPED, RewardScaling
from mlx_parallm.config.training import KLEstimator, Objective
from mlx_parallm.engine.compute.sampling import log_sum_exp

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

MAX_LOG_RATIO = 20.0  # of a token, and of a whole completion
EPSILON = 1e-4  # added to a deviation


def advantages(rewards: Floats, groups: Integers, algorithm: str, scaling: RewardScaling | None = None) -> Floats:
    """(N,), (N,) -> (N,): how much better each completion did than the others of its group. Equal rewards give zeros.

    `scaling`: None: the algorithm's own.
    """
    rule = ALGORITHMS[algorithm]
    scaling = scaling or rule.normalise
    advantage = np.zeros(len(rewards), np.float32)
    of_batch = _deviation(rewards.astype(np.float64))
    for group in np.unique(groups):
        members = groups == group
        some = rewards[members].astype(np.float64)
        centred = some - some.mean()
        if rule.baseline == "others" and len(some) > 1:
            centred *= len(some) / (len(some) - 1)  # the mean of the others
        if scaling != "none":
            centred /= of_batch if scaling == "batch" else _deviation(some)
        advantage[members] = centred if np.ptp(some) > 0 else 0.0
    return advantage


def _deviation(rewards: npt.NDArray[np.float64]) -> float:
    return float(rewards.std(ddof=1)) + EPSILON if len(rewards) > 1 else 1.0


def token_weights(lengths: Integers, algorithm: str, max_length: int) -> Floats:
    """(N,): what one token of each completion counts in the update. All together count one, but for Dr. GRPO's: there
    that is so only where every completion has `max_length` tokens."""
    match ALGORITHMS[algorithm].aggregation:
        case "completions":
            return (1.0 / (np.maximum(lengths, 1) * len(lengths))).astype(np.float32)
        case "tokens":
            return np.full(len(lengths), 1.0 / max(1, lengths.sum()), np.float32)
        case "constant":
            return np.full(len(lengths), 1.0 / (len(lengths) * max_length), np.float32)


def chosen_logprobs(logits: mx.array, tokens: mx.array, temperature: mx.array | float = 1.0) -> mx.array:
    """(B, T, V), (B, T) -> (B, T): log-probabilities of tokens as the sampler samples them at its temperature."""
    scaled = logits.astype(mx.float32)
    if not isinstance(temperature, float) or temperature != 1.0:
        scaled = scaled / temperature
    return cast(mx.array, _chosen(scaled, tokens))


@mx.custom_function
def _chosen(logits: mx.array, tokens: mx.array) -> mx.array:
    return mx.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0] - log_sum_exp(logits)


@_chosen.vjp
def _chosen_vjp(primals: tuple[mx.array, mx.array], cotangent: mx.array, output: mx.array) -> tuple[mx.array, mx.array]:
    """Computes the gradient by hand: over a vocabulary, each array that gradients pass through is as large as all the
    rest of the model."""
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


def divergence(new: mx.array, reference: mx.array, estimator: KLEstimator = "k3") -> mx.array:
    """KL(new || reference) by each sampled token. k1 is the difference of log-probabilities, without bias and of high
    variance; k2 half its square; k3 never negative, without bias, and of low variance."""
    gap = _held(reference - new)
    match estimator:
        case "k1":
            return -gap
        case "k2":
            return 0.5 * gap * gap
        case "k3":
            return mx.exp(gap) - gap - 1.0


def _held(gap: mx.array) -> mx.array:
    return mx.clip(gap, -MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(slots=True)
class Losses:
    """The losses of each token (B, T), before its weight; zero where the mask is."""

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
    proximal: mx.array | None = None,  # (B, T) of the policy as the update began; None: it is the one that learns
) -> Losses:
    kept = mask * near(objective, mx.stop_gradient(new), old, mask)
    start = old
    correction = mx.ones_like(new)
    if objective.importance_cap:
        # Ratios are those within the update; what lies between it and the sampler is a weight, which is cut off.
        start = mx.stop_gradient(new) if proximal is None else proximal
        correction = mx.minimum(mx.exp(_held(start - old)), objective.importance_cap)
    gap = (new - start) * mask
    rule = ALGORITHMS[objective.algorithm]
    if rule.ratio != "token":
        whole = mx.sum(gap, axis=1, keepdims=True)
        if rule.ratio == "mean":
            whole = whole / mx.maximum(mx.sum(mask, axis=1, keepdims=True), 1)
        gap = mx.broadcast_to(whole, gap.shape)
    surrogate = SURROGATES[rule.surrogate]
    policy, clipped = surrogate(objective, mx.exp(_held(gap)), new, advantage[:, None])
    policy = policy * correction
    apart = mx.zeros_like(policy) if reference is None else divergence(new, reference, objective.kl_estimator)
    return Losses(policy * kept, apart * kept, kept, clipped * kept)


def near(objective: Objective, new: mx.array, old: mx.array, mask: mx.array) -> mx.array:
    """(B, T): 0 for tokens and completions too far from the sampler for importance weights to mend."""
    gap = mx.abs(new - old) * mask
    keep = mx.ones_like(gap)
    if objective.token_limit is not None:
        keep = keep * (gap <= float(np.log(objective.token_limit)))
    if objective.answer_limit is not None:
        mean = mx.sum(gap, axis=1, keepdims=True) / mx.maximum(mx.sum(mask, axis=1, keepdims=True), 1)
        keep = keep * (mean <= float(np.log(objective.answer_limit)))
    return keep


Surrogate = Callable[[Objective, mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]


def _plain(objective: Objective, ratio: mx.array, new: mx.array, advantage: mx.array) -> tuple[mx.array, mx.array]:
    return -ratio * advantage, mx.zeros_like(ratio)


def _soft(objective: Objective, ratio: mx.array, new: mx.array, advantage: mx.array) -> tuple[mx.array, mx.array]:
    temperature = mx.where(advantage > 0, objective.sapo_temperature_pos, objective.sapo_temperature_neg)
    gate = mx.sigmoid(temperature * (ratio - 1)) * 4 / temperature
    return -gate * advantage, mx.zeros_like(ratio)


def _fixed(objective: Objective, ratio: mx.array, new: mx.array, advantage: mx.array) -> tuple[mx.array, mx.array]:
    bounded = _bounded(objective, ratio)
    return -mx.stop_gradient(bounded) * advantage * new, (bounded != ratio).astype(mx.float32)


def _bounded(objective: Objective, ratio: mx.array) -> mx.array:
    return mx.clip(ratio, 1 - objective.clip_low, 1 + objective.clip_high)


def _clipped(objective: Objective, ratio: mx.array, new: mx.array, advantage: mx.array) -> tuple[mx.array, mx.array]:
    """The worse of two: a token is held back only where it has gone too far the way that its advantage says, or, if
    that is down, where it has come to be far too likely (`dual_clip`)."""
    bounded = _bounded(objective, ratio)
    most = mx.minimum(ratio, objective.dual_clip) if objective.dual_clip else ratio
    plain = -most * advantage
    held = -bounded * advantage
    gone = ((held > plain) & (bounded != ratio)) | ((advantage < 0) & (most != ratio))
    return mx.maximum(plain, held), gone.astype(mx.float32)


# Each gives the tokens' losses (B, T), and where the clip has taken the gradient, of the ratio, the log-probabilities
# that learn, and the advantages (B, 1).
SURROGATES: Mapping[str, Surrogate] = {
    "plain": _plain,
    "soft": _soft,
    "fixed": _fixed,
    CLIPPED: _clipped,
}


def group_has_signal(rewards: Floats) -> bool:
    """Whether a group can teach anything: its rewards differ."""
    return len(rewards) > 1 and float(np.ptp(rewards)) > 0.0
