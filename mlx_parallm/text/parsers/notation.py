"""How calls are written between the marks of their block: what a format's file describes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mlx_parallm.text.parsers.call_blocks import JSON_HEAD, NO_QUOTES, Head, Quoting
from mlx_parallm.text.parsers.calls import Tool, ToolCall


class ReadCalls(Protocol):
    """The calls in a block, or None when it is malformed; of a text that is cut off, the last may be incomplete."""

    def __call__(self, text: str, cut_off: bool, tools: Sequence[Tool]) -> list[ToolCall] | None: ...


@dataclass(frozen=True, slots=True)
class Notation:
    """How calls are written between the marks of their block."""

    heads: tuple[Head, ...] = (JSON_HEAD,)
    fillers: tuple[str, ...] = ()  # marks between calls
    read: ReadCalls | None = None  # None: arguments are JSON, and `heads` come before them
    quoting: Quoting = NO_QUOTES  # of what `read` reads
