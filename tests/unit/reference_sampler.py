"""What sampling parameters mean, in plain NumPy and float64: the reference that `compute.sampling` is held against.

Repetition penalty on prompt and generated tokens, presence and frequency penalties on generated ones, logit bias, no
stop token before `min_tokens`, the grammar's mask; then the temperature, min-p, top-k and top-p, in this order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlx_parallm.sampling_params import SamplingParams

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Reference:
    """Of one row."""

    processed: Doubles  # (V,) log-probabilities that the token is drawn from; -inf: can't be drawn
    raw: Doubles  # (V,) of the model
    drawn: Doubles  # (V,) of the model at the row's temperature, before penalties and cuts
    margin: float  # how far the nearest token is from being cut or kept: where it is tiny, rounding decides


@dataclass(frozen=True)
class Context:
    """What a row's next token depends on beside the logits and the parameters."""

    prompt: Sequence[int] = ()
    generated: Sequence[int] = ()
    stop_ids: frozenset[int] = frozenset()
    allowed: Sequence[bool] | None = None  # by the grammar


def log_softmax(logits: Doubles) -> Doubles:
    top = logits.max()
    found: Doubles = logits - top - np.log(np.exp(logits - top).sum())
    return found


def reference(logits: npt.ArrayLike, params: SamplingParams, context: Context) -> Reference:
    raw = np.array(logits, np.float64)
    edited = _edited(raw, params, context)
    greedy = params.temperature == 0 or params.top_k == 1
    if greedy:
        return Reference(log_softmax(edited), log_softmax(raw), log_softmax(raw), _gap_to_second(edited))
    scaled = edited / params.temperature
    margins = [np.inf]
    for cut in CUTS:
        keep, margin = cut(scaled, params)
        scaled = np.where(keep, scaled, -np.inf)
        margins.append(margin)
    return Reference(log_softmax(scaled), log_softmax(raw), log_softmax(raw / params.temperature), min(margins))


def _edited(raw: Doubles, params: SamplingParams, context: Context) -> Doubles:
    """After penalties, bias, the least number of tokens and the grammar."""
    edited = raw.copy()
    for token in {*context.prompt, *context.generated}:
        factor = params.repetition_penalty
        edited[token] = edited[token] / factor if edited[token] > 0 else edited[token] * factor
    for token in set(context.generated):
        edited[token] -= params.presence_penalty + params.frequency_penalty * list(context.generated).count(token)
    for token, bias in params.logit_bias.items():
        edited[token] += bias
    if len(context.generated) < params.min_tokens:
        for token in context.stop_ids:
            edited[token] = -np.inf
    if context.allowed is not None:
        edited[~np.array(context.allowed)] = -np.inf
    return edited


def _gap_to_second(logits: Doubles) -> float:
    if len(logits) == 1:
        return np.inf
    second, first = np.sort(logits)[-2:]
    return float(first - second)


def _min_p(scaled: Doubles, params: SamplingParams) -> tuple[npt.NDArray[np.bool_], float]:
    """At least this share of the likeliest token's probability."""
    if params.min_p == 0:
        return np.ones(len(scaled), bool), np.inf
    shares = np.exp(scaled - scaled.max())
    return shares >= params.min_p, float(np.abs(shares - params.min_p).min())


def _top_k(scaled: Doubles, params: SamplingParams) -> tuple[npt.NDArray[np.bool_], float]:
    """The k likeliest."""
    if not 0 < params.top_k < len(scaled):
        return np.ones(len(scaled), bool), np.inf
    order = np.argsort(-scaled, kind="stable")
    keep = np.zeros(len(scaled), bool)
    keep[order[: params.top_k]] = True
    last, after = scaled[order[params.top_k - 1]], scaled[order[params.top_k]]
    return keep, float(last - after) if np.isfinite(after) else np.inf


def _top_p(scaled: Doubles, params: SamplingParams) -> tuple[npt.NDArray[np.bool_], float]:
    """The likeliest until their probabilities sum up to p, the one that reaches it included."""
    if params.top_p >= 1:
        return np.ones(len(scaled), bool), np.inf
    probabilities = np.exp(log_softmax(scaled))
    order = np.argsort(-probabilities, kind="stable")
    keep = np.zeros(len(scaled), bool)
    total, margin = 0.0, np.inf
    for token in order:
        margin = min(margin, abs(total - params.top_p))
        if total >= params.top_p:
            break
        keep[token] = True
        total += probabilities[token]
    return keep, margin


CUTS = (
    _min_p,
    _top_k,
    _top_p,
)
