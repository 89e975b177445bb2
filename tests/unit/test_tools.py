"""A chat model's text falls into reasoning, content and tool calls, however it is cut."""

import json
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools, mistral, pythonic, qwen3_coder

from mlx_parallm.engine.tools import CallDelta, ChatParser, Piece, Thinking, ToolFormat
from tests.unit.vocabularies import byte_level

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
THINKING = Thinking("<think>", "</think>")
OURS = ToolFormat("<tool_call>", "</tool_call>", native=False)


def native(parser: Any) -> ToolFormat:
    return ToolFormat(parser.tool_call_start, parser.tool_call_end, native=True, parse=parser.parse_tool_call)


def run(parser: ChatParser, text: str, size: int) -> Piece:
    """All that comes out, the deltas of each call put together."""
    whole = Piece()
    for part in [*(parser.push(text[at : at + size]) for at in range(0, len(text), size)), parser.finish()]:
        whole.content += part.content
        whole.reasoning += part.reasoning
        whole.calls += part.calls
    return whole


def joined(piece: Piece) -> list[tuple[str, Any]]:
    found: list[list[str]] = []
    for delta in piece.calls:
        if delta.name is not None:
            assert delta.index == len(found)
            assert delta.id
            found.append([delta.name, ""])
        found[delta.index][1] += delta.arguments
    return [(name, json.loads(arguments)) for name, arguments in found]


def block(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(params=[1, 3, 1000])
def size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=[True, False], ids=["streaming", "whole"])
def streaming(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_plain_text_passes_at_once() -> None:
    assert ChatParser().push("any <tool_call> text") == Piece("any <tool_call> text")


def test_parallel_calls_with_text_around(size: int, streaming: bool) -> None:
    nested = {"a": 1, "b": {"text": 'br{ace "quoted\\" ]', "list": [1, [2]]}}
    text = f"Let me see.\n\n{block('add', nested)}\n{block('add', {})}\n"
    piece = run(ChatParser(tool_format=OURS, tools=TOOLS, streaming=streaming), text, size)
    assert joined(piece) == [("add", nested), ("add", {})]
    assert piece.content == "Let me see."


def test_arguments_are_streamed_while_they_are_written() -> None:
    parser = ChatParser(tool_format=OURS, tools=TOOLS)
    parser.push('<tool_call>\n{"name": "add", ')
    opening = parser.push('"arguments": {"a"').calls
    assert [(delta.name, delta.arguments) for delta in opening] == [("add", ""), (None, '{"a"')]
    assert parser.push(": 1").calls == (CallDelta(0, arguments=": 1"),)
    assert parser.push("}").calls == (CallDelta(0, arguments="}"),)
    assert parser.push("}\n</tool_call>").calls == ()


def test_keys_in_another_order(size: int, streaming: bool) -> None:
    text = '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>'
    assert joined(run(ChatParser(tool_format=OURS, tools=TOOLS, streaming=streaming), text, size)) == [
        ("add", {"a": 1})
    ]


@pytest.mark.parametrize(
    "body", ["no json", '{"name": 5, "arguments": {}}', '{"arguments": {}}', "[]", "{", "", "null"]
)
def test_malformed_calls_are_content(body: str, size: int, streaming: bool) -> None:
    text = f"<tool_call>{body}</tool_call>"
    piece = run(ChatParser(tool_format=OURS, tools=TOOLS, streaming=streaming), text, size)
    assert (piece.content, piece.calls) == (text, ())


def test_a_call_cut_short(size: int) -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1'
    piece = run(ChatParser(tool_format=OURS, tools=TOOLS), text, size)
    assert "".join(delta.arguments for delta in piece.calls) == '{"a": 1'
    piece = run(ChatParser(tool_format=OURS, tools=TOOLS, streaming=False), text, size)
    assert (piece.content, piece.calls) == (text, ())


def test_a_call_without_its_end(size: int, streaming: bool) -> None:
    text = block("add", {"a": 1}).removesuffix("\n</tool_call>")
    assert joined(run(ChatParser(tool_format=OURS, tools=TOOLS, streaming=streaming), text, size)) == [
        ("add", {"a": 1})
    ]


def test_without_parallel_calls_the_first_is_the_last(size: int, streaming: bool) -> None:
    parser = ChatParser(tool_format=OURS, tools=TOOLS, parallel=False, streaming=streaming)
    piece = run(parser, f"{block('add', {'a': 1})}\n{block('add', {})} and more", size)
    assert joined(piece) == [("add", {"a": 1})]
    assert piece.content == ""
    assert parser.finished


@pytest.mark.parametrize(
    ("parser", "text", "expected"),
    [
        (json_tools, block("add", {"a": 1}), [("add", {"a": 1})]),
        (
            qwen3_coder,
            "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>",
            [("add", {"a": 3})],
        ),
        (qwen3_coder, block("add", {"a": 1}), [("add", {"a": 1})]),
        (
            pythonic,
            '<|tool_call_start|>[add(a=1), add(b="x")]<|tool_call_end|>',
            [("add", {"a": 1}), ("add", {"b": "x"})],
        ),
        (mistral, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', [("add", {"a": 1})]),
        (mistral, '[TOOL_CALLS]add[ARGS]{"a": 1}', [("add", {"a": 1})]),
    ],
)
def test_mlx_lm_formats(parser: Any, text: str, expected: list[Any], size: int, streaming: bool) -> None:
    piece = run(ChatParser(tool_format=native(parser), tools=TOOLS, streaming=streaming), text, size)
    assert joined(piece) == expected
    assert piece.content == ""


def test_reasoning_then_content(size: int) -> None:
    piece = run(ChatParser(thinking=THINKING), "<think>\nhm, </thin\n</think>\n\nThe answer.", size)
    assert (piece.reasoning, piece.content) == ("hm, </thin\n", "The answer.")


def test_reasoning_that_the_prompt_opened(size: int) -> None:
    parser = ChatParser(thinking=THINKING, inside_thinking=True)
    assert parser.state == "reasoning"
    piece = run(parser, "\nhm</think>yes", size)
    assert (piece.reasoning, piece.content) == ("hm", "yes")


@pytest.mark.parametrize("text", ["No thoughts.", "<thi is no mark", "  spaces", "late <think> mark"])
def test_no_reasoning(text: str, size: int) -> None:
    piece = run(ChatParser(thinking=THINKING), text, size)
    assert (piece.reasoning, piece.content) == ("", text)


def test_reasoning_without_end(size: int) -> None:
    piece = run(ChatParser(thinking=THINKING), "<think>endless", size)
    assert (piece.reasoning, piece.content) == ("endless", "")


def test_reasoning_then_a_call(size: int, streaming: bool) -> None:
    text = f"<think>\nI must add.</think>\n\n{block('add', {'a': 1})}"
    parser = ChatParser(thinking=THINKING, tool_format=OURS, tools=TOOLS, streaming=streaming)
    piece = run(parser, text, size)
    assert joined(piece) == [("add", {"a": 1})]
    assert (piece.reasoning, piece.content) == ("I must add.", "")
    straight = run(ChatParser(thinking=THINKING, tool_format=OURS, tools=TOOLS), f"<think>x{block('add', {})}", size)
    assert (straight.reasoning, joined(straight)) == ("x", [("add", {})])


def test_marks_of_the_format_are_dropped(size: int) -> None:
    parser = ChatParser(drop=["<|open|>response<|sep|>", "<|close|>"])
    assert run(parser, "<|open|>response<|sep|>hello <|close|>", size).content == "hello "


def test_format_of_a_tokenizer() -> None:
    plain = byte_level()
    assert ToolFormat.of(plain) == OURS
    assert Thinking.of(plain) is None
    own = TokenizerWrapper(
        byte_level(["<think>", "</think>"])._tokenizer,
        tool_call_start="[TOOL_CALLS]",
        tool_call_end="",
        tool_parser=mistral.parse_tool_call,
    )
    assert ToolFormat.of(own) == native(mistral)
    assert Thinking.of(own) == THINKING
