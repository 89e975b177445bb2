"""What a batch of an Atropos API means: its scored groups as trajectories. No MLX."""

import logging
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.training.rl.trajectories import Trajectory

log = logging.getLogger(__name__)

MASKED = -100  # in an Atropos mask: not learnt from
ROUNDING = 1e-4  # by which a log-probability may be above 0


@dataclass(slots=True)
class Parsed:
    trajectories: list[Trajectory] = field(default_factory=list)
    skipped: int = 0  # groups


def trajectories_of(batch: Mapping[str, Any], max_token_len: int = 0) -> Parsed:
    """Reads the trajectories of a response to /batch. Groups that are malformed, or have a sequence that is too long,
    are skipped whole."""
    parsed = Parsed()
    groups = batch.get("batch")
    for group in groups if isinstance(groups, list) else ():
        try:
            parsed.trajectories += _group(group, max_token_len)
        except (InvalidRequestError, OverflowError) as error:
            parsed.skipped += 1
            log.warning("a group from Atropos is skipped: %s", error)
    return parsed


def _group(group: Any, max_token_len: int) -> list[Trajectory]:
    if not isinstance(group, dict):
        raise InvalidRequestError("it is no object")
    tokens, masks, scores = (_list(group.get(name), name) for name in ("tokens", "masks", "scores"))
    count = len(tokens)
    if not count or count != len(masks) or count != len(scores):
        raise InvalidRequestError(f"{count} sequences, {len(masks)} masks, {len(scores)} scores")
    # An environment's base class sends empty lists for what is not there.
    advantages = _list(group.get("advantages") or [None] * count, "advantages")
    if len(advantages) != count:
        raise InvalidRequestError(f"{count} sequences, {len(advantages)} advantages")
    logprobs = _for_each(group.get("inference_logprobs"), count)
    overrides = [each if isinstance(each, dict) else {} for each in _for_each(group.get("overrides"), count)]
    name = f"atropos-{uuid.uuid4().hex}"
    trajectories = []
    for place, ids in enumerate(tokens):
        one = _trajectory(ids, masks[place], scores[place], advantages[place], logprobs[place], max_token_len)
        one.group_id = name
        one.temperature = _temperature(overrides[place], group.get("generation_params"), group.get("group_overrides"))
        if overrides[place].get("set_advantage_to_zero"):
            one.advantage = 0.0
        if (environment := group.get("env_id")) is not None:
            one.metadata["env_id"] = environment
        trajectories.append(one)
    return trajectories


def _trajectory(
    tokens: Any, mask: Any, score: Any, advantage: Any, logprobs: Any, max_token_len: int = 0
) -> Trajectory:
    tokens = _integers(tokens, "tokens")
    mask = _integers(mask, "masks")
    if len(tokens) != len(mask) or min(tokens, default=0) < 0:
        raise InvalidRequestError(f"{len(tokens)} tokens with a mask of {len(mask)}, or a negative token")
    if 0 < max_token_len < len(tokens):
        raise InvalidRequestError(f"a sequence has {len(tokens)} tokens, over {max_token_len}")
    # Nothing comes before the first token, so nothing can be learnt about it.
    learnt = [place for place in range(1, len(mask)) if mask[place] != MASKED]
    if not learnt:
        raise InvalidRequestError("there is no token to learn from")
    start = learnt[0]
    known = _logprobs(logprobs, learnt, len(tokens))
    return Trajectory(
        prompt_ids=tokens[:start],
        completion_ids=tokens[start:],
        reward=_finite(score, "score"),
        logprobs=known,
        mask=None if len(learnt) == len(tokens) - start else [value != MASKED for value in mask[start:]],
        advantage=_advantage(advantage, learnt, len(tokens)),
        off_policy=known is None,
    )


def _advantage(sent: Any, learnt: Sequence[int], length: int) -> float | None:
    """One number for the completion: where each token has its own, their mean over those learnt from."""
    if sent is None:
        return None
    if not isinstance(sent, list):
        return _finite(sent, "advantage")
    if len(sent) != length:
        raise InvalidRequestError(f"{length} tokens, {len(sent)} advantages")
    values = [_finite(sent[place], "advantage") for place in learnt]
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)


def _logprobs(sent: Any, learnt: Sequence[int], length: int) -> list[float] | None:
    """Returns the completion's log-probabilities. Tokens not sampled have a 1 there, and get 0: they are masked."""
    if not isinstance(sent, list) or len(sent) != length:
        return None
    logprobs = [0.0] * (length - learnt[0])
    for place in learnt:
        value = sent[place]
        if not isinstance(value, int | float) or not -math.inf < value <= ROUNDING:
            return None
        logprobs[place - learnt[0]] = min(float(value), 0.0)
    return logprobs


def _temperature(*sources: Any) -> float:
    """The first that says one; what was sampled greedily is scored as at 1, like the server's own."""
    for source in sources:
        if isinstance(source, dict) and "temperature" in source:
            value = source["temperature"]
            return float(value) if isinstance(value, int | float) and 0 < value < math.inf else 1.0
    return 1.0


def _for_each(values: Any, count: int) -> list[Any]:
    """Returns a value for every sequence. A list of another length can't be told apart, and says nothing."""
    return values if isinstance(values, list) and len(values) == count else [None] * count


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidRequestError(f"{name} is no list")
    return value


def _integers(value: Any, name: str) -> list[int]:
    values = _list(value, name)
    if not all(type(each) is int for each in values):
        raise InvalidRequestError(f"{name} are not all integers")
    return values


def _finite(value: Any, name: str) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequestError(f"a {name} is not a finite number")
    return float(value)
