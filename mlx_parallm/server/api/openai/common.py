"""What chat and completions have in common: their fields, and the call that these make."""

from typing import Any, Literal

import orjson
from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from mlx_parallm.sampling_params import INT64
from mlx_parallm.server.api.openai.response_types import EchoedFields
from mlx_parallm.server.api.openai.structure import StructureBody, structure_of
from mlx_parallm.server.api.openai.writer import ResponseOptions
from mlx_parallm.server.generation.call import GenerationCall
from mlx_parallm.server.generation.sampling_fields import SamplingBody, sampling_field
from mlx_parallm.server.http.schema import Body, TokenId

MAX_METADATA = 65_536  # bytes


class StreamOptions(Body):
    include_usage: bool = Field(False, description="End the stream with a chunk that carries the usage")
    continuous_usage_stats: bool = Field(False, description="Give the usage so far in every chunk")


class PolicyBody(Body):
    """What trainers send beside a request: any of these, and each choice says which adapter version made its tokens."""

    policy_version: int | None = Field(
        None,
        ge=0,
        le=INT64,
        description="The version that the trainer is at: it selects nothing (lora_adapter name@version does), and "
        "/generate returns it as metadata.requested_policy_version",
    )
    step_id: int | str | None = Field(None, description="Comes back with the response")
    request_id: str | None = Field(None, min_length=1, max_length=256, description="Comes back with the response")
    metadata: dict[str, Any] | None = Field(
        None, description="Comes back with the response, and goes to the scoring function"
    )
    collect_trajectory: bool | None = Field(None, description="Learn from the response, by its score or later feedback")
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
    def echoed(self) -> EchoedFields:
        """What comes back as it was sent."""
        fields = EchoedFields()
        if self.step_id is not None:
            fields["step_id"] = self.step_id
        if self.request_id is not None:
            fields["request_id"] = self.request_id
        if self.metadata is not None:
            fields["metadata"] = self.metadata
        return fields

    @property
    def of_a_trainer(self) -> bool:
        return any(getattr(self, name) is not None for name in PolicyBody.model_fields)


class GenerationBody(PolicyBody, StructureBody, SamplingBody):
    """What completions and chat have in common."""

    model: str = Field("default", description="A served model or adapter; `default` always names the first model")
    lora_adapter: str | None = Field(None, min_length=1, description="An adapter of the model, as name or name@version")
    n: int = sampling_field("n")
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=1024)
    include_stop_str_in_output: bool = False
    min_tokens: int = sampling_field("min_tokens")
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs_mode: Literal["raw", "processed", "raw_logprobs", "processed_logprobs"] = Field(
        "raw",
        description="Of the model itself, or as tokens were sampled: after temperature, penalties, top_p and top_k",
    )
    return_tokens_as_token_ids: bool = Field(False, description="Tokens in logprobs as `token_id:17`, not as text")
    use_beam_search: bool = Field(False, description="Not supported")
    allowed_token_ids: list[Any] | None = Field(None, description="Not supported: use structured_outputs")
    bad_words: list[Any] | None = Field(None, description="Not supported: use logit_bias, by tokens")
    prompt_logprobs: int | None = sampling_field("prompt_logprobs")
    return_token_ids: bool = Field(
        False, description="The ids of prompt and output, the token that ended it included, as are then its logprobs"
    )
    truncate_prompt_tokens: int | None = Field(None, ge=1, le=INT64, description="Keep only so many, from the end")
    priority: int = Field(0, ge=-(2**31), lt=2**31, description="Lower goes first")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024, description="Shares cached prompts only within it"
    )
    user: str | None = None

    @field_validator("stream_options")
    @classmethod
    def _only_for_streams(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise PydanticCustomError("stream_options", "stream_options needs stream to be true")
        return value

    @field_validator("logprobs_mode", mode="before")
    @classmethod
    def _no_logits(cls, value: Any) -> Any:
        if value in ("raw_logits", "processed_logits"):
            raise PydanticCustomError("logprobs_mode", "Logits are not returned: ask for raw or processed logprobs")
        return value

    @field_validator("use_beam_search")
    @classmethod
    def _no_beams(cls, value: bool) -> bool:
        if value:
            raise PydanticCustomError(
                "use_beam_search", "Beam search is not supported: sample with n, or with temperature 0"
            )
        return value

    @field_validator("allowed_token_ids", "bad_words")
    @classmethod
    def _not_supported(cls, value: list[Any] | None, info: ValidationInfo) -> list[Any] | None:
        if value:
            other = "structured_outputs" if info.field_name == "allowed_token_ids" else "logit_bias"
            raise PydanticCustomError(str(info.field_name), f"{info.field_name} is not supported: use {other}")
        return value

    @field_validator("prompt_logprobs")
    @classmethod
    def _not_for_streams(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("stream"):
            raise PydanticCustomError("prompt_logprobs", "prompt_logprobs can't be streamed")
        return value


def call_of(
    body: "GenerationBody", *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None, **fields: Any
) -> GenerationCall:
    """The call that a body makes; `fields` are those that only one of the two routes knows."""
    sampling = body.sampling_params(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        n=body.n,
        stop_token_ids=tuple(body.stop_token_ids),
        logprobs=logprobs,
        processed_logprobs=body.logprobs_mode.startswith("processed"),
        prompt_logprobs=prompt_logprobs,
    )
    return GenerationCall(
        sampling=sampling,
        structure=structure_of(body),
        model=body.model,
        lora_adapter=body.lora_adapter,
        follow_policy=bool(body.follow_policy),
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        exact_tokens=body.return_token_ids,
        stream=body.stream,
        priority=body.priority,
        cache_salt=body.cache_salt or "",
        request_id=body.request_id,
        collect_trajectory=bool(body.collect_trajectory),
        scoring_function=body.scoring_function,
        metadata=body.metadata or {},
        **fields,
    )


def options_of(body: "GenerationBody", logprobs: bool) -> ResponseOptions:
    options = body.stream_options
    return ResponseOptions(
        logprobs=logprobs,
        token_ids=body.return_token_ids,
        tokens_as_ids=body.return_tokens_as_token_ids,
        prompt_logprobs=body.prompt_logprobs is not None,
        usage=options is not None and options.include_usage,
        running_usage=options is not None and options.continuous_usage_stats,
        policy=body.of_a_trainer,
        echoed=body.echoed,
    )
