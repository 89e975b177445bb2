"""Arguments that models write as text: what a value means by its schema, and calls that are not JSON."""

import json
from typing import Any

import pytest

from mlx_parallm.text.parsers.call_blocks import (
    JSON_QUOTES,
    NAME,
    NO_QUOTES,
    PYTHON_QUOTES,
    Head,
    JsonBlock,
    Quoting,
    Scanner,
    TextBlock,
)
from mlx_parallm.text.parsers.calls import Calls, Piece, ToolCall
from mlx_parallm.text.parsers.formats.gemma import GemmaReader
from mlx_parallm.text.parsers.formats.glm import GLM, argument_pairs
from mlx_parallm.text.parsers.formats.kimi import KIMI_K3
from mlx_parallm.text.parsers.formats.minicpm import MINICPM
from mlx_parallm.text.parsers.formats.minimax import MINIMAX
from mlx_parallm.text.parsers.formats.muse import MUSE
from mlx_parallm.text.parsers.formats.pythonic import read_python
from mlx_parallm.text.parsers.formats.qwen import QWEN, lines
from mlx_parallm.text.parsers.tags import tags
from mlx_parallm.text.parsers.values import ANY, TEXT, literal, parameters_of, tool_call, typed, types_of

TOOLS = [
    {"type": "function", "function": {"name": "bare"}},
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"properties": {"s": {"type": "string"}, "i": {"type": "integer"}, "o": {"type": "object"}}},
        },
    },
    {"type": "function", "function": {"name": "odd", "parameters": {"properties": []}}},
]


def test_schemas_of_a_tools_parameters() -> None:
    assert parameters_of([{"type": "function"}, *TOOLS], "f")["i"] == {"type": "integer"}
    for name in ("bare", "odd", "nobody"):
        assert parameters_of(TOOLS, name) == {}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        (None, set()),
        ("string", set()),
        ({}, set()),
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"type": 5}, set()),
        ({"enum": ["a", "b"]}, {"string"}),
        ({"enum": [1, None]}, {"integer", "null"}),
        ({"enum": [1.5, True]}, {"number", "boolean"}),
        ({"enum": [[], {}]}, {"array", "object"}),
        ({"enum": "a"}, set()),
        ({"type": "string", "enum": [1]}, {"string"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"oneOf": [{"type": "array"}]}, {"array"}),
        ({"allOf": [{"anyOf": [{"type": "boolean"}]}, {}]}, {"boolean"}),
        ({"anyOf": "string"}, set()),
        ({"type": "integer", "oneOf": [{"type": "null"}]}, {"integer", "null"}),
    ],
)
def test_types_that_a_schema_names(schema: object, types: set[str]) -> None:
    assert types_of(schema) == types


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-2.5", -2.5),
        ('"a"', "a"),
        ('"a\nb"', "a\nb"),
        ("[1, {}]", [1, {}]),
        ("null", None),
        ("None", None),
        ("True", True),
        ("true", True),
        ("'it'", "it"),
        (" 'it' ", "it"),
        ("(1, 2)", [1, 2]),
        ("{'a': [true, null, false]}", {"a": [True, None, False]}),
        ("-3", -3),
        ("{'a': -1.5}", {"a": -1.5}),
        ("plain text", "plain text"),
        ("plain", "plain"),
        ("NaN", "NaN"),
        ("Infinity", "Infinity"),
        ("{1: 2}", "{1: 2}"),
        ("{**x}", "{**x}"),
        ("1 + 1", "1 + 1"),
        ("+1", "+1"),
        ("-'a'", "-'a'"),
        ("b'x'", "b'x'"),
        ("...", "..."),
        ("1j", "1j"),
        ("f(1)", "f(1)"),
        ("", ""),
        ("[" * 2000, "[" * 2000),
        ("'\\d'", "\\d"),
    ],
)
def test_values_in_json_and_in_python(text: str, value: object) -> None:
    found = literal(text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "schema", "undeclared", "value"),
    [
        ("5", {"type": "string"}, ANY, "5"),
        ("5", None, TEXT, "5"),
        ("5", None, ANY, 5),
        ("5", {"type": "integer"}, TEXT, 5),
        ("5.0", {"type": "integer"}, TEXT, 5),
        ("5.5", {"type": "integer"}, TEXT, "5.5"),
        ("5.0", {"type": ["integer", "number"]}, TEXT, 5.0),
        ("5.0", {"type": "number"}, TEXT, 5.0),
        ("5", {"type": "number"}, TEXT, 5),
        ("five", {"type": "integer"}, TEXT, "five"),
        ("true", {"type": "boolean"}, TEXT, True),
        ("1", {"type": "boolean"}, TEXT, "1"),
        ("null", {"type": "null"}, TEXT, None),
        ("[1]", {"type": "array"}, TEXT, [1]),
        ("{}", {"type": "array"}, TEXT, "{}"),
        ('{"a": 1}', {"type": "object"}, TEXT, {"a": 1}),
        ("x", {}, TEXT, "x"),
        ("1", {}, TEXT, 1),
    ],
)
def test_a_value_is_what_its_schema_allows(
    text: str, schema: object, undeclared: frozenset[str], value: object
) -> None:
    found = typed(text, schema, undeclared)
    assert (found, type(found)) == (value, type(value))


def test_arguments_that_are_incomplete_are_left_open() -> None:
    assert tool_call("f", {"a": "é"}) == ToolCall("f", '{"a": "é"}')
    assert tool_call("f", {"a": 1}, complete=False) == ToolCall("f", '{"a": 1')
    assert tool_call("f", {}, complete=False) == ToolCall("f", "{")


@pytest.mark.parametrize(
    ("entry", "call"),
    [
        ({"name": "f", "arguments": {"a": "é"}}, ToolCall("f", '{"a": "é"}')),
        ({"name": "f", "parameters": {"a": 1}}, ToolCall("f", '{"a": 1}')),
        ({"name": "f", "arguments": "{}", "id": "x"}, ToolCall("f", "{}", "x")),
        ({"name": "f", "id": 5}, ToolCall("f", "{}")),
        ({"name": "f", "arguments": None}, ToolCall("f", "{}")),
        ({"name": "f", "arguments": [1]}, ToolCall("f", "[1]")),
        ({"name": ""}, None),
        ({"name": 5}, None),
        ({}, None),
        ([], None),
        ("f", None),
    ],
)
def test_a_call_from_an_object(entry: object, call: ToolCall | None) -> None:
    assert ToolCall.from_entry(entry) == call


def test_calls_are_numbered_and_taken_once() -> None:
    calls = Calls()
    calls.add(ToolCall("f", '{"a": 1}', "own"))
    calls.open("g")
    calls.write("")
    first, arguments, second = calls.take()
    assert (first.index, first.id, first.name, first.arguments) == (0, "own", "f", "")
    assert (arguments.index, arguments.id, arguments.name, arguments.arguments) == (0, None, None, '{"a": 1}')
    assert (second.index, second.name, len(second.id or ""), (second.id or "")[:5]) == (1, "g", 29, "call_")
    assert (calls.take(), calls.count) == ((), 2)
    calls.write("{}")
    assert [delta.index for delta in calls.take()] == [1]


def test_only_the_first_call_counts_where_one_is_allowed() -> None:
    calls = Calls(parallel=False)
    calls.add(ToolCall("f", "{}"))
    calls.add(ToolCall("g", "{}"))
    assert ([delta.name for delta in calls.take() if delta.name], calls.count) == (["f"], 1)


def test_a_piece_says_whether_there_is_anything_in_it() -> None:
    calls = Calls()
    calls.open("f")
    assert not Piece()
    assert all([Piece("a"), Piece(reasoning="a"), Piece(calls=calls.take())])


def values(calls: list[ToolCall] | None) -> list[tuple[str, Any]] | None:
    return None if calls is None else [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[f(s='a', i=1), g()]", [("f", {"s": "a", "i": 1}), ("g", {})]),
        ("f(s='a')", [("f", {"s": "a"})]),
        ("f(s='a'), g()", [("f", {"s": "a"}), ("g", {})]),
        ("  [f()] ", [("f", {})]),
        ("[f.call(i=1)]", [("f", {"i": 1})]),
        ("[other.call(i=1)]", [("other.call", {"i": 1})]),
        ("[a.b(i=1)]", [("a.b", {"i": 1})]),
        ("[]", None),
        ("", None),
        ("[f(1)]", None),
        ("[f(**x)]", None),
        ("[f(a=g())]", None),
        ("[f()()]", None),
        ("[1]", None),
        ("[f(", None),
        ("f", None),
    ],
)
def test_python_calls(text: str, expected: list[tuple[str, Any]] | None) -> None:
    assert values(read_python(text, False, TOOLS)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[f(s='a', i=1", [("f", '{"s": "a"')]),
        ("[f(s='a',", [("f", '{"s": "a"')]),
        ("[f(s='a, (\\'", [("f", "{")]),
        ("[f(", [("f", "{")]),
        ("f(s='a', i=[1, {", [("f", '{"s": "a"')]),
        ("[f(s='a')", [("f", '{"s": "a"}')]),
        ("[f(s='a'), g(i", [("f", '{"s": "a"}'), ("g", "{")]),
        ("[f(o={'a': (1, 2)}, s=\"]", [("f", '{"o": {"a": [1, 2]}')]),
        ("[f(s='a')] and more [", [("f", '{"s": "a"}')]),
        ("[f", None),
        ("[", None),
        ("", None),
    ],
)
def test_python_calls_that_are_cut_off(text: str, expected: list[tuple[str, str]] | None) -> None:
    found = read_python(text, True, TOOLS)
    assert (None if found is None else [(call.name, call.arguments) for call in found]) == expected


GEMMA = GemmaReader("<q>")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("call:f{}", [("f", {})]),
        ("call:f{a:1,b:<q>x,}<q>}", [("f", {"a": 1, "b": "x,}"})]),
        ("call:f{ a : 1 , b : [ 1 , <q>y<q> , {c:true} ] , }", [("f", {"a": 1, "b": [1, "y", {"c": True}]})]),
        ("call:f{<q>a b<q>:1}", [("f", {"a b": 1})]),
        ('call:f{"a":"x\\"}y"}', [("f", {"a": 'x"}y'})]),
        ("call:f{a:[]}", [("f", {"a": []})]),
        ("call:f{a:plain text}", [("f", {"a": "plain text"})]),
        ("call:f{a:}", [("f", {"a": ""})]),
        ("call:f{a:1} call:g{b:2}", [("f", {"a": 1}), ("g", {"b": 2})]),
        ("call:a.b/c-d:e{}", [("a.b/c-d:e", {})]),
        ("call:f{a:{b:{c:null}}}", [("f", {"a": {"b": {"c": None}}})]),
        ("call:f{:1}", None),
        ("call:f{a:[,]}", None),
        ("call:f{a:x{y}", None),
        ("call:f{a:x[y}", None),
        ("call:f{a:1", None),
        ("call:f{<q>a<q>}", None),
        ('call:f{a:"\\x"}', None),
        ("nothing", None),
        ("", None),
        ("call:f{a:" + "[" * 99 + "1" + "]" * 99 + "}", [("f", {"a": eval("[" * 99 + "1" + "]" * 99)})]),
        ("call:f{a:" + "[" * 101 + "1" + "]" * 101 + "}", None),
    ],
)
def test_gemma_calls(text: str, expected: list[tuple[str, Any]] | None) -> None:
    assert values(GEMMA.read(text, False, TOOLS)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("call:f{", [("f", "{")]),
        ("call:f{a", [("f", "{")]),
        ("call:f{a:1", [("f", "{")]),
        ("call:f{a:1,", [("f", '{"a": 1')]),
        ("call:f{a:1,b:<q>x", [("f", '{"a": 1')]),
        ("call:f{a:1,<q>b<q>", [("f", '{"a": 1')]),
        ('call:f{a:1,b:"x', [("f", '{"a": 1')]),
        ("call:f{a:[1,", [("f", "{")]),
        ("call:f{a:1}call:g{b:2,c", [("f", '{"a": 1}'), ("g", '{"b": 2')]),
        ("call:f{a:1}call:g", [("f", '{"a": 1}')]),
        ("call:f", None),
        ("call:f{:1", None),
    ],
)
def test_gemma_calls_that_are_cut_off(text: str, expected: list[tuple[str, str]] | None) -> None:
    found = GEMMA.read(text, True, TOOLS)
    assert (None if found is None else [(call.name, call.arguments) for call in found]) == expected


MUSE_CALL = '<atem:invoke name="f"><atem:parameter name='


@pytest.mark.parametrize(
    ("tags", "text", "expected"),
    [
        (QWEN, "<function=f>\n<parameter=i>\n5\n</parameter>\n</function>", [("f", {"i": 5})]),
        (QWEN, "<function=f>\n<parameter=s>\n\n5\n\n</parameter>\n</function>", [("f", {"s": "\n5\n"})]),
        (QWEN, "<function=f><parameter=x>5</parameter></function>", [("f", {"x": "5"})]),
        (QWEN, "<function=f><parameter=i>5</function><function=g></function>", [("f", {"i": 5}), ("g", {})]),
        (QWEN, "<function=f><parameter=i>5", [("f", {"i": 5})]),
        (QWEN, "<function=f><parameter=i>5</parameter>", [("f", {"i": 5})]),
        (QWEN, "no call", None),
        (GLM, "f\n<arg_key>x</arg_key>\n<arg_value> 5 </arg_value>", [("f", {"x": 5})]),
        (GLM, "f<arg_key>s</arg_key><arg_value>5</arg_value>", [("f", {"s": "5"})]),
        (GLM, "f", [("f", {})]),
        (GLM, "two words", None),
        (MINIMAX, '<invoke name="f"><parameter name="o">{"a": 1}</parameter></invoke>', [("f", {"o": {"a": 1}})]),
        (MINIMAX, "<invoke name=f><parameter name='x'> y </parameter></invoke>", [("f", {"x": "y"})]),
        (MINICPM, '"f"><param name="s"><![CDATA[ </param> ]]></param>', [("f", {"s": " </param> "})]),
        (MINICPM, '"f"><param name="s"> <![CDATA[x]]> </param>', [("f", {"s": "x"})]),
        (MINICPM, '"f"><param name="s"><![CDATA[x</param>', [("f", {"s": "<![CDATA[x</param>"})]),
        (MUSE, MUSE_CALL + '"x">"q"</atem:parameter></atem:invoke>', [("f", {"x": "q"})]),
        (MUSE, MUSE_CALL + '"i">5</atem:parameter></atem:invoke>', [("f", {"i": 5})]),
        (MUSE, MUSE_CALL + '"s">5</atem:parameter></atem:invoke>', [("f", {"s": "5"})]),
        (MUSE, MUSE_CALL + '"i">"5"</atem:parameter></atem:invoke>', [("f", {"i": "5"})]),
        (
            KIMI_K3,
            '<|open|>call tool="f"<|sep|><|open|>argument key="x" type="string"<|sep|>5<|close|>argument<|sep|>',
            [("f", {"x": "5"})],
        ),
        (
            KIMI_K3,
            (
                '<|open|>call tool="f"<|sep|><|open|>argument key="x" type="number"<|sep|>5<|close|>argument<|sep|>'
                '<|open|>argument key="y"<|sep|>5<|close|>argument<|sep|><|close|>call<|sep|>'
            ),
            [("f", {"x": 5, "y": "5"})],
        ),
        (
            KIMI_K3,
            '<|open|>call tool="f"<|sep|><|open|>json type="object"<|sep|>[5]<|close|>json<|sep|><|close|>call<|sep|>',
            [("f", {"": [5]})],
        ),
    ],
)
def test_calls_with_tags(tags: Any, text: str, expected: list[tuple[str, Any]] | None) -> None:
    assert values(tags.read(text, False, TOOLS)) == expected


@pytest.mark.parametrize(
    ("tags", "text", "expected"),
    [
        (QWEN, "<function=f>\n<parameter=i>\n5", [("f", "{")]),
        (QWEN, "<function=f>\n<parameter=i>\n5\n</parameter>\n<par", [("f", '{"i": 5')]),
        (QWEN, "<function=f>\n<parameter=i>5</parameter></function>\n<function=g", [("f", '{"i": 5}')]),
        (QWEN, "<function=f>\n<parameter=i>5</parameter></function>\n<function=g>", [("f", '{"i": 5}'), ("g", "{")]),
        (QWEN, "<function=f\n", None),
        (GLM, "f", None),
        (GLM, "f\n<arg_key>x", [("f", "{")]),
        (GLM, "f\n<arg_key>x</arg_key><arg_value>5", [("f", "{")]),
        (GLM, "f\n<arg_key>x</arg_key><arg_value>5</arg_value>", [("f", '{"x": 5')]),
        (MINICPM, '"f"><param name="s"><![CDATA[x</param>', [("f", "{")]),
    ],
)
def test_calls_with_tags_that_are_cut_off(tags: Any, text: str, expected: list[tuple[str, str]] | None) -> None:
    found = tags.read(text, True, TOOLS)
    assert (None if found is None else [(call.name, call.arguments) for call in found]) == expected


def test_what_json_can_t_hold_stays_text() -> None:
    for number in ("1e999", "-1e999", "[1e999]", "{'a': 1e999}", "NaN"):
        assert literal(number) == number
    assert literal("{'a': 1.5}") == {"a": 1.5}
    assert read_python("[f(i=1e999)]", False, TOOLS) is None


def test_half_of_a_surrogate_pair_stays_escaped() -> None:
    """No answer could be encoded with it."""
    half = r'{"a": "é \ud800"}'
    (call,) = QWEN.read(f"<function=f><parameter=o>{half}</parameter></function>", False, TOOLS) or []
    assert call.arguments == r'{"o": {"a": "\u00e9 \ud800"}}'
    assert ToolCall.from_entry({"name": "f", "arguments": {"a": "\ud800"}}) == ToolCall("f", r'{"a": "\ud800"}')


def test_tags_are_made_of_patterns() -> None:
    glm = argument_pairs("")
    longcat = argument_pairs("longcat_")
    text = "f\n<arg_key>x</arg_key>\n<arg_value> 5 </arg_value><arg_key>y</arg_key><arg_value>6"
    assert values(glm.read(text, False, TOOLS)) == [("f", {"x": 5, "y": 6})]
    assert values(longcat.read(text.replace("arg_", "longcat_arg_"), False, TOOLS)) == [("f", {"x": 5, "y": 6})]
    assert (glm.several, glm.call_end, glm.cdata) == (False, "", False)
    made = tags(r"<(?P<name>\w+)!>", r"<p (?P<key>\w+)>", "</c.>", "</p>", lines, cdata=True)
    text = "<f!><p i>\n5\n</p><p s>\n<![CDATA[</p>]]></p></c.><g!><p x>6</c.>"
    assert values(made.read(text, False, TOOLS)) == [("f", {"i": 5, "s": "<![CDATA[</p>]]>"}), ("g", {"x": "6"})]
    assert (made.several, made.cdata, made.call_end) == (True, True, "</c.>")


def test_a_reader_of_gemma_s_strings_has_its_own_quotes() -> None:
    assert values(GemmaReader("%%").read("call:f{a:%%x}%%,b:<q>}", False, TOOLS)) == [("f", {"a": "x}", "b": "<q>"})]
    assert values(GemmaReader("%%").read('call:f{a:"",b:"a\nb"}', False, TOOLS)) == [("f", {"a": "", "b": "a\nb"})]
    assert GemmaReader("%%").read('call:f{a:"\\x",b:1', True, TOOLS) is None
    assert GemmaReader("%%").read("call:f{b:1,a", False, TOOLS) is None


CALL_G = '{"name": "g", "arguments": {}}'
Found = tuple[list[tuple[str, str]], str | None, str | None]


def block_of(text: str, size: int = 1, end: str = "<e>", **options: Any) -> Found:
    """The calls of a block, the text after it, and what is malformed, however the text is cut."""
    calls = Calls()
    block = JsonBlock(calls, end, **options)
    rest: str | None = None
    for at in range(0, len(text), size):
        rest = block.push(text[at : at + size])
        if rest is not None:
            rest += text[at + size :]
            break
    found: list[tuple[str, str]] = []
    for delta in calls.take():
        if delta.name is not None:
            found.append((delta.name, ""))
        name, written = found[delta.index]
        found[delta.index] = name, written + delta.arguments
    return found, rest, block.unread()


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("text", "calls", "rest", "unread"),
    [
        ('{"name": "f", "arguments": {"a": 1}}<e>x', [("f", '{"a": 1}')], "x", None),
        ('{"name": "f", "arguments": {"a": "<e>}"}}<e>', [("f", '{"a": "<e>}"}')], "", None),
        ('{"type": "function", "name": "f", "parameters": {}}<e>', [("f", "{}")], "", None),
        ('{"name": "f", "arguments": {}, "id": {"x": "}"}}' + CALL_G + "<e>", [("f", "{}"), ("g", "{}")], "", None),
        ('{"name": "f", "arguments": {}, "id": {"x"<e>y', [("f", "{}")], "y", None),
        ('{"name": "f", "arguments": {}<e>y', [("f", "{}")], "y", None),
        ('{"name": "f", "arguments": {} {"name": "g", "arguments": {}}<e>', [("f", "{}"), ("g", "{}")], "", None),
        ('[{"name": "f", "arguments": {}},; {"name": "g", "arguments": {}}]<e>', [("f", "{}"), ("g", "{}")], "", None),
        ('{"arguments": {"a": [1]}, "name": "f"}<e>', [("f", '{"a": [1]}')], "", None),
        ('{"arguments": {}, "name": "f"} {"arguments": {}, "name": "g"}<e>', [("f", "{}"), ("g", "{}")], "", None),
        ('{"x": 1}<e>y', [], "y", '{"x": 1}<e>'),
        ('{"x": 1<e>y', [], "y", '{"x": 1<e>'),
        ("junk <f> <e>y", [], "y", "junk <f> <e>"),
        ('{"name": "f", "arguments": {}} junk <e>y', [("f", "{}")], "y", None),
        ('{"x": 1}{"name": "f", "arguments": {}}<e>y', [], "y", '{"x": 1}{"name": "f", "arguments": {}}<e>'),
        ('{"name": "f", "arguments": {}}{"x": 1}' + CALL_G + "<e>", [("f", "{}"), ("g", "{}")], "", None),
        ("<e>y", [], "y", "<e>"),
    ],
)  # fmt: skip
def test_blocks_of_json(
    text: str, calls: list[tuple[str, str]], rest: str | None, unread: str | None, size: int
) -> None:
    assert block_of(text, size) == (calls, rest, unread)


def test_a_head_is_a_name_and_then_the_arguments() -> None:
    head = Head(rf"{NAME}!")
    assert not head.nested
    assert head.name.match("f! {x")["name"] == "f"
    assert head.whole.match("f! {x").end() == 4
    assert head.whole.match("f! ", partial=True).partial
    wrapped = Head(rf"\({NAME},", r"\s{0,4}\{", nested=True)
    text = 'f!{"a": 1};g! {"b": {}} <e>rest'
    assert block_of(text, heads=[head]) == ([("f", '{"a": 1}'), ("g", '{"b": {}}')], "rest", None)
    assert block_of('(f, {"a": 1}}(g,{}}<e>', heads=[wrapped]) == ([("f", '{"a": 1}'), ("g", "{}")], "", None)


def test_without_an_end_mark_a_block_ends_where_no_call_begins() -> None:
    text = '{"name": "f", "arguments": {}} and more'
    assert block_of(text, 1000, end="") == ([("f", "{}")], "and more", None)
    known = block_of('{"name": "g", "arguments": {}}', 1000, end="", names={"f"})
    assert known[0] == []


@pytest.mark.parametrize(
    ("quoting", "text", "found"),
    [
        (NO_QUOTES, 'a "<e>', (3, "end")),
        (JSON_QUOTES, '{"<e>": [1]} <e>', (12, "closed")),
        (JSON_QUOTES, '"<e>" <e>', (6, "end")),
        (JSON_QUOTES, '"a\\"<e>"<e>', (8, "end")),
        (JSON_QUOTES, '"a\n<e>', (3, "end")),
        (JSON_QUOTES, "'<e>", (1, "end")),
        (PYTHON_QUOTES, "'<e>' \"<e>\" (x)", (15, "closed")),
        (Quoting((("<<", ">>"),)), "<<\n<e>>> <e>", (9, "end")),
        (JSON_QUOTES, "a <", (2, None)),
        (JSON_QUOTES, '"a\\', (2, None)),
        (JSON_QUOTES, "]", (1, "closed")),
        (NO_QUOTES, "abc", (3, None)),
    ],
)
def test_what_a_scanner_finds(quoting: Quoting, text: str, found: tuple[int, str | None]) -> None:
    scanner = Scanner(quoting, ("<e>",))
    assert scanner.scan(text) == found
    assert scanner.mark == ("<e>" if found[1] == "end" else "")
    nested = Scanner(JSON_QUOTES, (), depth=1)
    assert nested.scan("{}}") == (3, "closed")


def test_a_block_of_text_is_read_at_its_end() -> None:
    def read(text: str, cut_off: bool) -> list[ToolCall] | None:
        return [ToolCall(text.strip(), "{}")] if "f" in text else None

    calls = Calls()
    block = TextBlock(calls, "<e>", read)
    assert (block.push(" f <"), calls.take(), block.push("e>x"), block.unread()) == (None, (), "x", None)
    assert [delta.name for delta in calls.take()] == ["f", None]
    malformed = TextBlock(calls, "<e>", read)
    assert (malformed.push("g<e>x"), malformed.unread()) == ("x", "g<e>")
    open_end = TextBlock(calls, "<e>", read)
    open_end.push("g<")
    assert (open_end.finish(True), open_end.finish(False)) == (None, "g<")
    bracketed = TextBlock(calls, "", read, PYTHON_QUOTES)
    assert (bracketed.push("[f(x='[')"), bracketed.push("] more")) == (None, " more")
