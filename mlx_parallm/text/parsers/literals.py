"""Tool calls written as Python calls, and as Gemma's `call:name{key:value}`."""

import ast
import json
import re
from collections.abc import Sequence

from mlx_parallm.text.parsers.calls import Tool, ToolCall
from mlx_parallm.text.parsers.values import literal, parse_python, python_value, tool_call


def read_python(text: str, cut_off: bool, tools: Sequence[Tool]) -> list[ToolCall] | None:
    """`[f(a=1), g(b="x")]`, or a single call without the list; `f.call(…)` calls `f`, as Llama's built-in tools do."""
    text = text.strip()
    if not text.startswith("["):
        text = f"[{text}]" if not cut_off else f"[{text}"
    unfinished = False
    if cut_off:
        text, unfinished = _closed(text)
    parsed = parse_python(text)
    if not isinstance(parsed, ast.List) or not parsed.elts:
        return None
    names = {tool["function"]["name"] for tool in tools}
    try:
        found = [_python_call(node, names) for node in parsed.elts]
    except (ValueError, RecursionError):
        return None
    last = len(found) - 1
    return [
        tool_call(name, arguments, complete=not unfinished or index < last)
        for index, (name, arguments) in enumerate(found)
    ]


_PUNCTUATION = re.compile(r"""["'()\[\]{},]""")


def _closed(text: str) -> tuple[str, bool]:
    """A list that is cut off, closed after its last complete argument, and whether that leaves a call unfinished."""
    keep, depth, at = 0, 0, 0
    while mark := _PUNCTUATION.search(text, at):
        at = mark.end()
        if mark[0] in "\"'":
            at = _string_end(text, at, mark[0])
            continue
        depth += 1 if mark[0] in "([{" else -1 if mark[0] in ")]}" else 0
        if depth == 0:
            return text[:at], False
        if (mark[0] == "(" and depth == 2) or (mark[0] == ")" and depth == 1):
            keep = at
        elif mark[0] == "," and depth == 2:
            keep = mark.start()
    unfinished = depth > 1
    return f"{text[:keep]}{')' if unfinished else ''}]", unfinished


_STRING_PART = re.compile(r"""\\.|["']""", re.DOTALL)


def _string_end(text: str, at: int, quote: str) -> int:
    while part := _STRING_PART.search(text, at):
        at = part.end()
        if part[0] == quote:
            return at
    return len(text)


def _python_call(node: ast.expr, names: set[str]) -> tuple[str, dict[str, object]]:
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ValueError("a call has a name, and so have its arguments")
    name = ast.unparse(node.func)
    base = name.removesuffix(".call")
    if name not in names and base in names:
        name = base
    arguments: dict[str, object] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("arguments have names")
        arguments[keyword.arg] = python_value(keyword.value)
    return name, arguments


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
        end = _string_end(self._text, at + 1, '"')
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
