"""How each family of models writes tool calls: found out from its tokenizer, and the table of notations.

Most formats have marks around a block of calls, and mlx-lm's name for them is the key to `NOTATIONS`. DeepSeek's, which
mlx-lm does not know, is found by its marks. Llama's calls may stand alone, gpt-oss has channels (`harmony.py`), and
a model that knows no tools is taught our own format.
Whatever a model's own notation is, a block that begins with a brace is read as JSON: so forced calls are written.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import regex
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_parallm.text.parsers import harmony
from mlx_parallm.text.parsers.blocks import (
    JSON_HEAD,
    NAME,
    NO_QUOTES,
    PYTHON_QUOTES,
    CallBlock,
    Head,
    JsonBlock,
    Quoting,
    TextBlock,
)
from mlx_parallm.text.parsers.calls import Calls, Tool, ToolCall
from mlx_parallm.text.parsers.literals import GemmaReader, read_python
from mlx_parallm.text.parsers.tags import CDATA, GLM, KIMI_K3, LONGCAT, MINICPM, MINIMAX, MUSE, QWEN

MlxParser = Callable[[str, list[Tool]], Any]  # of mlx_lm.tool_parsers


class ReadCalls(Protocol):
    """The calls in a block, or None when it is malformed; of a text that is cut off, the last may be incomplete."""

    def __call__(self, text: str, cut_off: bool, tools: Sequence[Tool]) -> list[ToolCall] | None: ...


@dataclass(frozen=True, slots=True)
class Notation:
    """How calls are written between the marks of their block."""

    heads: tuple[Head, ...] = (JSON_HEAD,)
    fillers: tuple[str, ...] = ()  # marks between calls
    read: ReadCalls | None = None  # None: arguments are JSON, and `heads` come before them
    quoting: Quoting = NO_QUOTES  # of what `read` reads


_LLAMA_FILLERS = (
    "<|python_tag|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|eom|>",
    "<|eot|>",
)
LLAMA = Notation(fillers=_LLAMA_FILLERS, read=read_python, quoting=PYTHON_QUOTES)

DEEPSEEK_MARKS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_SEP = "<｜tool▁sep｜>"
DEEPSEEK = Notation(
    heads=(
        JSON_HEAD,
        Head(rf"function{_SEP}{NAME}(?=[\s`{{])", r"\s{0,32}(?:```json)?\s{0,32}\{"),  # V3 and R1
        Head(rf"(?!function{_SEP}(?!\s{{0,32}}\{{)){NAME}{_SEP}"),  # V3.1
    ),
    fillers=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "```"),
)
NOTATIONS: Mapping[str, Notation] = {  # by the module of mlx_lm.tool_parsers
    "json_tools": Notation(),
    "mistral": Notation(
        heads=(JSON_HEAD, Head(rf"{NAME}(?:\[CALL_ID\](?P<id>\w{{1,64}}))?\s{{0,32}}\[ARGS\]")),
        fillers=("[TOOL_CALLS]",),
    ),
    "kimi_k2": Notation(
        heads=(
            JSON_HEAD,
            Head(
                r"(?P<id>(?:functions\.)?(?P<name>[\w./-]{1,128}):\d{1,9})\s{0,32}<\|tool_call_argument_begin\|>"
            ),
        ),
        fillers=("<|tool_call_begin|>", "<|tool_call_end|>"),
    ),
    "pythonic": Notation(read=read_python, quoting=PYTHON_QUOTES),
    "function_gemma": Notation(read=GemmaReader("<escape>").read, quoting=Quoting((("<escape>", "<escape>"),))),
    "gemma4": Notation(read=GemmaReader('<|"|>').read, quoting=Quoting((('<|"|>', '<|"|>'),))),
    "qwen3_coder": Notation(read=QWEN.read),
    "glm47": Notation(read=GLM.read),
    "longcat": Notation(read=LONGCAT.read),
    "minimax_m2": Notation(read=MINIMAX.read),
    "minicpm5": Notation(read=MINICPM.read, quoting=Quoting((CDATA,))),
    "muse_spark": Notation(read=MUSE.read),
    "kimi_k3": Notation(read=KIMI_K3.read),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The marks around tool calls, and what stands between them.

    `kind` "bare": an answer may also consist of calls alone, without marks, as Llama's do. A bare call must name a tool
    of the request: JSON that does not is an answer. Between marks, any name makes a call, so that clients hear of tools
    that the model has made up.
    """

    start: str
    end: str  # empty: a block ends where something else than a call begins
    native: bool  # the chat template renders tools, calls and their results itself
    parse: MlxParser | None = None
    kind: Literal["marked", "bare", "harmony"] = "marked"

    @classmethod
    def of(cls, tokenizer: TokenizerWrapper) -> "ToolFormat":
        if tokenizer.has_tool_calling:
            return cls(tokenizer.tool_call_start, tokenizer.tool_call_end, native=True, parse=tokenizer.tool_parser)
        if harmony.is_harmony(tokenizer):
            return cls("<|channel|>", "<|call|>", native=True, kind="harmony")
        if _is_deepseek(tokenizer):
            return cls(*DEEPSEEK_MARKS, native=_shows_tools(_template(tokenizer)))
        marks = _llama_marks(tokenizer)
        return cls(*marks, native=True, kind="bare") if marks else cls("<tool_call>", "</tool_call>", native=False)

    @property
    def marks(self) -> tuple[str, ...]:
        """All that must be seen in the text to find calls."""
        return harmony.MARKS if self.kind == "harmony" else tuple(filter(None, (self.start, self.end)))

    @property
    def notation(self) -> Notation:
        if self.kind == "bare":
            return LLAMA
        if (self.start, self.end) == DEEPSEEK_MARKS:
            return DEEPSEEK
        if self.parse is None:
            return NOTATIONS["json_tools"]
        module = str(getattr(self.parse, "__module__", None)).rpartition(".")[2]
        return NOTATIONS.get(module) or Notation(read=partial(_read_with, self.parse))

    def block(self, text: str, calls: Calls, tools: Sequence[Tool]) -> CallBlock | None:
        """A reader for the block that begins with this text; None as long as that does not say how to read it."""
        notation = self.notation
        beginning = _BLOCK_BEGINNING.match(text.lstrip())
        if beginning is None:
            return None
        if notation.read is None or beginning[1]:
            return JsonBlock(calls, self.end, heads=notation.heads, fillers=notation.fillers)
        return TextBlock(calls, self.end, partial(self._read, notation.read, tools), notation.quoting)

    def _read(self, read: ReadCalls, tools: Sequence[Tool], text: str, cut_off: bool) -> list[ToolCall] | None:
        """By our reader or, for variants that it does not know, by mlx-lm's, as far as that finds known tools."""
        found = read(text, cut_off, tools)
        if found is None and not cut_off and self.parse is not None and len(text) < _LONGEST_GUESS:
            names = {tool["function"]["name"] for tool in tools}
            guessed = _read_with(self.parse, text, cut_off, tools) or []
            found = guessed if guessed and all(call.name in names for call in guessed) else None
        return found

    def bare_block(self, text: str, calls: Calls, tools: Sequence[Tool]) -> CallBlock:
        """A reader for calls without marks, which `bare_call` has found at the beginning of the text."""
        names = {tool["function"]["name"] for tool in tools}
        if _BARE_JSON.match(text, partial=True):
            return JsonBlock(calls, heads=self.notation.heads, fillers=self.notation.fillers, names=names)
        return TextBlock(calls, "", partial(self._read, read_python, tools), PYTHON_QUOTES)


# An object or a list of objects, which is JSON, or anything else that is not just the beginning of such a list.
_BLOCK_BEGINNING = re.compile(r"(\{|\[\s{0,64}\{)|\[\s{0,64}[^\s{]|\[\s{65}|[^\[{]")
_LONGEST_GUESS = 4_000  # characters: some of mlx-lm's patterns take quadratic time

_BARE_JSON = regex.compile(rf"\s*\[?\s{{0,32}}{JSON_HEAD.whole.pattern}")
_BARE_PYTHON = regex.compile(r"\s*\[\s{0,32}(?P<name>[A-Za-z_][\w.]{0,127})\(")


def bare_call(text: str, names: set[str]) -> bool | None:
    """Whether the text begins with a call of one of these tools; None as long as it may become one."""
    for pattern in (_BARE_JSON, _BARE_PYTHON):
        found = pattern.match(text, partial=True)
        if found is not None and (found["name"] is None or found["name"] in names):
            return None if found.partial else True
    return False


def _template(tokenizer: TokenizerWrapper) -> str:
    return str(getattr(tokenizer, "chat_template", None) or "")


def _shows_tools(template: str) -> bool:
    return re.search(r"\btools\b", template) is not None


def _is_deepseek(tokenizer: TokenizerWrapper) -> bool:
    """Its own templates write calls but do not show tools: those of other makers do."""
    start, _ = DEEPSEEK_MARKS
    return start in tokenizer.get_vocab() or start in _template(tokenizer)


def _llama_marks(tokenizer: TokenizerWrapper) -> tuple[str, str] | None:
    """The marks that Llama's calls may have, if the template shows tools to the model in Llama's way."""
    template = _template(tokenizer).replace('\\"', '"')
    vocab = tokenizer.get_vocab()
    if not _shows_tools(template):
        return None
    if "<|python_start|>" in vocab and ("<|python_start|>" in template or _ASKS_FOR_JSON in template):
        return "<|python_start|>", "<|python_end|>"
    if "<|python_tag|>" in vocab and ("<|python_tag|>" in template or _ASKS_FOR_JSON in template):
        return "<|python_tag|>", ""
    return ("", "") if _ASKS_FOR_JSON in template else None


_ASKS_FOR_JSON = '{"name": function name, "parameters":'


def _read_with(parse: MlxParser, text: str, cut_off: bool, tools: Sequence[Tool]) -> list[ToolCall] | None:
    """By mlx-lm's parser, which knows complete blocks only."""
    if cut_off:
        return None
    try:  # others' code over a model's text: any exception says that it is malformed
        parsed = parse(text, list(tools))
    except Exception:
        return None
    calls = [ToolCall.from_entry(entry) for entry in (parsed if isinstance(parsed, list) else [parsed])]
    return [call for call in calls if call is not None] if calls and all(calls) else None
