"""A chat model's text falls into reasoning, content and tool calls, however it is cut."""

import importlib
import json
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools, mistral, pythonic, qwen3_coder

from mlx_parallm.server.generation.choices import ChoiceStream, Collected
from mlx_parallm.text.detokenize import TextStream, Vocabulary
from mlx_parallm.text.parsers import harmony
from mlx_parallm.text.parsers.calls import CallDelta, Piece
from mlx_parallm.text.parsers.chat_parser import ChatParser, Parser, Thinking, chat_parser
from mlx_parallm.text.parsers.formats.deepseek import MARKS as DEEPSEEK_MARKS
from mlx_parallm.text.parsers.tool_format import ToolFormat
from mlx_parallm.types import Delta
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


def run(parser: Parser, text: str, size: int, *, cut_off: bool = False) -> Piece:
    """All that comes out, the deltas of each call put together."""
    whole = Piece()
    parts = [parser.push(text[at : at + size]) for at in range(0, len(text), size)]
    for part in [*parts, parser.finish(cut_off=cut_off)]:
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


def test_plain_text_passes_at_once() -> None:
    assert ChatParser().push("any <tool_call> text") == Piece("any <tool_call> text")


def test_parallel_calls_with_text_around(size: int) -> None:
    nested = {"a": 1, "b": {"text": 'br{ace "quoted\\" ]', "list": [1, [2]]}}
    text = f"Let me see.\n\n{block('add', nested)}\n{block('add', {})}\n"
    piece = run(ChatParser(tool_format=OURS, tools=TOOLS), text, size)
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


def test_keys_in_another_order(size: int) -> None:
    text = '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>'
    assert joined(run(ChatParser(tool_format=OURS, tools=TOOLS), text, size)) == [("add", {"a": 1})]


@pytest.mark.parametrize(
    "body",
    [
        "no json",
        '{"name": 5, "arguments": {}}',
        '{"arguments": {}}',
        "[]",
        "{",
        "",
        "null",
        'X{"name": "add", "arguments": {}}',
    ],
)
def test_malformed_calls_are_content(body: str, size: int) -> None:
    text = f"<tool_call>{body}</tool_call>"
    piece = run(ChatParser(tool_format=OURS, tools=TOOLS), text, size)
    assert (piece.content, piece.calls) == (text, ())


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1', ['{"a": 1']),
        ('<tool_call>\n{"name": "add", "arg', [""]),
        ('<tool_call>\n{"name": "ad', []),
        ("<tool_call>", []),
        ("<tool_c", []),
        (f"{block('add', {})}\n<tool_call>{{", ["{}"]),
        (f"{block('add', {})}\n<tool_", ["{}"]),
    ],
)
def test_a_call_cut_off_leaves_no_markup(text: str, arguments: list[str], size: int) -> None:
    piece = run(ChatParser(tool_format=OURS, tools=TOOLS), f"So: {text}", size, cut_off=True)
    written = [""] * sum(delta.name is not None for delta in piece.calls)
    for delta in piece.calls:
        written[delta.index] += delta.arguments
    assert (piece.content, written) == ("So:", arguments)


def test_malformed_arguments_are_passed_on(size: int) -> None:
    """Their call has been announced already when they turn out to be malformed."""
    text = '<tool_call>{"name": "add", "arguments": {"a": oops</tool_call>\n' + block("add", {})
    piece = run(ChatParser(tool_format=OURS, tools=TOOLS), text, size)
    assert [delta.name for delta in piece.calls if delta.name] == ["add", "add"]
    assert "".join(delta.arguments for delta in piece.calls) == '{"a": oops{}'
    assert piece.content == ""


def test_a_quote_that_is_not_escaped_does_not_hide_the_next_call(size: int) -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": "say "hi"}}\n</tool_call>\n' + block("add", {})
    piece = run(ChatParser(tool_format=OURS, tools=TOOLS), text, size)
    assert [delta.name for delta in piece.calls if delta.name] == ["add", "add"]


def test_a_malformed_block_beside_a_call_is_left_out(size: int) -> None:
    text = f"{block('add', {})}\n<tool_call>no json</tool_call>\nDone."
    piece = run(ChatParser(tool_format=OURS, tools=TOOLS), text, size)
    assert (joined(piece), piece.content) == ([("add", {})], "Done.")


def test_a_mark_in_prose_stays(size: int) -> None:
    text = "The  <tool_call> tag\n begins a call."
    assert run(ChatParser(tool_format=OURS, tools=TOOLS), text, size).content == text


@pytest.mark.parametrize("templates_own", [False, True])
def test_a_call_without_its_end(templates_own: bool, size: int) -> None:
    text = block("add", {"a": 1}).removesuffix("\n</tool_call>")
    tool_format = native(json_tools) if templates_own else OURS
    assert joined(run(ChatParser(tool_format=tool_format, tools=TOOLS), text, size)) == [("add", {"a": 1})]


def test_without_parallel_calls_the_first_is_the_last(size: int) -> None:
    parser = ChatParser(tool_format=OURS, tools=TOOLS, parallel=False)
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
def test_mlx_lm_formats(parser: Any, text: str, expected: list[Any], size: int) -> None:
    piece = run(ChatParser(tool_format=native(parser), tools=TOOLS), text, size)
    assert joined(piece) == expected
    assert piece.content == ""


def test_a_format_that_only_mlx_lm_knows_is_read_by_its_parser(size: int) -> None:
    def parse(text: str, tools: list[Any]) -> Any:
        assert tools == TOOLS
        if text == "two":
            return [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {}}]
        return {"half": [{"name": "add"}, {}], "none": [], "one": {"name": "add", "arguments": {"b": 2}}}[text]

    tool_format = ToolFormat("<c>", "</c>", native=True, parse=parse)
    expected = {"one": [("add", {"b": 2})], "two": [("add", {"a": 1}), ("add", {})]}
    for body in ("one", "two", "half", "none", "unknown"):
        piece = run(ChatParser(tool_format=tool_format, tools=TOOLS), f"<c>{body}</c>", size)
        assert joined(piece) == expected.get(body, [])
        assert piece.content == ("" if body in expected else f"<c>{body}</c>")
    assert run(ChatParser(tool_format=tool_format, tools=TOOLS), "<c>one", size, cut_off=True) == Piece()


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


def test_reasoning_then_a_call(size: int) -> None:
    text = f"<think>\nI must add.</think>\n\n{block('add', {'a': 1})}"
    parser = ChatParser(thinking=THINKING, tool_format=OURS, tools=TOOLS)
    piece = run(parser, text, size)
    assert joined(piece) == [("add", {"a": 1})]
    assert (piece.reasoning, piece.content) == ("I must add.", "")


def test_marks_within_reasoning_are_reasoning(size: int) -> None:
    inside = f"I could write <tool_call> or {block('add', {})}"
    text = f"<think>{inside}</think>{block('add', {'a': 1})}"
    piece = run(ChatParser(thinking=THINKING, tool_format=OURS, tools=TOOLS), text, size)
    assert (piece.reasoning, joined(piece)) == (inside, [("add", {"a": 1})])
    kept = run(ChatParser(thinking=THINKING, tool_format=OURS, tools=TOOLS, separate_reasoning=False), text, size)
    assert (kept.reasoning, kept.content, joined(kept)) == ("", f"<think>{inside}</think>", [("add", {"a": 1})])


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


LLAMA_TEMPLATE = """{% if tools %}Respond in the format {"name": function name, "parameters": …}{% endif %}"""


def test_format_of_llama() -> None:
    inner = byte_level(["<|python_tag|>"])._tokenizer
    assert ToolFormat.of(TokenizerWrapper(inner)) == OURS, "a template that shows no tools"
    inner.chat_template = LLAMA_TEMPLATE
    assert ToolFormat.of(TokenizerWrapper(inner)) == ToolFormat("<|python_tag|>", "", native=True, kind="bare")
    other = byte_level()._tokenizer
    other.chat_template = LLAMA_TEMPLATE
    assert ToolFormat.of(TokenizerWrapper(other)) == ToolFormat("", "", native=True, kind="bare")
    fourth = byte_level(["<|python_start|>", "<|python_end|>"])._tokenizer
    fourth.chat_template = LLAMA_TEMPLATE
    assert ToolFormat.of(TokenizerWrapper(fourth)).start == "<|python_start|>"


@pytest.mark.parametrize(
    ("template", "special", "marks"),
    [
        ("{{ tools }} <|python_tag|>", ["<|python_tag|>"], ("<|python_tag|>", "")),
        ("{{ tools }} <|python_start|>", ["<|python_start|>"], ("<|python_start|>", "<|python_end|>")),
        (LLAMA_TEMPLATE.replace('"', '\\"'), [], ("", "")),
        ("{{ tools }}", ["<|python_tag|>", "<|python_start|>"], None),
        ("{{ tools }} <|python_tag|> <|python_start|>", [], None),
        ("{{ toolset }} <|python_tag|>", ["<|python_tag|>"], None),
    ],
)
def test_marks_of_llama(template: str, special: list[str], marks: tuple[str, str] | None) -> None:
    inner = byte_level(special)._tokenizer
    inner.chat_template = template
    expected = OURS if marks is None else ToolFormat(*marks, native=True, kind="bare")
    assert ToolFormat.of(TokenizerWrapper(inner)) == expected


LLAMA = ToolFormat("<|python_tag|>", "", native=True, kind="bare")


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "other", "parameters": {}}',
        '{"name": "add", "age": 5}',
        '{"name": "add"}',
        '{"answer": {"name": "add", "parameters": {}}}',
        'It is {"name": "add", "parameters": {}}.',
        "[1, 2]",
        "[add, 2]",
        "[add(1)]",
        '["name"]',
        '  {"na',
        "{",
    ],
)
def test_json_that_calls_no_tool_is_content(text: str, size: int) -> None:
    piece = run(ChatParser(tool_format=LLAMA, tools=TOOLS), text, size)
    assert (piece.content, piece.calls) == (text, ())


def test_a_bare_call_of_a_tool_that_nobody_offered_is_left_out(size: int) -> None:
    text = '{"name": "add", "parameters": {}}; {"name": "other", "parameters": {}}'
    piece = run(ChatParser(tool_format=LLAMA, tools=TOOLS), text, size)
    assert (joined(piece), piece.content) == ([("add", {})], "")


def test_bare_python_calls_may_hold_brackets_in_strings(size: int) -> None:
    piece = run(ChatParser(tool_format=LLAMA, tools=TOOLS), '[add(a="]", b=2), add(b=1)] done', size)
    assert (joined(piece), piece.content) == ([("add", {"a": "]", "b": 2}), ("add", {"b": 1})], "done")


def test_marks_of_llama_between_bare_calls_are_no_content(size: int) -> None:
    text = '<|python_tag|>{"name": "add", "parameters": {}}<|eom_id|>{"name": "add", "parameters": {"a": 1}}'
    piece = run(ChatParser(tool_format=LLAMA, tools=TOOLS), text, size)
    assert (joined(piece), piece.content) == ([("add", {}), ("add", {"a": 1})], "")


def test_text_after_a_bare_call(size: int) -> None:
    text = '{"name": "add", "parameters": {"a": 1}}\n\nI have added. {"name": "add", "parameters": {}}'
    piece = run(ChatParser(tool_format=LLAMA, tools=TOOLS), text, size)
    assert joined(piece) == [("add", {"a": 1})]
    assert piece.content == 'I have added. {"name": "add", "parameters": {}}'


HARMONY = byte_level(list(harmony.MARKS))


def harmony_choice(text: str, reason: str, **options: Any) -> tuple[ChoiceStream, Collected]:
    """Tokens through the text stream and the parser, as the server does it."""
    tool_format = ToolFormat.of(HARMONY)
    assert tool_format.kind == "harmony"
    parser = chat_parser(tool_format, thinking=Thinking.of(HARMONY), **options)
    visible = HARMONY.convert_tokens_to_ids(list(tool_format.marks))
    choice = ChoiceStream(0, 0, TextStream(Vocabulary(HARMONY), visible=visible, trim=True), parser)
    collected = Collected()
    for token in HARMONY.encode(text):
        if news := choice.take(Delta("id", 0, [token])):
            collected.add(news)
    if news := choice.take(Delta("id", 0, [], finish_reason=reason)):  # type: ignore[arg-type]
        collected.add(news)
    return choice, collected


def test_special_tokens_of_harmony_are_read_and_not_shown() -> None:
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
    )
    choice, collected = harmony_choice(text, "stop", tools=TOOLS)
    assert ("".join(collected.reasoning), "".join(collected.content)) == ("hm", "One moment.")
    assert [(call.name, call.arguments) for call in collected.calls] == [("add", '{"a": 1}')]
    assert (choice.finish_reason, choice.reasoning_tokens) == ("tool_calls", 3)
    choice, collected = harmony_choice(text.removesuffix("1}"), "length", tools=TOOLS)
    assert [(call.name, call.arguments) for call in collected.calls] == [("add", '{"a": ')]
    assert choice.finish_reason == "length"


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<|channel|>final<|message|>Hi.<|return|>", "", "Hi."),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b", "a", "b"),
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "a", "b"),
        ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", "1 + 1", ""),
        ("<|channel|>commentary to=functions.add<|message|>{}<|call|>", "{}", ""),  # there are no tools
        ("<|channel|>commentary<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b", "", "a\n\nb"),
        ("<|channel|>final<|message|>a<|end|><|start|>user<|message|>b", "", "a"),
        ("plain text", "", "plain text"),
        ("<|channel|>fin", "", ""),
    ],
)
def test_harmony_without_tools(text: str, reasoning: str, content: str) -> None:
    _, collected = harmony_choice(text, "stop")
    assert ("".join(collected.reasoning), "".join(collected.content)) == (reasoning, content)
    _, collected = harmony_choice(text, "stop", separate_reasoning=False)
    assert "".join(collected.content) == "\n\n".join(filter(None, [reasoning, content]))


def test_harmony_that_the_prompt_has_begun() -> None:
    text = "hm<|end|><|start|>assistant<|channel|>final<|message|>yes"
    choice, collected = harmony_choice(text, "stop", inside_thinking=True)
    assert ("".join(collected.reasoning), "".join(collected.content)) == ("hm", "yes")
    assert choice.reasoning_tokens == 3


DEEPSEEK_TOKENS = [*DEEPSEEK_MARKS, "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"]


def deepseek(template: str | None, special: list[str]) -> ToolFormat:
    inner = byte_level(special)._tokenizer
    inner.chat_template = template
    return ToolFormat.of(TokenizerWrapper(inner))


def test_format_of_deepseek() -> None:
    """By its marks; its own templates show no tools, so a request's are spelled out for it."""
    own = "{{ '<｜tool▁calls▁begin｜>' + message['tool_calls'] }}"
    assert deepseek(own, []) == deepseek(None, DEEPSEEK_TOKENS) == ToolFormat(*DEEPSEEK_MARKS, native=False)
    assert deepseek("{{ tools }}", DEEPSEEK_TOKENS) == ToolFormat(*DEEPSEEK_MARKS, native=True)


@pytest.mark.parametrize("fence", ["", "\n```json\n"], ids=["V3.1", "V3"])
def test_special_tokens_of_deepseek_are_read_and_not_shown(fence: str) -> None:
    tokenizer = byte_level([*DEEPSEEK_TOKENS, "<think>", "</think>"])
    tool_format, thinking = ToolFormat.of(tokenizer), Thinking.of(tokenizer)
    assert thinking == THINKING
    head = "function<｜tool▁sep｜>add\n```json\n" if fence else "add<｜tool▁sep｜>"
    call = f'<｜tool▁call▁begin｜>{head}{{"a": 1}}{"```" if fence else ""}<｜tool▁call▁end｜>'
    text = f"hm</think>Yes.{DEEPSEEK_MARKS[0]}{call}{call}{DEEPSEEK_MARKS[1]}"
    visible = tokenizer.convert_tokens_to_ids([*tool_format.marks, "<think>", "</think>"])
    parser = chat_parser(tool_format, thinking=thinking, inside_thinking=True, tools=TOOLS)
    choice = ChoiceStream(0, 0, TextStream(Vocabulary(tokenizer), visible=visible, trim=True), parser)
    collected = Collected()
    for delta in (Delta("id", 0, tokenizer.encode(text)), Delta("id", 0, [], finish_reason="stop")):
        if news := choice.take(delta):
            collected.add(news)
    assert ("".join(collected.reasoning), "".join(collected.content)) == ("hm", "Yes.")
    assert [(one.name, one.arguments) for one in collected.calls] == [("add", '{"a": 1}')] * 2
    assert choice.finish_reason == "tool_calls"


@pytest.mark.long
def test_long_calls_take_linear_time() -> None:
    """One character at a time; with work that grows by the square, this would take minutes."""
    long = "x{" * 20_000
    texts = {
        OURS: [
            f'<tool_call>{{"name": "add", "arguments": {{"a": "{long}"}}}}</tool_call>',
            f'<tool_call>{{"arguments": {{"a": "{long}',
            f"<tool_call>{long}",
            "<tool_call>" + " " * len(long),
            "\n" * len(long),
        ],
        native(qwen3_coder): [f"<tool_call><function=add><parameter=a>{long}</parameter></function></tool_call>"],
        native(mistral): [f'[TOOL_CALLS]add[ARGS]{{"a": "{long}"}}'],
        LLAMA: [f'{{"name": "add", "parameters": {{"a": "{long}"}}}}', " " * len(long)],
    }
    for tool_format, cases in texts.items():
        for text in cases:
            parser = ChatParser(thinking=THINKING, tool_format=tool_format, tools=TOOLS)
            pieces = [*map(parser.push, text), parser.finish()]
            size = sum(len(piece.content) + sum(len(delta.arguments) for delta in piece.calls) for piece in pieces)
            assert size >= len(long)


def test_text_that_needs_no_parser_has_none() -> None:
    assert chat_parser(OURS, thinking=None) is None
    assert chat_parser(OURS, thinking=THINKING, separate_reasoning=False) is None
    assert chat_parser(OURS, thinking=THINKING) is not None
    assert chat_parser(OURS, thinking=None, drop=["<|end|>"]) is not None
    assert chat_parser(OURS, thinking=None, tools=TOOLS) is not None


def test_without_tools_no_call_is_looked_for(size: int) -> None:
    parser = chat_parser(OURS, thinking=THINKING)
    assert parser is not None
    assert run(parser, f"a {block('add', {})}", size).content == f"a {block('add', {})}"
    whole = chat_parser(OURS, thinking=THINKING, tools=TOOLS, separate_reasoning=False)
    assert whole is not None
    assert run(whole, "<think>a</think>b", size) == Piece("<think>a</think>b")


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("\n\n  a</think>\n\n  b", "  a", "b"),
        ("\n", "", ""),
        ("a</think>\n ", "a", ""),
        ("a</think> \n<|end|>\n b", "a", "b"),
        ("a</think>b<|end|> c", "a", "b c"),
        ("a</think>\n\n<tool", "a", "<tool"),
        ("\n\n</thi", "</thi", ""),
    ],
)
def test_space_around_reasoning_and_before_content_is_left_out(
    text: str, reasoning: str, content: str, size: int
) -> None:
    parser = ChatParser(thinking=THINKING, inside_thinking=True, tool_format=OURS, tools=TOOLS, drop=["<|end|>"])
    piece = run(parser, text, size)
    assert (piece.reasoning, piece.content.rstrip()) == (reasoning, content)


def test_a_bare_call_behind_a_block_of_calls(size: int) -> None:
    marked = ToolFormat("<|python_start|>", "<|python_end|>", native=True, kind="bare")
    bare = '{"name": "add", "parameters": {"a": 2}}'
    piece = run(ChatParser(tool_format=marked, tools=TOOLS), f"<|python_start|>[add(a=1)]<|python_end|>\n{bare}", size)
    assert joined(piece) == [("add", {"a": 1}), ("add", {"a": 2})]
    wrong = f"<|python_start|>nothing<|python_end|>{bare}"
    assert run(ChatParser(tool_format=marked, tools=TOOLS), wrong, size) == Piece(wrong)


@pytest.mark.parametrize(
    ("name", "text", "identity"),
    [
        ("mistral", '[TOOL_CALLS]add[CALL_ID]abc123[ARGS]{"a": 1}', "abc123"),
        (
            "kimi_k2",
            '<|tool_calls_section_begin|>functions.add:7<|tool_call_argument_begin|>{"a": 1}<|tool_calls_section_end|>',
            "functions.add:7",
        ),
    ],
)
def test_a_call_keeps_the_id_that_the_model_gave_it(name: str, text: str, identity: str, size: int) -> None:
    parser = native(importlib.import_module(f"mlx_lm.tool_parsers.{name}"))
    piece = run(ChatParser(tool_format=parser, tools=TOOLS), text, size)
    assert joined(piece) == [("add", {"a": 1})]
    assert piece.calls[0].id == identity


def test_a_variant_that_only_mlx_lm_knows_is_read_by_its_parser(size: int) -> None:
    asked: list[str] = []

    def parse(text: str, tools: object) -> dict[str, object]:
        asked.append(text)
        return {"name": text.strip(), "arguments": {"a": 1}}

    parse.__module__ = "mlx_lm.tool_parsers.qwen3_coder"
    variant = ToolFormat("<call>", "</call>", native=True, parse=parse)

    def read(body: str, cut_off: bool = False) -> Piece:
        text = f"<call>{body}" if cut_off else f"<call>{body}</call>"
        return run(ChatParser(tool_format=variant, tools=TOOLS), text, size, cut_off=cut_off)

    assert joined(read("add")) == [("add", {"a": 1})]
    assert read("subtract") == Piece("<call>subtract</call>"), "a tool that nobody offered"
    asked.clear()
    long = "add" + " " * 4000
    assert read(long).calls == ()
    assert read("add", cut_off=True).calls == ()
    assert asked == [], "too long for patterns of quadratic time, or not whole"
