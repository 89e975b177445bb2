"""gpt-oss's messages: what each header means, where an answer ends, and what is left of one that is cut off."""

from typing import Any

import pytest

from mlx_parallm.text.parsers import harmony
from mlx_parallm.text.parsers.chat_parser import Thinking
from mlx_parallm.text.parsers.harmony import HarmonyParser, is_harmony
from mlx_parallm.text.parsers.tool_format import ToolFormat
from tests.unit.vocabularies import byte_level

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
Result = tuple[str, str, list[tuple[str, str]]]  # reasoning, content, calls


def read(text: str, size: int = 1000, *, cut_off: bool | None = None, **options: Any) -> Result:
    parser = HarmonyParser(**{"tools": TOOLS, **options})
    pieces = [parser.push(text[at : at + size]) for at in range(0, len(text), size)]
    pieces.append(parser.finish() if cut_off is None else parser.finish(cut_off=cut_off))
    calls: list[tuple[str, str]] = []
    for delta in (delta for piece in pieces for delta in piece.calls):
        if delta.name is not None:
            calls.append((delta.name, ""))
        name, arguments = calls[delta.index]
        calls[delta.index] = name, arguments + delta.arguments
    assert parser.calls == len(calls)
    assert parser.push("<|start|>assistant") is not None
    return "".join(piece.reasoning for piece in pieces), "".join(piece.content for piece in pieces), calls


CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
NEXT = "<|start|>assistant"


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>final<|message|>a <b|> c<|return|>", ("", "a <b|> c", [])),
        ("<|channel|>analysis<|message|>a<|end|>", ("a", "", [])),
        (f"<|channel|>analysis<|message|>a<|end|>{NEXT}<|channel|>analysis<|message|>b", ("a\n\nb", "", [])),
        (f"<|channel|>final<|message|>a<|end|>{NEXT}<|channel|>final<|message|>b", ("", "a\n\nb", [])),
        (f"<|channel|>final<|message|><|end|>{NEXT}<|channel|>final<|message|>b", ("", "b", [])),
        ("<|channel|>final<|message|>a<|message|>b<|constrain|>c", ("", "abc", [])),
        ("<|channel|>final<|message|>a<|channel|>analysis<|message|>b", ("b", "a", [])),
        ("<|channel|>final<|message|>a<|end|>ignored<|call|>too<|return|>and<|start|>assistant", ("", "a", [])),
        ("<|channel|>final<|message|>a<|start|>user<|message|>b<|end|><|start|>assistant<|message|>c", ("", "a", [])),
        ("<|message|>a", ("", "a", [])),
        ("<|channel|>other<|message|>a", ("", "a", [])),
        (f'{CALL}{{"a": 1}}<|call|>', ("", "", [("f", '{"a": 1}')])),
        (f'{CALL} {{"a": "<|call|>"}} junk<|call|>', ("", "", [("f", '{"a": "<|call|>"}')])),
        (f'{CALL}{{"a": 1}}', ("", "", [("f", '{"a": 1}')])),
        (f"{CALL}plain <|call|>{NEXT}{CALL}{{}}", ("", "", [("f", "plain "), ("f", "{}")])),
        (f'{CALL}say "hi<|call|>', ("", "", [("f", 'say "hi')])),
        ("<|channel|>commentary to=g<|message|>{}", ("", "", [("g", "{}")])),
        ("<|channel|>commentary to=browser.search<|message|>{}", ("{}", "", [])),
        ("<|channel|>commentary to=functions.<|message|>{}", ("{}", "", [])),
        ("<|channel|>commentary to=functions.made_up<|message|>{}", ("", "", [("made_up", "{}")])),
        ("to=functions.f<|channel|>commentary<|message|>{}", ("", "", [("f", "{}")])),
        ("  plain text", ("", "  plain text", [])),
        ("   ", ("", "   ", [])),
        ("<|chan", ("", "<|chan", [])),
        ("t", ("", "t", [])),
        ("today", ("", "today", [])),
    ],
)
def test_what_messages_mean(text: str, expected: Result, size: int) -> None:
    assert read(text, size) == expected
    assert read(text, size, cut_off=False) == expected


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>final<|message|>a<|en", ("", "a", [])),
        ("<|channel|>analysis<|message|>a<", ("a", "", [])),
        ("<|channel|>commentary to=functions.f", ("", "", [])),
        ("<|channel|>commentary to=functions.f ", ("", "", [("f", "")])),
        ("<|channel|>commentary to=functions.f<|constr", ("", "", [("f", "")])),
        ("<|channel|>commentary to=browser ", ("", "", [])),
        (f'{CALL}{{"a": 1', ("", "", [("f", '{"a": 1')])),
        (f'{CALL}{{"a": 1}}<|ca', ("", "", [("f", '{"a": 1}')])),
        (f"{CALL}x<|ca", ("", "", [("f", "x")])),
        ("<|chan", ("", "", [])),
        ("plain <|", ("", "plain ", [])),
        ("x" * 2, ("", "xx", [])),
        ("<|channel|>" + "x" * 1200 + " to=functions.f ", ("", "", [])),
    ],
)
def test_what_is_left_of_messages_that_are_cut_off(text: str, expected: Result, size: int) -> None:
    assert read(text, size, cut_off=True) == expected


def test_at_the_end_of_an_answer_that_was_not_cut_off_beginnings_of_marks_are_text() -> None:
    assert read("<|channel|>final<|message|>a<|en") == ("", "a<|en", [])
    assert read(f"{CALL}x<|ca") == ("", "", [("f", "x<|ca")])
    assert read("<|channel|>commentary to=functions.f ") == ("", "", [])


def test_without_tools_nothing_is_a_call_and_reasoning_may_stay_in_the_content() -> None:
    assert read(f"{CALL}{{}}", tools=()) == ("{}", "", [])
    text = f"<|channel|>analysis<|message|>a<|end|>{NEXT}<|channel|>final<|message|>b"
    assert read(text, separate_reasoning=False) == ("", "a\n\nb", [])
    assert read(f"a<|end|>{NEXT}<|channel|>final<|message|>b", inside_thinking=True) == ("a", "b", [])


def test_the_first_call_is_the_last_without_parallel_calls() -> None:
    text = f'{CALL}{{"a": 1}}<|call|>{NEXT}{CALL}{{}}<|call|>'
    assert read(text) == ("", "", [("f", '{"a": 1}'), ("f", "{}")])
    assert read(text, 1, parallel=False) == ("", "", [("f", '{"a": 1}')])


def test_states_on_the_way() -> None:
    parser = HarmonyParser(tools=TOOLS)
    states = [(parser.state, parser.finished)]
    called = (f"{NEXT}{CALL}", "{}<|call|>", "<|start|>user", "<|message|>")
    parts = ("<|channel|>", "analysis<|message|>", "a<|end|>", *called)
    for part in parts:
        parser.push(part)
        states.append((parser.state, parser.finished))
    assert [state for state, _ in states] == ["start", "content", "reasoning", *["content"] * 5]
    assert [finished for _, finished in states] == [False] * 7 + [True]
    assert HarmonyParser(inside_thinking=True).state == "reasoning"
    single = HarmonyParser(tools=TOOLS, parallel=False)
    single.push(f"{CALL}{{")
    assert not single.finished, "its arguments are being written"
    single.push("}<|call|>")
    assert single.finished


def test_harmony_is_known_by_its_tokens() -> None:
    tokens = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"]
    assert is_harmony(byte_level(tokens))
    for missing in tokens:
        assert not is_harmony(byte_level([token for token in tokens if token != missing]))
    tokenizer = byte_level(tokens)
    found = ToolFormat.of(tokenizer)
    assert found == ToolFormat("<|channel|>", "<|call|>", native=True, kind="harmony")
    assert found.marks == harmony.MARKS
    assert Thinking.of(tokenizer) == Thinking("<|channel|>analysis<|message|>", "<|end|>")
    assert harmony.call_header("f") == CALL
