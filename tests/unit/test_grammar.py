"""Grammars accept what they should and nothing else, token by token, and what they force is read back."""

import importlib
import json
import pkgutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx_lm.tool_parsers
import numpy as np
import pytest
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.api.openai.structural_tags import StructuralTag
from mlx_parallm.server.api.openai.structure import ResponseFormat
from mlx_parallm.text.detokenize import Vocabulary
from mlx_parallm.text.grammar import (
    GrammarCompiler,
    after_thinking,
    choice_grammar,
    either,
    in_final_channel,
    json_grammar,
    regex_grammar,
    tool_grammar,
)
from mlx_parallm.text.parsers import harmony
from mlx_parallm.text.parsers.calls import Tool
from mlx_parallm.text.parsers.chat_parser import Thinking, chat_parser
from mlx_parallm.text.parsers.formats.deepseek import MARKS as DEEPSEEK_MARKS
from mlx_parallm.text.parsers.tool_format import ToolFormat
from tests.tiny import tiny
from tests.unit.vocabularies import byte_level, word_piece

SPECIAL = ["<think>", "</think>", "[TOOL_CALLS]", *harmony.MARKS]
TOKENIZER = byte_level(SPECIAL, ["<tool_call>", "</tool_call>", "<muse>", "</muse>"])
VOCABULARY = Vocabulary(TOKENIZER)
EOS = TOKENIZER.eos_token_id
COMPILER = GrammarCompiler(TOKENIZER, len(TOKENIZER) + 7, [EOS])
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
OURS = ToolFormat("<tool_call>", "</tool_call>", native=False)
TOOLS: list[Tool] = [
    {"type": "function", "function": {"name": "add", "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {
            "name": "ref",
            "parameters": {
                "type": "object",
                "properties": {"x": {"$ref": "#/$defs/x"}},
                "required": ["x"],
                "$defs": {"x": {"enum": ["yes"]}},
            },
        },
    },
    {"type": "function", "function": {"name": "free"}},
]
CALLS = tool_grammar(TOOLS, OURS, VOCABULARY, name=None, parallel=True)


def accepts(grammar: str, text: str) -> bool:
    """Whether the grammar takes the text, and the end of it."""
    COMPILER.check(grammar, "grammar")
    matcher = COMPILER.compile(grammar).matcher()
    return all(matcher.consume_token(token) for token in TOKENIZER.encode(text)) and matcher.is_accepting()


def test_json() -> None:
    anything = json_grammar({"type": "object"})
    assert accepts(anything, '{"a": [1, {"b": null}]}')
    assert not accepts(anything, "[1]")
    assert not accepts(anything, "text")
    assert accepts(json_grammar(SCHEMA), '{\n  "a": 5\n}')
    assert not accepts(json_grammar(SCHEMA), '{"a": "5"}')
    assert not accepts(json_grammar(SCHEMA), '{"a": 5, "b": 1}')
    assert not accepts(json_grammar(SCHEMA), '{"a":' + " " * 100 + "5}")


def test_structural_tags() -> None:
    parts = [{"begin": "<f=add>", "schema": SCHEMA, "end": "</f>"}]
    old = StructuralTag.model_validate({"structures": parts, "triggers": ["<f="]}).grammar()
    contents = [
        {"type": "json_schema", "json_schema": SCHEMA},
        {"type": "regex", "pattern": r"a/b+\/c"},
        {"type": "grammar", "grammar": 'start: "x" | "y"'},
        {"type": "const_string", "value": 'q"'},
    ]
    tags = [{"begin": f"<f={n}>", "content": one, "end": "</f>"} for n, one in enumerate(contents)]
    new = StructuralTag.model_validate(
        {"format": {"type": "triggered_tags", "triggers": ["<f="], "tags": tags}}
    ).grammar()
    shaped = ResponseFormat.model_validate({"type": "structural_tag", "format": {"type": "tag", **tags[1]}})
    assert shaped.structural_tag is not None
    assert accepts(shaped.structural_tag.grammar(), "a <f=1>a/b/c</f>")
    for text in ("", "free < text", 'so <f=add>{"a": 1}</f> and <f=add>{"a": 2}</f>.'):
        assert accepts(old, text)
    for text in ('<f=add>{"a": "1"}</f>', "<f=sub>", '<f=add>{"a": 1}'):
        assert not accepts(old, text)
    assert accepts(new, 'a <f=0>{"a": 1}</f> <f=1>a/bb/c</f> <f=2>y</f><f=3>q"</f>')
    for text in ("<f=1>a/c</f>", "<f=2>z</f>", "<f=4>"):
        assert not accepts(new, text)
    one = {"format": {"type": "tag", "begin": "<x>", "content": contents[0], "end": "</x>"}}
    assert accepts(
        after_thinking(
            StructuralTag.model_validate(one).grammar(), Thinking("<think>", "</think>"), VOCABULARY, "before"
        ),
        "ab",
    )


def test_regex_and_choice() -> None:
    assert accepts(regex_grammar(r"[a-c]+/\d"), "abc/1")
    assert not accepts(regex_grammar("[a-c]+"), "abd")
    choices = choice_grammar(["left", 'quo"ted\n', "rïght"])
    assert all(accepts(choices, choice) for choice in ("left", 'quo"ted\n', "rïght"))
    assert not accepts(choices, "le")


def test_mask_ends_with_the_end() -> None:
    matcher = COMPILER.compile(regex_grammar("ab?")).matcher()
    mask = allocate_token_bitmask(1, len(TOKENIZER) + 7)

    def allowed() -> set[int]:
        fill_next_token_bitmask(matcher, mask)
        return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())

    a, b = TOKENIZER.encode("ab")
    assert allowed() == {a}
    matcher.consume_token(a)
    assert allowed() == {b, EOS}
    matcher.consume_token(b)
    assert allowed() == {EOS}


@pytest.mark.parametrize(
    "grammar",
    [
        json_grammar({"type": "banana"}),
        json_grammar({"$ref": "#/nowhere"}),
        json_grammar({"type": "string", "pattern": "(?=a)"}),
        regex_grammar("(a"),
        "no grammar [",
        "start: nobody",
    ],
)
def test_what_cannot_be_enforced_is_refused(grammar: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        COMPILER.check(grammar, "response_format")
    assert caught.value.param == "response_format"
    assert "<state>" not in caught.value.message


def test_a_tokenizer_without_json_is_refused() -> None:
    slow = word_piece()
    slow._tokenizer = object()
    with pytest.raises(InvalidRequestError, match="tokenizer can't follow"):
        GrammarCompiler(slow, 10, [1]).check(regex_grammar("a"), "guided_regex")


def test_what_compiles_for_too_long_is_refused_in_time_and_leaves_no_process() -> None:
    """llguidance compiles an `allOf` of patterns in exponential time: this one for minutes."""
    patterns = [{"pattern": f"[a-z]*{chr(97 + i)}[a-z]{{3}}"} for i in range(24)]
    schema = {"type": "object", "properties": {"x": {"type": "string", "allOf": patterns}}}
    compiler = GrammarCompiler(TOKENIZER, len(TOKENIZER) + 7, [EOS])
    compiler.check(regex_grammar("a"), "guided_regex")  # the process is there
    for _ in range(2):
        begun = time.monotonic()
        with pytest.raises(InvalidRequestError, match=r"too complex: compiling it takes more than 1\.5 seconds"):
            compiler.check(json_grammar(schema), "response_format")
        seconds = time.monotonic() - begun
    assert seconds < 0.1  # it is known by now
    tools = compiler._tools
    assert tools is not None
    assert tools[1]._process is not None
    process = tools[1]._process
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    assert not children.exists() or not children.read_text().split()
    del compiler, tools
    assert process.wait(10) == 0


def test_a_grammar_is_checked_while_another_compiles() -> None:
    patterns = [{"pattern": f"[a-z]*{chr(97 + i)}[a-z]{{3}}"} for i in range(24)]
    with ThreadPoolExecutor(1) as thread:
        slow = thread.submit(COMPILER.check, json_grammar({"type": "string", "allOf": patterns}), "x")
        time.sleep(0.1)
        for index in range(5):
            assert COMPILER.check(regex_grammar(f"a{index}"), "x") is not None
        assert not slow.done()
        assert isinstance(slow.exception(), InvalidRequestError)


def test_a_first_try_is_short() -> None:
    patterns = [{"pattern": f"[a-z]*{chr(97 + i)}[a-z]{{4}}"} for i in range(24)]
    begun = time.monotonic()
    assert COMPILER.check(json_grammar({"type": "string", "allOf": patterns}), "x", quick=True) is None
    assert time.monotonic() - begun < 1.2
    assert COMPILER.check(regex_grammar("quick"), "x", quick=True) is not None


def test_a_process_that_has_died_is_started_again() -> None:
    compiler = GrammarCompiler(TOKENIZER, len(TOKENIZER) + 7, [EOS])
    compiler.check(regex_grammar("a"), "x")
    assert compiler._tools is not None
    assert compiler._tools[1]._process is not None
    compiler._tools[1]._process.kill()
    compiler._tools[1]._process.wait()
    assert compiler.check(regex_grammar("b"), "x") is not None


def test_a_grammar_that_is_too_large_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"too large, with .* characters of at most 262144"):
        COMPILER.check(json_grammar({"enum": ["x" * 300_000]}), "response_format")


def test_matchers_are_independent() -> None:
    grammar = regex_grammar("ab")
    first, second = COMPILER.compile(grammar).matcher(), COMPILER.compile(grammar).matcher()
    assert first.consume_tokens(TOKENIZER.encode("ab"))
    assert second.consume_tokens(TOKENIZER.encode("a"))
    assert first.is_accepting()
    assert not second.is_accepting()


def calls(*pairs: tuple[str, Any]) -> str:
    blocks = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in pairs]
    return "\n".join(f"<tool_call>\n{block}\n</tool_call>" for block in blocks)


def test_required_tools() -> None:
    several = tool_grammar(TOOLS, OURS, VOCABULARY, name=None, parallel=True)
    assert accepts(several, calls(("add", {"a": 1})))
    assert accepts(several, calls(("add", {"a": 1}), ("ref", {"x": "yes"}), ("free", {"any": [1]})))
    assert not accepts(several, "text")
    assert not accepts(several, calls(("add", {"a": "1"})))
    assert not accepts(several, calls(("ref", {"x": "no"})))
    assert not accepts(several, calls(("other", {})))
    single = tool_grammar(TOOLS, OURS, VOCABULARY, name=None, parallel=False)
    assert accepts(single, calls(("free", {})))
    assert not accepts(single, calls(("free", {}), ("free", {})))


def test_named_tool() -> None:
    named = tool_grammar(TOOLS, OURS, VOCABULARY, name="ref", parallel=True)
    assert accepts(named, calls(("ref", {"x": "yes"})))
    assert not accepts(named, calls(("add", {"a": 1})))


FORMATS = [
    ToolFormat(module.tool_call_start, module.tool_call_end, native=True, parse=module.parse_tool_call)
    for module in (
        importlib.import_module(f"mlx_lm.tool_parsers.{found.name}")
        for found in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)
    )
]
DEEPSEEK = ToolFormat(*DEEPSEEK_MARKS, native=True)
LLAMA = ToolFormat("<|python_tag|>", "", native=True, kind="bare")
HARMONY = ToolFormat("<|channel|>", "<|call|>", native=True, kind="harmony")


def forced(tool_format: ToolFormat, arguments: list[str]) -> str:
    """Calls of `add` as the grammar has them."""
    if tool_format.kind == "harmony":
        return "".join(f"{harmony.call_header('add')}{text}" for text in arguments)
    key = "parameters" if tool_format.kind == "bare" else "arguments"
    objects = [f'{{"name": "add", "{key}": {text}}}' for text in arguments]
    if tool_format.kind == "bare":
        return "; ".join(objects)
    if not tool_format.end:
        return f"{tool_format.start}[{', '.join(objects)}]"
    return "\n".join(f"{tool_format.start}\n{text}\n{tool_format.end}" for text in objects)


# ASCII ids: pytest escapes others once more when it collects a second time in one process, as mutmut has it do.
@pytest.mark.parametrize(
    "tool_format",
    [OURS, *FORMATS, DEEPSEEK, LLAMA, HARMONY],
    ids=lambda one: f"{one.kind} {one.start.encode('ascii', 'ignore').decode()}",
)
@pytest.mark.parametrize("arguments", [['{"a": 1}'], ['{"a": 1}', '{"a": -2}']], ids=["one", "two"])
def test_forced_calls_are_read_back_whatever_the_format(tool_format: ToolFormat, arguments: list[str]) -> None:
    if tool_format.kind == "harmony":
        arguments = arguments[:1]  # its answer ends with a call
    grammar = tool_grammar(TOOLS, tool_format, VOCABULARY, name=None, parallel=len(arguments) > 1)
    text = forced(tool_format, arguments)
    assert accepts(grammar, text)
    parser = chat_parser(tool_format, thinking=None, tools=TOOLS)
    assert parser is not None
    pieces = [*map(parser.push, text), parser.finish()]
    assert not any(piece.content or piece.reasoning for piece in pieces)
    deltas = [delta for piece in pieces for delta in piece.calls]
    assert [delta.name for delta in deltas if delta.name] == ["add"] * len(arguments)
    assert "".join(delta.arguments for delta in deltas) == "".join(arguments)


def test_harmony_thinks_and_then_calls_or_answers() -> None:
    thinking = Thinking(harmony.ANALYSIS, "<|end|>")
    calls = tool_grammar(TOOLS, HARMONY, VOCABULARY, name="add", parallel=True)
    answer = in_final_channel(json_grammar(SCHEMA), VOCABULARY)
    call = harmony.call_header("add") + '{"a": 1}'
    final = f'{harmony.FINAL}{{"a": 1}}'
    thought = f"{harmony.ANALYSIS}hm {{<|end|>{harmony.NEXT_MESSAGE}"
    grammar = after_thinking(either(answer, calls), thinking, VOCABULARY, "before")
    for text in (call, final, thought + call, thought + final):
        assert accepts(grammar, text)
    assert not accepts(grammar, '{"a": 1}')
    assert not accepts(grammar, f'{harmony.FINAL}{{"b": 1}}')
    assert not accepts(after_thinking(calls, thinking, VOCABULARY, "before"), thought + final)
    inside = after_thinking(calls, thinking, VOCABULARY, "inside")
    assert accepts(inside, f"hm<|end|>{harmony.NEXT_MESSAGE}{call}")


@pytest.mark.parametrize("thinking", [Thinking(f"<{word}>", f"</{word}>") for word in ("think", "muse", "spelled")])
@pytest.mark.parametrize("grammar", [json_grammar(SCHEMA), either(json_grammar(SCHEMA), CALLS)])
def test_after_thinking(thinking: Thinking, grammar: str) -> None:
    before = after_thinking(grammar, thinking, VOCABULARY, "before")
    assert accepts(before, '{"a": 1}')
    assert accepts(before, f'{thinking.start}\nlet me {{ think </thi \n{thinking.end}\n\n{{"a": 1}}')
    assert not accepts(before, f'thought{thinking.end}{{"a": 1}}')
    inside = after_thinking(grammar, thinking, VOCABULARY, "inside")
    assert accepts(inside, f'thought{thinking.end}\n{{"a": 1}}')
    assert not accepts(inside, '{"a": 1}')


def test_an_answer_or_calls() -> None:
    grammar = either(json_grammar(SCHEMA), tool_grammar(TOOLS, OURS, VOCABULARY, name=None, parallel=True))
    assert accepts(grammar, '{"a": 1}')
    assert accepts(grammar, calls(("add", {"a": 1}), ("free", {})))
    assert not accepts(grammar, '{"b": 1}')
    assert not accepts(grammar, '{"a": 1}' + calls(("add", {"a": 1})))


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "banana"}, "there is no type banana"),
        ({"not": {"type": "string"}}, 'the keyword "not" is not supported'),
        ({"type": "array", "minItems": 5, "maxItems": 2}, "nothing can fit it: minItems"),
        ({"type": "string", "pattern": "(?=a)b"}, "the pattern (?=a)b can't be used: look-around"),
        ({"properties": {"a": {"$ref": "#/nope"}}}, "its $ref points to /nope, which is not there"),
    ],
)
def test_what_is_wrong_with_a_schema_is_said_without_the_compilers_own_words(schema: Any, said: str) -> None:
    tokenizer = tiny().tokenizer
    compiler = GrammarCompiler(tokenizer, len(tokenizer), tokenizer.eos_token_ids)
    with pytest.raises(InvalidRequestError) as refused:
        compiler.check(json_grammar(schema), "response_format")
    assert said in refused.value.message
    for internal in ("x-guidance", "%json", "start:", "failed to compile", "^"):
        assert internal not in refused.value.message
