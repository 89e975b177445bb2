"""The answers of `/v1/chat/completions`, whole and in chunks."""

from typing import Literal

from pydantic import Field

from mlx_parallm.server.api.openai.answers import REWARDS, PolicyAnswer, PolicyChoice, PromptLogprobs, Usage
from mlx_parallm.server.http.schema import AnswerBody


class TopLogprob(AnswerBody):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(AnswerBody):
    content: list[TokenLogprobs]
    refusal: None


class Function(AnswerBody):
    name: str
    arguments: str = Field(description="JSON text")


class ToolCallAnswer(AnswerBody):
    id: str
    type: Literal["function"]
    function: Function


class AssistantMessage(AnswerBody):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="The same as reasoning_content")
    tool_calls: list[ToolCallAnswer] | None = None


ChatFinish = Literal["stop", "length", "tool_calls", "abort"]  # abort: the engine was paused so


class ChatChoice(PolicyChoice):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatCompletion(PolicyAnswer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class FunctionDelta(AnswerBody):
    name: str | None = None
    arguments: str


class ToolCallDelta(AnswerBody):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class MessageDelta(AnswerBody):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(PolicyChoice):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatChunk(PolicyAnswer):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    rewards: list[float | None] | None = Field(None, description=REWARDS)
