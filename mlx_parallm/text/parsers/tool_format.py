"""Which format a model's tool calls have, found from its tokenizer; makes the readers of blocks of calls.

Most formats have marks around a block of calls, and mlx-lm's name for them is the key to their notation. DeepSeek's,
which mlx-lm does not know, is found by its marks. Llama's calls may stand alone, gpt-oss has channels (`harmony.py`),
and a model that knows no tools is taught the format of Hermes.
Whatever a model's own notation is, a block that begins with a brace is read as JSON: so forced calls are written.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_parallm.text.parsers import harmony
from mlx_parallm.text.parsers.call_blocks import PYTHON_QUOTES, CallBlock, JsonBlock, TextBlock
from mlx_parallm.text.parsers.calls import Calls, Tool, ToolCall
from mlx_parallm.text.parsers.formats import NOTATIONS, deepseek, hermes, llama
from mlx_parallm.text.parsers.formats.pythonic import read_python
from mlx_parallm.text.parsers.notation import Notation, ReadCalls
from mlx_parallm.text.parsers.templates import chat_template, shows_tools

MlxParser = Callable[[str, list[Tool]], Any]  # of mlx_lm.tool_parsers


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The marks around tool calls, and what stands between them.

    `kind` "bare": a completion may also consist of calls alone, without marks, as Llama's do. A bare call must name a
    tool of the request: JSON that does not is a completion. Between marks, any name makes a call, so that clients hear
    of tools that the model has made up.
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
        if deepseek.is_deepseek(tokenizer):
            return cls(*deepseek.MARKS, native=shows_tools(chat_template(tokenizer)))
        marks = llama.llama_marks(tokenizer)
        return cls(*marks, native=True, kind="bare") if marks else cls(hermes.START, hermes.END, native=False)

    @property
    def marks(self) -> tuple[str, ...]:
        """All that must be seen in the text to find calls."""
        return harmony.MARKS if self.kind == "harmony" else tuple(filter(None, (self.start, self.end)))

    @property
    def notation(self) -> Notation:
        if self.kind == "bare":
            return llama.LLAMA
        if (self.start, self.end) == deepseek.MARKS:
            return deepseek.DEEPSEEK
        if self.parse is None:
            return hermes.JSON
        module = str(getattr(self.parse, "__module__", None)).rpartition(".")[2]
        return NOTATIONS.get(module) or Notation(read=partial(_read_with, self.parse))

    def block(self, text: str, calls: Calls, tools: Sequence[Tool]) -> CallBlock | None:
        """A reader for the block that begins with this text; None as long as that does not say how to read it."""
        notation = self.notation
        start = _BLOCK_START.match(text.lstrip())
        if start is None:
            return None
        if notation.read is None or start[1]:
            return JsonBlock(calls, self.end, heads=notation.heads, fillers=notation.fillers)
        return TextBlock(calls, self.end, partial(self._read, notation.read, tools), notation.quoting)

    def _read(self, read: ReadCalls, tools: Sequence[Tool], text: str, cut_off: bool) -> list[ToolCall] | None:
        """Reads calls by our reader or, for variants that it does not know, by mlx-lm's, if that finds known tools."""
        found = read(text, cut_off, tools)
        if found is None and not cut_off and self.parse is not None and len(text) < _LONGEST_GUESS:
            names = {tool["function"]["name"] for tool in tools}
            guessed = _read_with(self.parse, text, cut_off, tools) or []
            found = guessed if guessed and all(call.name in names for call in guessed) else None
        return found

    def bare_block(self, text: str, calls: Calls, tools: Sequence[Tool]) -> CallBlock:
        """A reader for calls without marks, which `bare_call` has found at the start of the text."""
        names = {tool["function"]["name"] for tool in tools}
        if llama.BARE_JSON.match(text, partial=True):
            return JsonBlock(calls, heads=self.notation.heads, fillers=self.notation.fillers, names=names)
        return TextBlock(calls, "", partial(self._read, read_python, tools), PYTHON_QUOTES)


# An object or a list of objects, which is JSON, or anything else that is not just the start of such a list.
_BLOCK_START = re.compile(r"(\{|\[\s{0,64}\{)|\[\s{0,64}[^\s{]|\[\s{65}|[^\[{]")
_LONGEST_GUESS = 4_000  # characters: some of mlx-lm's patterns take quadratic time


def _read_with(parse: MlxParser, text: str, cut_off: bool, tools: Sequence[Tool]) -> list[ToolCall] | None:
    """Reads calls by mlx-lm's parser, which knows complete blocks only."""
    if cut_off:
        return None
    try:  # others' code over a model's text: any exception says that it is malformed
        parsed = parse(text, list(tools))
    except Exception:
        return None
    calls = [ToolCall.from_entry(entry) for entry in (parsed if isinstance(parsed, list) else [parsed])]
    return [call for call in calls if call is not None] if calls and all(calls) else None
