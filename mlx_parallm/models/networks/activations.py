"""Activations: a table of functions and their options, named and with defaults as torch's."""

import math
from collections.abc import Callable
from typing import ClassVar, Literal

import mlx.core as mx

from mlx_parallm.models.networks.layer import Layer, Shape, Weights, axis_of, variant
from mlx_parallm.models.networks.layer_options import Integer, Number


class Activation(Layer):
    """A function of one input; its options are keyword arguments."""

    compute: ClassVar[Callable[..., mx.array]]

    def run(self, weights: Weights, *inputs: mx.array) -> mx.array:
        return type(self).compute(inputs[0], **dict(self))


class AlongAxis(Activation):
    axis: Integer = -1

    def shape(self, *inputs: Shape) -> Shape:
        axis_of(self.axis, len(inputs[0]))
        return inputs[0]


def _gelu(x: mx.array, approximate: str) -> mx.array:
    if approximate == "tanh":
        return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1 + mx.erf(x / math.sqrt(2)))


def _leaky_relu(x: mx.array, negative_slope: float) -> mx.array:
    return mx.where(x > 0, x, negative_slope * x)


def _elu(x: mx.array, alpha: float) -> mx.array:
    return mx.where(x > 0, x, alpha * mx.expm1(mx.minimum(x, 0)))


# Not mlx.nn's functions: they are compiled, and on a CPU that takes a C++ compiler at run time.
ACTIVATIONS: dict[str, type[Layer]] = {
    "relu": variant(Activation, compute=lambda x: mx.maximum(x, 0)),
    "tanh": variant(Activation, compute=mx.tanh),
    "sigmoid": variant(Activation, compute=mx.sigmoid),
    "silu": variant(Activation, compute=lambda x: x * mx.sigmoid(x)),
    "gelu": variant(Activation, {"approximate": (Literal["none", "tanh"], "none")}, compute=_gelu),
    "elu": variant(Activation, {"alpha": (Number, 1.0)}, compute=_elu),
    "leaky_relu": variant(Activation, {"negative_slope": (Number, 0.01)}, compute=_leaky_relu),
    "softplus": variant(Activation, compute=lambda x: mx.logaddexp(x, mx.array(0.0))),
    "softmax": variant(AlongAxis, compute=lambda x, axis: mx.softmax(x, axis=axis, precise=True)),
    "log_softmax": variant(AlongAxis, compute=lambda x, axis: x - mx.logsumexp(x, axis=axis, keepdims=True)),
    "clip": variant(
        Activation,
        {"min": (Number, -math.inf), "max": (Number, math.inf)},
        compute=lambda x, min, max: mx.clip(x, min, max),
    ),
}
