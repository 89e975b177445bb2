"""Answers of training's routes."""

from typing import Any, Literal

from pydantic import Field

from mlx_parallm.server.http.schema import AnswerBody


class Updated(AnswerBody):
    policy_version: int
    published: bool
    loss: float | None
    trajectories_used: int
    trajectories_skipped: int = Field(description="Of groups whose rewards are all the same")
    rolled_back: str | None = Field(description="The alarm that brought the last good version back")
    checkpoint: str | None
    saved: bool = Field(description="It is on disk; false where it could not be written, and the log says why")
    metrics: dict[str, float]


class TrainingStatus(AnswerBody):
    training_enabled: bool
    policy_version: int
    current_lora: str | None = None
    updates: int | None = None
    updates_published: int | None = None
    updates_refused: int | None = None
    rollbacks: int | None = None
    trajectories_collected: int | None = None
    trajectories_buffered: int | None = None
    trajectories_ready: int | None = Field(None, description="That have others to be compared with")
    trajectories_used: int | None = None
    trajectories_flat: int | None = Field(None, description="Of groups without a difference, skipped")
    trajectories_stale: int | None = None
    trajectories_dropped: int | None = Field(None, description="To make room in the buffer")
    trajectories_off_policy: int | None = None
    last_update: float | None = None
    last_refusal: str | None = None
    loss: float | None = None
    reward_mean: float | None = None
    kl: float | None = Field(None, description="To the reference, nats a token, when last measured")
    kl_measured_at_update: int | None = Field(None, description="The number of the update that measured it")
    updates_per_second: float | None = None
    metrics: dict[str, float] | None = Field(
        None,
        description="Of the last update: mismatch_kl, max_logprob_gap, clip_fraction, effective_sample_size, …",
    )
    history: list[dict[str, Any]] | None = Field(None, description="The last 100 updates, the oldest first")
    available_checkpoints: list[str] | None = None
    adapters: list[str] | None = None
    scoring_functions: list[str] | None = None
    scoring_failures: int | None = None
    inference_share: float | None = None
    measured_inference_share: float | None = None
    longest_stall_seconds: float | None = None
    training_seconds: float | None = None
    atropos: dict[str, int] | None = Field(None, description="What the Atropos API has handed out")
    environment: dict[str, Any] | None = Field(None, description="The Atropos environment that was started with it")


class FeedbackTaken(AnswerBody):
    status: Literal["success"]
    request_id: str
    adapter: str
    trajectories_buffered: int
    trajectories_ready: int


class CheckpointWritten(AnswerBody):
    status: Literal["success"]
    checkpoint: str
    path: str


class TrainingInternals(AnswerBody):
    adapter: str
    lora: dict[str, Any]
    config: dict[str, Any]
    updates: int
    trainer_bytes: int = Field(description="LoRA parameters and the optimiser's")
    activation_bytes: int = Field(description="The most that a micro-batch has taken")
    shares_prompts: bool
    parameters: dict[str, list[int]]
    buffer: dict[str, int]
    ledger: int
    collecting: int
    background: dict[str, float]
    status: TrainingStatus


class SampleAnswer(AnswerBody):
    request_id: str
    index: int
    completion_ids: list[int]
    text: str
    logprobs: list[float]
    reward: float | None
    finish_reason: str
    policy_version: int
    policy_spans: list[tuple[int, int, int]]


class RolloutGroup(AnswerBody):
    prompt_ids: list[int]
    samples: list[SampleAnswer]


class Rollout(AnswerBody):
    groups: list[RolloutGroup]
