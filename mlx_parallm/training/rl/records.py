"""What the engine sampled: one record for each choice that has ended, with its tokens and their log-probabilities.

The ledger makes and keeps them, rollouts hand them out, and trajectories are made of them. Any thread; no MLX.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from typing import Any

import orjson

from mlx_parallm.engine.rows import Row
from mlx_parallm.policy_spans import PolicySpan, Spans, within
from mlx_parallm.types import CompletionNames, Request

NAMES = {"label": "client", "completion_id": "dialect", "http_id": "http"}  # in files, and in CompletionNames
TOKENS_OF_NAMES = 64  # what the names of a completion count as, so that many short completions are bounded, too


@dataclass(frozen=True, slots=True)
class ChoiceKey:
    """The engine's name of a choice."""

    request: str
    index: int

    @classmethod
    def of_json(cls, fields: Mapping[str, Any] | Sequence[Any]) -> "ChoiceKey":
        """Reads a key as orjson wrote it; files of earlier releases have lists."""
        if isinstance(fields, Mapping):
            return cls(request=str(fields["request"]), index=int(fields["index"]))
        request, index = fields
        return cls(request=str(request), index=int(index))


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One choice that the engine has ended."""

    request: str  # the engine's own name for it
    index: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: Spans
    policy: str | None  # the adapter, None: the model alone
    temperature: float
    finish_reason: str = "stop"
    max_tokens: int | None = None  # that it was allowed
    choices: int = 1  # of its request
    mask: tuple[bool, ...] | None = None  # tokens that the model chose, where others or a grammar did some; None: all
    names: CompletionNames = CompletionNames()
    owner: str = ""  # the name of the key that asked

    @property
    def id(self) -> str:
        """What feedback may call this completion: one name for each of a request's."""
        name = self.names.client or self.request
        return name if self.choices == 1 else f"{name}.{self.index}"

    @property
    def key(self) -> ChoiceKey:
        return ChoiceKey(request=self.request, index=self.index)

    @property
    def size(self) -> int:
        """What it takes to keep, in tokens: its own, the prompt's, and the room of its names."""
        return len(self.prompt_ids) + len(self.completion_ids) + TOKENS_OF_NAMES

    @property
    def sampled(self) -> int:
        """Tokens of the completion that the model sampled itself."""
        return len(self.completion_ids) if self.mask is None else sum(self.mask)

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> "Record":
        """Reads a record as `json` wrote it."""
        spans = tuple(PolicySpan.of_json(span) for span in fields["spans"])
        known = {name: value for name, value in fields.items() if name not in NAMES}
        names = CompletionNames(**{own: fields.get(name, "") for name, own in NAMES.items()})
        lists = {name: tuple(fields[name]) for name in ("prompt_ids", "completion_ids", "logprobs")}
        mask = None if fields.get("mask") is None else tuple(fields["mask"])
        return cls(**{**known, **lists, "spans": spans, "mask": mask, "names": names})

    def json(self) -> bytes:
        fields = {one.name: getattr(self, one.name) for one in dataclass_fields(self) if one.name != "names"}
        return orjson.dumps(fields | {name: getattr(self.names, own) for name, own in NAMES.items()})

    @classmethod
    def of(cls, request: Request, index: int, row: Row) -> "Record":
        completion = [*row.tokens, *([] if row.stop_token is None else [row.stop_token])]
        sampling = row.sampling
        return cls(
            request=request.id,
            index=request.first + index,
            prompt_ids=tuple(row.prompt),
            completion_ids=tuple(completion),
            logprobs=tuple(row.sampled_logprobs[: len(completion)]),
            spans=within(row.policy_spans, len(completion)),
            policy=None if row.adapter is None else row.adapter.name,
            temperature=1.0 if sampling.greedy else sampling.temperature,
            finish_reason=row.finish_reason or "abort",
            max_tokens=row.max_tokens,
            mask=tuple(number not in row.forced for number in range(len(completion))) if row.forced else None,
            choices=sampling.n,
            names=request.names,
            owner=request.owner,
        )

    def cut(self, tokens: int) -> "Record":
        """The first so many tokens of its completion: a stop string ends it in the middle."""
        if tokens >= len(self.completion_ids):
            return self
        mask = None if self.mask is None else self.mask[:tokens]
        return replace(
            self,
            completion_ids=self.completion_ids[:tokens],
            logprobs=self.logprobs[:tokens],
            spans=within(self.spans, tokens),
            mask=mask,
        )


@dataclass(frozen=True, slots=True)
class PackedRecord:
    """A record to be kept for long: its tokens take 4 bytes each, and 36 as Python's integers."""

    _rest: Record  # without what is packed
    _prompt_ids: "array[int]"
    _completion_ids: "array[int]"
    _logprobs: "array[float]"

    @classmethod
    def of(cls, record: Record) -> "PackedRecord":
        rest = replace(record, prompt_ids=(), completion_ids=(), logprobs=())
        tokens = array("I", record.prompt_ids), array("I", record.completion_ids)
        return cls(rest, *tokens, array("d", record.logprobs))

    def unpacked(self) -> Record:
        return replace(
            self._rest,
            prompt_ids=tuple(self._prompt_ids),
            completion_ids=tuple(self._completion_ids),
            logprobs=tuple(self._logprobs),
        )


@dataclass(frozen=True, slots=True)
class RewardedRecord:
    """A completion with its reward, on its way into a buffer. `group_id`: empty where its prompt names the group."""

    record: Record
    reward: float
    group_id: str
