"""gpt-oss's harmony format: a completion is a sequence of messages, each in a channel, some addressed to a tool.

    <|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
    <|start|>assistant<|channel|>final<|message|>content<|return|>

`HarmonyParser` is to these models what `ChatParser` is to all others. The prompt ends with `<|start|>assistant`, so the
first message begins in the middle of its header. The tokens that end a completion, `<|call|>` and `<|return|>`, are not
part of its text where they are end-of-sequence tokens.
"""

import re
from collections.abc import Sequence
from typing import Literal

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_parallm.text.detokenize import Prefixes
from mlx_parallm.text.parsers.call_blocks import JSON_QUOTES, NO_QUOTES, Scanner
from mlx_parallm.text.parsers.calls import Calls, Piece, Tool

MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
ANALYSIS = "<|channel|>analysis<|message|>"  # opens the reasoning
FINAL = "<|channel|>final<|message|>"
NEXT_MESSAGE = "<|start|>assistant"
BETWEEN_MESSAGES = "\n\n"  # in content and reasoning that consist of several


def is_harmony(tokenizer: TokenizerWrapper) -> bool:
    return {"<|start|>", "<|channel|>", "<|message|>", "<|end|>"} <= tokenizer.get_vocab().keys()


def call_header(name: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"


_ROLE = re.compile(r"<\|start\|>\s{0,8}([^\s<]{1,128})")
_CHANNEL = re.compile(r"<\|channel\|>\s{0,8}(\w{1,32})")
_RECIPIENT = re.compile(r"\bto=([^\s<]{1,192})(?=[\s<])")
_PREFIX = "functions."
_LONGEST_HEADER = 1000

Target = Literal["reasoning", "content", "call"]


class HarmonyParser:
    """Splits one choice's text into reasoning, content and tool calls.

    `analysis` is reasoning, and so is what is addressed to anything but the request's functions; `final`, and
    `commentary` to nobody, is content. A call is a call once its header is complete; cut off after the name,
    it has no arguments. `<|start|>` of another role than the assistant ends the completion.
    """

    def __init__(
        self,
        *,
        tools: Sequence[Tool] = (),
        parallel: bool = True,
        inside_thinking: bool = False,  # the prompt has opened the analysis already
        separate_reasoning: bool = True,  # False: reasoning is content too
    ) -> None:
        self._names = {tool["function"]["name"] for tool in tools}
        self._calls = Calls(parallel=parallel)
        self._parallel = parallel
        self._separate = separate_reasoning
        self._in_header = Prefixes(["<|message|>", "<|end|>", "<|call|>", "<|return|>"])
        self._in_text = Prefixes(MARKS)
        self._place: Literal["start", "header", "body"] = "body" if inside_thinking else "start"
        self._target: Target = "reasoning"
        self._header: list[str] = []  # of the message that begins
        self._scanner: Scanner | None = None  # of a call's arguments
        self._complete = False  # the arguments are
        self._buffer = ""
        self._written = {"content": False, "reasoning": False}
        self._fresh = False  # a message has begun and nothing of it was written yet
        self._over = False

    @property
    def calls(self) -> int:
        return self._calls.count

    @property
    def state(self) -> Literal["start", "reasoning", "content"]:
        if self._place == "start":
            return "start"
        return "reasoning" if self._place == "body" and self._target == "reasoning" else "content"

    @property
    def finished(self) -> bool:
        """True once nothing that follows could be used."""
        in_call = self._place == "body" and self._target == "call"
        return self._over or (not self._parallel and self.calls > 0 and not in_call)

    def push(self, text: str) -> Piece:
        piece = Piece()
        self._buffer += text
        while not self.finished and self._step(piece):
            continue
        piece.calls = self._calls.take()
        return piece

    def finish(self, *, cut_off: bool = False) -> Piece:
        """Returns what is left once the text has ended; `cut_off`: not by the model itself."""
        piece = Piece()
        rest = self._buffer
        self._buffer = ""
        if self.finished:
            return piece
        if self._place == "header" and cut_off:
            self._report_name("".join(self._header) + rest)
        elif self._place == "start" and not cut_off:
            piece.content = "".join(self._header) + rest
        elif self._place == "body" and not cut_off:
            if self._target != "call":
                self._write(rest, piece)
            elif not self._complete:
                self._calls.write(rest)
        piece.calls = self._calls.take()
        return piece

    def _step(self, piece: Piece) -> bool:
        if self._place == "start":
            return self._begin()
        if self._place == "header":
            return self._read_header()
        if self._target == "call":
            return self._read_arguments()
        return self._read_text(piece)

    def _begin(self) -> bool:
        """A completion begins within a header or, when the prompt has a complete one, with content."""
        text = self._buffer.lstrip()
        if not text:
            self._header.append(self._buffer)
            self._buffer = ""
            return False
        starts = (*MARKS, "to=")
        if text.startswith(starts):
            self._place = "header"
            return True
        if any(mark.startswith(text) for mark in starts):
            return False
        self._enter("content")
        self._buffer = "".join(self._header) + self._buffer
        self._header.clear()
        return True

    def _read_header(self) -> bool:
        text, mark = self._take(self._in_header)
        self._header.append(text)
        if mark is None:
            return False
        header = "".join(self._header)[:_LONGEST_HEADER] + mark
        self._header.clear()
        if mark == "<|message|>":
            self._open(header)
        return True

    def _open(self, header: str) -> None:
        role = _ROLE.search(header)
        if role is not None and role[1] != "assistant":
            self._over = True
            return
        name = self._called(header)
        if name is not None:
            self._calls.open(name)
            self._scanner = None
            self._complete = False
            self._enter("call")
            return
        channel = _CHANNEL.search(header)
        addressed = _RECIPIENT.search(header) is not None
        self._enter("reasoning" if addressed or (channel and channel[1] == "analysis") else "content")

    def _called(self, header: str) -> str | None:
        """The function that a message is addressed to."""
        recipient = _RECIPIENT.search(header)
        if recipient is None or not self._names:
            return None
        if recipient[1].startswith(_PREFIX):
            return recipient[1].removeprefix(_PREFIX) or None
        return recipient[1] if recipient[1] in self._names else None

    def _report_name(self, header: str) -> None:
        name = self._called(header[:_LONGEST_HEADER])
        if name is not None:
            self._calls.open(name)

    def _enter(self, target: Target) -> None:
        self._place = "body"
        self._target = target
        self._fresh = True

    def _read_text(self, piece: Piece) -> bool:
        text, mark = self._take(self._in_text)
        self._write(text, piece)
        return mark is not None and self._leave(mark)

    def _write(self, text: str, piece: Piece) -> None:
        if not text:
            return
        kind: Literal["content", "reasoning"] = "content"
        if self._target == "reasoning" and self._separate:
            kind = "reasoning"
        if self._fresh and self._written[kind]:
            text = BETWEEN_MESSAGES + text
        self._fresh = False
        self._written[kind] = True
        if kind == "content":
            piece.content += text
        else:
            piece.reasoning += text

    def _read_arguments(self) -> bool:
        """Passes arguments on as they are written; marks within JSON strings are part of them."""
        if self._scanner is None:
            self._buffer = self._buffer.lstrip()
            if not self._buffer:
                return False
            self._scanner = Scanner(JSON_QUOTES if self._buffer[0] == "{" else NO_QUOTES, MARKS)
        at, event = self._scanner.scan(self._buffer)
        text = self._buffer[:at]
        self._buffer = self._buffer[at:]
        if not self._complete:
            self._calls.write(text)
        if event == "closed":
            self._complete = True
            return True
        if event == "end":
            self._buffer = self._buffer[len(self._scanner.mark) :]
            return self._leave(self._scanner.mark)
        return False

    def _leave(self, mark: str) -> bool:
        """A mark ends a message, begins the header of the next one, or means nothing where it stands."""
        if mark in ("<|message|>", "<|constrain|>"):
            return True
        self._place = "header"
        if mark in ("<|start|>", "<|channel|>"):
            self._header.append(mark)
        return True

    def _take(self, marks: Prefixes) -> tuple[str, str | None]:
        """Text up to the next mark, which is removed, or all that can't be the start of one."""
        if found := marks.find(self._buffer):
            at, mark = found
            text = self._buffer[:at]
            self._buffer = self._buffer[at + len(mark) :]
            return text, mark
        end = len(self._buffer) - marks.held(self._buffer)
        text = self._buffer[:end]
        self._buffer = self._buffer[end:]
        return text, None
