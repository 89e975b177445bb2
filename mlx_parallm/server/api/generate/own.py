"""Our own shape of `/generate`: a prompt, or a list of them, with the adapter versions that made which tokens."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import (
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    PrivateAttr,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from mlx_parallm.sampling_params import MAX_LOGPROBS
from mlx_parallm.server.api.generate.writer import GenerateWriter
from mlx_parallm.server.api.openai.completions import CompletionBody
from mlx_parallm.server.generation.choices import ChoiceStream, ChoiceUpdate, Collected, ResponseFinish
from mlx_parallm.server.generation.http_call import Generation
from mlx_parallm.server.generation.token_logprobs import finite
from mlx_parallm.server.http.schema import response_body
from mlx_parallm.types import TokenLogprob


def _read_yes_or_no(value: Any) -> int | None:
    """Returns whether log-probabilities are wanted, or of how many of the likeliest tokens too."""
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
        "processed",
        description="processed: as tokens were sampled, after temperature, penalties and the cuts of top_p, top_k and "
        "min_p; raw: the model's own, before all of them",
    )
    return_token_ids: bool = True

    _several: bool = PrivateAttr(False)

    @property
    def several(self) -> bool:
        """Whether it was sent a list of prompts, and so is answered by a list."""
        return self._several

    @model_validator(mode="wrap")
    @classmethod
    def _note_list(cls, data: Any, handler: ModelWrapValidatorHandler["GenerateBody"]) -> "GenerateBody":
        body = handler(data)
        prompt = data.get("prompt") if isinstance(data, dict) else None
        if isinstance(prompt, list) and isinstance(prompt[0], str | list):
            body._several = True
            if body.stream:
                raise PydanticCustomError("stream", "A list of prompts is answered by a list, which can't be streamed")
        return body

    @field_validator("n")
    @classmethod
    def _one_response(cls, value: int) -> int:
        if value != 1:
            raise PydanticCustomError(
                "n",
                "Only one response fits this shape; without policy_version, step_id and "
                "request_id, vLLM's shape has room for n",
            )
        return value


@response_body
class Generated(TypedDict):
    request_id: str
    policy_version: Annotated[int, Field(description="The adapter version that made the newest token; 0: none")]
    step_id: int | str | None
    prompt_ids: list[int]
    completion_ids: Annotated[list[int], Field(description="With the token that ended it")]
    text: str
    logprobs: Annotated[list[float | None] | None, Field(description="One for each of completion_ids")]
    logprobs_mode: Annotated[
        Literal["raw", "processed"] | None,
        Field(description="processed: after temperature, penalties and cuts such as top_p; raw: before them"),
    ]
    finish_reason: ResponseFinish | None
    policy_spans: Annotated[list[list[int]], Field(description="[first token, end, version]")]
    mixed_policy: Annotated[
        bool,
        Field(
            description="Several versions made it (follow_policy): its log-probabilities are those of no single policy"
        ),
    ]
    metadata: dict[str, Any]
    index: NotRequired[Annotated[int, Field(description="Which prompt it answers, where a list of them was sent")]]


@response_body
class GeneratedChunk(TypedDict):
    request_id: str
    policy_version: int
    step_id: int | str | None
    completion_ids: Sequence[int]
    text: str
    logprobs: list[float | None] | None
    finish_reason: ResponseFinish | None
    policy_spans: NotRequired[list[list[int]]]
    mixed_policy: NotRequired[bool]
    metadata: NotRequired[dict[str, Any]]


class OwnWriter(GenerateWriter):
    def __init__(self, body: GenerateBody, generation: Generation, request_id: str) -> None:
        super().__init__(generation, request_id)
        self.body = body

    def _version(self, choice: ChoiceStream) -> int:
        # A model without adapters has no versions: then the number is the client's own.
        asked = self.body.policy_version
        registry = self.served.adapters
        return asked if asked is not None and not registry.names else choice.policy_version

    def _current(self) -> int:
        """Returns what the name of the request's own adapter means now; 0 for the model alone."""
        version = self.generation.version
        return 0 if version is None else self.served.adapters.newest(version).number

    def _part(self, choice: ChoiceStream, update: ChoiceUpdate) -> GeneratedChunk:
        part = GeneratedChunk(
            request_id=self.name,
            policy_version=self._version(choice),
            step_id=self.body.step_id,
            completion_ids=update.tokens,
            text=update.piece.content,
            logprobs=self._logprobs(update.scores),
            finish_reason=update.finish_reason,
        )
        if update.finish_reason is not None:
            part["policy_spans"] = choice.policy_spans
            part["mixed_policy"] = choice.mixed_policy
            part["metadata"] = self._metadata()
        return part

    def answer(self, results: Sequence[Collected]) -> Generated | list[Generated]:
        """Returns the response: for a list of prompts a list, in which each entry says which it is."""
        answers = [self._answer(*one) for one in zip(self.generation.choices, results, strict=True)]
        if not self.body.several:
            return answers[0]
        for index, answer in enumerate(answers):
            answer["index"] = index
        return answers

    def _answer(self, choice: ChoiceStream, result: Collected) -> Generated:
        return Generated(
            request_id=self.name,
            policy_version=self._version(choice),
            step_id=self.body.step_id,
            prompt_ids=self.generation.prompts[choice.prompt],
            completion_ids=result.tokens,
            text=self._text(result),
            logprobs=self._logprobs(result.scores),
            logprobs_mode=None if self.body.logprobs is None else self.body.logprobs_mode,
            finish_reason=choice.finish_reason,
            policy_spans=choice.policy_spans,
            mixed_policy=choice.mixed_policy,
            metadata=self._metadata(),
        )

    def _logprobs(self, scores: Sequence[TokenLogprob]) -> list[float | None] | None:
        return None if self.body.logprobs is None else [finite(score.logprob) for score in scores]

    def _metadata(self) -> dict[str, Any]:
        return {
            **(self.body.metadata or {}),
            "batch_size": max(1, self.served.client.metrics.running),
            "latency_ms": round(1000 * self.seconds, 3),
            "current_policy_version": self._current(),
            **({} if self.body.policy_version is None else {"requested_policy_version": self.body.policy_version}),
        }
