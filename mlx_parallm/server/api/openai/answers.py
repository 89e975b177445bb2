"""The parts of answers that chat and completions share."""

from typing import Any

from pydantic import Field

from mlx_parallm.server.http.schema import AnswerBody

REWARDS = "One for each choice, in the last chunk of a stream whose answers are scored"


class PromptTokensDetails(AnswerBody):
    cached_tokens: int = Field(description="Prompt tokens that were computed before and reused")


class CompletionTokensDetails(AnswerBody):
    reasoning_tokens: int


class Usage(AnswerBody):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


PromptLogprobs = list[dict[str, Any] | None]


class PolicyChoice(AnswerBody):
    """What trainers are told of a choice, when they send any of their fields, and everybody where several adapters
    share the traffic of the model's own name."""

    policy_version: int | None = Field(None, description="The adapter version that made its newest token; 0: none")
    lora_adapter: str | None = Field(None, description="The adapter that answered; base: none")
    policy_spans: list[tuple[int, int, int]] | None = Field(
        None, description="[first token, the one after the last, version] over its tokens"
    )
    mixed_policy: bool | None = Field(
        None,
        description="Several versions made it (follow_policy): its log-probabilities are those of no single policy",
    )
    reward: float | None = Field(
        None,
        description="What the scoring_function gave it; streams send `rewards`, one for each choice, in a chunk of its "
        "own at the end",
    )


class PolicyAnswer(AnswerBody):
    """What trainers sent comes back."""

    step_id: int | str | None = None
    request_id: str | None = None
    metadata: dict[str, Any] | None = None
