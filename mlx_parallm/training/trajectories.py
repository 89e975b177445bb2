"""What is learnt from: answers with their rewards, the ledger of what this server drew, and the buffer of groups.

The ledger keeps, of the last choices that the engine has ended, the tokens and their log-probabilities as drawn. It
makes a reward that comes later for a request id into a trajectory, and tells whether one from outside is what was drawn
here; what is not is marked off-policy. Any thread; no MLX.
"""

import hashlib
import itertools
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from mlx_parallm.engine.rows import Row
from mlx_parallm.errors import InvalidRequestError, NotFoundError
from mlx_parallm.types import Request

T = TypeVar("T")
Spans = tuple[tuple[int, int, int], ...]  # (first token, the one after the last, version)
MAX_LOGPROB = 1e-4  # rounding may lift the logarithm of 1 a little above 0
SAME_LOGPROB = 1e-3  # how far what a client sends back may be from the ledger
MAX_CHOICES = 64
MAX_KEPT_TOKENS = 1_000_000  # of answers that may still be rewarded, prompts included
MAX_REWARD = 1e6
KINDS = ("chatcmpl-", "cmpl-", "gen-")  # before a request's id, in answers


@dataclass(frozen=True, slots=True)
class Record:
    """One choice that the engine has ended."""

    request: str  # the engine's own name for it
    label: str  # the client's
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
    mask: tuple[bool, ...] | None = None  # tokens that the model drew, where others wrote some; None: all

    @property
    def id(self) -> str:
        """What feedback may call this answer: one name for each of a request's."""
        name = self.label or self.request
        return name if self.choices == 1 else f"{name}.{self.index}"

    @property
    def size(self) -> int:
        """Its tokens, the prompt's too."""
        return len(self.prompt_ids) + len(self.completion_ids)

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> "Record":
        """What orjson has written of one."""
        spans = tuple((int(first), int(end), int(version)) for first, end, version in fields["spans"])
        lists = {name: tuple(fields[name]) for name in ("prompt_ids", "completion_ids", "logprobs")}
        return cls(**{**fields, **lists, "spans": spans})

    def cut(self, tokens: int) -> "Record":
        """The first so many tokens of its answer: a stop string ends it in the middle."""
        if tokens >= len(self.completion_ids):
            return self
        spans = tuple((first, min(end, tokens), version) for first, end, version in self.spans if first < tokens)
        return replace(self, completion_ids=self.completion_ids[:tokens], logprobs=self.logprobs[:tokens], spans=spans)

    @classmethod
    def of(cls, request: Request, index: int, row: Row) -> "Record":
        completion = [*row.tokens, *([] if row.stop_token is None else [row.stop_token])]
        starts = [*row.policies, (len(completion), None)]
        spans = tuple(
            (first, min(end, len(completion)), 0 if adapter is None else adapter.number)
            for (first, adapter), (end, _) in itertools.pairwise(starts)
            if first < min(end, len(completion))
        )
        sampling = row.sampling
        return cls(
            request.id,
            request.label,
            request.first + index,
            tuple(row.prompt),
            tuple(completion),
            tuple(row.sampled_logprobs[: len(completion)]),
            spans,
            None if row.adapter is None else row.adapter.name,
            1.0 if sampling.greedy else sampling.temperature,
            row.finish_reason or "abort",
            row.max_tokens,
            sampling.n,
        )


@dataclass(slots=True, eq=False)
class Trajectory:
    """An answer with its reward. `logprobs` are those of the policy that drew it; None: nobody knows."""

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
    source: tuple[str, int] | None = None  # the engine's request and the choice, of one that was drawn here
    max_tokens: int | None = None  # that the answer was allowed; None: nobody knows
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.prompt_ids or not self.completion_ids:
            raise InvalidRequestError("a trajectory needs prompt_ids and completion_ids", param="trajectories")
        if not all(abs(number) <= MAX_REWARD for number in (self.reward, self.advantage or 0.0)):
            raise InvalidRequestError(f"a reward must be a number within ±{MAX_REWARD:g}", param="reward")
        for name, values in (("logprobs", self.logprobs), ("mask", self.mask)):
            if values is not None and len(values) != len(self.completion_ids):
                raise InvalidRequestError(
                    f"{len(values)} {name} for {len(self.completion_ids)} tokens of the answer", param=name
                )
        for place, value in enumerate(self.logprobs or ()):
            if not math.isfinite(value) or value > MAX_LOGPROB:
                raise InvalidRequestError(
                    f"log-probability {place} is {value}, and must be a finite number, at most 0", param="logprobs"
                )
        self.group_id = self.group_id or prompt_group(self.prompt_ids)

    @classmethod
    def recorded(cls, record: Record, reward: float, group_id: str = "") -> "Trajectory":
        """Of what the ledger has."""
        return cls(
            record.prompt_ids,
            record.completion_ids,
            reward,
            group_id,
            record.logprobs,
            record.temperature,
            record.spans,
            request_id=record.id,
            mask=record.mask,
            source=(record.request, record.index),
            max_tokens=record.max_tokens,
        )

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> "Trajectory":
        """What orjson has written of one."""
        spans = tuple((int(first), int(end), int(version)) for first, end, version in fields["spans"])
        source = fields["source"] and (str(fields["source"][0]), int(fields["source"][1]))
        return cls(**{**fields, "spans": spans, "source": source})

    @property
    def version(self) -> int:
        """The oldest that made any of it."""
        return min((version for _, _, version in self.spans), default=0)


def prompt_group(prompt: Sequence[int]) -> str:
    """Answers to one prompt are compared with each other, unless somebody says otherwise."""
    return "prompt-" + hashlib.blake2b(repr(list(prompt)).encode(), digest_size=8).hexdigest()


class Ledger:
    """The last choices, by the names of their requests; bounded by their tokens."""

    def __init__(self, max_tokens: int = MAX_KEPT_TOKENS) -> None:
        self._max_tokens = max_tokens
        self.on_record: Callable[[Record], None] = lambda record: None  # is told of each answer that is kept
        self._tokens = 0
        self._lock = threading.Lock()
        self._records: OrderedDict[tuple[str, int], Record] = OrderedDict()  # by the client's name and the number
        self._by_engine: dict[tuple[str, int], Record] = {}
        self._by_text: dict[bytes, Record] = {}
        self._wanted: dict[str, Callable[[Record], None]] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __call__(self, request: Request, index: int, row: Row, visible: int | None = None) -> None:
        """The engine's recorder. An answer that was aborted is not whole, and nobody learns from it.

        `visible`: a stop string has ended it for this reader, who saw so many tokens; the engine does not see that.
        """
        if not row.sampled_logprobs or not (row.tokens or row.stop_token is not None):
            return
        if visible is None and row.finish_reason is None:
            return
        record = Record.of(request, index, row)
        if visible is not None:
            record = replace(record.cut(visible), finish_reason="stop")
        with self._lock:
            self._put(record)
            wanted = self._wanted.get(request.id)
        self.on_record(record)
        if wanted is not None:
            wanted(record)

    def restore(self, records: Iterable[Record]) -> None:
        """Takes answers that an earlier process has kept, the oldest first."""
        with self._lock:
            for record in records:
                self._put(record)

    def records(self) -> list[Record]:
        """All that are kept, the oldest first."""
        with self._lock:
            return list(self._records.values())

    def listen(self, request_ids: Iterable[str], on_record: Callable[[Record], None]) -> None:
        """Has these requests' choices told as they end; on the engine thread, so be short."""
        with self._lock:
            self._wanted |= dict.fromkeys(request_ids, on_record)

    def forget(self, request_ids: Iterable[str]) -> None:
        with self._lock:
            for name in request_ids:
                self._wanted.pop(name, None)

    def find(self, request_id: str, index: int | None = None) -> Record:
        """An answer by the id of its request and its number, or by its own id; the number may be left out where
        the request has one answer."""
        with self._lock:
            found = self._named(request_id, index)
        if not found:
            number = "" if index is None else f" {index}"
            raise NotFoundError(
                f"there is no answer{number} of request {request_id!r} among the last {len(self._records)} kept",
                param="request_id",
            )
        if len(found) > 1:
            raise InvalidRequestError(
                f"request {request_id!r} has {found[0].choices} answers: say which by index, or by its own id, as "
                f"{found[0].id!r}",
                param="index",
            )
        return found[0]

    def _named(self, request_id: str, index: int | None) -> list[Record]:
        for name in _names(request_id):
            for table in (self._records, self._by_engine):
                numbers = range(MAX_CHOICES) if index is None else (index,)
                if found := [table[name, number] for number in numbers if (name, number) in table]:
                    return found
            label, _, number = name.rpartition(".")
            if label and number.isdecimal() and index in (None, int(number)):
                record = self._records.get((label, int(number)))
                if record is not None and record.id == name:
                    return [record]
        return []

    def _put(self, record: Record) -> None:
        key = record.label or record.request, record.index
        if (old := self._records.pop(key, None)) is not None:
            self._drop(old)
        self._records[key] = self._by_engine[record.request, record.index] = record
        self._by_text[_text(record.prompt_ids, record.completion_ids)] = record
        self._tokens += record.size
        while self._tokens > self._max_tokens and len(self._records) > 1:
            self._drop(self._records.popitem(last=False)[1])

    def _drop(self, record: Record) -> None:
        self._by_engine.pop((record.request, record.index), None)
        text = _text(record.prompt_ids, record.completion_ids)
        if self._by_text.get(text) is record:
            del self._by_text[text]
        self._tokens -= record.size

    def check(self, trajectory: Trajectory) -> None:
        """Marks one off-policy that this server did not draw, or not with these log-probabilities."""
        record = self._drawn(trajectory)
        trajectory.off_policy = record is None
        if record is not None:
            trajectory.temperature, trajectory.spans = record.temperature, record.spans
            trajectory.logprobs = trajectory.logprobs or record.logprobs[: len(trajectory.completion_ids)]

    def _drawn(self, trajectory: Trajectory) -> Record | None:
        with self._lock:
            found = [self._by_text.get(_text(trajectory.prompt_ids, trajectory.completion_ids))]
            for name in _names(trajectory.request_id) if trajectory.request_id is not None else ():
                found += [self._records.get((name, index)) for index in range(MAX_CHOICES)]  # perhaps not all of it
        return next((one for one in found if one is not None and _is_drawn(trajectory, one)), None)


def _is_drawn(trajectory: Trajectory, record: Record) -> bool:
    length = len(trajectory.completion_ids)
    same_text = (
        tuple(trajectory.prompt_ids) == record.prompt_ids
        and tuple(trajectory.completion_ids) == record.completion_ids[:length]
    )
    if trajectory.logprobs is None:
        return same_text
    learnt = trajectory.mask or [True] * length
    gaps = (
        abs(left - right)
        for left, right, counts in zip(trajectory.logprobs, record.logprobs, learnt, strict=False)
        if counts
    )
    return same_text and all(gap <= SAME_LOGPROB for gap in gaps)


def _names(request_id: str) -> list[str]:
    """What a request may be called: answers' ids have their kind in front."""
    return [request_id, *(request_id.removeprefix(kind) for kind in KINDS if request_id.startswith(kind))]


def _text(prompt: Sequence[int], completion: Sequence[int]) -> bytes:
    return hashlib.blake2b(repr([*prompt, *completion]).encode(), digest_size=16).digest()


@dataclass(slots=True)
class BufferCounts:
    collected: int = 0
    dropped: int = 0  # to make room
    stale: int = 0
    flat: int = 0  # of groups whose rewards are all the same: nothing to learn

    def restore(self, state: Mapping[str, int]) -> None:
        for name, value in state.items():
            if hasattr(self, name):
                setattr(self, name, int(value))


class Buffer:
    """Groups that wait to be learnt from, the oldest first; a bounded number of trajectories."""

    def __init__(self, max_trajectories: int, max_staleness: int | None = None) -> None:
        self._max = max_trajectories
        self._max_staleness = max_staleness
        self._groups: OrderedDict[str, list[Trajectory]] = OrderedDict()
        self._changed = threading.Condition()
        self._size = 0
        self.counts = BufferCounts()
        self.on_add: Callable[[Sequence[Trajectory]], None] = lambda trajectories: None  # may raise: none is taken then

    def __len__(self) -> int:
        return self._size

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Takes all of them, or none: a group must fit in the buffer."""
        with self._changed:
            new = Counter(one.group_id for one in trajectories if not self._has(one))
            for name, count in new.items():
                if len(self._groups.get(name, ())) + count > self._max:
                    raise InvalidRequestError(
                        f"group {name!r} would have {len(self._groups.get(name, ())) + count} trajectories, and the "
                        f"buffer holds {self._max}: use another group_id, or a larger --trajectory-buffer-size",
                        param="group_id",
                    )
            self.on_add(trajectories)
            self._put(trajectories)
            self.counts.collected += len(trajectories)
            self._make_room({one.group_id for one in trajectories})
            self._changed.notify_all()

    def count(self, collected: int = 0, flat: int = 0) -> None:
        """Trajectories that an update took from elsewhere, and those that it could not learn from."""
        with self._changed:
            self.counts.collected += collected
            self.counts.flat += flat

    def _make_room(self, keep: Collection[str] = ()) -> None:
        """Drops the oldest groups, those to keep last."""
        while self._size > self._max:
            oldest = next((name for name in self._groups if name not in keep), next(iter(self._groups)))
            gone = self._groups.pop(oldest)
            self._size -= len(gone)
            self.counts.dropped += len(gone)

    def _has(self, trajectory: Trajectory) -> bool:
        """Whether another reward for the same answer waits in its group."""
        group = self._groups.get(trajectory.group_id, ())
        return trajectory.source is not None and any(one.source == trajectory.source for one in group)

    def _put(self, trajectories: Iterable[Trajectory]) -> None:
        for trajectory in trajectories:
            group = self._groups.setdefault(trajectory.group_id, [])
            if self._has(trajectory):
                group[:] = [one for one in group if one.source != trajectory.source]  # a later word on the same
                self._size -= 1
            group.append(trajectory)
            self._size += 1

    def put_back(self, trajectories: Sequence[Trajectory]) -> None:
        """Those that were taken for an update that did not come about: the first to be taken again."""
        with self._changed:
            waiting = [one for group in self._groups.values() for one in group]
            self._groups.clear()
            self._size = 0
            self._put([*trajectories, *waiting])
            self._make_room()
            self._changed.notify_all()

    def restore(self, trajectories: Sequence[Trajectory], counts: Mapping[str, int], later: int) -> None:
        """Takes what an earlier process has kept; nobody is told. The last ones, `later`, were not counted yet."""
        with self._changed:
            self.counts.restore(counts)
            self.counts.collected += later
            self._put(trajectories)
            self._make_room()
            self._changed.notify_all()

    def freeze(self, work: Callable[[], T]) -> tuple[list[Trajectory], dict[str, int], T]:
        """What waits, the counts, and what `work` gives, with nothing added in between."""
        with self._changed:
            return [one for group in self._groups.values() for one in group], asdict(self.counts), work()

    def ready(self) -> int:
        """Trajectories that have others to be compared with."""
        with self._changed:
            return sum(len(group) for group in self._groups.values() if _comparable(group))

    def wait(self, count: int, timeout: float) -> bool:
        """Whether so many are ready, within that time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: sum(len(group) for group in self._groups.values() if _comparable(group)) >= count, timeout
            )

    def take(self, at_most: int, version: int) -> list[Trajectory]:
        """Whole groups, about so many trajectories; those too old for this version are dropped and counted."""
        taken: list[Trajectory] = []
        with self._changed:
            for name, group in list(self._groups.items()):
                if self._max_staleness is not None:
                    fresh = [one for one in group if version - one.version <= self._max_staleness]
                    self.counts.stale += len(group) - len(fresh)
                    self._size -= len(group) - len(fresh)
                    group[:] = fresh
                    if not fresh:
                        del self._groups[name]
                        continue
                if _comparable(group) and len(taken) < at_most:
                    taken += self._groups.pop(name)
                    self._size -= len(group)
        return taken

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _comparable(group: Sequence[Trajectory]) -> bool:
    return len(group) > 1 or any(one.advantage is not None for one in group)
