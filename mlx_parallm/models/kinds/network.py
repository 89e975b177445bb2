"""Networks: MLPs, small CNNs, LSTMs and GRUs of a folder with `network.json` and safetensors.

An input is a block of rows: arrays by name, with the batch first. Blocks of several clients whose other axes agree are
computed together.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlx_parallm.errors import ModelLoadError
from mlx_parallm.models.kinds import Predictor
from mlx_parallm.models.networks.definition import read_definition, read_file
from mlx_parallm.models.networks.graph import Graph, fit_tensors
from mlx_parallm.models.networks.network_files import read_weights
from mlx_parallm.signature import NetworkInfo
from mlx_parallm.tensors import Array, TensorError

Block = Mapping[str, Array]


def recognises(config: dict[str, Any]) -> bool:
    return isinstance(config.get("network"), dict) and "policy" not in config["network"]


def load(folder: Path) -> "NetworkPredictor":
    definition = read_definition(read_file(folder))
    graph = Graph(definition)
    try:
        tensors = fit_tensors(read_weights(folder), graph.tensors)
    except TensorError as error:
        raise ModelLoadError(f"{folder}: {error}") from error
    size = sum(array.nbytes for array in tensors.values())
    info = NetworkInfo(
        kind="network",
        source=str(folder),
        weight_bytes=size,
        signature=graph.signature.describe(),
        tensors=graph.signature,
    )
    found = NetworkPredictor(info, graph, tensors)
    found.rehearse()
    return found


class NetworkPredictor(Predictor):
    def __init__(self, info: NetworkInfo, graph: Graph, tensors: Mapping[str, Array]) -> None:
        self.info: NetworkInfo = info
        self._graph = graph
        self._weights = graph.prepare(tensors)
        self._names = [spec.name for spec in graph.signature.inputs]
        self._dynamic = [
            [axis for axis, dim in enumerate(spec.shape) if isinstance(dim, str)] for spec in graph.signature.inputs
        ]

    def cost(self, item: Any) -> int:
        """Rows, times the sizes of dynamic axes."""
        return max(
            math.prod(item[name].shape[axis] for axis in axes)
            for name, axes in zip(self._names, self._dynamic, strict=True)
        )

    def predict(self, batch: Sequence[Any]) -> list[Any]:
        return self.forward(batch)

    def forward(self, blocks: Sequence[Block]) -> list[dict[str, Array]]:
        """The outputs of each block."""
        results: list[dict[str, Array]] = [{}] * len(blocks)
        for places, outputs in self.passes(blocks):
            at = 0
            for place in places:
                end = at + len(blocks[place][self._names[0]])
                results[place] = {name: array[at:end] for name, array in outputs.items()}
                at = end
        return results

    def passes(self, blocks: Sequence[Block]) -> Iterator[tuple[list[int], dict[str, Array]]]:
        """Blocks of one shape, but for their rows, go through the network together: which ones, and all their rows."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for place, block in enumerate(blocks):
            groups.setdefault(tuple([block[name].shape[1:] for name in self._names]), []).append(place)
        for places in groups.values():
            joined = blocks[places[0]]
            if len(places) > 1:
                joined = {name: np.concatenate([blocks[place][name] for place in places]) for name in self._names}
            yield places, self._graph.run(self._weights, joined)

    def rehearse(self) -> None:
        """Computes one row of zeros, of the smallest size: what the layers can't do shows at the start."""
        sizes = {axis.name: axis.least for axis in self.info.tensors.axes}
        zeros = {
            spec.name: np.zeros(
                (1, *(sizes[dim] if isinstance(dim, str) else int(dim or 0) for dim in spec.shape[1:])), spec.dtype
            )
            for spec in self.info.tensors.inputs
        }
        self.forward([zeros])
