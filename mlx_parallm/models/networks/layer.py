"""What a layer is. Its options are fields, read from network.json; its weights are kept apart, so that they can be
replaced while it serves.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import mlx.core as mx
from pydantic import create_model

from mlx_parallm.models.networks.layer_options import Options

Shape = tuple[int, ...]
Takes = Literal["float", "int", "any"]
Weights = Mapping[str, Any]  # arrays by their name within the layer: weight, bias, weight_ih_l0, …


class ShapeError(ValueError):
    """A layer can't take what it is given; the graph says which layer."""


class Layer(Options):
    """One layer of a network. The first axis of everything is the batch, and no layer mixes its rows."""

    called: ClassVar[str] = "option"
    takes: ClassVar[Takes] = "float"
    keeps: ClassVar[bool] = False  # whether it gives integers where it takes them; all others give floats
    arity: ClassVar[tuple[int, ...]] = (1,)  # how many inputs it may have; empty: two or more
    extra: ClassVar[tuple[str, ...]] = ()  # further results, by their names behind the layer's

    def tensors(self, *inputs: Shape) -> dict[str, Shape]:
        """Names and shapes of its weights, when its inputs have these shapes."""
        return {}

    def prepare(self, weights: Weights) -> Weights:
        """The weights as `run` wants them."""
        return weights

    def shape(self, *inputs: Shape) -> Shape:
        """Returns the shape of the result; raises ShapeError."""
        return inputs[0]

    def shapes(self, *inputs: Shape) -> tuple[Shape, ...]:
        return (self.shape(*inputs),)

    def run(self, weights: Weights, *inputs: mx.array) -> mx.array:
        raise NotImplementedError

    def results(self, weights: Weights, *inputs: mx.array) -> tuple[mx.array, ...]:
        return (self.run(weights, *inputs),)


def variant(base: type[Layer], options: Mapping[str, tuple[Any, Any]] | None = None, **constants: Any) -> type[Layer]:
    """A kind of layer that has options beyond those of `base`, by type and default, or other constants of its class."""
    kind: type[Layer] = create_model(base.__name__, __base__=base, **(options or {}))  # type: ignore[call-overload]
    for name, value in constants.items():
        setattr(kind, name, value)
    return kind


def check_rank(shape: Shape, rank: int, what: str) -> None:
    if len(shape) != rank:
        raise ShapeError(f"takes {what}, not {len(shape)} axes")


def check_features(found: int, wanted: int, what: str) -> None:
    if found != wanted:
        raise ShapeError(f"takes {wanted} {what} and is given {found}")


def axis_of(axis: int, rank: int) -> int:
    """Counted from the front; the batch's own axis is nobody's."""
    place = axis + rank if axis < 0 else axis
    if not 1 <= place < rank:
        raise ShapeError(f"has no axis {axis} to work on: there are {rank}, and axis 0 is the batch")
    return place
