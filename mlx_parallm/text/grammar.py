"""Grammars that outputs must follow, through llguidance: JSON, schemas, patterns, choices, forced tool calls.

The server builds a grammar text here and has `GrammarCompiler.check` compile it before the engine sees it, on a thread
for that alone; rows get copies of the result.
"""

import hashlib
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import llguidance
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.text.compiled_grammar import CompiledGrammar
from mlx_parallm.text.detokenize import Vocabulary
from mlx_parallm.text.grammar_process import PARSER_LIMITS, QUICK_SECONDS, SECONDS, GrammarProcess
from mlx_parallm.text.parsers import harmony
from mlx_parallm.text.parsers.calls import Tool
from mlx_parallm.text.parsers.chat_parser import Thinking
from mlx_parallm.text.parsers.tool_format import ToolFormat

# Room for any sensible indentation, but no endless run of spaces, which small models fall into.
_WHITESPACE = r"[ \n\r\t]{1,32}"
_MOST_CALLS = 16
_MOST_ERROR = 2_000  # characters of an error that are looked at
_MOST_KEPT = 128  # compiled grammars, and refused ones
MAX_GRAMMAR = 1 << 18  # characters, of a whole grammar with the schemas of all tools
COMPLEX_SECONDS = 60.0  # for which a grammar that took too long is not tried again
TOO_COMPLEX = f"it is too complex: compiling it takes more than {SECONDS:g} seconds or too much memory"

Schema = Mapping[str, Any] | bool


def json_grammar(schema: Schema) -> str:
    """Any JSON value that the schema allows."""
    return f"start: {_inline(schema)}"


def regex_grammar(pattern: str) -> str:
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def pattern_grammar(pattern: str) -> str:
    """A regular expression in Lark, to be part of another grammar."""
    escaped = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern)
    return f"start: /{escaped}/"


def choice_grammar(choices: Sequence[str]) -> str:
    return "start: " + " | ".join(_quoted(choice) for choice in choices)


def tagged_grammar(tags: Sequence[llguidance.StructTag]) -> str:
    """Free text, in which what begins with the trigger of a tag follows its grammar to its end."""
    return llguidance.StructTag.to_grammar(list(tags), assume_special=False)


@dataclass(frozen=True, slots=True)
class CompletionFormat:
    """How a model writes its completions: its tool calls and its reasoning."""

    tool_format: ToolFormat
    thinking: Thinking | None
    vocabulary: Vocabulary
    inside_thinking: bool  # its prompt has it reasoning already


def completion_grammar(
    structure: str | None,
    completions: CompletionFormat,
    tools: Sequence[Tool],
    *,
    must_call: bool,
    tool_name: str | None,
    parallel: bool,
) -> str | None:
    """Returns a chat response's grammar, by the structure and the calls that are asked for; None where it is free."""
    grammar = structure
    vocabulary = completions.vocabulary
    if grammar is not None and completions.tool_format.kind == "harmony":
        grammar = in_final_channel(grammar, vocabulary)
    if tools and (must_call or grammar is not None):
        calls = tool_grammar(tools, completions.tool_format, vocabulary, name=tool_name, parallel=parallel)
        # Free to choose, a model may still call a tool instead of answering in the format.
        grammar = calls if must_call or grammar is None else either(grammar, calls)
    if grammar is None or completions.thinking is None:
        return grammar
    place: Literal["before", "inside"] = "inside" if completions.inside_thinking else "before"
    return after_thinking(grammar, completions.thinking, vocabulary, place)


def tool_grammar(
    tools: Sequence[Tool], tool_format: ToolFormat, vocabulary: Vocabulary, *, name: str | None, parallel: bool
) -> str:
    """One call, or more where `parallel` allows: of the tool called `name`, or of any.

    Calls are JSON between the marks of the model's format, which is what parsers read in every format.
    """
    functions = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    rules = [f"call: {' | '.join(f'call_{index}' for index in range(len(functions)))}"]
    for index, function in enumerate(functions):
        rules.append(f"call_{index}: {_call_rule(function['name'], f'arguments_{index}', tool_format, vocabulary)}")
        rules.append(f"arguments_{index}: {_inline(function.get('parameters') or {'type': 'object'})}")
    top = _calls_rule(tool_format, vocabulary, several=parallel and name is None)
    return "\n".join([f"start: {top}", *rules])


def _call_rule(name: str, arguments: str, tool_format: ToolFormat, vocabulary: Vocabulary) -> str:
    if tool_format.kind == "harmony":
        return f"{_mark(harmony.call_header(name), vocabulary)} {arguments}"
    key = "parameters" if tool_format.kind == "bare" else "arguments"
    head = f'{{"name": {_quoted(name)}, "{key}": '
    return f'{_quoted(head)} {arguments} "}}"'


def _calls_rule(tool_format: ToolFormat, vocabulary: Vocabulary, *, several: bool) -> str:
    """All calls of a completion: between marks, separated, or the one that ends a harmony answer."""
    if tool_format.kind == "harmony":
        return f"({_mark(harmony.NEXT_MESSAGE, vocabulary)})? call"
    if tool_format.kind == "bare":
        return _repeated("call", "; ", several)
    start, end = (_mark(mark, vocabulary) for mark in (tool_format.start, tool_format.end))
    if tool_format.end:
        return _repeated(f'({start} "\\n" call "\\n" {end})', "\n", several)
    return f'{start} "[" {_repeated("call", ", ", several)} "]"'  # a call that ends with the text: all in one list


def _repeated(rule: str, separator: str, several: bool) -> str:
    return f"{rule} ({_quoted(separator)} {rule}){{0,{_MOST_CALLS - 1}}}" if several else rule


def in_final_channel(grammar: str, vocabulary: Vocabulary) -> str:
    """A completion of a harmony model: the same grammar within the message that is its content."""
    start, final = (_mark(mark, vocabulary) for mark in (harmony.NEXT_MESSAGE, harmony.FINAL))
    return _composed(f"start: ({start})? {final} @final_answer", final_answer=grammar)


def after_thinking(grammar: str, thinking: Thinking, vocabulary: Vocabulary, where: Literal["before", "inside"]) -> str:
    """The same grammar for a model that may reason first, or whose prompt has it reasoning already."""
    end = _mark(thinking.end, vocabulary)
    # A token of its own ends the text by itself; a mark that is spelled out must be looked for.
    spelled = not end.startswith("<[")
    thought = f"thought[suffix={end}]: /(?s:.*)/" if spelled else f"thought: /(?s:.*)/ {end}"
    opening = f"({_mark(thinking.start, vocabulary)} thought gap)?" if where == "before" else "thought gap"
    top = f"start: {opening} @output\n{thought}\ngap: /[ \\n]{{0,4}}/"
    return _composed(top, output=grammar)


def either(completion: str, calls: str) -> str:
    """A completion in its format, or tool calls in theirs."""
    return _composed("start: @completion | @calls", completion=completion, calls=calls)


def _composed(top: str, **parts: str) -> str:
    """A Lark grammar whose `@name`s are other grammars, each Lark or llguidance's own JSON."""
    grammars: list[dict[str, Any]] = [{"lark_grammar": top}]
    for name, part in parts.items():
        if not part.startswith("{"):
            grammars.append({"name": name, "lark_grammar": part})
            continue
        first, *others = json.loads(part)["grammars"]
        grammars += [{**first, "name": name}, *others]
    return json.dumps({"grammars": grammars})


def _inline(schema: Schema) -> str:
    if isinstance(schema, Mapping):
        schema = {"x-guidance": {"whitespace_pattern": _WHITESPACE}, **schema}
    return f"%json {json.dumps(schema)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _mark(text: str, vocabulary: Vocabulary) -> str:
    """A mark in Lark: added tokens by their id, since their text would mean its letters; others as text."""
    parts: list[str] = []
    plain: list[int] = []
    for token in [*vocabulary.tokenizer.encode(text, add_special_tokens=False), None]:
        if token is not None and token not in vocabulary.added:
            plain.append(token)
            continue
        if plain:
            parts.append(_quoted(vocabulary.decode(plain)))
            plain.clear()
        if token is not None:
            parts.append(f"<[{token}]>")
    return " ".join(parts)


class GrammarCompiler:
    """Compiles grammars for one model's tokens, and keeps them. Any thread may call; none waits for another's."""

    def __init__(self, tokenizer: TokenizerWrapper, vocab_size: int, eos_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        # llguidance needs a token for the end of a text: a model without one lends it the last of its vocabulary,
        # which rows never sample.
        self.end_ids = frozenset(eos_ids) or frozenset({vocab_size - 1})
        self._compiled: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._refused: OrderedDict[bytes, tuple[str, float]] = OrderedDict()  # why, and when, by digests
        self._lock = threading.Lock()  # of these two, held for no longer than a look
        self._tools: tuple[llguidance.LLTokenizer, GrammarProcess] | None = None
        self._tools_lock = threading.Lock()

    def check(self, grammar: str, param: str, quick: bool = False) -> CompiledGrammar | None:
        """Compiles a client's grammar within the limits of `grammar_process`, or raises what is wrong.

        None: it takes longer than `quick` allows, and is to be checked again where slow ones wait for each other.
        """
        if (known := self._known(grammar)) is not None:
            return known
        digest = hashlib.blake2b(grammar.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            error, since = self._refused.get(digest, ("", 0.0))
        if not error or (error == TOO_COMPLEX and time.monotonic() - since > COMPLEX_SECONDS):
            error = self._try_out(grammar, param, quick)
            if error == TOO_COMPLEX and quick:
                return None
            if not error:
                return self.compile(grammar, param)
            with self._lock:
                self._refused[digest] = error, time.monotonic()
                _trim(self._refused)
        raise InvalidRequestError(f"{param} can't be enforced: {error}", param=param)

    def compile(self, grammar: str, param: str = "grammar") -> CompiledGrammar:
        """However long it takes: for grammars that were checked, and for those who wait for no one but themselves."""
        if (known := self._known(grammar)) is not None:
            return known
        tokens, _ = self._text_tools(param)
        limits = llguidance.LLParserLimits(**PARSER_LIMITS)
        matcher = llguidance.LLMatcher(tokens, grammar, log_level=0, limits=limits)
        if error := matcher.get_error():
            raise InvalidRequestError(f"{param} can't be enforced: {explain(error)}", param=param)
        compiled = CompiledGrammar(matcher, self.end_ids)
        with self._lock:
            self._compiled[grammar] = compiled
            _trim(self._compiled)
        return compiled

    def _known(self, grammar: str) -> CompiledGrammar | None:
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
            return self._compiled.get(grammar)

    def _try_out(self, grammar: str, param: str, quick: bool) -> str:
        """Returns what is wrong with it, in words for its client; empty: nothing."""
        if len(grammar) > MAX_GRAMMAR:
            return f"it is too large, with {len(grammar)} characters of at most {MAX_GRAMMAR}"
        error = self._text_tools(param)[1].try_out(grammar, QUICK_SECONDS if quick else SECONDS)
        return TOO_COMPLEX if error is None else error and explain(error)

    def _text_tools(self, param: str) -> tuple[llguidance.LLTokenizer, GrammarProcess]:
        with self._tools_lock:
            if self._tools is None:
                tokenizer = self._tokenizer._tokenizer  # the Hugging Face tokenizer inside mlx-lm's wrapper
                if not isinstance(tokenizer, PreTrainedTokenizerFast):
                    raise InvalidRequestError(
                        f"{param} needs a grammar, which this model's tokenizer can't follow: "
                        f"it is a {type(tokenizer).__name__} with no tokenizer.json",
                        param=param,
                    )
                backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
                backend.no_padding()
                backend.no_truncation()
                text = backend.to_str()
                end_ids = sorted(self.end_ids)
                tokens = llguidance.LLTokenizer(text, self._vocab_size, end_ids)
                self._tools = tokens, GrammarProcess(text, self._vocab_size, end_ids)
            return self._tools


def _trim(kept: "OrderedDict[Any, Any]") -> None:
    while len(kept) > _MOST_KEPT:
        kept.popitem(last=False)


# What llguidance says, and what that means to somebody who sent a schema.
_REASONS = (
    (re.compile(r"Unimplemented keys: \[(.*)\]"), r"the keyword \1 is not supported"),
    (re.compile(r"Unsatisfiable schema: (.*)"), r"nothing can fit it: \1"),
    (re.compile(r"Invalid type: (.*)"), r"there is no type \1"),
    (re.compile(r"Pointer '(.*)' does not exist"), r"its $ref points to \1, which is not there"),
    (re.compile(r"Resource '(.*?)' is not present.*"), r"its $ref points to \1, and only references within it work"),
    (
        re.compile(r"(?:line \d+, column \d+: )?(?:invalid regex .*?: )?regex parse error: (.*?) \^+ error: (.*)"),
        r"the pattern \1 can't be used: \2",
    ),
)


def explain(error: str) -> str:
    """llguidance's message without its listing of a grammar that the user never wrote."""
    lines = [line.strip() for line in error[:_MOST_ERROR].split("\n<state>")[0].splitlines()]
    told = " ".join(line for line in lines if line and not re.match(r"\d+ \|", line)).strip()
    told = re.sub(r"\s*\^$", "", told)
    told = re.sub(r"^(?:at )?(\d+)\((\d+)\): ", r"line \1, column \2: ", told)
    _, schema, reason = told.rpartition("failed to compile JSON schema: ")
    told = reason if schema else told
    for pattern, words in _REASONS:
        told = pattern.sub(words, told)
    return told[:300]
