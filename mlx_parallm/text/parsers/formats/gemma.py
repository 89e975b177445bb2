"""Gemma's calls: `call:name{key:value}`, with strings between marks of their own."""

import json
import re
from collections.abc import Sequence

from mlx_parallm.text.parsers.call_blocks import Quoting
from mlx_parallm.text.parsers.calls import Tool, ToolCall
from mlx_parallm.text.parsers.notation import Notation
from mlx_parallm.text.parsers.values import literal, string_end, tool_call


class _Incomplete(Exception):
    """The text ends inside a value."""


_DEEPEST = 100  # levels of a value; no tool has more


class GemmaReader:
    """`call:name{key:value}` with strings between marks of their own, which differ between Gemma's generations."""

    def __init__(self, quote: str) -> None:
        self.quote = quote

    def read(self, text: str, cut_off: bool, tools: Sequence[Tool]) -> list[ToolCall] | None:
        calls: list[ToolCall] = []
        at = 0
        while opening := _GEMMA_CALL.search(text, at):
            arguments: dict[str, object] = {}
            try:
                at = _GemmaText(text, self.quote).read_object(opening.end(), arguments, 0)
            except ValueError:
                return None
            except _Incomplete:
                if not cut_off:
                    return None
                calls.append(tool_call(opening["name"], arguments, complete=False))
                break
            calls.append(tool_call(opening["name"], arguments))
        return calls or None


_GEMMA_CALL = re.compile(r"call:(?P<name>[\w.:/-]{1,128})\{")
_GEMMA_KEY = re.compile(r"\s*(?:\"([^\"]*)\"|([^\s:,{}\[\]\"]+))\s*:\s*")
_GEMMA_BARE = re.compile(r"[^,{}\[\]]*")
_COLON = re.compile(r"\s*:\s*")
_SPACE = re.compile(r"\s*")


class _GemmaText:
    """Reads values at a place in the text; each method returns the place after what it has read."""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote

    def read_object(self, at: int, into: dict[str, object], depth: int) -> int:
        """The members of an object whose brace is open. They are put in as soon as they are complete."""
        at = self._skip_space(at)
        while self._text[at] != "}":
            key, at = self._read_key(at)
            value, at = self._read_value(at, depth + 1)
            into[key] = value
            at = self._skip_space(at)
            at = self._skip_space(at + 1) if self._text[at] == "," else at
        return at + 1

    def _read_list(self, at: int, depth: int) -> tuple[list[object], int]:
        items: list[object] = []
        at = self._skip_space(at)
        while self._text[at] != "]":
            before = at
            value, at = self._read_value(at, depth + 1)
            if at == before:
                raise ValueError("an item is missing")
            items.append(value)
            at = self._skip_space(at)
            at = self._skip_space(at + 1) if self._text[at] == "," else at
        return items, at + 1

    def _read_key(self, at: int) -> tuple[str, int]:
        if self._text.startswith(self._quote, at):
            key, at = self._read_string(at)
            colon = _COLON.match(self._text, at)
            if colon is None:
                raise _Incomplete
            return key, colon.end()
        found = _GEMMA_KEY.match(self._text, at)
        if found is None:
            if ":" in self._text[at:]:
                raise ValueError("a key is missing")
            raise _Incomplete
        return found[1] or found[2], self._skip_space(found.end())

    def _read_value(self, at: int, depth: int) -> tuple[object, int]:
        if depth > _DEEPEST:
            raise ValueError("too many levels")
        at = self._skip_space(at)
        if self._text.startswith(self._quote, at):
            return self._read_string(at)
        char = self._text[at]
        if char == "{":
            members: dict[str, object] = {}
            return members, self.read_object(at + 1, members, depth)
        if char == "[":
            return self._read_list(at + 1, depth)
        if char == '"':
            return self._read_json_string(at)
        bare = _GEMMA_BARE.match(self._text, at)
        assert bare is not None
        if bare.end() == len(self._text):
            raise _Incomplete
        if self._text[bare.end()] in "{[":
            raise ValueError("a bracket within a value")
        return literal(bare[0].strip()), bare.end()

    def _read_string(self, at: int) -> tuple[str, int]:
        start = at + len(self._quote)
        end = self._text.find(self._quote, start)
        if end < 0:
            raise _Incomplete
        return self._text[start:end], end + len(self._quote)

    def _read_json_string(self, at: int) -> tuple[object, int]:
        end = string_end(self._text, at + 1, '"')
        try:
            return json.loads(self._text[at:end], strict=False), end
        except ValueError:
            raise _Incomplete if end == len(self._text) else ValueError from None

    def _skip_space(self, at: int) -> int:
        space = _SPACE.match(self._text, at)
        assert space is not None
        if space.end() == len(self._text):
            raise _Incomplete
        return space.end()


def _notation(quote: str) -> Notation:
    return Notation(read=GemmaReader(quote).read, quoting=Quoting(((quote, quote),)))


NOTATIONS = {"function_gemma": _notation("<escape>"), "gemma4": _notation('<|"|>')}
