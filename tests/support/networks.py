"""Folders of small networks and policies of random weights, for tests and benchmarks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Definition = dict[str, Any]


def write_network(folder: Path, definition: Definition, tensors: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "network.json").write_text(json.dumps(definition, indent=2))
    save_file(tensors, folder / "model.safetensors")
    return folder


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Any]:
    chance = np.random.default_rng(seed)
    return {name: 0.5 * chance.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def sequence_network(folder: Path) -> Path:
    """Token ids of any length → an LSTM's last step → three classes."""
    definition = {
        "inputs": {"tokens": {"shape": ["batch", "time"], "dtype": "int64"}},
        "axes": {"time": {"max": 32}},
        "layers": [
            {"type": "embedding", "name": "embed", "num_embeddings": 10, "embedding_dim": 4},
            {"type": "lstm", "name": "core", "hidden_size": 5},
            {"type": "select", "axis": 1, "index": -1},
            {"type": "linear", "name": "head", "out_features": 3},
        ],
        "outputs": {"scores": {"shape": ["batch", 3]}},
    }
    shapes = {"embed.weight": (10, 4), "core.weight_ih_l0": (20, 4), "core.weight_hh_l0": (20, 5)}
    shapes |= {"core.bias_ih_l0": (20,), "core.bias_hh_l0": (20,), "head.weight": (3, 5), "head.bias": (3,)}
    return write_network(folder, definition, random_tensors(shapes))


def mlp_policy(
    folder: Path, head: Definition | None = None, *, observed: int = 4, actions: int = 2, width: int = 64, seed: int = 0
) -> Path:
    """Two hidden layers, a value, and observations that are normalised first."""
    layers = [{"type": "normalize", "name": "norm", "clip": 10.0}]
    for name in ("one", "two"):
        layers += [{"type": "linear", "name": name, "out_features": width}, {"type": "tanh"}]
    layers[-1]["name"] = "features"
    layers += [
        {"type": "linear", "name": "head", "input": "features", "out_features": actions},
        {"type": "linear", "name": "critic", "input": "features", "out_features": 1},
    ]
    definition = {
        "inputs": {"observation": {"shape": ["batch", observed]}},
        "layers": layers,
        "outputs": {"head": {}, "value": {"from": "critic"}},
        "policy": {"value": "value"} | (head or {"distribution": "categorical", "logits": "head"}),
    }
    shapes: dict[str, tuple[int, ...]] = {"one.weight": (width, observed), "one.bias": (width,)}
    shapes |= {"two.weight": (width, width), "two.bias": (width,), "head.weight": (actions, width)}
    shapes |= {"head.bias": (actions,), "critic.weight": (1, width), "critic.bias": (1,)}
    if "log_std" in (head or {}):
        shapes["log_std"] = (actions,)
    tensors = random_tensors(shapes, seed) | {
        "norm.mean": np.linspace(-1, 1, observed, dtype=np.float32),
        "norm.var": np.linspace(0.5, 2, observed, dtype=np.float32),
    }
    return write_network(folder, definition, tensors)


def recurrent_policy(folder: Path, seed: int = 0) -> Path:
    """A GRU over two numbers, with its state in and out."""
    definition = {
        "inputs": {"observation": {"shape": ["batch", 2]}, "h": {"shape": ["batch", 1, 8]}},
        "layers": [
            {"type": "gru", "name": "core", "hidden_size": 8, "inputs": ["observation", "h"]},
            {"type": "linear", "name": "logits", "out_features": 3},
        ],
        "outputs": {"logits": {}, "new_h": {"from": "core.h"}},
        "policy": {"distribution": "categorical", "logits": "logits", "state": {"h": "new_h"}},
    }
    shapes = {"core.weight_ih_l0": (24, 2), "core.weight_hh_l0": (24, 8), "core.bias_ih_l0": (24,)}
    shapes |= {"core.bias_hh_l0": (24,), "logits.weight": (3, 8), "logits.bias": (3,)}
    return write_network(folder, definition, random_tensors(shapes, seed))
