"""What `/v1/messages` answers: messages, counts and errors, for /docs and the tests. Streams are events of these."""

from typing import Any, Literal

from pydantic import ConfigDict, Field

from mlx_parallm.server.http.schema import AnswerBody

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "model_context_window_exceeded"
]


class AnsweredText(AnswerBody):
    type: Literal["text"]
    text: str


class AnsweredThinking(AnswerBody):
    type: Literal["thinking"]
    thinking: str
    signature: str = Field(description="Means nothing to this server; Anthropic's clients expect one")


class AnsweredToolUse(AnswerBody):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ThinkingUsage(AnswerBody):
    thinking_tokens: int


class MessageUsage(AnswerBody):
    """The prompt's tokens are input_tokens and those of the cache, all three together."""

    input_tokens: int = Field(description="Of the prompt, computed and not kept")
    cache_creation_input_tokens: int = Field(description="Computed, and kept for prompts that begin alike")
    cache_read_input_tokens: int = Field(description="Found in the prefix cache")
    output_tokens: int
    output_tokens_details: ThinkingUsage
    service_tier: Literal["standard"]


class MessageAnswer(AnswerBody):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "id": "msg_7aaae1f97e474d0ead3681c518286574",
                "type": "message",
                "role": "assistant",
                "model": "SmolLM2-135M-Instruct",
                "content": [{"type": "text", "text": "The capital of France is Paris."}],
                "stop_reason": "end_turn",
                "stop_sequence": None,
                "usage": {
                    "input_tokens": 5,
                    "cache_creation_input_tokens": 32,
                    "cache_read_input_tokens": 0,
                    "output_tokens": 8,
                    "output_tokens_details": {"thinking_tokens": 0},
                    "service_tier": "standard",
                },
            }
        }
    )
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredText | AnsweredThinking | AnsweredToolUse]
    stop_reason: StopReason | None = Field(description="null in the event that begins a stream")
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(AnswerBody):
    model_config = ConfigDict(json_schema_extra={"example": {"input_tokens": 37}})
    input_tokens: int


class AnthropicErrorDetail(AnswerBody):
    type: str
    message: str


class AnthropicError(AnswerBody):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "type": "error",
                "error": {"type": "invalid_request_error", "message": "max_tokens: Field required"},
                "request_id": "d614b417b1cb4d9e965da9be7d2ea901",
            }
        }
    )
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str
