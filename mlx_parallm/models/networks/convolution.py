"""Convolutions and pools. Their inputs and weights are laid out as torch's, channels first: (batch, C, L) and
(batch, C, H, W), weights (out, in / groups, *kernel). MLX computes channels last.
"""

from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.networks.layer import Layer, Shape, ShapeError, Weights, check_features, check_rank, variant
from mlx_parallm.models.networks.layer_options import Count, Flag, Paddings, Sizes

LAYOUTS = {1: "(batch, channels, length)", 2: "(batch, channels, height, width)"}


class Window(Layer):
    """A kernel that moves over the last axes."""

    axes: ClassVar[int] = 1
    kernel_size: Sizes

    def each(self, name: str) -> tuple[int, ...]:
        """An option's value for each axis."""
        value: tuple[int, ...] = getattr(self, name, (1,))
        if len(value) not in (1, self.axes):
            raise ShapeError(f"has {len(value)} values of {name} for {self.axes} axes")
        return value * self.axes if len(value) == 1 else value

    def places(self, shape: Shape, stride: tuple[int, ...]) -> tuple[int, ...]:
        """Returns how often the kernel fits, along each axis."""
        check_rank(shape, self.axes + 2, LAYOUTS[self.axes])
        options = zip(
            shape[2:], self.each("kernel_size"), stride, self.each("padding"), self.each("dilation"), strict=True
        )
        found = []
        for size, kernel, step, padding, dilation in options:
            reach = dilation * (kernel - 1) + 1
            if size + 2 * padding < reach:
                raise ShapeError(f"has a kernel that reaches over {reach} where its input has {size + 2 * padding}")
            found.append((size + 2 * padding - reach) // step + 1)
        return tuple(found)


class Conv(Window):
    out_channels: Count
    in_channels: Count | None = None
    stride: Sizes = (1,)
    padding: Paddings = (0,)
    dilation: Sizes = (1,)
    groups: Count = 1
    bias: Flag = True

    def tensors(self, *inputs: Shape) -> dict[str, Shape]:
        if self.in_channels is None:
            self.in_channels = inputs[0][1]
        weight = {"weight": (self.out_channels, self.in_channels // self.groups, *self.each("kernel_size"))}
        return weight | ({"bias": (self.out_channels,)} if self.bias else {})

    def prepare(self, weights: Weights) -> Weights:
        weight = weights["weight"]
        return {**weights, "weight": mx.contiguous(mx.moveaxis(weight, 1, -1))}

    def shape(self, *inputs: Shape) -> Shape:
        check_rank(inputs[0], self.axes + 2, LAYOUTS[self.axes])
        check_features(inputs[0][1], self.in_channels or inputs[0][1], "channels")
        if inputs[0][1] % self.groups or self.out_channels % self.groups:
            raise ShapeError(f"has {self.groups} groups, which divide not both its channels")
        return (inputs[0][0], self.out_channels, *self.places(inputs[0], self.each("stride")))

    def run(self, weights: Weights, *inputs: mx.array) -> mx.array:
        given = mx.moveaxis(inputs[0], 1, -1)
        found = mx.conv_general(
            given,
            weights["weight"],
            stride=list(self.each("stride")),
            padding=list(self.each("padding")),
            kernel_dilation=list(self.each("dilation")),
            groups=self.groups,
        )
        if self.bias:
            found = found + weights["bias"]
        return mx.moveaxis(found, -1, 1)


class PoolingLayer(Window):
    pool: ClassVar[Any]  # MLX's, channels last
    stride: Sizes | None = None  # default: the kernel's size
    padding: Paddings = (0,)

    def _stride(self) -> tuple[int, ...]:
        return self.each("kernel_size") if self.stride is None else self.each("stride")

    def shape(self, *inputs: Shape) -> Shape:
        places = self.places(inputs[0], self._stride())
        if any(2 * pad > kernel for pad, kernel in zip(self.each("padding"), self.each("kernel_size"), strict=True)):
            raise ShapeError("pads by more than half of its kernel")
        return (*inputs[0][:2], *places)

    def run(self, weights: Weights, *inputs: mx.array) -> mx.array:
        options = [self.each("kernel_size"), self._stride(), self.each("padding")]
        kernel, stride, padding = [value[0] if self.axes == 1 else value for value in options]
        pool = self.pool(kernel, stride, padding)
        return mx.moveaxis(pool(mx.moveaxis(inputs[0], 1, -1)), -1, 1)


WINDOWS: dict[str, type[Layer]] = {
    "conv1d": Conv,
    "conv2d": variant(Conv, axes=2),
    "max_pool1d": variant(PoolingLayer, pool=nn.MaxPool1d),
    "max_pool2d": variant(PoolingLayer, axes=2, pool=nn.MaxPool2d),
    "avg_pool1d": variant(PoolingLayer, pool=nn.AvgPool1d),  # padding counts as zeros, as in torch by default
    "avg_pool2d": variant(PoolingLayer, axes=2, pool=nn.AvgPool2d),
}
