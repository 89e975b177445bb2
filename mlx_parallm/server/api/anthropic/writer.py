"""Writes messages as Anthropic's clients read them: whole, or as events that open, fill and close blocks."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_parallm.errors import ParallmError
from mlx_parallm.server.api.anthropic.errors import anthropic_error
from mlx_parallm.server.api.anthropic.response_types import (
    ContentBlock,
    MessageResponse,
    StopReason,
    TextOutput,
    ThinkingOutput,
    TokenUsage,
    ToolUseOutput,
)
from mlx_parallm.server.generation.choices import ChoiceStream, ChoiceUpdate, Collected
from mlx_parallm.server.generation.http_call import Generation
from mlx_parallm.server.generation.responses import one_line
from mlx_parallm.server.http.error_shapes import Failure
from mlx_parallm.text.parsers.calls import CallDelta, read_arguments

STOP_REASONS: dict[str, StopReason] = {"stop": "end_turn", "tool_calls": "tool_use", "abort": "pause_turn"}
PING = b'event: ping\ndata: {"type": "ping"}\n\n'


@dataclass(frozen=True, slots=True)
class MessageOptions:
    request_id: str
    max_tokens: int
    hide_thinking: bool = False


class MessageWriter:
    ending = b""
    media_type = b"text/event-stream; charset=utf-8"

    def __init__(self, generation: Generation, options: MessageOptions) -> None:
        self._generation = generation
        self._options = options
        self._choice = generation.choices[0]
        self._blocks = 0  # that were opened
        self._open: str | None = None  # the type of the block that is not closed
        self._thoughts = hashlib.blake2b(digest_size=24)

    def opening(self) -> bytes:
        return _event("message_start", message=self._message([], ended=False))

    def chunk(self, choice: ChoiceStream, update: ChoiceUpdate) -> bytes:
        piece = update.piece
        parts = []
        if piece.reasoning:
            self._thoughts.update(piece.reasoning.encode("utf-8", "surrogatepass"))
            parts.append(self._opened(ThinkingOutput(type="thinking", thinking="", signature="")))
            if not self._options.hide_thinking:
                parts.append(self._delta({"type": "thinking_delta", "thinking": piece.reasoning}))
        if piece.content:
            parts.append(self._opened(TextOutput(type="text", text="")))
            parts.append(self._delta({"type": "text_delta", "text": piece.content}))
        for call in piece.calls:
            if call.name is not None:
                parts.append(self._closed())
                parts.append(self._opened(_tool_use(call, {})))
            parts.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
        return b"".join(parts)

    def closing(self) -> bytes:
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return self._closed() + _event("message_delta", delta=delta, usage=self._usage()) + _event("message_stop")

    def failure(self, error: ParallmError) -> bytes:
        return (
            b"event: error\ndata: " + one_line(anthropic_error(Failure.of(error), self._options.request_id)) + b"\n\n"
        )

    def answer(self, results: Sequence[Collected]) -> MessageResponse:
        result = results[0]
        content: list[ContentBlock] = []
        if reasoning := "".join(result.reasoning):
            self._thoughts.update(reasoning.encode("utf-8", "surrogatepass"))
            shown = "" if self._options.hide_thinking else reasoning
            content.append(ThinkingOutput(type="thinking", thinking=shown, signature=self._signature()))
        if text := "".join(result.content):
            content.append(TextOutput(type="text", text=text))
        content += [_tool_use(call, read_arguments(call.arguments)) for call in result.calls]
        return self._message(content, ended=True)

    def _opened(self, block: ContentBlock) -> bytes:
        """Opens a block, unless one of its kind is open."""
        kind = block["type"]
        if self._open == kind:
            return b""
        data = self._closed() + _event("content_block_start", index=self._blocks, content_block=block)
        self._blocks += 1
        self._open = kind
        return data + PING if self._blocks == 1 else data

    def _closed(self) -> bytes:
        """Closes the block that is open, if any."""
        kind = self._open
        self._open = None
        if kind is None:
            return b""
        stop = _event("content_block_stop", index=self._blocks - 1)
        return (
            self._delta({"type": "signature_delta", "signature": self._signature()}) + stop
            if kind == "thinking"
            else stop
        )

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _signature(self) -> str:
        return base64.b64encode(self._thoughts.digest()).decode()

    def _message(self, content: list[ContentBlock], *, ended: bool) -> MessageResponse:
        reason, sequence = self._stop() if ended else (None, None)
        asked = self._generation.call.model
        return {
            "id": self._generation.completion_id,
            "type": "message",
            "role": "assistant",
            "model": self._generation.served.name if asked == "default" else asked,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": {**self._usage(), "service_tier": "standard"},
        }

    def _stop(self) -> tuple[StopReason, str | None]:
        choice = self._choice
        if choice.finish_reason == "length":
            full = choice.completion_tokens < self._options.max_tokens
            return ("model_context_window_exceeded" if full else "max_tokens"), None
        if choice.finish_reason == "stop" and isinstance(choice.stop_reason, str):
            return "stop_sequence", choice.stop_reason
        return STOP_REASONS[str(choice.finish_reason)], None

    def _usage(self) -> TokenUsage:
        """The prompt's whole blocks are kept in the prefix cache; what is left over is not."""
        prompt = self._generation.prompt_tokens
        cached = self._choice.cached_tokens
        size = self._generation.served.client.block_size
        kept = max(0, prompt // size * size - cached) if size else 0
        return {
            "input_tokens": prompt - cached - kept,
            "cache_creation_input_tokens": kept,
            "cache_read_input_tokens": cached,
            "output_tokens": self._choice.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._choice.reasoning_tokens},
        }


def _event(name: str, **fields: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + one_line({"type": name, **fields}) + b"\n\n"


def _tool_use(call: CallDelta, arguments: dict[str, Any]) -> ToolUseOutput:
    name = str(call.id).replace("call_", "toolu_", 1)
    return ToolUseOutput(type="tool_use", id=name, name=call.name or "", input=arguments)
