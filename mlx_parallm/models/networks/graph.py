"""A network: layers joined by the names of values, with shapes known before anything is computed.

Shapes are followed twice, with two sizes of every dynamic axis: what differs between them is dynamic too, and where a
weight would have to differ, the network is refused when it loads and not by a request.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.config import nearest
from mlx_parallm.errors import InvalidRequestError, ModelLoadError
from mlx_parallm.host import to_numpy
from mlx_parallm.models.networks.definition import Definition, LayerEntry, OutputEntry
from mlx_parallm.models.networks.layer import Layer, Shape, ShapeError, Weights
from mlx_parallm.signature import BATCH, Axis, Dim, Signature, TensorSpec
from mlx_parallm.tensors import DTYPES, Array, TensorError

STEPS = (101, 103, 107, 109, 113, 127)  # between the two sizes of a dynamic axis: no layer's stride
GROUP_ELEMENTS = 1 << 23  # of all results of one pass: more rows are computed in several
ROW_ELEMENTS = 1 << 26  # of one row: more are refused
IGNORED = ".num_batches_tracked"  # torch's batch norms count their training steps


@dataclass(frozen=True, slots=True)
class Value:
    """What a layer gives or the network is given, while it is built."""

    index: int
    small: Shape  # at the first of the two sizes
    large: Shape
    integer: bool = False
    origins: frozenset[str] = frozenset()  # inputs whose integers it holds


@dataclass(frozen=True, slots=True)
class Node:
    layer: Layer
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    place: str


class Graph:
    def __init__(self, definition: Definition) -> None:
        self._axes = definition.axes
        self._values: dict[str, Value] = {}
        self._nodes: list[Node] = []
        self._bounds: dict[str, int] = {}
        self._count = 0
        self.tensors: dict[str, Shape] = {}  # that the layers need
        last = self._add_inputs(definition.inputs)
        for entry in definition.layers:
            last = self._add_layer(entry, last)
        assert last is not None  # there is a layer at least
        self._sources: dict[str, int] = {}
        outputs = tuple(
            self._output(name, entry, last, len(definition.outputs)) for name, entry in definition.outputs.items()
        )
        self.signature = Signature(
            inputs=tuple(self._bounded(spec) for spec in definition.inputs), outputs=outputs, axes=definition.axes
        )
        self._row_elements = lru_cache(256)(self._elements_of_row)

    # Building it.

    def _add_inputs(self, specs: Sequence[TensorSpec]) -> Value | None:
        small = {BATCH: 2} | {axis.name: axis.least for axis in self._axes}
        large = {BATCH: 3} | {axis.name: _larger(axis, place) for place, axis in enumerate(self._axes)}
        for spec in specs:
            integer = DTYPES[spec.dtype].kind != "f"
            origins = frozenset({spec.name}) if integer else frozenset()
            first = _sized(spec.shape, small)
            second = _sized(spec.shape, large)
            self._values[spec.name] = Value(self._next(), first, second, integer, origins)
        return self._values[specs[0].name] if len(specs) == 1 else None

    def _next(self) -> int:
        self._count += 1
        return self._count - 1

    def _add_layer(self, entry: LayerEntry, last: Value | None) -> Value:
        values = self._inputs_of(entry, last)
        layer = entry.layer
        self._check_dtype(entry, values)
        small, large = ([getattr(value, size) for value in values] for size in ("small", "large"))
        try:
            shapes = layer.shapes(*small)
            needed = layer.tensors(*small)
            others = layer.shapes(*large)
            if layer.tensors(*large) != needed:
                raise ShapeError("has weights over a dynamic axis, which has no one size")
        except ShapeError as error:
            raise ModelLoadError(f"{entry.place} {error}{self._hint(small, large)}") from None
        if needed and not entry.name:
            raise ModelLoadError(
                f"{entry.place} has weights and needs a name: its tensors are NAME.{next(iter(needed))}"
            )
        self.tensors |= {f"{entry.name}.{leaf}": shape for leaf, shape in needed.items()}
        integer = layer.keeps and any(value.integer for value in values)
        origins = frozenset[str]().union(*(value.origins for value in values)) if integer else frozenset[str]()
        results = [Value(self._next(), *both, integer, origins) for both in zip(shapes, others, strict=True)]
        if entry.name:
            for name, value in zip(("", *(f".{extra}" for extra in layer.extra)), results, strict=True):
                self._name(entry, entry.name + name, value)
        self._nodes.append(
            Node(layer, entry.name, tuple(v.index for v in values), tuple(v.index for v in results), entry.place)
        )
        return results[0]

    def _inputs_of(self, entry: LayerEntry, last: Value | None) -> list[Value]:
        if entry.inputs:
            return [self._find(name, entry.place) for name in entry.inputs]
        if last is None:
            names = ", ".join(self._values)
            raise ModelLoadError(
                f"{entry.place} is the first of a network with several inputs: say by input which it takes: {names}"
            )
        return [last]

    def _find(self, name: str, place: str) -> Value:
        if name not in self._values:
            raise ModelLoadError(f"{place}: there is no layer or input {name!r} before it{nearest(name, self._values)}")
        return self._values[name]

    def _name(self, entry: LayerEntry, name: str, value: Value) -> None:
        if name in self._values:
            raise ModelLoadError(f"{entry.place}: the name {name!r} is taken already")
        self._values[name] = value

    def _check_dtype(self, entry: LayerEntry, values: Sequence[Value]) -> None:
        layer = entry.layer
        for value in values:
            if layer.takes == "float" and value.integer:
                raise ModelLoadError(f"{entry.place} takes floats and is given integers: put a scale layer before it")
            if layer.takes == "int" and not value.integer:
                raise ModelLoadError(f"{entry.place} takes integers, and is given floats: declare the input as int64")
        if len({value.integer for value in values}) > 1:
            raise ModelLoadError(
                f"{entry.place} is given both integers and floats: put a scale layer before the former"
            )
        if (size := getattr(layer, "indices", None)) is not None:
            for name in values[0].origins:
                self._bounds[name] = min(size - 1, self._bounds.get(name, size))

    def _hint(self, small: Sequence[Shape], large: Sequence[Shape]) -> str:
        if list(small) == [(shape[0] - 1, *shape[1:]) for shape in large] or not self._axes:
            return ""
        sizes = ", ".join(f"{axis.name} is {axis.least} to {axis.most}" for axis in self._axes)
        return f" ({sizes}: axes has their limits)"

    def _bounded(self, spec: TensorSpec) -> TensorSpec:
        if spec.name not in self._bounds:
            return spec
        bounds = (0, self._bounds[spec.name])
        return TensorSpec(name=spec.name, shape=spec.shape, dtype=spec.dtype, finite=spec.finite, bounds=bounds)

    def _output(self, name: str, entry: OutputEntry, last: Value, count: int) -> TensorSpec:
        place = f"outputs.{name}"
        if entry.source is None and name not in self._values and count == 1:
            value = last
        else:
            value = self._find(entry.source or name, place)
        self._sources[name] = value.index
        shape = tuple(self._dim(*sizes) for sizes in zip(value.small, value.large, strict=True))
        if entry.shape and not _fits(entry.shape, shape):
            raise ModelLoadError(f"{place}: shape is {list(entry.shape)}, but the layers give {list(shape)}")
        dtype = "int64" if value.integer else "float32"
        if entry.dtype not in (None, dtype):
            raise ModelLoadError(f"{place}: dtype is {entry.dtype}, but the layers give {dtype}")
        return TensorSpec(name=name, shape=entry.shape or shape, dtype=dtype)

    def _dim(self, small: int, large: int) -> Dim:
        if small == large:
            return small
        if (small, large) == (2, 3) and not any((axis.least, _larger(axis, 0)) == (2, 3) for axis in self._axes):
            return BATCH
        names = [axis.name for at, axis in enumerate(self._axes) if (axis.least, _larger(axis, at)) == (small, large)]
        return names[0] if names else None

    # Running it.

    def prepare(self, tensors: Mapping[str, Array]) -> list[Weights]:
        """The weights of each layer, on the device. `fit_tensors` has checked them."""
        found = []
        for node in self._nodes:
            prefix = f"{node.name}."
            own = [name for name in self.tensors if name.startswith(prefix) and "." not in name[len(prefix) :]]
            arrays = {name[len(prefix) :]: mx.array(tensors[name]) for name in own} if node.name else {}
            found.append(node.layer.prepare(arrays))
        mx.eval(found)
        return found

    def run(self, weights: Sequence[Weights], inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs for inputs that fit the signature, in passes of bounded size."""
        first = self.signature.inputs[0]
        rows = len(inputs[first.name])
        shapes = tuple(inputs[spec.name].shape[1:] for spec in self.signature.inputs)
        try:
            elements = self._row_elements(shapes)
        except ShapeError as error:
            raise InvalidRequestError(f"the network can't take inputs of this shape: {error}", param="inputs") from None
        if elements > ROW_ELEMENTS:
            message = (
                f"a row of this shape makes {elements:,} numbers on its way, and at most {ROW_ELEMENTS:,} are computed"
            )
            raise InvalidRequestError(message, param="inputs")
        step = max(1, GROUP_ELEMENTS // max(1, elements))
        if rows <= step:
            return self._run(weights, inputs)
        parts = [
            self._run(weights, {name: array[at : at + step] for name, array in inputs.items()})
            for at in range(0, rows, step)
        ]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _run(self, weights: Sequence[Weights], inputs: Mapping[str, Array]) -> dict[str, Array]:
        values: list[Any] = [None] * self._count
        for place, spec in enumerate(self.signature.inputs):
            given = mx.array(inputs[spec.name])
            values[place] = given.astype(mx.float32 if DTYPES[spec.dtype].kind == "f" else mx.int64)
        for node, own in zip(self._nodes, weights, strict=True):
            found = node.layer.results(own, *(values[index] for index in node.inputs))
            for index, value in zip(node.outputs, found, strict=True):
                values[index] = value
        outputs = {name: values[index] for name, index in self._sources.items()}
        mx.eval(outputs)
        return {name: to_numpy(value) for name, value in outputs.items()}

    def _elements_of_row(self, shapes: tuple[Shape, ...]) -> int:
        """Counts the elements of all results of one row; raises ShapeError where a layer can't take it."""
        values: list[Shape] = [()] * self._count
        for place, shape in enumerate(shapes):
            values[place] = (1, *shape)
        total = 0
        for node in self._nodes:
            for index, shape in zip(node.outputs, node.layer.shapes(*(values[i] for i in node.inputs)), strict=True):
                values[index] = shape
                total += math.prod(shape)
        return total


def fit_tensors(found: Mapping[str, Array], wanted: Mapping[str, Shape]) -> dict[str, Array]:
    """The tensors that are wanted, as float32; TensorError where one is missing, too many, or of another shape."""
    unused = [name for name in found if name not in wanted and not name.endswith(IGNORED)]
    missing = [name for name in wanted if name not in found]
    if missing:
        near = nearest(missing[0], unused) if unused else ""
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise TensorError(f"tensor {missing[0]!r}{more} is missing{near}")
    if unused:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        raise TensorError(
            f"tensor {unused[0]!r}{more} belongs to no layer{nearest(unused[0], wanted) if wanted else ''}"
        )
    fitted = {}
    for name, shape in wanted.items():
        array = found[name]
        if array.shape != shape:
            raise TensorError(f"tensor {name!r} has shape {list(array.shape)}, and its layer needs {list(shape)}")
        if array.dtype.kind != "f":
            raise TensorError(f"tensor {name!r} has dtype {array.dtype}, and weights are floats")
        fitted[name] = array.astype("float32", copy=False)
        if not math.isfinite(float(abs(fitted[name]).max(initial=0.0))):
            raise TensorError(f"tensor {name!r} holds NaN or infinity")
    return fitted


def _larger(axis: Axis, place: int) -> int:
    return min(axis.most, axis.least + STEPS[place % len(STEPS)])


def _sized(shape: Sequence[Dim], sizes: Mapping[str, int]) -> Shape:
    return tuple(sizes[dim] if isinstance(dim, str) else int(dim or 0) for dim in shape)


def _fits(declared: Sequence[Dim], found: Sequence[Dim]) -> bool:
    """Sizes must be equal; where a size is not fixed, it may have any name."""
    pairs = zip(declared, found, strict=False)
    return len(declared) == len(found) and all(
        ours == theirs if isinstance(theirs, int) else not isinstance(ours, int) for ours, theirs in pairs
    )
