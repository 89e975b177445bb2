"""The bodies of `/generate`: our own, vLLM's and SGLang's, told apart by their fields. `generate` answers them."""

from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from mlx_parallm.server.schemas import (
    Body,
    CompletionBody,
    LogitBias,
    Stop,
    TokenId,
    read_prompt,
)
from mlx_parallm.types import INT64, MAX_LOGPROBS


def _read_yes_or_no(value: Any) -> int | None:
    """Whether log-probabilities are wanted, or of how many of the likeliest tokens too."""
    if isinstance(value, bool):
        return 0 if value else None
    if type(value) is int and 0 <= value <= MAX_LOGPROBS:
        return value
    raise PydanticCustomError("logprobs", f"Expected true, false, or a number up to {MAX_LOGPROBS}")


class GenerateBody(CompletionBody):
    """A prompt for the policy."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"prompt": "The capital of France is", "temperature": 0.8, "max_tokens": 32, "step_id": 7}
        }
    )
    logprobs: Annotated[int | None, PlainValidator(_read_yes_or_no, json_schema_input_type=bool | int)] = Field(
        0, description="False: without log-probabilities"
    )
    logprobs_mode: Literal["raw", "processed"] = Field(
        "processed", description="As tokens were drawn, or of the model itself"
    )
    return_token_ids: bool = True

    @field_validator("prompt")
    @classmethod
    def _one_prompt(cls, value: Any) -> Any:
        if len(value) != 1:
            raise PydanticCustomError("prompt", "Expected one prompt, as text or token ids")
        return value

    @field_validator("n")
    @classmethod
    def _one_answer(cls, value: int) -> int:
        if value != 1:
            raise PydanticCustomError(
                "n",
                "Only one answer fits this shape; without policy_version, step_id and "
                "request_id, vLLM's shape has room for n",
            )
        return value


def _read_vllm_prompt(value: Any) -> list[str] | list[list[int]]:
    if isinstance(value, dict):
        ids, text = value.get("prompt_token_ids"), value.get("prompt")
        value = text if ids is None and isinstance(text, str) else ids if isinstance(ids, list) else None
    prompts = read_prompt(value)
    if len(prompts) != 1:
        raise PydanticCustomError("prompt", "Expected one prompt, as text, token ids, or an object of prompt_token_ids")
    return prompts


class VllmBody(CompletionBody):
    """What vLLM's own server takes at /generate."""

    model_config = ConfigDict(json_schema_extra={"example": {"prompt": "The capital of France is", "n": 2}})
    prompt: Annotated[
        list[str] | list[list[int]],
        PlainValidator(_read_vllm_prompt, json_schema_input_type=str | list[int] | dict[str, list[int]]),
    ]
    return_token_ids: bool = True

    @model_validator(mode="before")
    @classmethod
    def _ids_beside(cls, data: Any) -> Any:
        """vLLM takes `prompt_token_ids` in place of the prompt, too."""
        if not isinstance(data, dict) or data.get("prompt_token_ids") is None:
            return data
        if data.get("prompt") is not None:
            raise PydanticCustomError("prompt", "Give either prompt or prompt_token_ids")
        return data | {"prompt": {"prompt_token_ids": data["prompt_token_ids"]}}


class SglangSampling(Body):
    max_new_tokens: int = Field(128, ge=0, le=INT64)
    min_new_tokens: int = Field(0, ge=0, le=INT64)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1, le=INT64)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    logit_bias: LogitBias = Field(default_factory=dict)
    sampling_seed: int | None = Field(
        None, ge=-INT64 - 1, le=INT64, validation_alias=AliasChoices("sampling_seed", "seed")
    )
    n: int = Field(1, ge=1)
    stop: Stop = ()
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=1024)
    no_stop_trim: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    json_schema: str | None = None
    regex: str | None = Field(None, min_length=1, max_length=10_000)
    ebnf: str | None = Field(None, min_length=1, max_length=100_000)


def _read_sampling(value: Any) -> Any:
    if isinstance(value, list):
        if not value or any(one != value[0] for one in value):
            raise PydanticCustomError("sampling_params", "All prompts of a request are sampled alike: give one object")
        return value[0]
    return value


def _read_input_ids(value: Any) -> Any:
    if isinstance(value, str) or isinstance(read_prompt(value)[0], str):
        raise PydanticCustomError("input_ids", "Expected token ids, or a list of such lists")
    return value


class SglangBody(Body):
    """What SGLang's own server takes at /generate."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"input_ids": [504, 3575, 282], "sampling_params": {"max_new_tokens": 8}, "return_logprob": True}
        }
    )
    text: str | list[str] | None = None
    input_ids: Annotated[
        list[int] | list[list[int]] | None,
        PlainValidator(_read_input_ids, json_schema_input_type=list[TokenId] | list[list[TokenId]] | None),
    ] = None
    sampling_params: Annotated[SglangSampling, BeforeValidator(_read_sampling)] = Field(
        default_factory=lambda: SglangSampling.model_validate({})
    )
    return_logprob: bool = False
    logprob_start_len: int = Field(-1, ge=-1, le=INT64, description="From here on the prompt's too; -1: none")
    top_logprobs_num: int = Field(0, ge=0, le=MAX_LOGPROBS)
    return_text_in_logprobs: bool = False
    stream: bool = False
    lora_path: str | None = Field(None, min_length=1, description="An adapter's name")
    rid: str | list[str] | None = Field(None, description="Names of the request, one per prompt")
    follow_policy: bool | None = None
    policy_version: int | None = Field(None, ge=0, le=INT64)

    @model_validator(mode="after")
    def _one_input(self) -> "SglangBody":
        if (self.text is None) == (self.input_ids is None):
            raise PydanticCustomError("input", "Give either text or input_ids")
        return self

    @property
    def several(self) -> bool:
        """Whether the answer is a list."""
        return isinstance(self.text, list) or bool(self.input_ids and isinstance(self.input_ids[0], list))

    def name_of(self, prompt: int) -> str | None:
        if isinstance(self.rid, list):
            return self.rid[prompt] if prompt < len(self.rid) else None
        return self.rid

    def completion(self) -> CompletionBody:
        """The same, as a completion. Log-probabilities are as SGLang's: as tokens were drawn."""
        params = self.sampling_params
        same = params.model_dump(
            include={
                "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
                "repetition_penalty", "n", "stop_token_ids", "ignore_eos", "skip_special_tokens",
            }
        )  # fmt: skip
        return CompletionBody.model_validate(
            {
                **same,
                "prompt": self.text if self.text is not None else self.input_ids,
                "lora_adapter": self.lora_path,
                "max_tokens": params.max_new_tokens,
                "echo": params.max_new_tokens == 0,  # only the prompt is to be scored
                "min_tokens": params.min_new_tokens,
                "stop": list(params.stop),
                "logit_bias": {str(token): bias for token, bias in params.logit_bias.items()},
                "seed": params.sampling_seed,
                "include_stop_str_in_output": params.no_stop_trim,
                "guided_json": params.json_schema,
                "guided_regex": params.regex,
                "guided_grammar": params.ebnf,
                "stream": self.stream,
                "logprobs": self.top_logprobs_num if self.return_logprob else None,
                "logprobs_mode": "processed",
                "prompt_logprobs": 0 if self.return_logprob and self.logprob_start_len >= 0 else None,
                "return_token_ids": True,
                "follow_policy": self.follow_policy,
                "policy_version": self.policy_version,
            }
        )


SGLANG_FIELDS = ("text", "input_ids", "sampling_params", "input_embeds")
OUR_FIELDS = ("policy_version", "step_id", "request_id")
# Fields that only vLLM's own server has; `stream` and `logprobs` are everybody's.
VLLM_FIELDS = ("n", "best_of", "use_beam_search", "prompt_logprobs", "prompt_token_ids", "detokenize")


def shape_of(body: Any) -> str:
    """Whose body /generate was sent, by the fields that only one of the three dialects has."""
    given = {key for key, value in body.items() if value is not None} if isinstance(body, dict) else set()
    if given.intersection(SGLANG_FIELDS):
        return "sglang"
    if given and isinstance(body["prompt"] if "prompt" in given else None, dict):
        return "vllm"
    if given.intersection(OUR_FIELDS):
        return "own"
    return "vllm" if given.intersection(VLLM_FIELDS) else "own"


GenerateInput = Annotated[
    Annotated[GenerateBody, Tag("own")] | Annotated[VllmBody, Tag("vllm")] | Annotated[SglangBody, Tag("sglang")],
    Discriminator(shape_of),
]
