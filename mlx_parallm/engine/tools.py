"""What a chat model's raw text means: reasoning, content and tool calls, told apart as the text arrives.

`ToolFormat` says how a model writes tool calls: its own way, read back by mlx-lm's parsers, or ours for models
that have none. `ChatParser` is fed one choice's text and yields `Piece`s. The server and `LLM.chat` use both.
"""

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_parallm.engine.text import Prefixes

Tool = Mapping[str, Any]  # as in a request: {"type": "function", "function": {"name", "description", "parameters"}}


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The marks around a tool call, and the model's own reader of what stands between them."""

    start: str
    end: str  # empty: a call ends with the text
    native: bool  # the chat template renders tools, calls and their results itself
    parse: Callable[[str, Any], Any] | None = None

    @classmethod
    def of(cls, tokenizer: TokenizerWrapper) -> "ToolFormat":
        if not tokenizer.has_tool_calling:
            return cls("<tool_call>", "</tool_call>", native=False)
        return cls(tokenizer.tool_call_start, tokenizer.tool_call_end, native=True, parse=tokenizer.tool_parser)

    def read(self, body: str, tools: Sequence[Tool]) -> "list[ToolCall] | None":
        """The calls in a block, or None when it is malformed. JSON is read whatever the model's own format is."""
        try:
            parsed = orjson.loads(body.strip())
        except orjson.JSONDecodeError:
            parsed = self._parse_natively(body, tools)
        entries = parsed if isinstance(parsed, list) else [parsed]
        calls = [_tool_call(entry) for entry in entries]
        return [call for call in calls if call is not None] if calls and all(calls) else None

    def _parse_natively(self, body: str, tools: Sequence[Tool]) -> Any:
        if self.parse is None:
            return None
        try:  # the parsers are others' code over a model's text: any exception says that it is malformed
            return self.parse(body, list(tools))
        except Exception:
            return None


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str  # JSON text
    id: str | None = None  # a model may name its calls itself


def _tool_call(entry: Any) -> ToolCall | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"]:
        return None
    arguments = entry.get("arguments", entry.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    identity = entry.get("id")
    return ToolCall(entry["name"], arguments, identity if isinstance(identity, str) else None)


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True)
class Thinking:
    """The marks around a model's reasoning."""

    start: str
    end: str

    @classmethod
    def of(cls, tokenizer: TokenizerWrapper) -> "Thinking | None":
        return cls(tokenizer.think_start, tokenizer.think_end) if tokenizer.has_thinking else None


@dataclass(slots=True)
class CallDelta:
    """News of one tool call: its id and name first, then pieces of its arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Piece:
    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


# The head of a JSON call whose name comes before its arguments, as models are trained to write it.
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_MARKS = re.compile(r'["{}\[\]]')
_STRING = re.compile(r'(?:[^"\\]|\\.)*"', re.DOTALL)


class _OpenCall:
    """A JSON call whose arguments are passed on while they are being written."""

    __slots__ = ("_depth", "_in_string", "_scanned", "complete", "index", "sent")

    def __init__(self, index: int, start: int) -> None:
        self.index = index
        self.sent = start  # so much of the block has been passed on
        self.complete = False
        self._scanned = start
        self._depth = 0
        self._in_string = False

    def take(self, block: str) -> str:
        """The part of the arguments that has come in since the last time."""
        while not self.complete and self._advance(block):
            continue
        start, self.sent = self.sent, self._scanned if self.complete else len(block)
        return block[start : self.sent]

    def _advance(self, block: str) -> bool:
        """One more bracket or string; False when the rest of the block is needed first."""
        if self._in_string:
            closing = _STRING.match(block, self._scanned)
            if closing is None:
                return False
            self._in_string, self._scanned = False, closing.end()
        mark = _MARKS.search(block, self._scanned)
        if mark is None:
            return False
        self._scanned = mark.end()
        if mark[0] == '"':
            self._in_string = True
        else:
            self._depth += 1 if mark[0] in "{[" else -1
            self.complete = self._depth == 0
        return True


class ChatParser:
    """Splits one choice's text. `state` is where the text is now: about to begin, reasoning, content or tool."""

    def __init__(
        self,
        *,
        thinking: Thinking | None = None,
        inside_thinking: bool = False,  # the prompt has opened the reasoning already
        tool_format: ToolFormat | None = None,  # None: no tools, nothing is looked for
        tools: Sequence[Tool] = (),
        parallel: bool = True,  # False: the first call is the last
        drop: Sequence[str] = (),  # marks of the model's format that are no content
        streaming: bool = True,
    ) -> None:
        self._thinking = thinking
        self._format = tool_format
        self._tools = tools
        self._parallel = parallel
        self._streaming = streaming
        self._buffer = ""
        self._trim = inside_thinking
        self._open: _OpenCall | None = None
        calls = [tool_format.start] if tool_format else []
        self._in_content = Prefixes([*calls, *drop])
        self._in_reasoning = Prefixes([thinking.end, *calls]) if thinking else Prefixes([])
        self.calls = 0
        self.state: Literal["start", "reasoning", "content", "tool"] = "content"
        if thinking:
            self.state = "reasoning" if inside_thinking else "start"

    @property
    def finished(self) -> bool:
        """True once nothing that follows could be used."""
        return not self._parallel and self.calls > 0 and self.state != "tool"

    def push(self, text: str) -> Piece:
        piece = Piece()
        if self.state == "content" and not self._in_content.strings and not self._trim:
            piece.content = text
            return piece
        self._buffer += text
        while not self.finished and self._step(piece):
            continue
        return piece

    def finish(self) -> Piece:
        """What is left once the text has ended, perhaps in the middle of something."""
        piece = Piece()
        rest, self._buffer = self._buffer, ""
        if self.finished:
            return piece
        if self.state == "tool":
            self._finish_tool(rest, piece)
        elif self.state == "reasoning":
            piece.reasoning = rest.lstrip("\n") if self._trim else rest
        elif not self._trim or rest.strip():
            piece.content = rest
        return piece

    def _step(self, piece: Piece) -> bool:
        """Does what the current state can do; True when the state changed, so that there may be more to do."""
        if self.state == "start":
            return self._look_for_thinking()
        if self.state == "reasoning":
            return self._reason(piece)
        if self.state == "content":
            return self._write(piece)
        return self._call(piece)

    def _look_for_thinking(self) -> bool:
        assert self._thinking is not None
        text = self._buffer.lstrip()
        if text.startswith(self._thinking.start):
            self._buffer = text[len(self._thinking.start) :]
            self.state, self._trim = "reasoning", True
            return True
        if self._thinking.start.startswith(text):
            return False
        self.state = "content"
        return True

    def _reason(self, piece: Piece) -> bool:
        text, mark = self._take(self._in_reasoning)
        piece.reasoning += text
        if mark is None:
            return False
        self.state = "content" if self._thinking and mark == self._thinking.end else "tool"
        self._trim = True
        return True

    def _write(self, piece: Piece) -> bool:
        text, mark = self._take(self._in_content)
        if self._format is not None and mark is None:
            # A gap before a call is no content: it waits until it is known what follows.
            solid = text.rstrip()
            self._buffer = text[len(solid) :] + self._buffer
            text = solid
        elif self._format is not None and mark == self._format.start:
            text = text.rstrip()
            self.state = "tool"
        piece.content += text
        return mark is not None

    def _take(self, marks: Prefixes) -> tuple[str, str | None]:
        """Text up to the next mark, which is removed, or all that can't be the beginning of one."""
        if self._trim:
            self._buffer = self._buffer.lstrip("\n" if self.state == "reasoning" else None)
        if found := marks.find(self._buffer):
            at, mark = found
            text, self._buffer = self._buffer[:at], self._buffer[at + len(mark) :]
            return text, mark
        end = len(self._buffer) - marks.held(self._buffer)
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        self._trim = self._trim and not text
        return text, None

    def _call(self, piece: Piece) -> bool:
        assert self._format is not None
        end = self._buffer.find(self._format.end) if self._format.end else -1
        if end < 0:
            if self._streaming:
                self._pass_on(self._buffer, piece)
            return False
        block, self._buffer = self._buffer[:end], self._buffer[end + len(self._format.end) :]
        self._close(block, self._format.end, piece)
        self.state, self._trim = "content", True
        return True

    def _pass_on(self, block: str, piece: Piece) -> None:
        """Begins or continues to stream the call being written, where it is written as JSON."""
        if self._open is None:
            head = _HEAD.match(block)
            if head is None:
                return
            self._open = _OpenCall(self.calls, head.end())
            self.calls += 1
            piece.calls += (CallDelta(self._open.index, new_call_id(), head[1]),)
        if arguments := self._open.take(block):
            piece.calls += (CallDelta(self._open.index, arguments=arguments),)

    def _close(self, block: str, end: str, piece: Piece) -> None:
        """A whole block: the rest of a streamed call, or calls to report at once, or malformed text."""
        assert self._format is not None
        if self._streaming:
            self._pass_on(block, piece)
        if self._open is not None:
            self._open = None
            return
        calls = self._format.read(block, self._tools)
        if calls is None:
            piece.content += f"{self._format.start}{block}{end}"
            return
        for call in calls if self._parallel else calls[:1]:
            opening = CallDelta(self.calls, call.id or new_call_id(), call.name)
            piece.calls += (opening, CallDelta(self.calls, arguments=call.arguments))
            self.calls += 1

    def _finish_tool(self, block: str, piece: Piece) -> None:
        self._close(block, "", piece)
        self.state = "content"
