"""SGLang's own shape of `/generate`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from mlx_parallm.sampling_params import INT64, MAX_LOGPROBS, SHARED
from mlx_parallm.server.api.generate.writer import GenerateWriter
from mlx_parallm.server.api.openai.structure import StructureBody, structure_of
from mlx_parallm.server.generation.call import GenerationCall
from mlx_parallm.server.generation.choices import ChoiceStream, ChoiceUpdate, Collected
from mlx_parallm.server.generation.http_call import Generation
from mlx_parallm.server.generation.sampling_fields import SampledBody, samples, sampling_field
from mlx_parallm.server.generation.token_logprobs import finite
from mlx_parallm.server.http.schema import Body, TokenId, read_prompt, response_body


@samples(
    *SHARED,
    max_tokens=("max_new_tokens", sampling_field("max_tokens", default=128)),
    min_tokens=("min_new_tokens", sampling_field("min_tokens")),
    top_k=("top_k", sampling_field("top_k", default=-1)),
    seed=("sampling_seed", sampling_field("seed", validation_alias=AliasChoices("sampling_seed", "seed"))),
    n=("n", sampling_field("n")),
)
class SglangSampling(SampledBody):
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=1024)
    no_stop_trim: bool = False
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
            "example": {"input_ids": [72, 101, 108], "sampling_params": {"max_new_tokens": 8}, "return_logprob": True}
        }
    )
    api_fields: ClassVar = frozenset(
        (
            "audio_data background bootstrap_host bootstrap_port bootstrap_room conversation_id "
            "custom_logit_processor image_data input_embeds log_metrics logprob_start_len modalities "
            "return_hidden_states return_text_in_logprobs session_params token_ids_logprob video_data"
        ).split()
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
        read_prompt(self.text if self.text is not None else self.input_ids)
        return self

    @property
    def several(self) -> bool:
        """Whether the response is a list."""
        return isinstance(self.text, list) or bool(self.input_ids and isinstance(self.input_ids[0], list))

    def name_of(self, prompt: int) -> str | None:
        if isinstance(self.rid, list):
            return self.rid[prompt] if prompt < len(self.rid) else None
        return self.rid


def _prompt_logprobs(body: SglangBody, max_tokens: int | None) -> int | None:
    if not body.return_logprob:
        return None
    if max_tokens == 0:  # only the prompt is to be scored
        return body.top_logprobs_num
    return 0 if body.logprob_start_len >= 0 else None


def sglang_call(body: SglangBody) -> GenerationCall:
    """Log-probabilities are as tokens were sampled."""
    params = body.sampling_params
    sampling = params.sampling_params(
        stop_token_ids=tuple(params.stop_token_ids),
        logprobs=body.top_logprobs_num if body.return_logprob else None,
        processed_logprobs=True,
    )
    structure = StructureBody.model_validate(
        {"guided_json": params.json_schema, "guided_regex": params.regex, "guided_grammar": params.ebnf}
    )
    return GenerationCall(
        prompts=read_prompt(body.text if body.text is not None else body.input_ids),
        sampling=replace(sampling, prompt_logprobs=_prompt_logprobs(body, sampling.max_tokens)),
        structure=structure_of(structure),
        lora_adapter=body.lora_path,
        follow_policy=bool(body.follow_policy),
        include_stop=params.no_stop_trim,
        skip_special_tokens=params.skip_special_tokens,
        exact_tokens=True,
        stream=body.stream,
    )


ScoredToken = tuple[float | None, int, str | None]  # log-probability, token, its text


@response_body
class SglangFinish(TypedDict):
    type: Literal["stop", "length", "abort"]
    matched: NotRequired[Annotated[str | int | None, Field(description="The stop string or token")]]
    length: NotRequired[int]
    message: NotRequired[str]


@response_body
class SglangMeta(TypedDict):
    id: str
    finish_reason: SglangFinish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: Annotated[float, Field(description="Seconds")]
    weight_version: Annotated[str, Field(description="The adapter version that made the newest token; 0: none")]
    policy_spans: list[list[int]]
    mixed_policy: bool
    output_token_logprobs: NotRequired[list[ScoredToken]]
    output_top_logprobs: NotRequired[list[list[ScoredToken]]]
    input_token_logprobs: NotRequired[list[ScoredToken]]


@response_body
class SglangGenerated(TypedDict):
    text: str
    output_ids: list[int]
    meta_info: SglangMeta
    index: int


class SglangWriter(GenerateWriter):
    """SGLang's: an object per choice, the text so far in every chunk of a stream."""

    def __init__(self, body: SglangBody, generation: Generation, request_id: str) -> None:
        super().__init__(generation, request_id)
        self._body = body

    def _part(self, choice: ChoiceStream, update: ChoiceUpdate) -> SglangGenerated:
        return self._one(choice, self._so_far[choice.index])

    def answer(self, results: Sequence[Collected]) -> SglangGenerated | list[SglangGenerated]:
        found = [self._one(*pair) for pair in zip(self.generation.choices, results, strict=True)]
        return found if self._body.several or len(found) > 1 else found[0]

    def _one(self, choice: ChoiceStream, result: Collected) -> SglangGenerated:
        meta = SglangMeta(
            id=self._body.name_of(choice.prompt) or f"{self.name}-{choice.index}",
            finish_reason=_finish(choice),
            prompt_tokens=len(self.generation.prompts[choice.prompt]),
            completion_tokens=choice.completion_tokens,
            cached_tokens=choice.cached_tokens,
            e2e_latency=self.seconds,
            weight_version=str(choice.policy_version),
            policy_spans=choice.policy_spans,
            mixed_policy=choice.mixed_policy,
        )
        if self._body.return_logprob:
            meta["output_token_logprobs"] = [self._triple(score.token, score.logprob) for score in result.scores]
            if self._body.top_logprobs_num:
                meta["output_top_logprobs"] = [[self._triple(*pair) for pair in score.top] for score in result.scores]
        if choice.prompt_logprobs is not None and self._body.logprob_start_len >= 0:
            tokens = self.generation.prompts[choice.prompt]
            start = self._body.logprob_start_len
            known = zip(tokens, choice.prompt_logprobs, strict=True)
            meta["input_token_logprobs"] = [
                self._triple(token, None if one is None else one.logprob) for token, one in list(known)[start:]
            ]
        return SglangGenerated(text=self._text(result), output_ids=result.tokens, meta_info=meta, index=choice.index)

    def _triple(self, token: int, logprob: float | None) -> ScoredToken:
        text = self.served.vocabulary.text(token) if self._body.return_text_in_logprobs else None
        return None if logprob is None else finite(logprob), token, text


def _finish(choice: ChoiceStream) -> SglangFinish | None:
    if choice.finish_reason is None:
        return None
    if choice.finish_reason == "abort":
        return SglangFinish(type="abort", message="the engine was paused")
    if choice.finish_reason == "length":
        return SglangFinish(type="length", length=choice.completion_tokens)
    matched = choice.stop_reason if choice.stop_reason is not None else choice.stop_token
    return SglangFinish(type="stop", matched=matched)
