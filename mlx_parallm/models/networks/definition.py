"""network.json, read and checked: inputs, axes and layers with their inputs. `graph` makes a network of it."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_parallm.config import nearest
from mlx_parallm.errors import ModelLoadError
from mlx_parallm.models.networks import basic, convolution, recurrent
from mlx_parallm.models.networks.layer import Layer
from mlx_parallm.models.networks.layer_options import MAX_SIZE, read_options
from mlx_parallm.signature import BATCH, MAX_AXIS, Axis, TensorSpec
from mlx_parallm.tensors import DTYPES

FILE = "network.json"
VERSION = 1
MAX_FILE_BYTES = 1 << 22
MAX_LAYERS = 4096
KEYS = ("version", "description", "inputs", "outputs", "axes", "layers", "policy")
NAME = re.compile(r"[A-Za-z0-9_][\w./-]{0,199}")
LAYERS: dict[str, type[Layer]] = {
    "linear": basic.LinearLayer,
    "conv1d": convolution.Conv1d,
    "conv2d": convolution.Conv2d,
    "max_pool1d": convolution.MaxPool1d,
    "max_pool2d": convolution.MaxPool2d,
    "avg_pool1d": convolution.AvgPool1d,
    "avg_pool2d": convolution.AvgPool2d,
    "lstm": recurrent.LSTM,
    "gru": recurrent.GRU,
    "embedding": basic.EmbeddingLookup,
    "one_hot": basic.OneHot,
    "layer_norm": basic.LayerNorm,
    "batch_norm": basic.BatchNorm,
    "normalize": basic.Normalize,
    "relu": basic.Relu,
    "tanh": basic.Tanh,
    "sigmoid": basic.Sigmoid,
    "silu": basic.Silu,
    "gelu": basic.Gelu,
    "elu": basic.Elu,
    "leaky_relu": basic.LeakyRelu,
    "softplus": basic.Softplus,
    "softmax": basic.Softmax,
    "log_softmax": basic.LogSoftmax,
    "clip": basic.Clip,
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


@dataclass(frozen=True, slots=True)
class OutputEntry:
    name: str
    source: str | None  # the name of a value; None: the value of its own name, or what the last layer gives
    shape: tuple[int | str | None, ...] | None
    dtype: str | None


@dataclass(frozen=True, slots=True)
class Definition:
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[OutputEntry, ...]
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
    for key in document:
        if key not in KEYS:
            raise ModelLoadError(f"{FILE} has an unknown key {key!r}{nearest(key, KEYS)}")
    if document.get("version", VERSION) != VERSION:
        raise ModelLoadError(f"{FILE} is of version {document['version']!r}; this release reads version {VERSION}")
    inputs = tuple(_input(name, entry) for name, entry in _section(document, "inputs").items())
    axes = _axes(inputs, document.get("axes", {}))
    layers = document.get("layers")
    if not isinstance(layers, list) or not 0 < len(layers) <= MAX_LAYERS:
        raise ModelLoadError(f"layers must be a list of 1 to {MAX_LAYERS} layers")
    entries = tuple(_layer(place, entry) for place, entry in enumerate(layers))
    outputs = tuple(_output(name, entry) for name, entry in _section(document, "outputs").items())
    policy = document.get("policy")
    if policy is not None and not isinstance(policy, dict):
        raise ModelLoadError(f"policy must be an object, not {policy!r:.60}")
    return Definition(inputs, outputs, axes, entries, policy)


def _section(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = document.get(name)
    if not isinstance(found, dict) or not found:
        raise ModelLoadError(f"{name} must be an object with at least one tensor in it, by name")
    for key in found:
        check_name(key, f"{name}: {key!r:.60}")
    return found


def check_name(name: str, what: str) -> None:
    if name == "__metadata__":
        raise ModelLoadError(f"{what} is a name that safetensors files have for something else")
    if not NAME.fullmatch(name):
        raise ModelLoadError(f"{what} is no name: letters, digits, and _ . - / inside, at most 200 characters")


def _checked(entry: Any, place: str, known: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(entry, dict):
        raise ModelLoadError(f"{place} must be an object, not {entry!r:.60}")
    for key in entry:
        if key not in known:
            raise ModelLoadError(f"{place} has an unknown key {key!r}{nearest(key, known)}")
    return entry


def _input(name: str, entry: Any) -> TensorSpec:
    place = f"inputs.{name}"
    entry = _checked(entry, place, ("shape", "dtype", "finite"))
    shape = _shape(entry.get("shape"), place)
    if any(dim is None for dim in shape):
        raise ModelLoadError(f"{place}: an axis of an input has a size or a name, not null")
    finite = entry.get("finite", True)
    if not isinstance(finite, bool):
        raise ModelLoadError(f"{place}: finite must be true or false, not {finite!r:.60}")
    return TensorSpec(name=name, shape=shape, dtype=_dtype(entry.get("dtype", "float32"), place), finite=finite)


def _output(name: str, entry: Any) -> OutputEntry:
    place = f"outputs.{name}"
    entry = _checked(entry, place, ("from", "shape", "dtype"))
    source = entry.get("from")
    if source is not None and not isinstance(source, str):
        raise ModelLoadError(f"{place}: from must be the name of a layer or an input, not {source!r:.60}")
    shape = _shape(entry["shape"], place) if "shape" in entry else None
    return OutputEntry(name, source, shape, _dtype(entry["dtype"], place) if "dtype" in entry else None)


def _shape(value: Any, place: str) -> tuple[int | str | None, ...]:
    if not isinstance(value, list) or not value or value[0] != BATCH:
        raise ModelLoadError(f'{place}: shape must be a list that begins with "{BATCH}", not {value!r:.60}')
    if len(value) > 8:
        raise ModelLoadError(f"{place}: shape has {len(value)} axes, and at most 8 are supported")
    for dim in value[1:]:
        if isinstance(dim, str) and dim != BATCH:
            check_name(dim, f"{place}: axis {dim!r:.60}")
        elif dim is not None and (type(dim) is not int or not 1 <= dim <= MAX_SIZE):
            raise ModelLoadError(
                f"{place}: an axis is a size from 1 to {MAX_SIZE} or the name of a dynamic axis, not {dim!r:.60}"
            )
    return tuple(value)


def _dtype(value: Any, place: str) -> str:
    if not isinstance(value, str) or value not in DTYPES:
        raise ModelLoadError(f"{place}: dtype {value!r:.60} is unknown{nearest(value, DTYPES)}")
    return value


def _axes(inputs: Sequence[TensorSpec], limits: Any) -> tuple[Axis, ...]:
    """All dynamic axes of inputs but the batch, with their limits."""
    names = dict.fromkeys(dim for spec in inputs for dim in spec.shape if isinstance(dim, str) and dim != BATCH)
    limits = _checked(limits, "axes", list(names))
    found = []
    for name in names:
        place = f"axes.{name}"
        entry = _checked(limits.get(name, {}), place, ("min", "max"))
        least, most = entry.get("min", 1), entry.get("max", MAX_AXIS)
        for bound in (least, most):
            if type(bound) is not int or not 1 <= bound <= MAX_SIZE:
                raise ModelLoadError(f"{place}: min and max are whole numbers from 1 to {MAX_SIZE}, not {bound!r:.60}")
        if least > most:
            raise ModelLoadError(f"{place}: min {least} is larger than max {most}")
        found.append(Axis(name, least, most))
    return tuple(found)


def _layer(number: int, entry: Any) -> LayerEntry:
    place = f"layers.{number}"
    if not isinstance(entry, dict):
        raise ModelLoadError(f"{place} must be an object, not {entry!r:.60}")
    kind, name = entry.get("type"), entry.get("name", "")
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
    try:
        layer = read_options(LAYERS[kind], options, place)
    except ModelLoadError as error:
        raise error if error.message.startswith(place) else ModelLoadError(f"{place}: {error.message}") from None
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
