"""Golden transcripts of every format: what they mean is the same however the text is cut, and no markup leaks."""

import importlib
import json
import os
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any

import mlx_lm.tool_parsers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.text.parsers.calls import Piece
from mlx_parallm.text.parsers.chat_parser import Parser, Thinking, chat_parser
from mlx_parallm.text.parsers.formats.deepseek import MARKS as DEEPSEEK_MARKS
from mlx_parallm.text.parsers.tool_format import ToolFormat
from tests.golden.tool_transcripts import FORMATS, TOOLS, Format, Transcript

Result = tuple[str, str, list[tuple[str, str]]]  # reasoning, content, names and arguments of calls

SPECIAL = {
    "ours": ToolFormat("<tool_call>", "</tool_call>", native=False),
    "deepseek": ToolFormat(*DEEPSEEK_MARKS, native=True),
    "llama": ToolFormat("<|python_tag|>", "", native=True, kind="bare"),
    "llama4": ToolFormat("<|python_start|>", "<|python_end|>", native=True, kind="bare"),
    "harmony": ToolFormat("<|channel|>", "<|call|>", native=True, kind="harmony"),
}
HURRIED = "MUTANT_UNDER_TEST" in os.environ  # `make mutate` runs these thousands of times
CASES = [
    pytest.param(form, transcript, id=f"{form.parser}-{transcript.title}")
    for form in FORMATS
    for transcript in form.transcripts
]


def tool_format(name: str) -> ToolFormat:
    if name in SPECIAL:
        return SPECIAL[name]
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    return ToolFormat(module.tool_call_start, module.tool_call_end, native=True, parse=module.parse_tool_call)


def make(form: Format, **options: Any) -> Parser:
    thinking = Thinking(*form.thinking) if form.thinking else None
    parser = chat_parser(tool_format(form.parser), thinking=thinking, tools=TOOLS, drop=form.drop, **options)
    assert parser is not None
    return parser


def read(parser: Parser, parts: Iterable[str], *, cut_off: bool = False) -> Result:
    content, reasoning, calls = "", "", list[tuple[str, str]]()
    pieces: list[Piece] = [parser.push(part) for part in parts]
    for piece in [*pieces, parser.finish(cut_off=cut_off)]:
        content += piece.content
        reasoning += piece.reasoning
        for delta in piece.calls:
            if delta.name is not None:
                assert delta.id
                assert delta.index == len(calls)
                calls.append((delta.name, ""))
            name, arguments = calls[delta.index]
            calls[delta.index] = name, arguments + delta.arguments
    assert parser.calls == len(calls)
    return reasoning, content, calls


def meaning(result: Result) -> tuple[str, str, list[tuple[str, Any]]]:
    reasoning, content, calls = result
    return reasoning, content, [(name, json.loads(arguments)) for name, arguments in calls]


def test_every_parser_of_mlx_lm_has_transcripts() -> None:
    known = {module.name for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)}
    assert known - {form.parser for form in FORMATS} <= {"laguna"}, "Laguna's is GLM's under another name"


@pytest.mark.parametrize(("form", "transcript"), CASES)
def test_whole(form: Format, transcript: Transcript) -> None:
    found = meaning(read(make(form), [transcript.text]))
    assert found == (transcript.reasoning, transcript.content, list(transcript.calls))


@pytest.mark.parametrize("form", [form for form in FORMATS if form.parser not in SPECIAL], ids=lambda form: form.parser)
def test_a_simple_call_is_what_mlx_lm_reads(form: Format) -> None:
    own = tool_format(form.parser)
    assert own.parse is not None
    transcript = form.transcripts[0]
    found = own.parse(transcript.text.removeprefix(own.start).removesuffix(own.end), TOOLS)
    call = found[0] if isinstance(found, list) else found
    assert [(call["name"], call["arguments"])] == list(transcript.calls)


@pytest.mark.parametrize(("form", "transcript"), CASES)
def test_cut_in_two_anywhere(form: Format, transcript: Transcript) -> None:
    text = transcript.text
    whole = read(make(form), [text])
    for at in range(1, len(text)):
        assert read(make(form), [text[:at], text[at:]]) == whole


@pytest.mark.parametrize(("form", "transcript"), CASES)
def test_one_character_at_a_time(form: Format, transcript: Transcript) -> None:
    assert read(make(form), transcript.text) == read(make(form), [transcript.text])


@pytest.mark.parametrize("step", [29 if HURRIED else 3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("form", "transcript"), CASES)
def test_cut_off_anywhere(form: Format, transcript: Transcript, step: int) -> None:
    """No markup in content, and calls are beginnings of those of the whole."""
    *_, expected = read(make(form), [transcript.text])
    for at in range(0, len(transcript.text), step):
        text = transcript.text[:at]
        parts = [text[start : start + 4] for start in range(0, at, 4)]
        whole = read(make(form), [text], cut_off=True)
        assert read(make(form), parts, cut_off=True) == whole, text
        reasoning, content, calls = whole
        assert transcript.reasoning.startswith(reasoning.rstrip(form.thinking[1] if form.thinking else None)), text
        assert transcript.content.startswith(content.strip()), text
        assert not any(mark in content for mark in form.markup), text
        assert len(calls) <= len(expected)
        for (name, arguments), (whole_name, whole_arguments) in zip(calls, expected, strict=False):
            assert name == whole_name, text
            assert whole_arguments.startswith(arguments), text
        assert read(make(form), parts) == read(make(form), [text]), text


@pytest.mark.parametrize(("form", "transcript"), CASES)
def test_only_the_first_without_parallel_calls(form: Format, transcript: Transcript) -> None:
    parser = make(form, parallel=False)
    *_, calls = meaning(read(parser, transcript.text))
    assert calls == list(transcript.calls[:1])


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.parser)
def test_a_call_is_reported_as_soon_as_its_name_is_cut_off(form: Format) -> None:
    """At most a few characters lie between a complete name and its report."""
    transcript = form.transcripts[0]
    (name, _), *_ = transcript.calls
    end = transcript.text.index(name) + len(name)
    reported = (read(make(form), [transcript.text[:at]], cut_off=True)[2] for at in range(end, len(transcript.text)))
    first = next(place for place, calls in enumerate(reported) if calls)
    assert first <= len("</arg_key><arg_value> <|constrain|>json<|message|>")


def pieces(form: Format) -> st.SearchStrategy[str]:
    """Texts of a format's marks and beginnings of its transcripts, in any order: much of it malformed."""
    own = tool_format(form.parser)
    texts = [transcript.text for transcript in form.transcripts]
    marks = [*own.marks, *(form.thinking or ()), *form.drop, '{"name": "', '"', "\n", "}", "[", "a <", "\\", " to=now "]
    beginnings = st.builds(lambda text, at: text[: at % len(text)], st.sampled_from(texts), st.integers(0, 400))
    ends = st.builds(lambda text, at: text[at % len(text) :], st.sampled_from(texts), st.integers(0, 400))
    return st.lists(st.sampled_from(marks) | beginnings | ends, max_size=5).map("".join)


def fuzz(form: Format) -> Callable[[], None]:
    @settings(max_examples=8 if HURRIED else 60, deadline=None, derandomize=True, database=None)
    @given(text=pieces(form), size=st.integers(1, 9), cut_off=st.booleans())
    def check(text: str, size: int, cut_off: bool) -> None:
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        assert read(make(form), parts, cut_off=cut_off) == read(make(form), [text], cut_off=cut_off)

    return check


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.parser)
def test_malformed_text_means_the_same_however_it_is_cut(form: Format) -> None:
    fuzz(form)()
