"""Layers without convolution or recurrence: linear, norms, embeddings, and changes of shape.

Names, defaults and tensors are torch's, so that a `state_dict` fits.
"""

import math
from typing import ClassVar

import mlx.core as mx

from mlx_parallm.models.networks.layer import Layer, Shape, ShapeError, Takes, Weights, axis_of, check_features
from mlx_parallm.models.networks.layer_options import Count, Flag, Integer, Integers, NotNegative, Number


class LinearLayer(Layer):
    out_features: Count
    in_features: Count | None = None  # needed for nobody; checked where it is given
    bias: Flag = True

    def tensors(self, *inputs: Shape) -> dict[str, Shape]:
        if self.in_features is None:
            self.in_features = inputs[0][-1]
        weight = {"weight": (self.out_features, self.in_features)}
        return weight | ({"bias": (self.out_features,)} if self.bias else {})

    def shape(self, *inputs: Shape) -> Shape:
        if len(inputs[0]) < 2:
            raise ShapeError("takes (batch, …, features), not the batch axis alone")
        check_features(inputs[0][-1], self.in_features or inputs[0][-1], "features")
        return (*inputs[0][:-1], self.out_features)

    def run(self, weights: Weights, *inputs: mx.array) -> mx.array:
        if self.bias:
            return mx.addmm(weights["bias"], inputs[0], weights["weight"].T)
        return inputs[0] @ weights["weight"].T


class Identity(Layer):
    takes: ClassVar[Takes] = "any"
    keeps: ClassVar[bool] = True

    def run(self, weights: Weights, *inputs: mx.array) -> mx.array:
        return inputs[0]


class Dropout(Identity):
    p: NotNegative = 0.5  # of training; nothing is dropped here


class Scale(Layer):
    """x · factor + offset, for integers too: bytes of an image to numbers from 0 to 1."""

    takes: ClassVar[Takes] = "any"
    factor: Number = 1.0
    offset: Number = 0.0

    def run(self, weights: Weights, *inputs: mx.array) -> mx.array:
        return inputs[0].astype(mx.float32) * self.factor + self.offset


class LayerNorm(Layer):
    """Layer normalisation over the last axis."""

    epsilon: NotNegative = 1e-5
    affine: Flag = True

    def tensors(self, *inputs: Shape) -> dict[str, Shape]:
        return {"weight": inputs[0][-1:], "bias": inputs[0][-1:]} if self.affine else {}

    def shape(self, *inputs: Shape) -> Shape:
        axis_of(-1, len(inputs[0]))
        return inputs[0]

    def run(self, weights: Weights, *inputs: mx.array) -> mx.array:
        return mx.fast.layer_norm(inputs[0], weights.get("weight"), weights.get("bias"), self.epsilon)


class BatchNorm(Layer):
    """Batch normalisation as at inference, by running mean and variance; channels are axis 1."""

    epsilon: NotNegative = 1e-5
    affine: Flag = True

    def tensors(self, *inputs: Shape) -> dict[str, Shape]:
        channels: Shape = (inputs[0][1],)
        affine = {"weight": channels, "bias": channels} if self.affine else {}
        return affine | {"running_mean": channels, "running_var": channels}

    def shape(self, *inputs: Shape) -> Shape:
        axis_of(1, len(inputs[0]))
        return inputs[0]

    def run(self, weights: Weights, *inputs: mx.array) -> mx.array:
        x = inputs[0]
        scale = mx.rsqrt(weights["running_var"] + self.epsilon)
        scale = scale * weights["weight"] if self.affine else scale
        offset = (weights["bias"] if self.affine else 0) - weights["running_mean"] * scale
        channels = (-1,) + (1,) * (x.ndim - 2)
        return x * scale.reshape(channels) + offset.reshape(channels)


class Normalize(Layer):
    """(x − mean) / sqrt(var + epsilon), clipped: running statistics of observations, which travel with the weights."""

    epsilon: NotNegative = 1e-8
    clip: NotNegative | None = None

    def tensors(self, *inputs: Shape) -> dict[str, Shape]:
        return {"mean": inputs[0][1:], "var": inputs[0][1:]}

    def run(self, weights: Weights, *inputs: mx.array) -> mx.array:
        normal = (inputs[0] - weights["mean"]) * mx.rsqrt(weights["var"] + self.epsilon)
        return normal if self.clip is None else mx.clip(normal, -self.clip, self.clip)


class EmbeddingLookup(Layer):
    takes: ClassVar[Takes] = "int"
    num_embeddings: Count
    embedding_dim: Count

    @property
    def indices(self) -> int:
        return self.num_embeddings

    def tensors(self, *inputs: Shape) -> dict[str, Shape]:
        return {"weight": (self.num_embeddings, self.embedding_dim)}

    def shape(self, *inputs: Shape) -> Shape:
        return (*inputs[0], self.embedding_dim)

    def run(self, weights: Weights, *inputs: mx.array) -> mx.array:
        return weights["weight"][inputs[0]]


class OneHot(Layer):
    takes: ClassVar[Takes] = "int"
    num_classes: Count

    @property
    def indices(self) -> int:
        return self.num_classes

    def shape(self, *inputs: Shape) -> Shape:
        return (*inputs[0], self.num_classes)

    def run(self, weights: Weights, *inputs: mx.array) -> mx.array:
        return (inputs[0][..., None] == mx.arange(self.num_classes)).astype(mx.float32)


class Flatten(Layer):
    takes: ClassVar[Takes] = "any"
    keeps: ClassVar[bool] = True
    start_axis: Integer = 1
    end_axis: Integer = -1

    def shape(self, *inputs: Shape) -> Shape:
        shape = inputs[0]
        start = axis_of(self.start_axis, len(shape))
        end = axis_of(self.end_axis, len(shape))
        if start > end:
            raise ShapeError(f"flattens from axis {start} to {end}")
        return (*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :])

    def run(self, weights: Weights, *inputs: mx.array) -> mx.array:
        return inputs[0].reshape(self.shape(inputs[0].shape))


class Reshape(Layer):
    """Reshapes to (batch, *sizes); one size may be −1: what is left."""

    takes: ClassVar[Takes] = "any"
    keeps: ClassVar[bool] = True
    sizes: Integers

    def shape(self, *inputs: Shape) -> Shape:
        total = math.prod(inputs[0][1:])
        fixed = math.prod(size for size in self.sizes if size != -1)
        if self.sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in self.sizes):
            raise ShapeError(f"reshapes to {list(self.sizes)}, where each size must be positive and one may be -1")
        rest, left = divmod(total, fixed)
        if left or (-1 not in self.sizes and rest != 1):
            raise ShapeError(f"reshapes to {list(self.sizes)} what has {total} values per row")
        return (inputs[0][0], *(rest if size == -1 else size for size in self.sizes))

    def run(self, weights: Weights, *inputs: mx.array) -> mx.array:
        return inputs[0].reshape(self.shape(inputs[0].shape))


class Transpose(Layer):
    """Axes in a new order, the batch first: [0, 2, 1] swaps time and features."""

    takes: ClassVar[Takes] = "any"
    keeps: ClassVar[bool] = True
    axes: Integers

    def shape(self, *inputs: Shape) -> Shape:
        if sorted(self.axes) != list(range(len(inputs[0]))) or self.axes[0] != 0:
            raise ShapeError(f"orders {len(inputs[0])} axes by {list(self.axes)}; each once, and 0, the batch, first")
        return tuple(inputs[0][axis] for axis in self.axes)

    def run(self, weights: Weights, *inputs: mx.array) -> mx.array:
        return inputs[0].transpose(self.axes)


class Select(Layer):
    """One place along an axis: index −1 of axis 1 is the last step of a sequence."""

    takes: ClassVar[Takes] = "any"
    keeps: ClassVar[bool] = True
    index: Integer = -1
    axis: Integer = 1

    def shape(self, *inputs: Shape) -> Shape:
        axis = axis_of(self.axis, len(inputs[0]))
        if not -inputs[0][axis] <= self.index < inputs[0][axis]:
            raise ShapeError(f"selects index {self.index} of an axis of size {inputs[0][axis]}")
        return (*inputs[0][:axis], *inputs[0][axis + 1 :])

    def run(self, weights: Weights, *inputs: mx.array) -> mx.array:
        axis = self.axis % inputs[0].ndim
        return mx.take(inputs[0], self.index % inputs[0].shape[axis], axis=axis)


class Mean(Layer):
    """The mean over some axes; [2, 3] of a picture is torch's AdaptiveAvgPool2d(1) with Flatten."""

    axes: Integers

    def shape(self, *inputs: Shape) -> Shape:
        gone = {axis_of(axis, len(inputs[0])) for axis in self.axes}
        return tuple(size for place, size in enumerate(inputs[0]) if place not in gone)

    def run(self, weights: Weights, *inputs: mx.array) -> mx.array:
        return mx.mean(inputs[0], axis=self.axes)


class Concat(Layer):
    takes: ClassVar[Takes] = "any"
    keeps: ClassVar[bool] = True
    arity: ClassVar[tuple[int, ...]] = ()
    axis: Integer = -1

    def shape(self, *inputs: Shape) -> Shape:
        axis = axis_of(self.axis, len(inputs[0]))
        others = {(*shape[:axis], *shape[axis + 1 :]) for shape in inputs}
        if len({len(shape) for shape in inputs}) > 1 or len(others) > 1:
            raise ShapeError(f"joins {', '.join(map(str, inputs))} along axis {axis}; the other axes must agree")
        return (*inputs[0][:axis], sum(shape[axis] for shape in inputs), *inputs[0][axis + 1 :])

    def run(self, weights: Weights, *inputs: mx.array) -> mx.array:
        return mx.concatenate(list(inputs), axis=self.axis)


class Add(Layer):
    """The sum of values of one shape: a residual connection."""

    arity: ClassVar[tuple[int, ...]] = ()

    def shape(self, *inputs: Shape) -> Shape:
        if len(set(inputs)) > 1:
            raise ShapeError(f"adds {', '.join(map(str, inputs))}; all must have one shape")
        return inputs[0]

    def run(self, weights: Weights, *inputs: mx.array) -> mx.array:
        return sum(inputs[1:], inputs[0])


class Multiply(Add):
    def run(self, weights: Weights, *inputs: mx.array) -> mx.array:
        return math.prod(inputs[1:], start=inputs[0])
