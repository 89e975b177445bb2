"""What is learnt from: completions with their rewards.

Sessions keep them in a buffer and hand them to the trainer in groups that are compared. Any thread; no MLX.
"""

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.policy_spans import PolicySpan, Spans
from mlx_parallm.training.rl.records import ChoiceKey, Record

MAX_LOGPROB = 1e-4  # rounding may lift the logarithm of 1 a little above 0
MAX_REWARD = 1e6


def check_reward(number: float) -> None:
    if not abs(number) <= MAX_REWARD:  # nor NaN
        raise InvalidRequestError(f"a reward must be a number within ±{MAX_REWARD:g}", param="reward")


@dataclass(slots=True, eq=False)
class Trajectory:
    """A completion with its reward. `logprobs` are those of the policy that sampled it; None: nobody knows."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    reward: float
    group_id: str = ""
    logprobs: Sequence[float] | None = None
    temperature: float = 1.0
    spans: Spans = ()
    mask: Sequence[bool] | None = None  # tokens to learn from; None: all
    advantage: float | None = None  # None: by its group
    request_id: str | None = None
    off_policy: bool = False
    source: ChoiceKey | None = None  # the choice, of one that was sampled here
    max_tokens: int | None = None  # that the completion was allowed; None: nobody knows
    metadata: dict[str, Any] = field(default_factory=dict)
    truncated: bool = False  # cut off at the longest length that it was allowed

    def __post_init__(self) -> None:
        if not self.prompt_ids or not self.completion_ids:
            raise InvalidRequestError("a trajectory needs prompt_ids and completion_ids", param="trajectories")
        for number in (self.reward, self.advantage or 0.0):
            check_reward(number)
        for name, values in (("logprobs", self.logprobs), ("mask", self.mask)):
            if values is not None and len(values) != len(self.completion_ids):
                raise InvalidRequestError(
                    f"{len(values)} {name} for {len(self.completion_ids)} tokens of the completion", param=name
                )
        for place, value in enumerate(self.logprobs or ()):
            if not math.isfinite(value) or value > MAX_LOGPROB:
                raise InvalidRequestError(
                    f"log-probability {place} is {value}, and must be a finite number, at most 0", param="logprobs"
                )
        self.group_id = self.group_id or prompt_group(self.prompt_ids)

    @classmethod
    def recorded(cls, record: Record, reward: float, group_id: str = "") -> "Trajectory":
        """Makes a trajectory from a record of the ledger."""
        return cls(
            prompt_ids=record.prompt_ids,
            completion_ids=record.completion_ids,
            reward=reward,
            group_id=group_id,
            logprobs=record.logprobs,
            temperature=record.temperature,
            spans=record.spans,
            mask=record.mask,
            request_id=record.id,
            source=record.key,
            max_tokens=record.max_tokens,
            truncated=record.finish_reason == "length",
        )

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> "Trajectory":
        """Reads a trajectory as orjson wrote it."""
        spans = tuple(PolicySpan.of_json(span) for span in fields["spans"])
        source = None if fields["source"] is None else ChoiceKey.of_json(fields["source"])
        return cls(**{**fields, "spans": spans, "source": source})

    @property
    def version(self) -> int:
        """The oldest that sampled any of it."""
        return min((span.version for span in self.spans), default=0)

    def comes_from(self, versions: Collection[int]) -> bool:
        """Whether any of these versions of the adapter that learns sampled a part of it."""
        return not self.foreign and any(span.version in versions for span in self.spans)

    @property
    def foreign(self) -> bool:
        """Sampled here by another adapter than the one that learns, with versions of its own."""
        return self.off_policy and self.source is not None


def joined_masks(recorded: Sequence[bool] | None, sent: Sequence[bool] | None) -> Sequence[bool] | None:
    """Tokens to learn from: those that the model chose, and that whoever sent them wants; None: all."""
    if recorded is None or sent is None:
        return sent if recorded is None else recorded
    return [bool(own and wanted) for own, wanted in zip(recorded, sent, strict=True)]


def prompt_group(prompt: Sequence[int]) -> str:
    """Completions to one prompt are compared with each other, unless somebody says otherwise."""
    return "prompt-" + hashlib.blake2b(repr(list(prompt)).encode(), digest_size=8).hexdigest()
