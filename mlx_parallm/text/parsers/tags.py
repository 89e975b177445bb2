"""Tool calls written with tags around each parameter, as in XML: one reader, and the tags of each model."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlx_parallm.text.parsers.calls import Tool, ToolCall
from mlx_parallm.text.parsers.values import ANY, TEXT, literal, parameters_of, tool_call, typed

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
        name, at = opening["name"], opening.end()
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
        """Where a value ends, and its closing tag; -1 for a tag that is missing: the value ends with the call then."""
        if closing := self.value_end.search(text, self._inside(text, at)):
            return closing.span()
        end = text.find(self.call_end, at) if self.call_end else -1
        return (end if end >= 0 else len(text)), -1

    def _inside(self, text: str, at: int) -> int:
        """Where to begin looking for the end of a value."""
        if not self.cdata or not text[at : at + 64].lstrip().startswith(CDATA[0]):
            return at
        end = text.find(CDATA[1], at)
        return end if end >= 0 else len(text)


CDATA = ("<![CDATA[", "]]>")


def _lines(raw: str, tag: "re.Match[str]", schema: object) -> object:
    """Qwen's: a value on lines of its own; text unless the schema says otherwise."""
    return typed(raw.removeprefix("\n").removesuffix("\n"), schema, TEXT)


def _stripped_text(raw: str, tag: "re.Match[str]", schema: object) -> object:
    return typed(_without_cdata(raw), schema, TEXT)


def _without_cdata(raw: str) -> str:
    text = raw.strip()
    if text.startswith(CDATA[0]) and text.endswith(CDATA[1]):
        return text[len(CDATA[0]) : -len(CDATA[1])]
    return text


def _stripped_value(raw: str, tag: "re.Match[str]", schema: object) -> object:
    """GLM's: without a schema, whatever value the text reads as."""
    return typed(raw.strip(), schema, ANY)


def _json_value(raw: str, tag: "re.Match[str]", schema: object) -> object:
    """Muse Spark's: JSON where it is JSON, strings among it, else text."""
    value = literal(raw.strip())
    return value if isinstance(value, str) else typed(raw.strip(), schema, ANY)


def _declared_value(raw: str, tag: "re.Match[str]", schema: object) -> object:
    """Kimi K3's: the tag says whether the value is a string; a tag without a key holds all arguments as JSON."""
    declared = _TYPE.search(tag[0])
    return raw if tag["key"] and (declared is None or declared[1] == "string") else literal(raw)


_TYPE = re.compile(r'\btype="(\w{1,32})"')


def _tags(call: str, parameter: str, call_end: str, value_end: str, value: Value, **options: bool) -> Tags:
    end = re.escape(call_end) if call_end else "(?!)"
    following = re.compile(f"{parameter}|(?P<end>{end})")
    return Tags(re.compile(call), following, re.compile(value_end), value, call_end, **options)


_NAME = r"[\w.:/-]{1,128}"
_QUOTED = rf"""["']?(?P<name>{_NAME})["']?"""
_QUOTED_KEY = r"""["']?(?P<key>[^"'<>]{1,256})["']?"""


def _argument_pairs(prefix: str) -> Tags:
    """GLM's tags, which Longcat has under names of its own: the name stands alone before them."""
    return _tags(
        rf"\A\s{{0,64}}(?P<name>{_NAME})\s{{0,64}}(?=<{prefix}arg_key>|\Z)",
        rf"<{prefix}arg_key>(?P<key>[^<]{{1,256}})</{prefix}arg_key>(?:\\n|\s){{0,64}}<{prefix}arg_value>",
        "",
        f"</{prefix}arg_value>",
        _stripped_value,
        several=False,
    )


GLM = _argument_pairs("")
LONGCAT = _argument_pairs("longcat_")
QWEN = _tags(
    rf"<function=\s{{0,8}}(?P<name>{_NAME})(?:\s{{0,8}}>|\n)",
    r"<parameter=\s{0,8}(?P<key>[^\s<>]{1,256})\s{0,8}>",
    "</function>",
    "</parameter>",
    _lines,
)
MINIMAX = _tags(
    rf"<invoke name={_QUOTED}\s{{0,8}}>",
    rf"<parameter name={_QUOTED_KEY}\s{{0,8}}>",
    "</invoke>",
    "</parameter>",
    _stripped_text,
)
MINICPM = _tags(  # its start mark ends before the name
    rf"\A\s{{0,8}}{_QUOTED}\s{{0,8}}>",
    rf"<param\s{{1,8}}name\s{{0,8}}=\s{{0,8}}{_QUOTED_KEY}\s{{0,8}}>",
    "",
    "</param>",
    _stripped_text,
    several=False,
    cdata=True,
)
MUSE = _tags(
    r'<atem:invoke\b[^<>]{0,256}?\bname="(?P<name>[^"<>]{1,128})"[^<>]{0,256}>',
    r'<atem:parameter\b[^<>]{0,256}?\bname="(?P<key>[^"<>]{1,256})"[^<>]{0,256}>',
    "</atem:invoke>",
    "</atem:parameter>",
    _json_value,
)
KIMI_K3 = _tags(
    r'<\|open\|>call\b[^<>]{0,256}?\btool="(?P<name>[^"<>]{1,128})"[^<>]{0,256}<\|sep\|>',
    r'<\|open\|>(?:argument\b[^<>]{0,256}?\bkey="(?P<key>[^"<>]{1,256})"|json\b)[^<>]{0,256}<\|sep\|>',
    "<|close|>call<|sep|>",
    r"<\|close\|>(?:argument|json)<\|sep\|>",
    _declared_value,
)
