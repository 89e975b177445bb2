"""network.json, read and checked: inputs, axes and layers with their inputs. `graph` makes a network of it."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from mlx_parallm.config import nearest
from mlx_parallm.errors import ModelLoadError
from mlx_parallm.models.networks import basic, recurrent
from mlx_parallm.models.networks.activations import ACTIVATIONS
from mlx_parallm.models.networks.convolution import WINDOWS
from mlx_parallm.models.networks.layer import Layer
from mlx_parallm.models.networks.layer_options import MAX_SIZE, Count, Flag, Options, T, read_options
from mlx_parallm.signature import BATCH, MAX_AXIS, Axis, Dim, TensorSpec
from mlx_parallm.tensors import DTYPES

FILE = "network.json"
VERSION = 1
MAX_FILE_BYTES = 1 << 22
MAX_LAYERS = 4096
SHAPE = (
    f'a list that begins with "{BATCH}" and has at most 8 axes, each other one a size from 1 to {MAX_SIZE} '
    "or the name of a dynamic axis"
)
NAME = re.compile(r"[A-Za-z0-9_][\w./-]{0,199}")
LAYERS: dict[str, type[Layer]] = {
    **WINDOWS,
    **ACTIVATIONS,
    "linear": basic.LinearLayer,
    "lstm": recurrent.LSTM,
    "gru": recurrent.GRU,
    "embedding": basic.EmbeddingLookup,
    "one_hot": basic.OneHot,
    "layer_norm": basic.LayerNorm,
    "batch_norm": basic.BatchNorm,
    "normalize": basic.Normalize,
    "scale": basic.Scale,
    "dropout": basic.Dropout,
    "identity": basic.Identity,
    "flatten": basic.Flatten,
    "reshape": basic.Reshape,
    "transpose": basic.Transpose,
    "select": basic.Select,
    "mean": basic.Mean,
    "concat": basic.Concat,
    "add": basic.Add,
    "multiply": basic.Multiply,
}


@dataclass(frozen=True, slots=True)
class LayerEntry:
    """One entry of `layers`."""

    layer: Layer
    name: str  # empty: nobody can refer to it
    inputs: tuple[str, ...]  # names of values; empty: what the layer before gives
    place: str  # for errors


def _dtype(value: str) -> str:
    if value not in DTYPES:
        raise ModelLoadError(f"dtype {value!r:.60} is unknown{nearest(value, DTYPES)}")
    return value


def _shape(value: tuple[Dim, ...]) -> tuple[Dim, ...]:
    if value[:1] != (BATCH,) or BATCH in value[1:]:
        raise ValueError
    for dim in value:
        if isinstance(dim, str):
            check_name(dim, f"axis {dim!r:.60}")
    return value


Dtype = Annotated[str, AfterValidator(_dtype), Field(description="the name of a dtype")]
DeclaredShape = Annotated[
    tuple[Count | str | None, ...],
    AfterValidator(_shape),
    Field(strict=False, max_length=8, description=SHAPE),
]
Section = Annotated[
    dict[str, Any], Field(min_length=1, description="an object with at least one tensor in it, by name")
]
Layers = Annotated[
    list[Any], Field(min_length=1, max_length=MAX_LAYERS, description=f"a list of 1 to {MAX_LAYERS} layers")
]


class InputEntry(Options):
    shape: DeclaredShape
    dtype: Dtype = "float32"
    finite: Flag = True

    def model_post_init(self, context: Any) -> None:
        if None in self.shape:
            raise ModelLoadError("an axis of an input has a size or a name, not null")


class OutputEntry(Options):
    # A value; None: that of the output's name, or what the last layer gives.
    source: str | None = Field(None, alias="from", description="the name of a layer or an input")
    shape: DeclaredShape = ()  # what the layers give
    dtype: Dtype | None = None


class AxisLimits(Options):
    min: Count = 1
    max: Count = MAX_AXIS

    def model_post_init(self, context: Any) -> None:
        if self.min > self.max:
            raise ModelLoadError(f"min {self.min} is larger than max {self.max}")


class NetworkDocument(Options):
    """Represents network.json before its entries are read."""

    version: Any = VERSION
    description: Any = None
    inputs: Section
    outputs: Section
    axes: Annotated[dict[str, Any], Field(description="an object of axes and their limits")] = {}
    layers: Layers
    policy: Annotated[dict[str, Any] | None, Field(description="an object")] = None


@dataclass(frozen=True, slots=True)
class Definition:
    inputs: tuple[TensorSpec, ...]
    outputs: Mapping[str, OutputEntry]
    axes: tuple[Axis, ...]
    layers: tuple[LayerEntry, ...]
    policy: Mapping[str, Any] | None


def read_file(folder: Path) -> dict[str, Any]:
    """The network.json of a folder, as it is; ModelLoadError."""
    path = folder / FILE
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ModelLoadError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
        document = json.loads(data)
    except OSError as error:
        raise ModelLoadError(f"{path} can't be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ModelLoadError(f"{path} is not a JSON object")
    return document


def read_definition(document: Mapping[str, Any]) -> Definition:
    """ModelLoadError says what is wrong and where."""
    version = document.get("version", VERSION)
    if version != VERSION:
        raise ModelLoadError(f"{FILE} is of version {version!r}; this release reads version {VERSION}")
    given = read_options(NetworkDocument, document, FILE)
    entries = _section(InputEntry, "inputs", given.inputs)
    inputs = tuple(TensorSpec(name=name, **dict(entry)) for name, entry in entries.items())
    axes = _axes(inputs, given.axes)
    layers = tuple(_layer(place, entry) for place, entry in enumerate(given.layers))
    return Definition(inputs, _section(OutputEntry, "outputs", given.outputs), axes, layers, given.policy)


def _section(kind: type[T], section: str, entries: Mapping[str, Any]) -> dict[str, T]:
    for name in entries:
        check_name(name, f"{section}: {name!r:.60}")
    return {name: read_options(kind, entry, f"{section}.{name}") for name, entry in entries.items()}


def check_name(name: str, what: str) -> None:
    if name == "__metadata__":
        raise ModelLoadError(f"{what} is a name that safetensors files have for something else")
    if not NAME.fullmatch(name):
        raise ModelLoadError(f"{what} is no name: letters, digits, and _ . - / inside, at most 200 characters")


def _axes(inputs: Sequence[TensorSpec], limits: Mapping[str, Any]) -> tuple[Axis, ...]:
    """All dynamic axes of inputs but the batch, with their limits."""
    names = dict.fromkeys(dim for spec in inputs for dim in spec.shape if isinstance(dim, str) and dim != BATCH)
    for name in limits:
        if name not in names:
            raise ModelLoadError(f"axes has an unknown key {name!r}{nearest(name, names)}")
    found = {name: read_options(AxisLimits, limits.get(name, {}), f"axes.{name}") for name in names}
    return tuple(Axis(name, limit.min, limit.max) for name, limit in found.items())


def _layer(number: int, entry: Any) -> LayerEntry:
    place = f"layers.{number}"
    if not isinstance(entry, dict):
        raise ModelLoadError(f"{place} must be an object, not {entry!r:.60}")
    kind = entry.get("type")
    name = entry.get("name", "")
    if not isinstance(kind, str) or kind not in LAYERS:
        raise ModelLoadError(f"{place} is of an unknown type {kind!r:.60}{nearest(kind, LAYERS)}")
    if not isinstance(name, str):
        raise ModelLoadError(f"{place}: name must be a string, not {name!r:.60}")
    place = f"{place} ({kind} {name!r})" if name else f"{place} ({kind})"
    if name:
        check_name(name, f"{place}: {name!r:.60}")
    options = {key: value for key, value in entry.items() if key not in ("type", "name", "input", "inputs")}
    if kind == "reshape" and "shape" in options:
        options["sizes"] = options.pop("shape")
    layer = read_options(LAYERS[kind], options, place)
    inputs = _sources(entry, place)
    wanted = layer.arity or (2,)
    if len(inputs or [""]) not in wanted and (layer.arity or len(inputs) < 2):
        counts = " or ".join(map(str, layer.arity)) if layer.arity else "two or more"
        raise ModelLoadError(f"{place} takes {counts} inputs, not {len(inputs) or 1}: name them in inputs")
    return LayerEntry(layer, name, inputs, place)


def _sources(entry: Mapping[str, Any], place: str) -> tuple[str, ...]:
    if "input" in entry and "inputs" in entry:
        raise ModelLoadError(f"{place} has both input and inputs: give one of them")
    value = [entry["input"]] if "input" in entry else entry.get("inputs", [])
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ModelLoadError(f"{place}: inputs must be names of layers or inputs, not {value!r:.60}")
    if "inputs" in entry and not value:
        raise ModelLoadError(f"{place}: inputs is empty")
    return tuple(value)
