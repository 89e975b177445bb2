"""The parts of responses that chat and completions share."""

from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from mlx_parallm.server.http.schema import response_body

REWARD = (
    "What the scoring_function gave it; streams send `rewards`, one for each choice, in a chunk of its own at the end"
)
REWARDS = "One for each choice, in the last chunk of a stream whose responses are scored"


@response_body
class PromptTokensDetails(TypedDict):
    cached_tokens: Annotated[int, Field(description="Prompt tokens that were computed before and reused")]


@response_body
class CompletionTokensDetails(TypedDict):
    reasoning_tokens: int
    accepted_prediction_tokens: NotRequired[
        Annotated[int, Field(description="Tokens that speculation had drafted; left out where it drafted none")]
    ]
    rejected_prediction_tokens: NotRequired[
        Annotated[int, Field(description="Drafted tokens that were not sampled, and are in no completion")]
    ]


@response_body
class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


@response_body
class PromptTokenLogprob(TypedDict):
    logprob: float | None
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptTokenLogprob] | None]  # by token id


@response_body
class PolicyChoice(TypedDict, total=False):
    """What trainers are told of a choice, when they send any of their fields, and everybody where several adapters
    share the traffic of the model's own name."""

    policy_version: Annotated[int, Field(description="The adapter version that made its newest token; 0: none")]
    lora_adapter: Annotated[str, Field(description="The adapter that answered; base: none")]
    policy_spans: Annotated[
        list[list[int]], Field(description="[first token, the one after the last, version] over its tokens")
    ]
    mixed_policy: Annotated[
        bool,
        Field(
            description="Several versions made it (follow_policy): its log-probabilities are those of no single policy"
        ),
    ]
    reward: Annotated[float | None, Field(description=REWARD)]


@response_body
class EchoedFields(TypedDict, total=False):
    """What trainers sent comes back."""

    step_id: int | str
    request_id: str
    metadata: dict[str, Any]


@response_body
class GenerationResponse(EchoedFields):
    id: str
    created: int
    model: str
    usage: Usage
    system_fingerprint: str


@response_body
class GenerationChunk(EchoedFields):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: NotRequired[Usage | None]
    rewards: NotRequired[Annotated[list[float | None], Field(description=REWARDS)]]
