"""Responses of training's routes."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from mlx_parallm.server.http.schema import response_body


@response_body
class Updated(TypedDict):
    policy_version: int
    published: bool
    loss: float | None
    trajectories_used: int
    trajectories_skipped: Annotated[int, Field(description="Of groups whose rewards are all the same")]
    rolled_back: Annotated[str | None, Field(description="The alarm that brought the last good version back")]
    checkpoint: str | None
    saved: Annotated[
        bool, Field(description="It is on disk; false where it could not be written, and the log says why")
    ]
    metrics: Mapping[str, float]


@response_body
class TrainingStatus(TypedDict):
    training_enabled: bool
    policy_version: int
    current_lora: NotRequired[str | None]
    updates: NotRequired[int | None]
    updates_published: NotRequired[int | None]
    updates_refused: NotRequired[int | None]
    rollbacks: NotRequired[int | None]
    trajectories_collected: NotRequired[int | None]
    trajectories_buffered: NotRequired[int | None]
    trajectories_ready: NotRequired[Annotated[int | None, Field(description="That have others to be compared with")]]
    trajectories_used: NotRequired[int | None]
    trajectories_flat: NotRequired[Annotated[int | None, Field(description="Of groups without a difference, skipped")]]
    trajectories_stale: NotRequired[int | None]
    trajectories_dropped: NotRequired[Annotated[int | None, Field(description="To make room in the buffer")]]
    trajectories_off_policy: NotRequired[int | None]
    last_update: NotRequired[float | None]
    last_refusal: NotRequired[str | None]
    loss: NotRequired[float | None]
    reward_mean: NotRequired[float | None]
    kl: NotRequired[Annotated[float | None, Field(description="To the reference, nats a token, when last measured")]]
    kl_measured_at_update: NotRequired[
        Annotated[int | None, Field(description="The number of the update that measured it")]
    ]
    updates_per_second: NotRequired[float | None]
    metrics: NotRequired[
        Annotated[
            dict[str, float] | None,
            Field(
                description="Of the last update: mismatch_kl, max_logprob_gap, clip_fraction, effective_sample_size, …"
            ),
        ]
    ]
    history: NotRequired[
        Annotated[list[dict[str, Any]] | None, Field(description="The last 100 updates, the oldest first")]
    ]
    available_checkpoints: NotRequired[list[str] | None]
    adapters: NotRequired[list[str] | None]
    scoring_functions: NotRequired[list[str] | None]
    scoring_failures: NotRequired[int | None]
    inference_share: NotRequired[float | None]
    measured_inference_share: NotRequired[float | None]
    longest_stall_seconds: NotRequired[float | None]
    training_seconds: NotRequired[float | None]
    atropos: NotRequired[Annotated[dict[str, int] | None, Field(description="What the Atropos API has handed out")]]
    environment: NotRequired[
        Annotated[dict[str, Any] | None, Field(description="The Atropos environment that was started with it")]
    ]


@response_body
class FeedbackTaken(TypedDict):
    status: Literal["success"]
    request_id: str
    adapter: str
    trajectories_buffered: int
    trajectories_ready: int


@response_body
class CheckpointWritten(TypedDict):
    status: Literal["success"]
    checkpoint: str
    path: str


@response_body
class TrainingInternals(TypedDict):
    adapter: str
    lora: dict[str, Any]
    config: dict[str, Any]
    updates: int
    trainer_bytes: Annotated[int, Field(description="LoRA parameters and the optimiser's")]
    activation_bytes: Annotated[int, Field(description="The most that a micro-batch has taken")]
    shares_prompts: bool
    parameters: dict[str, list[int]]
    buffer: dict[str, int]
    ledger: int
    collecting: int
    background: dict[str, float]
    status: TrainingStatus


@response_body
class SampleResponse(TypedDict):
    request_id: str
    index: int
    completion_ids: Sequence[int]
    text: str
    logprobs: Sequence[float]
    reward: float | None
    finish_reason: str
    policy_version: int
    policy_spans: list[list[int]]


@response_body
class RolloutGroup(TypedDict):
    prompt_ids: Sequence[int]
    samples: list[SampleResponse]


@response_body
class Rollout(TypedDict):
    groups: list[RolloutGroup]
