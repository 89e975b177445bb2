"""Bodies and responses of `/v1/predict` and `/v1/rl/act`."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import AliasChoices, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from mlx_parallm.sampling_params import INT64
from mlx_parallm.server.http.schema import Body, response_body

MAX_SESSIONS = 4096  # of a request
ENCODED = {"data": "AACAPwAAAEAAAEBAAACAQA==", "shape": [1, 4], "dtype": "float32"}
TENSOR = "Nested lists, or `{data, shape, dtype}` with the numbers in base64, little-endian, in C order"


class PredictBody(Body):
    """Named tensors for a network."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"model_id": "iris", "inputs": {"x": [[5.1, 3.5, 1.4, 0.2]]}}}
    )
    model_id: str | None = Field(
        None, validation_alias=AliasChoices("model_id", "model"), description="Default: the first network"
    )
    inputs: dict[str, Any] = Field(description=f"Each input of the signature by its name. {TENSOR}")
    encoding: Literal["json", "base64"] = Field("json", description="Of the outputs")


@response_body
class Predicted(TypedDict):
    model_id: str
    outputs: dict[str, Any]


class ActBody(Body):
    """Observations for a policy."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"model_id": "cartpole", "observations": [[0.01, -0.02, 0.03, 0.04]], "seed": 7}}
    )
    model_id: str | None = Field(
        None, validation_alias=AliasChoices("model_id", "model"), description="Default: the first policy"
    )
    observations: Any = Field(
        description=f"A batch of them. {TENSOR}; an object of them by name, where the policy has several observations"
    )
    hidden_states: Any = Field(
        None, description="`new_hidden_states` of the response before; default: zeros, an episode's start"
    )
    session_id: str | None = Field(
        None, min_length=1, max_length=256, description="Keeps the state of all rows on the server under this name"
    )
    session_ids: list[str] | None = Field(
        None, min_length=1, max_length=MAX_SESSIONS, description="The same, with a session for each row"
    )
    episode_starts: Any = Field(None, description="A boolean for each row: true begins with a state of zeros")
    deterministic: bool = Field(False, description="The likeliest action, or the mean")
    seed: int | None = Field(
        None, ge=-INT64 - 1, le=INT64, description="A row's random number depends on it and on the row's number alone"
    )
    encoding: Literal["json", "base64"] = Field("json", description="Of the response's tensors")

    @model_validator(mode="after")
    def _one_state(self) -> "ActBody":
        if self.observations is None:
            raise PydanticCustomError("act", "observations must be given")
        given = [name for name in ("hidden_states", "session_id", "session_ids") if getattr(self, name) is not None]
        if len(given) > 1:
            raise PydanticCustomError("act", f"Give {' or '.join(given)}, not both")
        return self


@response_body
class Acted(TypedDict):
    model_id: str
    actions: Any
    action_log_probs: Any
    value_estimates: NotRequired[Any]
    new_hidden_states: NotRequired[
        Annotated[dict[str, Any], Field(description="Of recurrent policies without a session")]
    ]
    new_sessions: NotRequired[Annotated[list[str], Field(description="Sessions that began with this request")]]
    policy_version: Annotated[int, Field(description="Of the weights that acted; the newest, where rows differ")]
    policy_spans: Annotated[list[list[int]], Field(description="[first row, end, version]")]
