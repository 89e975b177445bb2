"""The bodies of Ollama's routes that generate, and what its options mean here."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, ConfigDict, Field, PlainValidator, field_validator, model_validator
from pydantic_core import PydanticCustomError

from mlx_parallm.sampling_params import INT64, MAX_LOGPROBS, SamplingParams
from mlx_parallm.server.api.ollama.durations import KeepAlive
from mlx_parallm.server.generation.sampling_fields import SampledBody, samples, sampling_field
from mlx_parallm.server.http.schema import MAX_MESSAGES, MAX_TOOLS, Body, few


@samples(
    *("min_p", "presence_penalty", "frequency_penalty", "stop"),
    temperature=("temperature", sampling_field("temperature", default=0.8)),
    top_k=("top_k", sampling_field("top_k", default=40)),
    top_p=("top_p", sampling_field("top_p", default=0.9)),
    repetition_penalty=("repeat_penalty", sampling_field("repetition_penalty")),
)
class OllamaOptions(SampledBody):
    """How tokens are chosen, with Ollama's defaults. Those that say how a model is loaded are accepted and unused."""

    num_predict: int = Field(-1, ge=-INT64, le=INT64, description="Most tokens; 0 or less: what the context allows")
    seed: int = Field(-1, ge=-INT64, le=INT64, description="Negative: another one each time")
    num_ctx: int | None = Field(None, description="Accepted: a model has its whole context, or `--max-model-len`")
    typical_p: float = Field(1.0, ge=1, le=1, description="Only 1, which is off, is supported")
    tfs_z: float = Field(1.0, ge=1, le=1, description="Only 1, which is off, is supported")
    mirostat: int = Field(0, ge=0, le=0, description="Only 0, which is off, is supported")

    def sampling(self, logprobs: int | None) -> SamplingParams:
        return self.sampling_params(
            max_tokens=self.num_predict if self.num_predict > 0 else None,
            seed=self.seed if self.seed >= 0 else None,
            logprobs=logprobs,
        )


def _read_format(value: Any) -> dict[str, Any] | None:
    if value in ("", None):
        return None
    if value == "json":
        return {"type": "object"}
    if not isinstance(value, dict):
        raise PydanticCustomError("format", "Expected json, or a JSON schema, which is an object")
    return value


Format = Annotated[
    dict[str, Any] | None, PlainValidator(_read_format, json_schema_input_type=Literal["", "json"] | dict[str, Any])
]
Think = bool | Literal["low", "medium", "high", "max"]


class NamedModelBody(Body):
    """The body of a route about one model. Old clients call it name."""

    api_fields: ClassVar = frozenset(
        (
            "_debug_render_only context dimensions format images keep_alive logprobs options raw shift stream "
            "suffix system template think top_logprobs truncate verbose"
        ).split()
    )
    model: str = Field(
        min_length=1, validation_alias=AliasChoices("model", "name"), description="With or without `:latest`"
    )


class OllamaBody(NamedModelBody):
    """What chats and prompts have in common."""

    options: OllamaOptions = Field(default_factory=lambda: OllamaOptions.model_validate({}))
    format: Format = Field(None, description="`json`, or a JSON schema that the response follows")
    stream: bool = True
    think: Think | None = Field(None, description="Whether a model that can reason does; default: as the model does")
    keep_alive: KeepAlive | None = Field(
        None,
        description="How long the model stays in memory then: seconds or `5m`; 0: not at all, negative: for ever; "
        "where there are keys, only an admin's changes that",
    )
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)

    @property
    def template_kwargs(self) -> dict[str, Any]:
        if self.think is None:
            return {}
        kwargs: dict[str, Any] = {"enable_thinking": bool(self.think)}
        if isinstance(self.think, str):
            kwargs["reasoning_effort"] = "high" if self.think == "max" else self.think
        return kwargs

    def sampling(self) -> SamplingParams:
        return self.options.sampling(self.top_logprobs if self.logprobs else None)


class OllamaFunctionCall(Body):
    name: str = Field(min_length=1, max_length=256)
    arguments: dict[str, Any] = Field(default_factory=dict)


class OllamaToolCall(Body):
    id: str | None = None
    function: OllamaFunctionCall


class OllamaMessage(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: list[str] = Field(default_factory=list, description="In base64")
    tool_calls: list[OllamaToolCall] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_name: str | None = Field(None, description="Of the tool whose result this is")
    tool_call_id: str | None = None


class OllamaFunction(Body):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema")


class OllamaTool(Body):
    type: Literal["function"] = "function"
    function: OllamaFunction


class OllamaChatBody(OllamaBody):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "model": "default",
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "stream": False,
            }
        }
    )
    messages: Annotated[list[OllamaMessage], few(MAX_MESSAGES)] = Field(
        default_factory=list, description="None: the model is loaded, or unloaded"
    )
    tools: list[OllamaTool] = Field(default_factory=list, max_length=MAX_TOOLS)


class OllamaGenerateBody(OllamaBody):
    model_config = ConfigDict(
        json_schema_extra={"example": {"model": "default", "prompt": "Why is the sky blue?", "stream": False}}
    )
    prompt: str = Field("", description="Empty: the model is loaded, or unloaded with a keep_alive of 0")
    system: str = ""
    images: list[str] = Field(default_factory=list, description="In base64")
    raw: bool = Field(False, description="The prompt goes to the model as it is, without a chat template")
    suffix: str = Field("", description="Not supported")
    template: str = Field("", description="Not supported: the model's own is used")
    context: list[Any] = Field(default_factory=list, description="Not supported: `/api/chat` takes a conversation")

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, value: str) -> str:
        if value:
            raise PydanticCustomError("suffix", "Text between two parts is not supported: leave the suffix out")
        return value

    @field_validator("template")
    @classmethod
    def _no_template(cls, value: str) -> str:
        if value:
            raise PydanticCustomError("template", "The model's own template is used; with raw, none is")
        return value

    @field_validator("context")
    @classmethod
    def _no_context(cls, value: list[Any]) -> list[Any]:
        if value:
            raise PydanticCustomError(
                "context", "Send earlier turns as messages to /api/chat: context is not supported"
            )
        return value

    @model_validator(mode="after")
    def _raw_is_text(self) -> "OllamaGenerateBody":
        if self.raw and (self.images or self.system):
            raise PydanticCustomError("raw", "A raw prompt has no images and no system prompt: write them into it")
        return self
