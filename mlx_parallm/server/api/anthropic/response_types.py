"""What `/v1/messages` answers: messages, counts and errors, for /docs and the tests. Streams are events of these."""

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from mlx_parallm.server.http.schema import response_body

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "model_context_window_exceeded"
]


@response_body
class TextOutput(TypedDict):
    type: Literal["text"]
    text: str


@response_body
class ThinkingOutput(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: Annotated[str, Field(description="Means nothing to this server; Anthropic's clients expect one")]


@response_body
class ToolUseOutput(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


@response_body
class ThinkingUsage(TypedDict):
    thinking_tokens: int


@response_body
class TokenUsage(TypedDict):
    """The prompt's tokens are input_tokens and those of the cache, all three together."""

    input_tokens: Annotated[int, Field(description="Of the prompt, computed and not kept")]
    cache_creation_input_tokens: Annotated[int, Field(description="Computed, and kept for prompts that begin alike")]
    cache_read_input_tokens: Annotated[int, Field(description="Found in the prefix cache")]
    output_tokens: int
    output_tokens_details: ThinkingUsage


@response_body
class MessageUsage(TokenUsage):
    service_tier: Literal["standard"]


ContentBlock = TextOutput | ThinkingOutput | ToolUseOutput


@response_body
class MessageResponse(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Annotated[StopReason | None, Field(description="null in the event that begins a stream")]
    stop_sequence: str | None
    usage: MessageUsage


@response_body
class TokenCount(TypedDict):
    input_tokens: int


@response_body
class AnthropicErrorDetail(TypedDict):
    type: str
    message: str


@response_body
class AnthropicError(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str
