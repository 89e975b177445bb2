"""The ledger of what this server sampled: the last choices that the engine has ended, as records.

It makes a reward that comes later for a request id into a trajectory, and tells whether one from outside is what was
sampled here; what is not is marked off-policy. The engine calls it as its recorder. Any thread; no MLX.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from mlx_parallm.engine.rows import Row
from mlx_parallm.errors import InvalidRequestError, NotFoundError
from mlx_parallm.training.rl.records import ChoiceKey, PackedRecord, Record
from mlx_parallm.training.rl.trajectories import Trajectory, joined_masks
from mlx_parallm.types import Request

SAME_LOGPROB = 1e-3  # how far what a client sends back may be from the ledger
MAX_CHOICES = 64
MAX_KEPT_TOKENS = 1_000_000  # of completions that may still be rewarded, prompts included; at most 60 MB

OwnKey = tuple[str, ChoiceKey]  # an owner, and its own name of a choice


class Ledger:
    """The last choices, by the names of their requests; bounded by their tokens."""

    def __init__(self, max_tokens: int = MAX_KEPT_TOKENS) -> None:
        self._max_tokens = max_tokens
        self.on_record: Callable[[Record], None] = lambda record: None  # called with each completion that is kept
        self._tokens = 0
        self._lock = threading.Lock()
        self._records: OrderedDict[OwnKey, PackedRecord] = OrderedDict()  # by owner and the name that the client gave
        self._by_name: dict[ChoiceKey, PackedRecord] = {}  # by all names of the request: the newest of any owner
        self._by_text: dict[bytes, PackedRecord] = {}
        self._listeners: dict[str, Callable[[Record], None]] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __call__(self, request: Request, index: int, row: Row, visible: int | None = None) -> None:
        """The engine's recorder. A completion that was aborted is not whole, and nobody learns from it.

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
            listener = self._listeners.get(request.id)
        self.on_record(record)
        if listener is not None:
            listener(record)

    def restore(self, records: Iterable[Record]) -> None:
        """Takes completions that an earlier process has kept, the oldest first."""
        with self._lock:
            for record in records:
                self._put(record)

    def records(self) -> Iterator[Record]:
        """All that are kept, the oldest first."""
        with self._lock:
            packed = list(self._records.values())
        return (one.unpacked() for one in packed)

    def listen(self, request_ids: Iterable[str], on_record: Callable[[Record], None]) -> None:
        """Calls `on_record` with each choice of these requests as it ends; on the engine thread, so be short."""
        with self._lock:
            self._listeners |= dict.fromkeys(request_ids, on_record)

    def forget(self, request_ids: Iterable[str]) -> None:
        with self._lock:
            for name in request_ids:
                self._listeners.pop(name, None)

    def find(self, request_id: str, index: int | None = None, owner: str | None = None) -> Record:
        """A completion by the id of its request and its number, or by its own id; the number may be left out where
        the request has one completion. `owner`: nobody else's; None: anybody's."""
        with self._lock:
            records = self._named(request_id, index, owner)
        if not records:
            number = "" if index is None else f" {index}"
            raise NotFoundError(
                f"there is no completion{number} of request {request_id!r} among the last {len(self._records)} kept",
                param="request_id",
            )
        if len(records) > 1:
            raise InvalidRequestError(
                f"request {request_id!r} has {records[0].choices} answers: say which by index, or by its own id, as "
                f"{records[0].id!r}",
                param="index",
            )
        return records[0]

    def missing(self, request_ids: Iterable[str]) -> set[str]:
        """Those by which no completion is known yet."""
        with self._lock:
            return {name for name in request_ids if not self._named(name, None, None)}

    def _named(self, request_id: str, index: int | None, owner: str | None) -> list[Record]:
        numbers = range(MAX_CHOICES) if index is None else (index,)
        if records := [one for number in numbers if (one := self._get(request_id, number, owner)) is not None]:
            return records
        label, _, number = request_id.rpartition(".")
        if label and number.isdecimal() and index in (None, int(number)):
            record = self._get(label, int(number), owner)
            if record is not None and record.choices > 1:
                return [record]
        return []

    def _get(self, name: str, index: int, owner: str | None) -> Record | None:
        own = None if owner is None else self._records.get((owner, ChoiceKey(name, index)))
        if (found := own or self._by_name.get(ChoiceKey(name, index))) is None:
            return None
        record = found.unpacked()
        return record if owner in (None, record.owner) else None

    def _put(self, record: Record) -> None:
        key = record.owner, ChoiceKey(record.names.client or record.request, record.index)
        if (old := self._records.pop(key, None)) is not None:
            self._drop(old)
        packed = PackedRecord.of(record)
        self._records[key] = packed
        self._by_name |= dict.fromkeys(_keys(record), packed)
        self._by_text[_text(record.prompt_ids, record.completion_ids)] = packed
        self._tokens += record.size
        while self._tokens > self._max_tokens and len(self._records) > 1:
            _, oldest = self._records.popitem(last=False)
            self._drop(oldest)

    def _drop(self, packed: PackedRecord) -> None:
        record = packed.unpacked()
        for key in _keys(record):
            if self._by_name.get(key) is packed:
                del self._by_name[key]
        text = _text(record.prompt_ids, record.completion_ids)
        if self._by_text.get(text) is packed:
            del self._by_text[text]
        self._tokens -= record.size

    def check(self, trajectory: Trajectory) -> None:
        """Marks one off-policy that this server did not sample; one that it sampled gets what was recorded of it.

        Of a completion that its `request_id` names, the recorded log-probabilities count, whatever was sent: a client
        has them after top_p and penalties. Without the name they tell whether it is that answer at all.
        """
        record = self._sampled(trajectory)
        trajectory.off_policy = record is None
        if record is not None:
            record = record.cut(len(trajectory.completion_ids))
            trajectory.temperature = record.temperature
            trajectory.spans = record.spans
            trajectory.logprobs = record.logprobs
            trajectory.mask = joined_masks(record.mask, trajectory.mask)
            trajectory.truncated = record.finish_reason == "length"

    def _sampled(self, trajectory: Trajectory) -> Record | None:
        with self._lock:
            packed = self._by_text.get(_text(trajectory.prompt_ids, trajectory.completion_ids))
            named = [] if trajectory.request_id is None else self._named(trajectory.request_id, None, None)
        # Perhaps the trajectory is only the prefix of one of these.
        if (record := next((one for one in named if _has_text(trajectory, one)), None)) is not None:
            return record
        same_text = None if packed is None else packed.unpacked()
        return same_text if same_text is not None and _has_logprobs(trajectory, same_text) else None


def _has_text(trajectory: Trajectory, record: Record) -> bool:
    length = len(trajectory.completion_ids)
    return (
        tuple(trajectory.prompt_ids) == record.prompt_ids
        and tuple(trajectory.completion_ids) == record.completion_ids[:length]
    )


def _has_logprobs(trajectory: Trajectory, record: Record) -> bool:
    """Returns whether the trajectory has the record's log-probabilities, where they count, and as far as it has any."""
    sent = trajectory.logprobs or ()
    learnt = trajectory.mask or [True] * len(sent)
    compared = zip(sent, record.logprobs, learnt, strict=False)
    return all(abs(left - right) <= SAME_LOGPROB for left, right, counts in compared if counts)


def _keys(record: Record) -> list[ChoiceKey]:
    """All names of a record: the client's, the completion's id, the HTTP request's and the engine's."""
    names = (*record.names.all, record.request)
    return [ChoiceKey(name, record.index) for name in names if name]


def is_called(request: Request, name: str) -> bool:
    """Whether a client may mean this request, or one of its choices, by that name."""
    names = {*request.names.all, request.id} - {""}
    label, _, number = name.rpartition(".")
    return name in names or (label in names and number.isdecimal())


def _text(prompt: Sequence[int], completion: Sequence[int]) -> bytes:
    return hashlib.blake2b(repr([*prompt, *completion]).encode(), digest_size=16).digest()
