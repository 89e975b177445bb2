"""The responses of `/v1/chat/completions`, whole and in chunks."""

from collections.abc import Sequence
from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from mlx_parallm.server.api.openai.response_types import (
    GenerationChunk,
    GenerationResponse,
    PolicyChoice,
    PromptLogprobs,
)
from mlx_parallm.server.generation.choices import ResponseFinish
from mlx_parallm.server.generation.token_logprobs import TokenLogprobs
from mlx_parallm.server.http.schema import response_body


@response_body
class ChatLogprobs(TypedDict):
    content: list[TokenLogprobs]
    refusal: None


@response_body
class Function(TypedDict):
    name: str
    arguments: Annotated[str, Field(description="JSON text")]


@response_body
class ToolCallResponse(TypedDict):
    id: str
    type: Literal["function"]
    function: Function


@response_body
class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[Annotated[str, Field(description="The same as reasoning_content")]]
    tool_calls: NotRequired[list[ToolCallResponse]]


@response_body
class ChatChoice(PolicyChoice):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ResponseFinish | None
    stop_reason: str | int | None
    token_ids: NotRequired[Sequence[int]]


@response_body
class ChatCompletion(GenerationResponse):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: NotRequired[list[int]]


@response_body
class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


@response_body
class ToolCallDelta(TypedDict):
    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


@response_body
class MessageDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


@response_body
class ChatChunkChoice(PolicyChoice):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: ResponseFinish | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[Sequence[int]]


@response_body
class ChatChunk(GenerationChunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: NotRequired[list[int]]
