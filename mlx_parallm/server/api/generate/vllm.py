"""vLLM's own shape of `/generate`."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, NotRequired

from pydantic import ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from mlx_parallm.server.api.generate.writer import GenerateWriter
from mlx_parallm.server.api.openai.completions import CompletionBody
from mlx_parallm.server.generation.choices import ChoiceStream, ChoiceUpdate, Collected, ResponseFinish
from mlx_parallm.server.generation.http_call import Generation
from mlx_parallm.server.generation.responses import one_line
from mlx_parallm.server.generation.token_logprobs import finite
from mlx_parallm.server.http.schema import read_prompt, response_body
from mlx_parallm.types import TokenLogprob


def _read_vllm_prompt(value: Any) -> list[str] | list[list[int]]:
    if isinstance(value, dict):
        ids = value.get("prompt_token_ids")
        text = value.get("prompt")
        value = ids if isinstance(ids, list) else None
        if ids is None and isinstance(text, str):
            value = text
    prompts = read_prompt(value)
    if len(prompts) != 1:
        raise PydanticCustomError("prompt", "Expected one prompt, as text, token ids, or an object of prompt_token_ids")
    return prompts


class VllmBody(CompletionBody):
    """What vLLM's own server takes at /generate."""

    model_config = ConfigDict(json_schema_extra={"example": {"prompt": "The capital of France is", "n": 2}})
    api_fields: ClassVar = frozenset(
        (
            "allowed_token_ids bad_words detokenize early_stopping guided_decoding length_penalty "
            "logits_processors spaces_between_special_tokens use_beam_search"
        ).split()
    )
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


@response_body
class VllmGenerated(TypedDict):
    """Lists over the choices."""

    text: Annotated[list[str], Field(description="Each begins with the prompt, where that was text")]
    request_id: str
    token_ids: list[list[int]]
    finish_reasons: list[ResponseFinish | None]
    policy_version: int
    policy_spans: list[list[list[int]]]
    mixed_policy: list[bool]
    logprobs: NotRequired[
        Annotated[
            list[list[list[dict[str, float | None]]]],
            Field(description="Of each token an object of one for itself, then one for each of the likeliest others"),
        ]
    ]
    prompt_token_ids: NotRequired[Annotated[list[int], Field(description="Not in the lines of a stream")]]
    prompt_logprobs: NotRequired[list[dict[str, float | None] | None]]


class VllmWriter(GenerateWriter):
    """vLLM's: lists over the choices; a token's log-probabilities are objects of one, the sampled first."""

    ending = b""
    media_type = b"application/json"

    def __init__(self, body: VllmBody, generation: Generation, request_id: str) -> None:
        super().__init__(generation, request_id)
        self.body = body

    def _frame(self, part: Any) -> bytes:
        return one_line(part) + b"\n"

    def _part(self, choice: ChoiceStream, update: ChoiceUpdate) -> VllmGenerated:
        return self._so_far_said(self._so_far)

    def answer(self, results: Sequence[Collected]) -> VllmGenerated:
        answer = self._so_far_said(results)
        answer["prompt_token_ids"] = self.generation.prompts[0]
        if self.body.prompt_logprobs is not None:
            known = self.generation.choices[0].prompt_logprobs or []
            answer["prompt_logprobs"] = [None if one is None else _merged(one) for one in known]
        return answer

    def _prompt(self, choice: ChoiceStream) -> str:
        """vLLM's text begins with a prompt that was text."""
        prompt = self.body.prompt[choice.prompt]
        return prompt if isinstance(prompt, str) else ""

    def _so_far_said(self, results: Sequence[Collected]) -> VllmGenerated:
        choices = self.generation.choices
        pairs = zip(choices, results, strict=True)
        answer = VllmGenerated(
            text=[self._prompt(choice) + self._text(result) for choice, result in pairs],
            request_id=self.name,
            token_ids=[result.tokens for result in results],
            finish_reasons=[choice.finish_reason for choice in choices],
            policy_version=choices[0].policy_version,
            policy_spans=[choice.policy_spans for choice in choices],
            mixed_policy=[choice.mixed_policy for choice in choices],
        )
        if self.body.logprobs is not None:
            answer["logprobs"] = [[_separate(score) for score in result.scores] for result in results]
        return answer


def _separate(score: TokenLogprob) -> list[dict[str, float | None]]:
    others = [(token, logprob) for token, logprob in score.top if token != score.token]
    return [{str(token): finite(logprob)} for token, logprob in [(score.token, score.logprob), *others]]


def _merged(score: TokenLogprob) -> dict[str, float | None]:
    return {str(token): finite(logprob) for token, logprob in [*score.top, (score.token, score.logprob)]}
