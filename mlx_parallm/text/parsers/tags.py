"""Tool calls written with tags around each parameter, as in XML: one reader for all models that write so."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlx_parallm.text.parsers.calls import Tool, ToolCall
from mlx_parallm.text.parsers.values import TEXT, parameters_of, tool_call, typed

# From a parameter's text, the tag before it and its schema to the value.
Value = Callable[[str, "re.Match[str]", object], object]


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of one notation. All patterns are bounded: nothing is matched twice over a long text."""

    call: "re.Pattern[str]"  # opens a call, with its `name`
    next: "re.Pattern[str]"  # opens a parameter, with its `key`, or closes the call, with a group `end`
    value_end: "re.Pattern[str]"
    value: Value
    call_end: str = ""
    several: bool = True  # False: the block is one call and ends with it
    cdata: bool = False  # values may stand between <![CDATA[ and ]]>

    def read(self, text: str, cut_off: bool, tools: Sequence[Tool]) -> list[ToolCall] | None:
        calls: list[ToolCall] = []
        at = 0
        while opening := self.call.search(text, at):
            if cut_off and opening.end() == len(text) and not opening[0].endswith(">"):
                break  # its name may be incomplete
            call, at = self._read_call(text, opening, cut_off, tools)
            calls.append(call)
            if not self.several:
                break
        return calls or None

    def _read_call(
        self, text: str, opening: "re.Match[str]", cut_off: bool, tools: Sequence[Tool]
    ) -> tuple[ToolCall, int]:
        name = opening["name"]
        at = opening.end()
        schemas = parameters_of(tools, name)
        arguments: dict[str, object] = {}
        while (tag := self.next.search(text, at)) and not tag["end"]:
            end, at = self._value_span(text, tag.end())
            if at < 0 and cut_off:
                return tool_call(name, arguments, complete=False), len(text)
            at = max(at, end)
            key = tag["key"] or ""
            value = self.value(text[tag.end() : end], tag, schemas.get(key))
            arguments |= value if not key and isinstance(value, dict) else {key: value}
        complete = tag is not None or not cut_off
        return tool_call(name, arguments, complete=complete), tag.end() if tag is not None else len(text)

    def _value_span(self, text: str, at: int) -> tuple[int, int]:
        """Finds where a value and its closing tag end; -1 for a tag that is missing: the value ends with the call."""
        if closing := self.value_end.search(text, self._inside(text, at)):
            return closing.span()
        end = text.find(self.call_end, at) if self.call_end else -1
        return (end if end >= 0 else len(text)), -1

    def _inside(self, text: str, at: int) -> int:
        """Returns where to begin looking for the end of a value."""
        if not self.cdata or not text[at : at + 64].lstrip().startswith(CDATA[0]):
            return at
        end = text.find(CDATA[1], at)
        return end if end >= 0 else len(text)


CDATA = ("<![CDATA[", "]]>")


def stripped_text(raw: str, tag: "re.Match[str]", schema: object) -> object:
    return typed(_without_cdata(raw), schema, TEXT)


def _without_cdata(raw: str) -> str:
    text = raw.strip()
    if text.startswith(CDATA[0]) and text.endswith(CDATA[1]):
        return text[len(CDATA[0]) : -len(CDATA[1])]
    return text


def tags(call: str, parameter: str, call_end: str, value_end: str, value: Value, **options: bool) -> Tags:
    end = re.escape(call_end) if call_end else "(?!)"
    following = re.compile(f"{parameter}|(?P<end>{end})")
    return Tags(re.compile(call), following, re.compile(value_end), value, call_end, **options)


NAME = r"[\w.:/-]{1,128}"
QUOTED = rf"""["']?(?P<name>{NAME})["']?"""
QUOTED_KEY = r"""["']?(?P<key>[^"'<>]{1,256})["']?"""
