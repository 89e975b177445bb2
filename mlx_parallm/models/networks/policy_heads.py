"""What a policy samples from its network's outputs: categorical, multi-discrete, Gaussian and tanh-squashed Gaussian.

All in NumPy and float64, for the rows of all clients at once. A log-probability is that of the returned action: for the
squashed Gaussian with the logarithm of the Jacobian of tanh and of the scaling to the action's bounds. A Gaussian with
bounds returns clipped actions, with the log-probability before the clip, as most trainers have it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from mlx_parallm.config import nearest
from mlx_parallm.errors import ModelLoadError
from mlx_parallm.models.networks.layer import Shape
from mlx_parallm.models.networks.layer_options import Integers, Name, Numbers, Options, read_options
from mlx_parallm.models.networks.seeded_random import Floats, Words, normals, uniforms
from mlx_parallm.signature import TensorSpec
from mlx_parallm.tensors import Array

Flags = npt.NDArray[np.bool_]
SampledActions = tuple[Array, Floats]  # actions (rows, …) and their log-probabilities (rows,)


@dataclass(frozen=True, slots=True)
class RowSeeds:
    """Whose random numbers they are."""

    seeds: Words
    numbers: Words
    deterministic: Flags


class ActionHead(Options, ABC):
    """A distribution over actions. `bind` checks it against the network's outputs, before anything is sampled."""

    called: ClassVar[str] = "option"

    @abstractmethod
    def bind(self, outputs: Mapping[str, TensorSpec]) -> None: ...

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """The outputs that it reads."""

    @property
    def tensors(self) -> dict[str, Shape]:
        """Weights that belong to it and to no layer."""
        return {}

    @abstractmethod
    def describe(self) -> dict[str, Any]: ...

    @abstractmethod
    def sample(self, outputs: Mapping[str, Array], weights: Mapping[str, Array], rows: RowSeeds) -> SampledActions: ...


class MultiDiscrete(ActionHead):
    logits: Name
    nvec: Integers

    def bind(self, outputs: Mapping[str, TensorSpec]) -> None:
        width = width_of(self.logits, outputs, "logits")
        if min(self.nvec) < 1 or sum(self.nvec) != width:
            raise ModelLoadError(f"policy: nvec {list(self.nvec)} must be positive and add up to the {width} logits")

    @property
    def names(self) -> list[str]:
        return [self.logits]

    def describe(self) -> dict[str, Any]:
        return {"distribution": "multi_discrete", "nvec": list(self.nvec)}

    def sample(self, outputs: Mapping[str, Array], weights: Mapping[str, Array], rows: RowSeeds) -> SampledActions:
        chances = uniforms(rows.seeds, rows.numbers, len(self.nvec))
        parts = np.split(outputs[self.logits].astype(np.float64), np.cumsum(self.nvec)[:-1], axis=1)
        sampled = [
            sample_categorical(logits, chances[:, part], rows.deterministic) for part, logits in enumerate(parts)
        ]
        scores: Floats = np.sum([scores for _, scores in sampled], axis=0)
        return np.stack([actions for actions, _ in sampled], axis=1), scores


class CategoricalHead(ActionHead):
    logits: Name
    _width: int = 0  # set by `bind`

    def bind(self, outputs: Mapping[str, TensorSpec]) -> None:
        self._width = width_of(self.logits, outputs, "logits")

    @property
    def names(self) -> list[str]:
        return [self.logits]

    def describe(self) -> dict[str, Any]:
        return {"distribution": "categorical", "n": self._width}

    def sample(self, outputs: Mapping[str, Array], weights: Mapping[str, Array], rows: RowSeeds) -> SampledActions:
        chances = uniforms(rows.seeds, rows.numbers, 1)
        return sample_categorical(outputs[self.logits].astype(np.float64), chances[:, 0], rows.deterministic)


class Gaussian(ActionHead):
    """`log_std` is an output, or else a tensor of the weights: one number for each action, whatever is observed."""

    squashed: ClassVar[bool] = False
    mean: Name
    log_std: Name
    low: Numbers | None = None
    high: Numbers | None = None
    _width: int = 0  # both set by `bind`
    _free: bool = False

    def bind(self, outputs: Mapping[str, TensorSpec]) -> None:
        self._width = width_of(self.mean, outputs, "mean")
        self._free = self.log_std not in outputs
        if not self._free and width_of(self.log_std, outputs, "log_std") != self._width:
            raise ModelLoadError(f"policy: log_std must have the {self._width} values that mean has")
        if (self.low is None) != (self.high is None):
            raise ModelLoadError("policy: give both low and high, or neither")
        low, high = self.bounds
        if (low >= high).any():
            raise ModelLoadError(f"policy: low must be below high: {self.low} and {self.high}")

    @property
    def bounds(self) -> tuple[Floats, Floats]:
        """The bounds of each action; a single number holds for all."""
        found = []
        for name, default in (("low", -1.0), ("high", 1.0)):
            given = getattr(self, name) or (default,)
            if len(given) not in (1, self._width):
                raise ModelLoadError(f"policy: {name} has {len(given)} numbers for {self._width} actions")
            found.append(np.broadcast_to(np.array(given, np.float64), (self._width,)))
        return found[0], found[1]

    @property
    def names(self) -> list[str]:
        return [self.mean] if self._free else [self.mean, self.log_std]

    @property
    def tensors(self) -> dict[str, Shape]:
        return {self.log_std: (self._width,)} if self._free else {}

    def describe(self) -> dict[str, Any]:
        found: dict[str, Any] = {"distribution": "tanh_gaussian" if self.squashed else "gaussian"}
        found["size"] = self._width
        if self.squashed or self.low is not None:
            found["low"], found["high"] = (bound.tolist() for bound in self.bounds)
        return found

    def sample(self, outputs: Mapping[str, Array], weights: Mapping[str, Array], rows: RowSeeds) -> SampledActions:
        mean = outputs[self.mean].astype(np.float64)
        log_std = np.broadcast_to((weights if self._free else outputs)[self.log_std].astype(np.float64), mean.shape)
        noise = np.where(rows.deterministic[:, None], 0.0, normals(rows.seeds, rows.numbers, self._width))
        return self.act(mean + np.exp(log_std) * noise, mean, log_std)

    def act(self, raw: Floats, mean: Floats, log_std: Floats) -> SampledActions:
        """The action that a sample stands for, and its log-probability."""
        scores: Floats = log_density(raw, mean, log_std)
        if self.low is None:
            return raw.astype(np.float32), scores
        return np.clip(raw, *self.bounds).astype(np.float32), scores


class TanhGaussian(Gaussian):
    """Always has bounds: −1 and 1 where none are given."""

    squashed: ClassVar[bool] = True

    def act(self, raw: Floats, mean: Floats, log_std: Floats) -> SampledActions:
        low, high = self.bounds
        half = (high - low) / 2
        # log(1 − tanh²) without loss of digits far from 0
        jacobian = 2 * (math.log(2) - raw - np.logaddexp(0.0, -2 * raw)) + np.log(half)
        scores: Floats = log_density(raw, mean, log_std) - jacobian.sum(-1)
        actions = np.clip((low + high) / 2 + half * np.tanh(raw), low, high)
        return actions.astype(np.float32), scores


HEADS: dict[str, type[ActionHead]] = {
    "categorical": CategoricalHead,
    "multi_discrete": MultiDiscrete,
    "gaussian": Gaussian,
    "tanh_gaussian": TanhGaussian,
}


def read_head(options: Mapping[str, Any], outputs: Mapping[str, TensorSpec]) -> ActionHead:
    """The head that the `policy` of network.json describes; ModelLoadError."""
    kind = options.get("distribution")
    if not isinstance(kind, str) or kind not in HEADS:
        raise ModelLoadError(f"policy: distribution {kind!r:.60} is unknown{nearest(kind, HEADS)}")
    given = {name: value for name, value in options.items() if name != "distribution"}
    head = read_options(HEADS[kind], given, "policy")
    head.bind(outputs)
    return head


def width_of(name: str, outputs: Mapping[str, TensorSpec], role: str) -> int:
    """The number of values per row of an output that must be (batch, values)."""
    if name not in outputs:
        raise ModelLoadError(f"policy: {role} is {name!r}, which is no output of the network{nearest(name, outputs)}")
    shape = outputs[name].shape
    if len(shape) != 2 or not isinstance(shape[1], int):
        raise ModelLoadError(f"policy: {role} must have the shape (batch, values), and {name!r} has {list(shape)}")
    return shape[1]


def sample_categorical(logits: Floats, chances: Floats, deterministic: Flags) -> tuple[Array, Floats]:
    """(rows,) actions by the inverse of the cumulated probabilities; the likeliest ones where deterministic."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    scores = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    totals = np.cumsum(np.exp(scores), axis=1)
    sampled = (totals <= (chances * totals[:, -1])[:, None]).sum(axis=1)
    actions = np.where(deterministic, logits.argmax(axis=1), sampled)
    return actions, np.take_along_axis(scores, actions[:, None], axis=1)[:, 0]


def log_density(raw: Floats, mean: Floats, log_std: Floats) -> Floats:
    """Returns the log density of a diagonal Gaussian, summed over the actions."""
    distance = (raw - mean) * np.exp(-log_std)
    found: Floats = (-0.5 * distance**2 - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)
    return found
