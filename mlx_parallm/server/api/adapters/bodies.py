"""Bodies and responses of the adapters' routes."""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from mlx_parallm.arms import CONFIDENCE, MIN_REWARDS
from mlx_parallm.sampling_params import INT64
from mlx_parallm.server.http.schema import Body, response_body
from mlx_parallm.types import MAX_VERSION


class LoadAdapterBody(Body):
    model_config = ConfigDict(json_schema_extra={"example": {"name": "math", "path": "adapters/math"}})
    name: str | None = Field(
        None,
        validation_alias=AliasChoices("name", "lora_name", "adapter_name"),
        description="Without one it is the next version of `adapter`, and the model's own name serves it",
    )
    path: str = Field(min_length=1, validation_alias=AliasChoices("path", "lora_path", "adapter_path"))
    version: int | None = Field(
        None, ge=1, le=MAX_VERSION, description="Must be newer than the newest; default: the next"
    )
    model: str = Field("default", description="The model that it is for")


class UpdateWeightsBody(Body):
    model_config = ConfigDict(json_schema_extra={"example": {"name": "math", "tensors": "AgAAAAAAAAB7fQ=="}})
    name: str = Field(validation_alias=AliasChoices("name", "lora_name", "adapter_name"))
    tensors: str = Field(min_length=1, description="A safetensors file in base64")
    config: dict[str, Any] | None = Field(None, description="adapter_config.json, of mlx-lm or PEFT")
    version: int | None = Field(
        None, ge=1, le=MAX_VERSION, description="Must be newer than the newest; default: the next"
    )
    model: str = Field("default", description="The model that it is for")


class UnloadAdapterBody(Body):
    model_config = ConfigDict(json_schema_extra={"example": {"name": "math"}})
    name: str = Field(validation_alias=AliasChoices("name", "lora_name", "adapter_name"))


class RollbackBody(UnloadAdapterBody):
    version: int | None = Field(None, ge=1, le=INT64, description="Default: the one before")
    checkpoint: str | None = Field(
        None, min_length=1, max_length=100, description="Of an adapter that is trained: go on from this checkpoint"
    )


class VllmLoadBody(Body):
    model_config = ConfigDict(json_schema_extra={"example": {"lora_name": "math", "lora_path": "adapters/math"}})
    lora_name: str
    lora_path: str = Field(min_length=1)
    load_inplace: bool = False


class VllmUnloadBody(Body):
    model_config = ConfigDict(json_schema_extra={"example": {"lora_name": "math"}})
    lora_name: str


class SwitchBody(Body):
    """What requests for the model's own name get: one adapter, or several with their shares."""

    model_config = ConfigDict(json_schema_extra={"example": {"name": "math", "split": {"v1": 0.9, "v2": 0.1}}})
    version: str | int | None = Field(
        None, description="name, name@version, a version of `name`, or base (also 0): the model alone"
    )
    split: dict[str, float] | None = Field(None, min_length=1, max_length=16, description="Shares that add up to 1")
    auto: bool = Field(
        False,
        description="The better arm gets all requests once each has min_rewards rewards and it is proven",
    )
    confidence: float = Field(CONFIDENCE, ge=0.5, le=0.9999, description="One-sided, by Welch's test")
    min_rewards: int = Field(MIN_REWARDS, ge=2, le=1_000_000, description="Of each arm")
    name: str | None = Field(None, description="The adapter whose versions are meant; needed where there are several")
    model: str = Field("default", description="The model whose name it is about")

    @model_validator(mode="after")
    def _one_way(self) -> "SwitchBody":
        if (self.version is None) == (self.split is None):
            raise PydanticCustomError("switch", "Give either version or split")
        if self.auto and len(self.split or ()) < 2:
            raise PydanticCustomError("switch", "auto needs a split between two arms or more")
        return self

    @field_validator("split")
    @classmethod
    def _whole(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value is not None and (min(value.values()) <= 0 or abs(sum(value.values()) - 1) > 1e-3):
            raise PydanticCustomError("split", "Shares must be above 0 and add up to 1")
        return value


class PinBody(UnloadAdapterBody):
    version: int | None = Field(None, ge=1, le=INT64, description="Default: what the name means")


@response_body
class AdapterInfo(TypedDict):
    name: str
    version: int
    current: Annotated[bool, Field(description="Whether the name means this version")]
    parent: str
    rank: int
    bytes: int
    pinned_requests: Annotated[int, Field(description="Rows that use it, or wait to")]
    pinned: Annotated[bool, Field(description="Whether it is kept, however many newer ones there are")]
    requests: Annotated[int, Field(description="That it has answered or is answering")]
    generated_tokens: int
    rewards: Annotated[int, Field(description="That its responses got")]
    reward_mean: float | None
    latency_mean: Annotated[float | None, Field(description="Seconds from a request's submission to its end")]
    digest: Annotated[str, Field(description="Of its weights as they are served: equal weights have equal ones")]
    source: str
    created: int


@response_body
class AdapterList(TypedDict):
    object: Literal["list"]
    data: list[AdapterInfo]


@response_body
class AdapterChanged(TypedDict):
    status: Literal["success"]
    name: str
    policy_version: int
    message: str


@response_body
class Switched(TypedDict):
    status: Literal["success"]
    model: str
    serves: Annotated[dict[str, float], Field(description="Adapters with their shares of the requests")]
    policy_version: int
    message: str
