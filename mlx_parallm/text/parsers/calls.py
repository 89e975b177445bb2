"""Tool calls as parsers report them: the types that all formats share, and the collection of one completion's calls."""

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pydantic_core

Tool = Mapping[str, Any]  # as in a request: {"type": "function", "function": {"name", "description", "parameters"}}


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str  # JSON text
    id: str | None = None  # a model may name its calls itself

    @classmethod
    def from_entry(cls, entry: object) -> "ToolCall | None":
        """A call from an object with a name and arguments, as most models write it; None for anything else."""
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"]:
            return None
        arguments = entry.get("arguments", entry.get("parameters"))
        if not isinstance(arguments, str):
            arguments = json_text({} if arguments is None else arguments)
        identity = entry.get("id")
        return cls(entry["name"], arguments, identity if isinstance(identity, str) else None)


def json_text(value: object) -> str:
    """A value as JSON. Half of a surrogate pair, which no text can hold, stays escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or not _SURROGATE.search(text) else json.dumps(value)


_SURROGATE = re.compile("[\ud800-\udfff]")


def read_arguments(text: str) -> dict[str, Any]:
    """A call's arguments as an object: what there is of them, where the text was cut off, and nothing of what is no
    object."""
    try:
        parsed = pydantic_core.from_json(text or "{}", allow_partial=True)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


@dataclass(slots=True)
class CallDelta:
    """News of one tool call: its id and name first, then pieces of its arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Piece:
    """What some text has added to a completion."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class Calls:
    """The calls of one completion. Parsers open calls and write their arguments; `take` returns what is new."""

    __slots__ = ("_limit", "_muted", "_new", "count")

    def __init__(self, *, parallel: bool = True) -> None:
        self.count = 0
        self._limit = None if parallel else 1  # calls beyond it are read and ignored
        self._muted = False
        self._new: list[CallDelta] = []

    def open(self, name: str, identity: str | None = None) -> None:
        self._muted = self._limit is not None and self.count >= self._limit
        if not self._muted:
            self._new.append(CallDelta(self.count, identity or f"call_{uuid.uuid4().hex[:24]}", name))
            self.count += 1

    def write(self, arguments: str) -> None:
        """Continues the arguments of the call opened last."""
        if arguments and not self._muted:
            self._new.append(CallDelta(self.count - 1, arguments=arguments))

    def add(self, call: ToolCall) -> None:
        self.open(call.name, call.id)
        self.write(call.arguments)

    def take(self) -> tuple[CallDelta, ...]:
        new = tuple(self._new)
        self._new = []
        return new
