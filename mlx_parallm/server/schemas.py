"""Request bodies, as clients send them and as /docs describes them.

Strict: a number in quotes, a boolean for a number, a value out of range are errors that name their place.
A null field means an absent one. Fields that we don't know are ignored, as OpenAI-compatible servers do.
`server.params` turns a valid body into what the engine takes.
"""

from typing import Annotated, Any, Literal

import orjson
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from mlx_parallm.types import INT64, MAX_LOGPROBS, MAX_STOPS

MAX_TOOLS = 128
MAX_PROMPTS = 1024
MAX_TOKENS = 1 << 22  # of a prompt: more than any context
MAX_METADATA = 65_536  # bytes


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data


def read_prompt(value: Any) -> list[str] | list[list[int]]:
    """One prompt or several, as text or as token ids, always as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("prompt", "Expected a string, token ids, or a non-empty list of either")
    if _are_tokens(value):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise PydanticCustomError("prompt", f"At most {MAX_PROMPTS} prompts fit in one request")
    texts = all(isinstance(item, str) for item in value)
    if texts or all(isinstance(item, list) and item and _are_tokens(item) for item in value):
        return value
    raise PydanticCustomError("prompt", "Expected only strings, only token ids, or only non-empty lists of token ids")


def _are_tokens(items: list[Any]) -> bool:
    """Without Python's work for each: there may be millions."""
    if len(items) > MAX_TOKENS:
        raise PydanticCustomError("prompt", f"At most {MAX_TOKENS} token ids fit in one prompt")
    return set(map(type, items)) == {int} and min(items) >= 0


def _read_stop(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise PydanticCustomError("stop", "Expected a string or a list of strings")
    if len(strings) > MAX_STOPS:
        raise PydanticCustomError("stop", f"At most {MAX_STOPS} stop strings are allowed")
    if not all(strings):
        raise PydanticCustomError("stop", "A stop string must not be empty")
    return tuple(strings)


def _read_logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias", "Expected an object of token ids and numbers")
    bias: dict[int, float] = {}
    for key, number in value.items():
        if not key.isascii() or not key.isdigit() or len(key) > 10:
            raise PydanticCustomError("logit_bias", "Its keys must be token ids")
        if isinstance(number, bool) or not isinstance(number, int | float) or not -100 <= number <= 100:
            raise PydanticCustomError("logit_bias", "Its values must be numbers between -100 and 100")
        bias[int(key)] = float(number)
    return bias


PromptInput = Annotated[
    list[str] | list[list[int]],
    PlainValidator(read_prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]
Stop = Annotated[tuple[str, ...], PlainValidator(_read_stop, json_schema_input_type=str | list[str])]
LogitBias = Annotated[dict[int, float], PlainValidator(_read_logit_bias, json_schema_input_type=dict[str, float])]
TokenId = Annotated[int, Field(ge=0)]


class StreamOptions(Body):
    include_usage: bool = Field(False, description="End the stream with a chunk that carries the usage")
    continuous_usage_stats: bool = Field(False, description="Give the usage so far in every chunk")


class StructuredOutputs(Body):
    """vLLM's way to ask for structure: exactly one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="A JSON schema")
    regex: str | None = Field(None, max_length=10_000)
    choice: list[str] | None = Field(None, min_length=1, max_length=1000)
    grammar: str | None = Field(None, max_length=100_000, description="A Lark grammar")
    json_object: bool | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> "StructuredOutputs":
        if sum(bool(value) for value in (self.json_, self.regex, self.choice, self.grammar, self.json_object)) != 1:
            raise PydanticCustomError("structure", "Give exactly one of json, regex, choice, grammar and json_object")
        return self


class JsonSchema(Body):
    name: str = Field(max_length=64)
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool = Field(False, description="The schema is always enforced, whatever this says")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise PydanticCustomError("missing_schema", "The type json_schema needs json_schema.schema")
        return self


class PolicyBody(Body):
    """What trainers send beside a request: any of these, and each choice says which adapter version made its tokens."""

    policy_version: int | None = Field(
        None, ge=0, le=INT64, description="The adapter's version that is to answer; 0 is the model without one"
    )
    step_id: int | str | None = Field(None, description="Comes back with the answer")
    request_id: str | None = Field(None, min_length=1, max_length=256, description="Comes back with the answer")
    metadata: dict[str, Any] | None = Field(
        None, description="Comes back with the answer, and goes to the scoring function"
    )
    collect_trajectory: bool | None = Field(None, description="Learn from the answer, by its score or later feedback")
    scoring_function: str | None = Field(
        None, min_length=1, max_length=200, description="What scores it: the name of a task or of one given at start"
    )
    follow_policy: bool | None = Field(
        None, description="Go on with a newer version of the adapter from the step after it is published"
    )

    @field_validator("metadata")
    @classmethod
    def _can_come_back(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        try:
            size = len(orjson.dumps({"in": {"the": {"answer": [value]}}}))
        except (TypeError, ValueError):
            raise PydanticCustomError("metadata", "It is nested too deeply") from None
        if size > MAX_METADATA:
            raise PydanticCustomError("metadata", f"At most {MAX_METADATA} bytes are taken")
        return value

    @property
    def of_a_trainer(self) -> bool:
        return any(getattr(self, name) is not None for name in PolicyBody.model_fields)


class GenerationBody(PolicyBody):
    """What completions and chat have in common."""

    model: str = Field("default", description="A served model or adapter; `default` always names the first model")
    lora_adapter: str | None = Field(None, min_length=1, description="An adapter of the model, as name or name@version")
    temperature: float = Field(1.0, ge=0, le=2, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=INT64, description="Sample from the k likeliest tokens; 0 or -1: off")
    min_p: float = Field(0.0, ge=0, le=1, description="Drop tokens less likely than this share of the likeliest")
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=10, description="On prompt and output tokens; 1: off")
    logit_bias: LogitBias = Field(default_factory=dict, description="Token id to a number added to its logit")
    seed: int | None = Field(None, ge=-INT64 - 1, le=INT64, description="Same seed and prompt: same tokens")
    n: int = Field(1, ge=1, description="How many choices per prompt")
    stop: Stop = Field((), description="Text that ends the output and is not part of it")
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=1024)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = Field(False, description="Go on after the end-of-sequence token")
    min_tokens: int = Field(0, ge=0, le=INT64)
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs_mode: Literal["raw", "processed"] = Field(
        "raw", description="Of the model itself, or as tokens were drawn: after temperature, penalties, top_p and top_k"
    )
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: bool = Field(
        False, description="The ids of prompt and output, the token that ended it included, as are then its logprobs"
    )
    truncate_prompt_tokens: int | None = Field(None, ge=1, le=INT64, description="Keep only so many, from the end")
    priority: int = Field(0, ge=-(2**31), lt=2**31, description="Lower goes first")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024, description="Shares cached prompts only within it"
    )
    user: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = Field(None, min_length=1, max_length=10_000)
    guided_choice: list[str] | None = Field(None, min_length=1, max_length=1000)
    guided_grammar: str | None = Field(None, min_length=1, max_length=100_000)

    @field_validator("stream_options")
    @classmethod
    def _only_for_streams(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise PydanticCustomError("stream_options", "stream_options needs stream to be true")
        return value

    @field_validator("prompt_logprobs")
    @classmethod
    def _not_for_streams(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("stream"):
            raise PydanticCustomError("prompt_logprobs", "prompt_logprobs can't be streamed")
        return value


class CompletionBody(GenerationBody):
    """Text to continue."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}}
    )
    prompt: PromptInput = Field(description="Text or token ids, or a list of either")
    echo: bool = Field(False, description="Begin the text with the prompt")
    max_tokens: int | None = Field(
        None,
        ge=0,
        le=INT64,
        description="Must fit the context beside the prompt; default 16; 0 with echo scores the prompt",
    )
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="So many of the likeliest tokens at each place"
    )
    best_of: int | None = Field(None, ge=1, description="Only as many as n")
    suffix: str | None = Field(None, description="Not supported: filling in the middle needs a model for it")
    add_special_tokens: bool = Field(True, description="Begin a text prompt as the tokenizer does, with its BOS token")

    @field_validator("best_of")
    @classmethod
    def _equals_n(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value != info.data.get("n"):
            raise PydanticCustomError("best_of", "best_of must equal n: choices are not ranked")
        return value

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, value: str | None) -> str | None:
        if value:
            raise PydanticCustomError("suffix", "suffix is not supported")
        return value

    @field_validator("max_tokens")
    @classmethod
    def _something_to_answer(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value == 0 and not info.data.get("echo"):
            raise PydanticCustomError("max_tokens", "max_tokens 0 leaves nothing to answer unless echo is true")
        return value


class ContentPart(Body):
    """A piece of a message. Only text is understood."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _is_text(self) -> "ContentPart":
        if self.type in ("image_url", "input_image", "image", "input_audio", "audio_url", "video_url", "file"):
            kind = self.type.removesuffix("_url").removeprefix("input_")
            raise PydanticCustomError("part", f"This model reads text only: {kind} parts are not supported")
        if self.type not in ("text", "input_text", "output_text", "refusal"):
            raise PydanticCustomError("part", "Expected a part of type text")
        if (self.refusal if self.type == "refusal" else self.text) is None:
            raise PydanticCustomError("part", f"A part of type {self.type} needs its text")
        return self

    @property
    def content(self) -> str:
        return (self.refusal if self.type == "refusal" else self.text) or ""


class FunctionCall(Body):
    name: str = Field(min_length=1, max_length=256)
    arguments: str | dict[str, Any] = Field("{}", description="JSON text")


class MessageToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = Field(None, validate_default=True, description="Text, or parts of text")
    name: str | None = None
    tool_calls: list[MessageToolCall] = Field(default_factory=list, max_length=MAX_TOOLS, description="An assistant's")
    tool_call_id: str | None = Field(
        None, validate_default=True, description="Of the call that a tool message answers; needed there"
    )
    reasoning_content: str | None = None

    @field_validator("content")
    @classmethod
    def _needed(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and info.data.get("role") not in ("assistant", None):
            raise PydanticCustomError("content", f"A {info.data['role']} message needs content")
        return value

    @field_validator("tool_call_id")
    @classmethod
    def _names_its_call(cls, value: str | None, info: ValidationInfo) -> str | None:
        if info.data.get("role") == "tool" and not value:
            raise PydanticCustomError("tool_call_id", "A tool message needs the id of the call that it answers")
        return value


class FunctionDefinition(Body):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema")
    strict: bool | None = None


class ToolDefinition(Body):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    name: str


class NamedToolChoice(Body):
    type: Literal["function"] = "function"
    function: NamedFunction


class TemplateBody(Body):
    """What a chat template takes."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[ToolDefinition] = Field(default_factory=list, max_length=MAX_TOOLS)
    add_generation_prompt: bool | None = Field(None, description="Open the assistant's turn; the default")
    continue_final_message: bool = Field(False, description="Go on writing the last message")
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, description="Passed to the chat template")

    @field_validator("continue_final_message")
    @classmethod
    def _one_or_the_other(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("add_generation_prompt"):
            raise PydanticCustomError("continue", "It excludes add_generation_prompt: one message can't be both")
        return value


CHAT_EXAMPLE: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 64,
    "temperature": 0.7,
}


class ChatBody(GenerationBody, TemplateBody):
    """A conversation to continue."""

    model_config = ConfigDict(json_schema_extra={"example": CHAT_EXAMPLE})
    max_tokens: int | None = Field(
        None, ge=1, le=INT64, description="Must fit the context beside the prompt; default: what fits"
    )
    max_completion_tokens: int | None = Field(None, ge=1, le=INT64, description="The same, and goes first")
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool = Field(True, description="False: at most one call")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    add_special_tokens: bool = Field(False, description="Have the tokenizer add its own to the template's")
    separate_reasoning: bool = Field(True, description="False: reasoning stays in the content, marks and all")

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and not info.data.get("logprobs"):
            raise PydanticCustomError("top_logprobs", "top_logprobs needs logprobs to be true")
        return value

    functions: Any = Field(None, description="Not supported: OpenAI has replaced it by `tools`")
    function_call: Any = Field(None, description="Not supported: OpenAI has replaced it by `tool_choice`")

    @field_validator("functions", "function_call")
    @classmethod
    def _is_replaced(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None:
            name = "tools" if info.field_name == "functions" else "tool_choice"
            raise PydanticCustomError(
                str(info.field_name), f"OpenAI has replaced {info.field_name}: send {name} instead"
            )
        return value

    @field_validator("tool_choice")
    @classmethod
    def _names_a_tool(cls, value: Any, info: ValidationInfo) -> Any:
        names = [tool.function.name for tool in info.data.get("tools", [])]
        if isinstance(value, NamedToolChoice) and value.function.name not in names:
            known = f"the tools are {', '.join(names[:20])}" if names else "there are no tools"
            message = f"There is no function {value.function.name[:100]!r} to choose: {known}"
            raise PydanticCustomError("tool_choice", message.replace("{", "{{").replace("}", "}}"))
        if value == "required" and not names:
            raise PydanticCustomError("tool_choice", "required needs at least one tool")
        return value


class TokenizeBody(Body):
    """Text, or a conversation, to split into tokens."""

    model_config = ConfigDict(json_schema_extra={"example": {"prompt": "Hello, world!"}})
    model: str = "default"
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    tools: list[ToolDefinition] = Field(default_factory=list, max_length=MAX_TOOLS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_special_tokens: bool | None = Field(None, description="True for a prompt, false for messages")
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """Tokens to join into text."""

    model_config = ConfigDict(json_schema_extra={"example": {"tokens": [19556, 28, 905, 17]}})
    model: str = "default"
    tokens: list[TokenId] = Field(max_length=1_000_000)


class LoadAdapterBody(Body):
    model_config = ConfigDict(json_schema_extra={"example": {"name": "math", "path": "adapters/math"}})
    name: str = Field(validation_alias=AliasChoices("name", "lora_name", "adapter_name"))
    path: str = Field(min_length=1, validation_alias=AliasChoices("path", "lora_path", "adapter_path"))
    version: int | None = Field(None, ge=1, le=INT64, description="Must be newer than the newest; default: the next")
    model: str = Field("default", description="The model that it is for")


class UpdateWeightsBody(Body):
    model_config = ConfigDict(json_schema_extra={"example": {"name": "policy", "tensors": "UEsDBA==", "version": 2}})
    name: str = Field(validation_alias=AliasChoices("name", "lora_name", "adapter_name"))
    tensors: str = Field(min_length=1, description="A safetensors file in base64")
    config: dict[str, Any] | None = Field(None, description="adapter_config.json, of mlx-lm or PEFT")
    version: int | None = Field(None, ge=1, le=INT64, description="Must be newer than the newest; default: the next")
    model: str = Field("default", description="The model that it is for")


class UnloadAdapterBody(Body):
    model_config = ConfigDict(json_schema_extra={"example": {"name": "math"}})
    name: str = Field(validation_alias=AliasChoices("name", "lora_name", "adapter_name"))


class RollbackBody(UnloadAdapterBody):
    version: int | None = Field(None, ge=1, le=INT64, description="Default: the one before")
    checkpoint: str | None = Field(
        None, min_length=1, max_length=100, description="Of an adapter that is trained: go on from this checkpoint"
    )


class VllmLoadBody(Body):
    model_config = ConfigDict(json_schema_extra={"example": {"lora_name": "math", "lora_path": "adapters/math"}})
    lora_name: str
    lora_path: str = Field(min_length=1)
    load_inplace: bool = False


class VllmUnloadBody(Body):
    model_config = ConfigDict(json_schema_extra={"example": {"lora_name": "math"}})
    lora_name: str


class SwitchBody(Body):
    """What requests for the model's own name get: one adapter, or several with their shares."""

    model_config = ConfigDict(json_schema_extra={"example": {"split": {"v12": 0.9, "v13": 0.1}}})
    version: str | int | None = Field(
        None, description="name, name@version, a version of `name`, or base (also 0): the model alone"
    )
    split: dict[str, float] | None = Field(None, min_length=1, max_length=16, description="Shares that add up to 1")
    name: str | None = Field(None, description="The adapter whose versions are meant; needed where there are several")
    model: str = Field("default", description="The model whose name it is about")

    @model_validator(mode="after")
    def _one_way(self) -> "SwitchBody":
        if (self.version is None) == (self.split is None):
            raise PydanticCustomError("switch", "Give either version or split")
        return self

    @field_validator("split")
    @classmethod
    def _whole(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value is not None and (min(value.values()) <= 0 or abs(sum(value.values()) - 1) > 1e-3):
            raise PydanticCustomError("split", "Shares must be above 0 and add up to 1")
        return value


class PinBody(UnloadAdapterBody):
    version: int | None = Field(None, ge=1, le=INT64, description="Default: what the name means")


PauseModeName = Literal["abort", "wait", "keep", "in_place", "retract"]


class PauseBody(Body):
    model_config = ConfigDict(json_schema_extra={"example": {"mode": "keep"}})
    mode: PauseModeName | None = Field(None, description="What becomes of running requests; default abort")
    clear_cache: bool | None = Field(None, description="Forget cached prompts, once nothing runs")
