"""What a chat model's raw text means: reasoning, content and tool calls, told apart as the text arrives.

`chat_parser` gives a choice its parser: `ChatParser`, or `HarmonyParser` for gpt-oss. What a text means does not depend
on how it is cut: all that is pushed and a single push of the whole come to the same. So there are no two verdicts for
streamed and whole completions:

- A call is a call once its head, name and start of the arguments, is complete; its arguments are passed on as they
  are written and are not checked.
- A block between marks that has ended and holds no call is content, as text, unless calls came before it.
- A block that is cut off is a call with the arguments written so far if its name is complete. Otherwise it is left out.
- Marks of calls within reasoning are reasoning.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_parallm.text.detokenize import Prefixes
from mlx_parallm.text.parsers import harmony
from mlx_parallm.text.parsers.call_blocks import CallBlock
from mlx_parallm.text.parsers.calls import Calls, Piece, Tool
from mlx_parallm.text.parsers.formats.llama import bare_call
from mlx_parallm.text.parsers.tool_format import ToolFormat


@dataclass(frozen=True, slots=True)
class Thinking:
    """The marks around a model's reasoning."""

    start: str
    end: str

    @classmethod
    def of(cls, tokenizer: TokenizerWrapper) -> "Thinking | None":
        if harmony.is_harmony(tokenizer):
            return cls(harmony.ANALYSIS, "<|end|>")
        return cls(tokenizer.think_start, tokenizer.think_end) if tokenizer.has_thinking else None


class Parser(Protocol):
    """Splits one choice's text."""

    @property
    def state(self) -> Literal["start", "reasoning", "content", "tool"]:
        """The part that the text is in now; in "tool", special tokens of the model's format are part of it."""

    @property
    def calls(self) -> int:
        """How many there are so far."""

    @property
    def finished(self) -> bool:
        """True once nothing that follows could be used."""

    def push(self, text: str) -> Piece: ...

    def finish(self, *, cut_off: bool = False) -> Piece:
        """Returns what is left once the text has ended; `cut_off`: by a limit, not by the model or a stop string."""


def chat_parser(
    tool_format: ToolFormat,
    *,
    thinking: Thinking | None,
    inside_thinking: bool = False,  # the prompt has opened the reasoning already
    tools: Sequence[Tool] = (),
    parallel: bool = True,  # False: the first call is the last
    separate_reasoning: bool = True,  # False: reasoning stays in the content
    drop: Sequence[str] = (),  # marks of the model's format that are no content
) -> Parser | None:
    """A parser for a choice, or None where its text is its content."""
    if tool_format.kind == "harmony":
        return harmony.HarmonyParser(
            tools=tools, parallel=parallel, inside_thinking=inside_thinking, separate_reasoning=separate_reasoning
        )
    if not tools and not drop and (thinking is None or not separate_reasoning):
        return None
    return ChatParser(
        thinking=thinking,
        inside_thinking=inside_thinking,
        tool_format=tool_format if tools else None,
        tools=tools,
        parallel=parallel,
        separate_reasoning=separate_reasoning,
        drop=drop,
    )


class ChatParser:
    """The parser for models that put marks around reasoning and calls, and those whose calls stand alone."""

    def __init__(
        self,
        *,
        thinking: Thinking | None = None,
        inside_thinking: bool = False,
        tool_format: ToolFormat | None = None,  # None: no tools, nothing is looked for
        tools: Sequence[Tool] = (),
        parallel: bool = True,
        separate_reasoning: bool = True,
        drop: Sequence[str] = (),
    ) -> None:
        self._thinking = thinking
        self._separate = separate_reasoning
        self._format = tool_format
        self._tools = tools
        self._names = {tool["function"]["name"] for tool in tools}
        self._parallel = parallel
        self._calls = Calls(parallel=parallel)
        self._block: CallBlock | None = None
        self._mark: list[str] = []  # what opened the block, and white space after it
        self._buffer = ""  # text that is not decided yet
        self._gap: list[str] = []  # white space that is content only if more content follows
        self._trim = inside_thinking and thinking is not None and separate_reasoning
        self._may_be_bare = tool_format is not None and tool_format.kind == "bare"
        start = [tool_format.start] if tool_format is not None and tool_format.start else []
        self._in_content = Prefixes([*start, *drop])
        self._in_reasoning = Prefixes([thinking.end] if thinking else [])
        self.state: Literal["start", "reasoning", "content", "tool"] = "content"
        if thinking:
            self.state = "reasoning" if inside_thinking else "start"

    @property
    def calls(self) -> int:
        return self._calls.count

    @property
    def finished(self) -> bool:
        return not self._parallel and self.calls > 0 and self.state != "tool"

    def push(self, text: str) -> Piece:
        piece = Piece()
        if self.state == "content" and self._format is None and not self._in_content.strings and not self._trim:
            piece.content = text
            return piece
        self._buffer += text
        while not self.finished and self._step(piece):
            continue
        return piece

    def finish(self, *, cut_off: bool = False) -> Piece:
        piece = Piece()
        if self.finished:
            return piece
        if self.state == "content" and self._may_be_bare and cut_off and self._buffer:
            self._open_bare_block()
        if self.state == "tool":
            self._finish_block(cut_off, piece)
            return piece
        rest = self._buffer
        self._buffer = ""
        if self.state == "reasoning":
            self._add_reasoning(rest.lstrip("\n") if self._trim else rest, piece)
        elif not cut_off or not rest.strip():  # else it is the start of a mark
            text = "".join(self._gap) + rest
            piece.content += text.lstrip() if self._trim else text
        return piece

    def _step(self, piece: Piece) -> bool:
        """Does what the current state can do; True when there may be more to do."""
        if self.state == "start":
            return self._look_for_thinking(piece)
        if self.state == "reasoning":
            return self._reason(piece)
        if self.state == "content":
            return self._settle_bare() if self._may_be_bare else self._write(piece)
        return self._call(piece)

    def _look_for_thinking(self, piece: Piece) -> bool:
        assert self._thinking is not None
        if self._hold_space(self._gap):
            return False
        text = self._buffer.lstrip()
        if text.startswith(self._thinking.start):
            self._buffer = text[len(self._thinking.start) :]
            self._gap.clear()
            self.state = "reasoning"
            self._trim = self._separate
            piece.content += "" if self._separate else self._thinking.start
            return True
        if self._thinking.start.startswith(text):
            return False
        self.state = "content"
        self._release_gap()
        return True

    def _hold_space(self, into: list[str]) -> bool:
        """Puts white space aside that is all there is to read; nothing is looked at again while only that arrives."""
        if self._buffer.strip():
            return False
        into.append(self._buffer)
        self._buffer = ""
        return True

    def _release_gap(self) -> None:
        self._buffer = "".join(self._gap) + self._buffer
        self._gap.clear()

    def _reason(self, piece: Piece) -> bool:
        text, mark = self._take(self._in_reasoning)
        self._add_reasoning(text, piece)
        if mark is None:
            return False
        self.state = "content"
        self._trim = self._separate
        piece.content += "" if self._separate else mark
        return True

    def _add_reasoning(self, text: str, piece: Piece) -> None:
        if self._separate:
            piece.reasoning += text
        else:
            piece.content += text

    def _settle_bare(self) -> bool:
        """Decides, at the start of content, whether it is a call without marks; False until that is known."""
        if self._hold_space(self._gap):
            return False
        verdict = bare_call(self._buffer, self._names)
        if verdict:
            self._open_bare_block()
        elif verdict is False:
            self._may_be_bare = False
            self._release_gap()
        return verdict is not None

    def _open_bare_block(self) -> None:
        assert self._format is not None
        self._block = self._format.bare_block(self._buffer, self._calls, self._tools)
        self._mark = []
        self.state = "tool"

    def _write(self, piece: Piece) -> bool:
        text, mark = self._take(self._in_content)
        if self._format is None:
            piece.content += text
            return mark is not None
        solid = text.rstrip()
        if solid:  # a gap before a call is no content: it waits until it is known what follows
            piece.content += "".join(self._gap) + solid
            self._gap.clear()
        self._gap.append(text[len(solid) :])
        if mark is not None and mark == self._format.start:
            self._block = None
            self._mark = [mark]
            self.state = "tool"
        return mark is not None

    def _take(self, marks: Prefixes) -> tuple[str, str | None]:
        """Text up to the next mark, which is removed, or all that can't be the start of one."""
        if self._trim:
            self._buffer = self._buffer.lstrip("\n" if self.state == "reasoning" else None)
        if found := marks.find(self._buffer):
            at, mark = found
            text = self._buffer[:at]
            self._buffer = self._buffer[at + len(mark) :]
            self._trim = self._trim and not text
            return text, mark
        end = len(self._buffer) - marks.held(self._buffer)
        text = self._buffer[:end]
        self._buffer = self._buffer[end:]
        self._trim = self._trim and not text
        return text, None

    def _call(self, piece: Piece) -> bool:
        """Hands text to the block; True when the block has ended."""
        if self._block is None and not self._choose_block():
            return False
        assert self._block is not None
        rest = self._block.push(self._buffer)
        self._buffer = rest or ""
        if rest is None:
            piece.calls += self._calls.take()
            return False
        self._end_block(self._block.unread(), piece)
        return True

    def _choose_block(self) -> bool:
        assert self._format is not None
        if not self._hold_space(self._mark):
            self._block = self._format.block(self._buffer, self._calls, self._tools)
        return self._block is not None

    def _end_block(self, unread: str | None, piece: Piece) -> None:
        """Ends a block: its calls are reported, or its text becomes content."""
        piece.calls += self._calls.take()
        malformed = unread is not None and not self.calls
        if malformed:
            piece.content += "".join([*self._gap, *self._mark, unread or ""])
        self._gap.clear()
        self._trim = not malformed
        self._block = None
        self.state = "content"
        self._may_be_bare = self._format is not None and self._format.kind == "bare" and self.calls > 0

    def _finish_block(self, cut_off: bool, piece: Piece) -> None:
        rest = self._buffer
        self._buffer = ""
        if self._block is None:  # nothing that says how to read it
            self._end_block(None if cut_off else rest, piece)
            return
        if rest:
            self._block.push(rest)
        self._end_block(self._block.finish(cut_off), piece)
