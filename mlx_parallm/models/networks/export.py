"""Writes a network's folder from a state_dict and a layer list: `parallm export`.

A layer list is a network.json, in JSON or YAML, whose layers may say by `from` what they are called in the state_dict;
`tensors` says it of weights that belong to no layer (a free log_std).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mlx_parallm.config import nearest
from mlx_parallm.errors import ModelLoadError
from mlx_parallm.models.kinds.network import NetworkPredictor
from mlx_parallm.models.kinds.network import load as load_network
from mlx_parallm.models.kinds.policy import load as load_policy
from mlx_parallm.models.kinds.policy import read_policy
from mlx_parallm.models.networks.definition import FILE, read_definition
from mlx_parallm.models.networks.graph import IGNORED, Graph, fit_tensors
from mlx_parallm.models.networks.layer import Shape
from mlx_parallm.models.networks.network_files import WEIGHTS
from mlx_parallm.models.networks.torch_file import read_torch, state_dict
from mlx_parallm.tensors import Array, TensorError, dump_safetensors, parse_safetensors


@dataclass(frozen=True, slots=True)
class LayerList:
    """network.json, as it will be written, and where its tensors are in the state_dict."""

    document: dict[str, Any]
    sources: Mapping[str, str]  # by the layer's name
    tensors: Mapping[str, str]  # by the tensor's name


def read_state(path: Path, key: str | None, prefix: str) -> dict[str, Array]:
    """Tensors of a .safetensors file, or of one that torch.save wrote; `prefix` is taken off their names."""
    if path.suffix == ".safetensors":
        try:
            found = parse_safetensors(path.read_bytes())
        except OSError as error:
            raise ModelLoadError(f"{path} can't be read: {error.strerror or error}") from error
        except TensorError as error:
            raise ModelLoadError(f"{path}: {error}") from error
    else:
        found = state_dict(read_torch(path), key)
    return {name.removeprefix(prefix): array for name, array in found.items()}


def read_layers(path: Path) -> LayerList:
    try:
        document = yaml.safe_load(path.read_text())  # JSON is YAML too
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ModelLoadError(f"{path} can't be read: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("layers"), list):
        raise ModelLoadError(f"{path} must have inputs, layers and outputs; docs/NETWORKS.md shows one")
    sources = {}
    layers = []
    for place, layer in enumerate(document["layers"]):
        entry = dict(layer) if isinstance(layer, dict) else layer
        if isinstance(entry, dict) and "from" in entry:
            source = entry.pop("from")
            if not isinstance(source, str | int) or not entry.get("name"):
                raise ModelLoadError(
                    f"{path}: layers.{place}: from is a name in the state_dict, of a layer with a name"
                )
            sources[str(entry["name"])] = str(source)
        layers.append(entry)
    tensors = document.get("tensors", {})
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors.values()):
        raise ModelLoadError(f"{path}: tensors must be an object of names here and names in the state_dict")
    kept = {name: value for name, value in document.items() if name != "tensors"}
    return LayerList(kept | {"layers": layers}, sources, tensors)


def export(state: Mapping[str, Array], layers: LayerList, folder: Path, allow_unused: bool) -> NetworkPredictor:
    """Writes network.json and model.safetensors, loads them and computes once; ModelLoadError."""
    definition = read_definition(layers.document)
    graph = Graph(definition)
    free: dict[str, Shape] = {}
    if definition.policy is not None:
        free = read_policy(dict(definition.policy), graph)[2].tensors
    names = source_names(graph.tensors, free, layers)
    unused = [name for name in state if name not in names.values() and not name.endswith(IGNORED)]
    missing = [name for name in names.values() if name not in state]
    if missing:
        raise ModelLoadError(f"the state_dict has no {missing[0]!r}{nearest(missing[0], unused or state)}")
    if unused and not allow_unused:
        raise ModelLoadError(
            f"no layer uses {', '.join(unused[:5])}{' …' if len(unused) > 5 else ''} of the state_dict: add layers "
            "for them, or leave them out with --allow-unused"
        )
    found = {name: state[source] for name, source in names.items()}
    for name, shape in free.items():
        if found[name].shape == (1, *shape):  # as many trainers keep a log_std
            found[name] = found[name][0]
    try:
        tensors = fit_tensors(found, graph.tensors | free)
    except TensorError as error:
        raise ModelLoadError(str(error)) from error
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WEIGHTS).write_bytes(dump_safetensors(tensors))
    (folder / FILE).write_text(json.dumps(layers.document, indent=2) + "\n")
    return load_network(folder) if definition.policy is None else load_policy(folder)


def source_names(tensors: Mapping[str, Shape], free: Mapping[str, Shape], layers: LayerList) -> dict[str, str]:
    """Returns what each tensor is called in the state_dict."""
    found = {}
    for name in tensors:
        layer, _, leaf = name.rpartition(".")
        found[name] = layers.tensors.get(name, f"{layers.sources.get(layer, layer)}.{leaf}")
    for name in layers.tensors:
        if name not in tensors and name not in free:
            raise ModelLoadError(f"tensors: the network has no tensor {name!r}{nearest(name, [*tensors, *free])}")
    return found | {name: layers.tensors.get(name, name) for name in free}
