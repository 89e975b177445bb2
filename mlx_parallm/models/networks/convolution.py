"""Convolutions and pools. Their inputs and weights are laid out as torch's, channels first: (batch, C, L) and
(batch, C, H, W), weights (out, in / groups, *kernel). MLX computes channels last.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.networks.layer import Layer, Shape, ShapeError, Weights, check_features, check_rank
from mlx_parallm.models.networks.layer_options import count, flag, sizes

LAYOUTS = {1: "(batch, channels, length)", 2: "(batch, channels, height, width)"}


@dataclass(slots=True, kw_only=True)
class Window(Layer):
    """A kernel that moves over the last axes."""

    axes: ClassVar[int] = 1
    kernel_size: tuple[int, ...] = sizes()

    def each(self, name: str) -> tuple[int, ...]:
        """An option's value for each axis."""
        value: tuple[int, ...] = getattr(self, name, (1,))
        if len(value) not in (1, self.axes):
            raise ShapeError(f"has {len(value)} values of {name} for {self.axes} axes")
        return value * self.axes if len(value) == 1 else value

    def places(self, shape: Shape, stride: tuple[int, ...]) -> tuple[int, ...]:
        """How often the kernel fits, along each axis."""
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


@dataclass(slots=True, kw_only=True)
class Conv(Window):
    out_channels: int = count()
    in_channels: int | None = count(None)
    stride: tuple[int, ...] = sizes((1,))
    padding: tuple[int, ...] = sizes((0,), least=0)
    dilation: tuple[int, ...] = sizes((1,))
    groups: int = count(1)
    bias: bool = flag(True)

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


@dataclass(slots=True, kw_only=True)
class Conv1d(Conv):
    pass


@dataclass(slots=True, kw_only=True)
class Conv2d(Conv):
    axes: ClassVar[int] = 2


@dataclass(slots=True, kw_only=True)
class PoolingLayer(Window):
    pool: ClassVar[Any]  # MLX's, channels last
    stride: tuple[int, ...] | None = sizes(None)  # default: the kernel's size
    padding: tuple[int, ...] = sizes((0,), least=0)

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


@dataclass(slots=True, kw_only=True)
class MaxPool1d(PoolingLayer):
    pool: ClassVar[Any] = nn.MaxPool1d


@dataclass(slots=True, kw_only=True)
class MaxPool2d(PoolingLayer):
    axes: ClassVar[int] = 2
    pool: ClassVar[Any] = nn.MaxPool2d


@dataclass(slots=True, kw_only=True)
class AvgPool1d(PoolingLayer):
    """Padding counts as zeros, as in torch by default."""

    pool: ClassVar[Any] = nn.AvgPool1d


@dataclass(slots=True, kw_only=True)
class AvgPool2d(PoolingLayer):
    """Padding counts as zeros, as in torch by default."""

    axes: ClassVar[int] = 2
    pool: ClassVar[Any] = nn.AvgPool2d
