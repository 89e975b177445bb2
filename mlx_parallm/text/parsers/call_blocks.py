"""Blocks of tool calls, read as their text arrives.

A block is the text between a format's marks. `JsonBlock` streams calls whose arguments are JSON; `TextBlock` collects
a block in any other notation and has it read when it is complete. `ChatParser` feeds both.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

import orjson
import regex

from mlx_parallm.text.detokenize import Prefixes
from mlx_parallm.text.parsers.calls import Calls, ToolCall

Event = Literal["closed", "end"] | None


@dataclass(frozen=True, slots=True)
class Quoting:
    """What hides an end mark in a notation: strings, by the marks around them."""

    strings: tuple[tuple[str, str], ...] = ()  # the opening and the closing mark of each kind
    brackets: str = ""  # opening and closing brackets in turn
    escapes: bool = False  # a backslash hides the character after it, and no string spans lines


NO_QUOTES = Quoting()
JSON_QUOTES = Quoting((('"', '"'),), "{}[]", escapes=True)
PYTHON_QUOTES = Quoting((('"', '"'), ("'", "'")), "{}[]()", escapes=True)


class Scanner:
    """Follows brackets and strings through text that arrives in parts, and finds the end mark outside of strings.

    A string with a raw line break in it is malformed where backslashes escape; from there on the end mark counts
    again, so that a quote the model forgot to escape does not hide the end of the call.
    """

    __slots__ = ("_broken", "_closing", "_depth", "_ends", "_quoting", "mark")

    def __init__(self, quoting: Quoting, ends: tuple[str, ...] = (), depth: int = 0) -> None:
        self._quoting = quoting
        self._ends = ends
        self._depth = depth
        self._closing = ""  # the mark that closes the current string
        self._broken = False
        self.mark = ""  # the end mark that was found

    def scan(self, text: str) -> tuple[int, Event]:
        """Returns how much of the text is understood, and what comes then.

        "closed": the outermost bracket was closed there; "end": an end mark begins there; None: more text is needed.
        """
        at = 0
        while True:
            pattern, marks = _pattern(self._quoting, self._ends, self._closing, self._broken)
            found = pattern.search(text, at)
            if found is None:
                return len(text) - self._withheld(text[at:], marks), None
            at = found.end()
            mark = found[0]
            if mark in self._ends:
                self.mark = mark
                return found.start(), "end"
            if self._closing:
                self._read_string(mark)
            elif self._closes(mark):
                return at, "closed"

    def _read_string(self, mark: str) -> None:
        if mark == self._closing:
            self._closing = ""
            self._broken = False
        elif mark == "\n":
            self._broken = True

    def _closes(self, mark: str) -> bool:
        """Takes a mark outside of strings into account; True when it closes the outermost bracket."""
        for opening, closing in self._quoting.strings:
            if mark == opening:
                self._closing = closing
                return False
        if self._quoting.brackets.index(mark) % 2 == 0:
            self._depth += 1
            return False
        self._depth = max(self._depth - 1, 0)
        return self._depth == 0

    def _withheld(self, rest: str, marks: Prefixes) -> int:
        """Returns how much at the end may be the start of a mark or of an escaped character."""
        if self._closing and self._quoting.escapes and rest.endswith("\\"):
            return 1
        return marks.held(rest)


@lru_cache(maxsize=256)
def _pattern(quoting: Quoting, ends: tuple[str, ...], closing: str, broken: bool) -> tuple[re.Pattern[str], Prefixes]:
    """Returns what to look for inside a string or, with no `closing` mark, outside."""
    marks = [closing] if closing else [opening for opening, _ in quoting.strings]
    if broken or not closing:
        marks += ends
    parts = [re.escape(mark) for mark in marks]
    if closing and quoting.escapes:
        parts += [r"\\.", r"\n"]
    if not closing:
        parts += [re.escape(bracket) for bracket in quoting.brackets]
    return re.compile("|".join(parts) or r"(?!)", re.DOTALL), Prefixes(marks)


class CallBlock(Protocol):
    """One block of calls. Calls go to `Calls` as they are found."""

    def push(self, text: str) -> str | None:
        """Takes more text; once the block has ended, returns the text after it."""

    def unread(self) -> str | None:
        """The text of a block that has ended and holds no call: it is malformed."""

    def finish(self, cut_off: bool) -> str | None:
        """Ends the block where the text ends. Returns its text if it is malformed, rather than cut off."""


_S = r"\s{0,32}"  # bounded, so that a model that writes spaces without end costs nothing


class Head:
    """How a call with JSON arguments begins. The patterns have a group `name` and may have a group `id`.

    `name` matches as far as the name is known to be complete, `whole` up to and with the first brace of the arguments.
    """

    __slots__ = ("name", "nested", "whole")

    def __init__(self, name: str, arguments: str = rf"{_S}\{{", *, nested: bool = False) -> None:
        self.name = regex.compile(name)
        self.whole = regex.compile(name + arguments)
        self.nested = nested  # the arguments stand in an object that is still open after them


NAME = r"(?P<name>[\w.:/-]{1,128})"
JSON_HEAD = Head(
    rf'\{{{_S}(?:"type"{_S}:{_S}"function"{_S},{_S})?"name"{_S}:{_S}"{NAME}"',
    rf'{_S},{_S}"(?:arguments|parameters)"{_S}:{_S}\{{',
    nested=True,
)
_GAP = " \t\r\n,;[]"  # may stand between two calls


class JsonBlock:
    """Calls with JSON arguments, one or more in a block; arguments are passed on while they are being written.

    A call is a call as soon as its head is complete, whatever follows. An object in another order of keys is read when
    it is complete. A block without a call in it is malformed; what is malformed beside calls is left out.
    Without an end mark, a block ends where something that is no call begins.
    """

    def __init__(
        self,
        calls: Calls,
        end: str = "",
        *,
        heads: Sequence[Head] = (JSON_HEAD,),
        fillers: Sequence[str] = (),  # marks that may stand before and between calls
        names: Collection[str] | None = None,  # the only ones that make a call; None: any
    ) -> None:
        self._calls = calls
        self._end = end
        self._heads = heads
        self._fillers = fillers
        self._names = names
        self._marks = [mark for mark in (end, *fillers) if mark]
        self._gap = "".join(char for char in _GAP if not any(mark.startswith(char) for mark in self._marks))
        self._state: Literal["seek", "arguments", "tail", "skip", "object", "junk"] = "seek"
        self._scanner = Scanner(JSON_QUOTES)
        self._nested = False
        self._pending = ""  # not understood yet
        self._object: list[str] = []
        self._found = False
        self._raw: list[str] = []  # the block's text until a call is found in it
        self._rest: str | None = None

    def push(self, text: str) -> str | None:
        if not self._found:
            self._raw.append(text)
        self._pending += text
        while self._rest is None and _STEPS[self._state](self):
            continue
        return self._rest

    def unread(self) -> str | None:
        text = "".join(self._raw)
        return None if self._found else text[: len(text) - len(self._rest or "")]

    def finish(self, cut_off: bool) -> str | None:
        if cut_off and self._state in ("seek", "object"):
            self._report_name("".join(self._object) + self._pending)
        return None if self._found or cut_off else "".join(self._raw)

    def _report_name(self, text: str) -> None:
        """A call that is cut off after its name is reported without arguments."""
        for head in self._heads:
            found = head.name.match(text)
            if found and self._is_known(found["name"]):
                self._open(found)

    def _is_known(self, name: str) -> bool:
        return self._names is None or name in self._names

    def _open(self, head: Any) -> None:
        self._found = True
        self._raw.clear()
        self._calls.open(head["name"], head.groupdict().get("id"))

    def _seek(self) -> bool:
        """Looks for the next call, or the end of the block."""
        text = self._pending = self._pending.lstrip(self._gap)
        if self._end and text.startswith(self._end):
            return self._close()
        for filler in self._fillers:
            if text.startswith(filler):
                self._pending = text[len(filler) :]
                return True
        if not text or any(mark.startswith(text) for mark in self._marks):
            return False
        if text[0] in _GAP:
            self._pending = text[1:]
            return True
        return self._look_at_head(text)

    def _look_at_head(self, text: str) -> bool:
        for head in self._heads:
            found = head.whole.match(text, partial=True)
            if found is None:
                continue
            if found.partial:
                return False
            if self._is_known(found["name"]):
                self._open(found)
                self._pending = text[found.end() - 1 :]
                self._nested = head.nested
                return self._go("arguments", depth=0)
        return self._go("object" if text[0] == "{" else "junk", depth=0)

    def _go(self, state: Literal["seek", "arguments", "skip", "object", "junk"], depth: int | None = None) -> bool:
        self._state = state
        if depth is not None:
            self._scanner = Scanner(JSON_QUOTES, (self._end,) if self._end else (), depth)
        return True

    def _close(self) -> bool:
        """The end mark comes next."""
        self._rest = self._pending[len(self._end) :]
        return False

    def _scan(self) -> tuple[str, Event]:
        at, event = self._scanner.scan(self._pending)
        text = self._pending[:at]
        self._pending = self._pending[at:]
        return text, event

    def _read_arguments(self) -> bool:
        text, event = self._scan()
        self._calls.write(text)
        if event == "closed":
            self._state = "tail" if self._nested else "seek"
            return True
        return event == "end" and self._close()

    def _read_tail(self) -> bool:
        """Reads what follows the arguments in an object: its closing brace, which may be missing, or more keys."""
        text = self._pending = self._pending.lstrip()
        if not text:
            return False
        if text[0] == ",":
            return self._go("skip", depth=1)
        self._pending = text.removeprefix("}")
        return self._go("seek")

    def _skip(self) -> bool:
        _, event = self._scan()
        if event == "closed":
            return self._go("seek")
        return event == "end" and self._close()

    def _read_object(self) -> bool:
        """An object that does not begin with a name and arguments: read as a whole."""
        text, event = self._scan()
        self._object.append(text)
        if event == "end":
            return self._close()
        if event is None:
            return False
        call = _call_in("".join(self._object))
        self._object.clear()
        if call is not None and self._is_known(call.name):
            self._found = True
            self._raw.clear()
            self._calls.add(call)
            return self._go("seek")
        return self._go("seek" if self._found else "junk")

    def _read_junk(self) -> bool:
        if not self._end:
            if self._found:
                self._rest = self._pending
            self._pending = ""
            return False
        at = self._pending.find(self._end)
        if at < 0:
            self._pending = self._pending[1 - len(self._end) :] if len(self._end) > 1 else ""
            return False
        self._pending = self._pending[at:]
        return self._close()


_STEPS: Mapping[str, Callable[[JsonBlock], bool]] = {
    "seek": JsonBlock._seek,
    "arguments": JsonBlock._read_arguments,
    "tail": JsonBlock._read_tail,
    "skip": JsonBlock._skip,
    "object": JsonBlock._read_object,
    "junk": JsonBlock._read_junk,
}


def _call_in(text: str) -> ToolCall | None:
    try:
        return ToolCall.from_entry(orjson.loads(text))
    except orjson.JSONDecodeError:
        return None


# The calls in a block's text, or None when it is malformed. Of a text that is cut off, the last call may be incomplete:
# it has the arguments that are complete, in JSON text that is not closed.
ReadText = Callable[[str, bool], "list[ToolCall] | None"]


class TextBlock:
    """Calls in a notation that is not JSON: collected until the end mark, then read at once."""

    def __init__(self, calls: Calls, end: str, read: ReadText, quoting: Quoting = NO_QUOTES) -> None:
        self._calls = calls
        self._read = read
        self._ends = bool(end)
        self._scanner = Scanner(quoting, (end,) if end else ())
        self._pending = ""
        self._parts: list[str] = []
        self._unread: str | None = None

    def push(self, text: str) -> str | None:
        self._pending += text
        while True:
            at, event = self._scanner.scan(self._pending)
            self._parts.append(self._pending[:at])
            self._pending = self._pending[at:]
            if event is None:
                return None
            if event == "end" or not self._ends:
                return self._close()

    def unread(self) -> str | None:
        return self._unread

    def finish(self, cut_off: bool) -> str | None:
        text = "".join(self._parts) + self._pending
        return None if self._report(text, cut_off) or cut_off else text

    def _close(self) -> str:
        """The block ends at the end mark or, where there is none, with its last bracket."""
        mark = self._scanner.mark
        text = "".join(self._parts)
        if not self._report(text, cut_off=False):
            self._unread = text + mark
        return self._pending[len(mark) :]

    def _report(self, text: str, cut_off: bool) -> bool:
        calls = self._read(text, cut_off)
        for call in calls or ():
            self._calls.add(call)
        return bool(calls)
