"""New weights for a policy that serves: read and checked on the caller's thread, put in place on the engine's, between
two batches. `LocalPredictor` calls it for `/update_adapter_weights` and `/v1/adapters/rollback`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.models.kinds import Predictor
from mlx_parallm.models.kinds.policy import PolicyPredictor
from mlx_parallm.signature import WeightsVersion
from mlx_parallm.tensors import TensorError, parse_safetensors

Run = Callable[[Callable[[], int]], int]  # has the engine's thread do something, and waits for it


def update_weights(name: str, model: Predictor, run: Run, data: bytes, number: int | None) -> WeightsVersion:
    tensors = read_weights(name, model, data)
    policy = policy_of(name, model)
    return version_of(name, policy, run(lambda: policy.replace(tensors, number)))


def roll_back(name: str, model: Predictor, run: Run, number: int | None) -> WeightsVersion:
    policy = policy_of(name, model)
    return version_of(name, policy, run(lambda: policy.rollback(number)))


def read_weights(name: str, model: Predictor, data: bytes) -> Mapping[str, Any]:
    """The tensors of a safetensors file, checked against the policy's."""
    policy = policy_of(name, model)
    try:
        return policy.fit(parse_safetensors(data))
    except TensorError as error:
        raise InvalidRequestError(f"{error}; {name!r} keeps version {policy.version}", param="tensors") from error


def version_of(name: str, policy: PolicyPredictor, number: int) -> WeightsVersion:
    return WeightsVersion(name, number, tuple(policy.versions))


def policy_of(name: str, model: Predictor) -> PolicyPredictor:
    if not isinstance(model, PolicyPredictor):
        raise InvalidRequestError(
            f"{name!r} is a {model.info.kind} model; only the weights of policies can be replaced", param="name"
        )
    return model
