"""What networks and policies take and give: named tensors with shapes and dtypes. Plain values, no tensors.

`models.networks` reads it from network.json, `/v1/models` shows it, and the server checks every input against it before
it reaches the engine's thread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.types import PredictorInfo

BATCH = "batch"  # the first axis of every input and output
MAX_AXIS = 1024  # of a dynamic axis that has no limit of its own: a batch with long sequences holds up running rows

Dim = int | str | None  # its size, the name of a dynamic axis, or: follows from others


@dataclass(frozen=True, slots=True)
class Axis:
    """A dynamic axis: the same size in all inputs of a request that have it."""

    name: str
    least: int = 1
    most: int = MAX_AXIS


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    name: str
    shape: tuple[Dim, ...]
    dtype: str = "float32"
    finite: bool = True  # NaN and infinities are refused
    bounds: tuple[int, int] | None = None  # of integers that are indices

    def describe(self) -> dict[str, Any]:
        found: dict[str, Any] = {"shape": list(self.shape), "dtype": self.dtype}
        if self.bounds is not None:
            found["minimum"], found["maximum"] = self.bounds
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    axes: tuple[Axis, ...] = ()

    def describe(self) -> dict[str, Any]:
        """Describes the signature as `/v1/models/NAME` shows it."""
        found: dict[str, Any] = {
            "inputs": {spec.name: spec.describe() for spec in self.inputs},
            "outputs": {spec.name: spec.describe() for spec in self.outputs},
        }
        if self.axes:
            found["axes"] = {axis.name: {"min": axis.least, "max": axis.most} for axis in self.axes}
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkInfo(PredictorInfo):
    tensors: Signature


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInfo(NetworkInfo):
    observations: tuple[str, ...]  # inputs that are observations; the others are recurrent state
    states: tuple[str, ...] = ()
    actions: Mapping[str, Any] = field(default_factory=dict)  # the distribution and the space, for people


@dataclass(frozen=True, slots=True, kw_only=True)
class ActInput:
    """Observations of one client for a policy, one or more rows, with their state. Arrays are NumPy's."""

    inputs: Mapping[str, Any]
    seed: int
    first: int = 0  # its first row's number in the request: random numbers depend on seed and number alone
    deterministic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ActOutput:
    actions: Any
    log_probs: Any
    values: Any | None
    states: Mapping[str, Any]
    version: int  # of the weights


@dataclass(frozen=True, slots=True)
class WeightsVersion:
    """A policy's weights after a change."""

    name: str
    number: int
    kept: Sequence[int] = ()  # versions that it can go back to

    @property
    def label(self) -> str:
        return f"{self.name}@{self.number}"
