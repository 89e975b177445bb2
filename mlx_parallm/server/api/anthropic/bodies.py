"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`, and the call that they make."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from mlx_parallm.sampling_params import INT64
from mlx_parallm.server.api.anthropic.content_blocks import AnyMessage, MessageText
from mlx_parallm.server.api.anthropic.conversation import Transcript
from mlx_parallm.server.generation.call import ChatTurn, GenerationCall, Structure
from mlx_parallm.server.generation.sampling_fields import SampledBody, samples, sampling_field
from mlx_parallm.server.http.schema import MAX_MESSAGES, Body, few
from mlx_parallm.text.grammar import json_grammar
from mlx_parallm.text.parsers.calls import Tool
from mlx_parallm.text.prompts import Conversation

MAX_AGENT_TOOLS = 1024  # agents with many MCP servers bring hundreds
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
PROMPT_EXAMPLE: dict[str, Any] = {
    "model": "default",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}


class AnthropicTool(Body):
    type: str = Field("custom", description="Only `custom`: tools that Anthropic defines or runs are not known here")
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    input_schema: dict[str, Any] | None = Field(None, validate_default=True, description="A JSON schema; needed")
    cache_control: dict[str, Any] | None = Field(None, description="Accepted: every prompt is cached as it is")

    @field_validator("type")
    @classmethod
    def _is_custom(cls, value: str) -> str:
        if value != "custom":
            message = (
                "{kind} is a tool that Anthropic defines or runs: only custom tools with an input_schema work here"
            )
            raise PydanticCustomError("tool", message, {"kind": value[:100]})
        return value

    @field_validator("input_schema")
    @classmethod
    def _needed(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is None:
            raise PydanticCustomError("tool", "A tool needs its input_schema, a JSON schema")
        return value

    def as_function(self) -> Tool:
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


class AnthropicToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, validate_default=True, description="Of the tool, with the type `tool`")
    disable_parallel_tool_use: bool = Field(False, description="At most one call")

    @field_validator("name")
    @classmethod
    def _named(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and info.data.get("type") == "tool":
            raise PydanticCustomError("tool_choice", "The type tool needs the name of one")
        return value


class ThinkingBody(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(
        None, ge=1, le=INT64, description="Less than max_tokens. Accepted: a model ends its reasoning by itself"
    )
    display: Literal["summarized", "omitted"] = Field(
        "summarized", description="`omitted`: blocks of thinking come without their text"
    )

    @property
    def is_on(self) -> bool:
        return self.type != "disabled"


class JsonOutput(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Goes to the chat template as reasoning_effort"
    )
    format: JsonOutput | None = Field(None, description="A JSON schema that the response follows")


class PromptBody(Body):
    """What makes the prompt."""

    api_fields: ClassVar = frozenset(
        (
            "betas container context_management inference_geo mcp_servers metadata output_config service_tier speed"
        ).split()
    )
    model: str = Field(min_length=1, description="A served model or adapter; `default` always names the first model")
    messages: Annotated[list[AnyMessage], few(MAX_MESSAGES)] = Field(min_length=1)
    system: str | list[MessageText] = ""
    tools: list[AnthropicTool] = Field(default_factory=list, max_length=MAX_AGENT_TOOLS)
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingBody | None = Field(None, description="Switches the reasoning of models that can")
    output_config: OutputConfig = Field(default_factory=lambda: OutputConfig.model_validate({}))
    mcp_servers: list[Any] = Field(default_factory=list, description="Not supported: tools run at the client")
    cache_control: dict[str, Any] | None = Field(None, description="Accepted: every prompt is cached as it is")

    @field_validator("tool_choice")
    @classmethod
    def _names_a_tool(cls, value: AnthropicToolChoice | None, info: ValidationInfo) -> AnthropicToolChoice | None:
        names = [tool.name for tool in info.data.get("tools", [])]
        if value is not None and value.type == "tool" and value.name not in names:
            known = f"the tools are {', '.join(names[:20])}" if names else "there are no tools"
            found = {"name": str(value.name)[:100], "known": known}
            raise PydanticCustomError("tool_choice", "There is no tool '{name}' to choose: {known}", found)
        if value is not None and value.type == "any" and not names:
            raise PydanticCustomError("tool_choice", "The type any needs at least one tool")
        return value

    @field_validator("mcp_servers")
    @classmethod
    def _none(cls, value: list[Any]) -> list[Any]:
        if value:
            raise PydanticCustomError("mcp", "MCP servers are not called from here: have the client call their tools")
        return value

    def turn(self) -> ChatTurn:
        choice = self.tool_choice or AnthropicToolChoice.model_validate({"type": "auto"})
        transcript = Transcript.of(self.system, self.messages)
        conversation = Conversation(
            messages=transcript.messages,
            tools=[tool.as_function() for tool in self.tools] if choice.type != "none" else [],
            add_generation_prompt=not transcript.is_begun,
            continue_final_message=transcript.is_begun,
            template_kwargs=self._template_kwargs(),
        )
        return ChatTurn(
            conversation=conversation,
            images=transcript.images,
            must_call=choice.type in ("any", "tool"),
            tool_name=choice.name if choice.type == "tool" else None,
            parallel_calls=not choice.disable_parallel_tool_use,
        )

    def _template_kwargs(self) -> dict[str, Any]:
        """Returns the chat template's variables: as in Anthropic's API, a model reasons only when it is asked to."""
        kwargs: dict[str, Any] = {"enable_thinking": self.thinking is not None and self.thinking.is_on}
        if self.output_config.effort is not None:
            kwargs["reasoning_effort"] = EFFORTS[self.output_config.effort]
        return kwargs


class CountTokensBody(PromptBody):
    """A prompt whose tokens are counted."""

    model_config = ConfigDict(json_schema_extra={"example": PROMPT_EXAMPLE})


@samples(
    "top_p",
    temperature=(
        "temperature",
        sampling_field("temperature", description="0 is greedy; up to 2, where Anthropic's ends at 1"),
    ),
    top_k=("top_k", sampling_field("top_k", ge=0)),
    stop=("stop_sequences", sampling_field("stop")),
)
class MessagesBody(PromptBody, SampledBody):
    """A conversation to continue."""

    model_config = ConfigDict(json_schema_extra={"example": PROMPT_EXAMPLE | {"max_tokens": 64}})

    max_tokens: int = Field(ge=1, le=INT64, description="Where the context has less room, the response ends there")
    stream: bool = False
    metadata: dict[str, Any] | None = Field(None, description="Accepted, as `user_id`; it changes nothing")
    service_tier: str | None = Field(None, description="Accepted: there is one")

    @field_validator("max_tokens")
    @classmethod
    def _has_room_for_thinking(cls, value: int, info: ValidationInfo) -> int:
        thinking = info.data.get("thinking")
        if thinking is not None and thinking.is_on and (thinking.budget_tokens or 0) >= value:
            raise PydanticCustomError("max_tokens", "It must be greater than thinking.budget_tokens")
        return value

    def call(self) -> GenerationCall:
        shape = self.output_config.format
        structure = None if shape is None else Structure(json_grammar(shape.schema_), "output_config.format.schema")
        return GenerationCall(
            chat=self.turn(),
            model=self.model,
            sampling=self.sampling_params(max_tokens=self.max_tokens),
            structure=structure,
            stream=self.stream,
            fit_max_tokens=True,
        )
