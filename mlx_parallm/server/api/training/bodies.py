"""Bodies of training's routes."""

from typing import Any

from pydantic import ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from mlx_parallm.server.generation.chat_messages import ChatMessages
from mlx_parallm.server.http.schema import MAX_TOKENS, Body
from mlx_parallm.types import TrajectoryInput

MAX_TRAJECTORIES = 4096
MAX_PROMPTS = 256


class TrajectoryBody(Body):
    """A response with its reward. With a `request_id` that this server answered, ids and log-probabilities may be left
    out."""

    group_id: str | int | None = Field(None, description="Those of one group are compared; default: by their prompt")
    prompt_ids: list[int] | None = Field(None, min_length=1, max_length=MAX_TOKENS)
    completion_ids: list[int] | None = Field(None, min_length=1, max_length=MAX_TOKENS)
    logprobs: list[float] | None = Field(
        None,
        description="At the temperature of sampling, before the cuts of top_p, top_k and min_p and without penalties; "
        "where request_id names a response of this server, what was recorded of it counts instead; without either it "
        "counts as off-policy",
    )
    reward: float
    policy_version: int | None = Field(None, ge=0)
    request_id: str | None = None
    index: int | None = Field(
        None, ge=0, description="Which of the request's choices; may be left out where it has one"
    )
    temperature: float = Field(1.0, gt=0, description="At which it was sampled")
    mask: list[bool] | None = Field(None, description="Tokens of the response to learn from; default: all")
    advantage: float | None = Field(None, description="Instead of the one by its group")
    metadata: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _complete(self) -> "TrajectoryBody":
        if self.request_id is None and (self.prompt_ids is None or self.completion_ids is None):
            raise PydanticCustomError("trajectory", "It needs prompt_ids and completion_ids, or a request_id")
        return self

    def trajectory(self) -> TrajectoryInput:
        fields = self.model_dump(exclude={"group_id", "metadata"})
        group = "" if self.group_id is None else str(self.group_id)
        return TrajectoryInput(**fields, group_id=group, metadata=self.metadata or {})


class UpdateBody(Body):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "trajectories": [
                    {"group_id": "g1", "request_id": "r-1", "reward": 1.0},
                    {"group_id": "g1", "request_id": "r-2", "reward": 0.0},
                ],
                "update_inference": True,
            }
        }
    )
    trajectories: list[TrajectoryBody] | None = Field(
        None, min_length=1, max_length=MAX_TRAJECTORIES, description="Default: those in the buffer"
    )
    update_inference: bool = Field(True, description="False: the new parameters are kept, and not served yet")
    checkpoint_name: str | None = Field(None, min_length=1, max_length=100, description="Write a checkpoint after it")
    adapter: str | None = Field(None, description="Which of the adapters that learn; default: the first")


class FeedbackBody(Body):
    model_config = ConfigDict(json_schema_extra={"example": {"request_id": "chatcmpl-1f3a", "reward": 1.0}})
    request_id: str = Field(min_length=1, max_length=300, description="A response's id, X-Request-Id, or one's own")
    reward: float
    index: int | None = Field(None, ge=0, description="Which of its choices; may be left out where it has one")
    group_id: str | None = Field(None, max_length=300, description="Default: responses to one prompt are a group")
    adapter: str | None = Field(None, description="Which adapter learns from it; default: the one that answered")


class CheckpointBody(Body):
    model_config = ConfigDict(json_schema_extra={"example": {"name": "before-the-weekend"}})
    name: str | None = Field(None, min_length=1, max_length=100, description="Default: by the number of updates")
    adapter: str | None = None


ALL_DEFAULT = CheckpointBody.model_validate({})


class RolloutBody(Body):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {"prompts": ["2 + 2 ="], "n": 4, "max_tokens": 8, "scoring_function": "format", "submit": True}
        }
    )
    model: str = Field("default", description="The model, or an adapter of it")
    prompts: list[str | list[int] | ChatMessages] = Field(min_length=1, max_length=MAX_PROMPTS)
    n: int = Field(1, ge=1)
    max_tokens: int = Field(128, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0: off")
    seed: int | None = Field(None, ge=0, lt=1 << 62)
    stop_token_ids: list[int] = Field(default_factory=list, max_length=64)
    cache_salt: str = Field("", max_length=300, description="Cached prompts are shared by calls with the same one")
    scoring_function: str | None = None
    metadata: list[dict[str, Any]] | None = Field(None, description="One for each prompt, for the scoring function")
    submit: bool = Field(False, description="Put them into the buffer to learn from")

    @field_validator("metadata")
    @classmethod
    def _one_each(cls, value: Any, info: Any) -> Any:
        if value is not None and len(value) != len(info.data.get("prompts", value)):
            raise PydanticCustomError("metadata", "Expected one for each prompt")
        return value
