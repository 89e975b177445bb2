"""The responses of `/v1/responses` and of the routes of stored responses."""

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from mlx_parallm.server.http.schema import response_body


@response_body
class InputTokensDetails(TypedDict):
    cached_tokens: Annotated[int, Field(description="Input tokens that were computed before and reused")]
    cache_write_tokens: Annotated[int, Field(description="Not counted here: 0")]


@response_body
class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


@response_body
class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


@response_body
class ResponseFailure(TypedDict):
    code: str
    message: str


@response_body
class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


@response_body
class ResponseObject(TypedDict):
    id: str
    object: Literal["response"]
    created_at: Annotated[int, Field(description="Seconds since 1970")]
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    completed_at: int | None
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: Annotated[list[dict[str, Any]], Field(description="reasoning, message, function_call, custom_tool_call, …")]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Annotated[bool, Field(description="Whether the response is kept")]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None


@response_body
class ResponseDeleted(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


@response_body
class InputItemList(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


@response_body
class InputTokenCount(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int
