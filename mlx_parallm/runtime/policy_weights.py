"""New weights for a policy that serves: read and checked on the caller's thread, put in place on the engine's, between
two batches. `LocalPredictor` calls it for `/update_adapter_weights` and `/v1/adapters/rollback`.
"""

from collections.abc import Callable

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.models.kinds import Predictor
from mlx_parallm.models.kinds.policy import PolicyPredictor
from mlx_parallm.signature import WeightsVersion
from mlx_parallm.tensors import TensorError, parse_safetensors

Run = Callable[[Callable[[], int]], int]  # has the engine's thread do something, and waits for it


def update_weights(name: str, model: Predictor, run: Run, data: bytes, number: int | None) -> WeightsVersion:
    policy = _policy(name, model)
    try:
        tensors = policy.fit(parse_safetensors(data))
    except TensorError as error:
        raise InvalidRequestError(f"{error}; {name!r} keeps version {policy.version}", param="tensors") from error
    found = run(lambda: policy.replace(tensors, number))
    return WeightsVersion(name, found, tuple(policy.versions))


def roll_back(name: str, model: Predictor, run: Run, number: int | None) -> WeightsVersion:
    policy = _policy(name, model)
    found = run(lambda: policy.rollback(number))
    return WeightsVersion(name, found, tuple(policy.versions))


def _policy(name: str, model: Predictor) -> PolicyPredictor:
    if not isinstance(model, PolicyPredictor):
        raise InvalidRequestError(
            f"{name!r} is a {model.info.kind} model; only the weights of policies can be replaced", param="name"
        )
    return model
