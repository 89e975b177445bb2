"""What `/v1/responses` is sent: the body of a request, with all that is wrong with it found before anything runs."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from mlx_parallm.sampling_params import INT64, MAX_LOGPROBS
from mlx_parallm.server.api.responses.items import Identity, InputItem, problem
from mlx_parallm.server.api.responses.tools import ToolBody, ToolChoiceBody, ToolUse, offered_tools
from mlx_parallm.server.generation.sampling_fields import SamplingBody
from mlx_parallm.server.http.schema import MAX_MESSAGES, MAX_TOOLS, Body, few

MAX_ITEMS = MAX_MESSAGES  # of a conversation
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
# Those of OpenAI's own tools, and image URLs, which are listed anyway, are of no effect.
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
EXAMPLE: dict[str, Any] = {"input": "What is the capital of France?", "max_output_tokens": 32, "temperature": 0}


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=64)
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = Field(None, description="The schema is always enforced, whatever this says")

    @model_validator(mode="after")
    def _has_schema(self) -> "TextFormat":
        if self.type == "json_schema" and (self.schema_ is None or not self.name):
            raise problem("The type json_schema needs a name and a schema")
        return self


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="Comes back, and is of no effect")


class ReasoningOptions(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="For chat templates that take it; none turns reasoning off where the template can"
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Comes back, and is of no effect: reasoning is given whole"
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseSampling(SamplingBody):
    """How tokens are sampled: OpenAI's fields, and those that this server's other routes have."""

    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    max_output_tokens: int | None = Field(
        None,
        ge=1,
        le=INT64,
        description="Reasoning included; must fit the context beside the input; default: what fits",
    )


class ResponseBody(ResponseSampling):
    """An input to answer."""

    model_config = ConfigDict(json_schema_extra={"example": EXAMPLE})
    api_fields: ClassVar = frozenset(
        (
            "context_management conversation moderation prompt prompt_cache_key prompt_cache_options "
            "prompt_cache_retention safety_identifier service_tier stream_options user"
        ).split()
    )
    model: str = Field("default", description="A served model or adapter; `default` always names the first model")
    lora_adapter: str | None = Field(None, min_length=1, description="An adapter of the model, as name or name@version")
    input: str | Annotated[list[InputItem], few(MAX_ITEMS)] = Field(
        description="A user's message, or items: messages, calls and their outputs, reasoning, references"
    )
    instructions: str | None = Field(None, description="A system message for this response alone")
    previous_response_id: Identity | None = Field(None, description="Of a stored response that this one continues")
    store: bool = Field(True, description="Keep the response, so that others can continue it")
    stream: bool = False
    background: bool = Field(False, description="Answer at once with a response that is in progress: ask for it later")
    tools: list[ToolBody] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceBody | None = None
    parallel_tool_calls: bool = Field(True, description="False: at most one call")
    max_tool_calls: int | None = Field(None, ge=1, le=INT64, description="Of OpenAI's own tools: of no effect here")
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] = Field(
        "disabled", description="auto: input that is too long loses its oldest items; disabled: it is refused"
    )
    include: list[Includable] = Field(default_factory=list, max_length=32)
    metadata: dict[str, Annotated[str, Field(max_length=512)]] = Field(default_factory=dict, max_length=16)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, description="Passed to the chat template")
    priority: int = Field(0, ge=-(2**31), lt=2**31, description="Lower goes first")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024, description="Shares cached prompts only within it"
    )
    prompt_cache_key: str | None = Field(None, description="Comes back; cached prompts are found without it")
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None
    prompt: Any = Field(None, description="Not supported: templates are kept at OpenAI")
    conversation: Any = Field(None, description="Not supported: use `previous_response_id`")
    context_management: Any = Field(None, description="Not supported: use `truncation`")

    @field_validator("metadata")
    @classmethod
    def _keys_are_short(cls, value: dict[str, str]) -> dict[str, str]:
        if any(len(key) > 64 for key in value):
            raise problem("Keys have at most 64 characters")
        return value

    @field_validator("prompt", "conversation", "context_management")
    @classmethod
    def _is_not_here(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None:
            raise problem(str(cls.model_fields[str(info.field_name)].description))
        return value

    @field_validator("background")
    @classmethod
    def _can_be_asked_for(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("stream"):
            raise problem("A background response can't be streamed: leave stream out, and ask for it by its id")
        if value and not info.data.get("store", True):
            raise problem("A background response needs store to be true")
        return value

    @field_validator("tools")
    @classmethod
    def _have_names_of_their_own(cls, value: list[ToolBody]) -> list[ToolBody]:
        names = [tool.function for tool in offered_tools(value)]
        if len(names) > MAX_TOOLS:
            raise problem(f"At most {MAX_TOOLS} tools are taken, those in namespaces included")
        if double := next((name for name in names if names.count(name) > 1), None):
            raise problem(f"Two tools are called {double!r}")
        return value

    @field_validator("tool_choice")
    @classmethod
    def _names_a_tool(cls, value: Any, info: ValidationInfo) -> Any:
        if "tools" in info.data:
            ToolUse.of(offered_tools(info.data["tools"]), value)
        return value

    @property
    def tool_use(self) -> ToolUse:
        return ToolUse.of(offered_tools(self.tools), self.tool_choice)

    @property
    def template_kwargs(self) -> dict[str, Any]:
        kwargs = dict(self.chat_template_kwargs)
        effort = self.reasoning.effort if self.reasoning is not None else None
        if effort is not None:
            kwargs.setdefault("reasoning_effort", effort)
            kwargs.setdefault("enable_thinking", effort != "none")
        return kwargs

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in self.include or self.top_logprobs is not None
