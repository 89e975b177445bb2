"""What all replicas must agree on, as changes in plain values: adapters, what the model's name serves, the weights of
policies, models, pauses.

A replica that is asked for a change proposes it to the front (`replicated.py`), which has every replica check it, then
apply it (`members.py`). `SharedState` keeps of the changes so far what a replica that starts now needs: of adapters the
files of the versions that are kept, under their numbers. No Ray, no MLX.
"""

import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import orjson

Kind = Literal[
    "publish", "unload", "rollback", "pin", "serve", "load_model", "unload_model", "pause", "resume", "flush_cache"
]

KEPT_VERSIONS = 4  # of a name, as lora.registry keeps them, beside those that are pinned or served
KEPT_WEIGHTS = 5  # of a policy, as models.kinds.policy keeps them
RECENT = 16  # changes that a replica may lack and still go on
_LENGTHS = struct.Struct(">IQ")


@dataclass(frozen=True, slots=True)
class Change:
    kind: Kind
    model: str
    name: str = ""  # an adapter's; of a policy's own weights it is empty
    number: int | None = None  # its version
    fields: Mapping[str, Any] = field(default_factory=dict)  # what else it takes, as JSON has it
    data: bytes = b""  # weights

    def encode(self) -> bytes:
        head = orjson.dumps([self.kind, self.model, self.name, self.number, dict(self.fields)])
        return _LENGTHS.pack(len(head), len(self.data)) + head + self.data


def decode(body: bytes) -> Iterator[Change]:
    """All changes of a body, in which they stand one behind the other."""
    place = 0
    while place < len(body):
        head, data = _LENGTHS.unpack_from(body, place)
        place += _LENGTHS.size
        kind, model, name, number, fields = orjson.loads(body[place : place + head])
        place += head
        yield Change(kind, model, name, number, fields, bytes(body[place : place + data]))
        place += data


@dataclass(slots=True)
class AdapterHistory:
    """The versions of an adapter that are kept."""

    published: dict[int, Change] = field(default_factory=dict)  # by their numbers; not those that flags have loaded
    current: int = 0
    last: int = 0  # the highest number ever given out
    pinned: set[int] = field(default_factory=set)
    unloaded: bool = False  # since the start, with whatever flags have loaded

    def forget_old(self, count: int, served: set[int]) -> None:
        newest = sorted(self.published)[-count:]
        kept = {*newest, *self.pinned, *served, self.current}
        self.published = {number: change for number, change in self.published.items() if number in kept}


class SharedState:
    def __init__(self) -> None:
        self.position = 0  # changes so far
        self._adapters: dict[
            tuple[str, str], AdapterHistory
        ] = {}  # by model and name, the one published last at the end
        self._served: dict[str, Change] = {}  # by model
        self._models: dict[str, Change] = {}  # loaded or unloaded by request
        self._paused: dict[str, Change] = {}
        self._recent: deque[Change] = deque(maxlen=RECENT)

    def since(self, position: int) -> list[Change] | None:
        """What a replica lacks that has made so many changes; None: it has to start anew."""
        missing = self.position - position
        if position == 0 or missing == 0:
            return self.replay() if missing else []
        return list(self._recent)[-missing:] if 0 < missing <= len(self._recent) else None

    def numbered(self, change: Change) -> Change:
        """Returns the change with a version that was never given out: a number means one set of weights, also where a
        call has failed."""
        if change.kind != "publish" or change.number is None:
            return change
        history = self._adapters.get((change.model, change.name))
        return change if history is None else replace(change, number=max(change.number, history.last + 1))

    def take_number(self, change: Change) -> None:
        """The number of a version is used up, whatever becomes of it."""
        if change.kind == "publish" and change.number is not None:
            history = self._adapters.setdefault((change.model, change.name), AdapterHistory(unloaded=False))
            history.last = max(history.last, change.number)

    def add(self, change: Change) -> None:
        """All replicas have made it."""
        self.position += 1
        self._recent.append(change)
        getattr(self, f"_add_{change.kind}", lambda change: None)(change)

    def _add_publish(self, change: Change) -> None:
        assert change.number is not None
        key = (change.model, change.name)
        history = self._adapters.pop(key, None) or AdapterHistory()
        history.published[change.number] = change
        history.current = history.last = change.number
        history.forget_old(KEPT_VERSIONS if change.name else KEPT_WEIGHTS, self._served_numbers(*key))
        self._adapters[key] = history

    def _add_unload(self, change: Change) -> None:
        history = self._history(change)
        history.published = {}
        history.pinned = set()
        history.current = 0
        history.unloaded = True

    def _add_rollback(self, change: Change) -> None:
        self._history(change).current = change.number or 0

    def _add_pin(self, change: Change) -> None:
        numbers = self._history(change).pinned
        (numbers.add if change.fields["pinned"] else numbers.discard)(change.number or 0)

    def _add_serve(self, change: Change) -> None:
        self._served[change.model] = change

    def _add_load_model(self, change: Change) -> None:
        self._models[change.model] = change

    def _add_unload_model(self, change: Change) -> None:
        self._models[change.model] = change
        self._served.pop(change.model, None)
        for key in [key for key in self._adapters if key[0] == change.model]:
            del self._adapters[key]

    def _add_pause(self, change: Change) -> None:
        self._paused[change.model] = change

    def _add_resume(self, change: Change) -> None:
        self._paused.pop(change.model, None)

    def replay(self) -> list[Change]:
        """Returns what brings a replica that has just started to where all others are."""
        changes = [*self._models.values()]
        for (model, name), history in self._adapters.items():
            changes += _replay(model, name, history)
        return [*changes, *self._served.values(), *self._paused.values()]

    def _history(self, change: Change) -> AdapterHistory:
        return self._adapters.setdefault((change.model, change.name), AdapterHistory())

    def _served_numbers(self, model: str, name: str) -> set[int]:
        routes: Sequence[Sequence[Any]] = self._served[model].fields["routes"] if model in self._served else ()
        return {number for served, number, _ in routes if served == name and number is not None}


def _replay(model: str, name: str, history: AdapterHistory) -> Iterator[Change]:
    if history.unloaded:
        yield Change("unload", model, name)  # what a flag has loaded, if it has
    yield from (history.published[number] for number in sorted(history.published))
    if history.current and history.current != max(history.published, default=0):
        yield Change("rollback", model, name, history.current)
    yield from (Change("pin", model, name, number, {"pinned": True}) for number in sorted(history.pinned))
