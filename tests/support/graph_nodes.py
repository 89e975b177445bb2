"""Counts the operations of a decode step: on a GPU each is a kernel to start, or a view that the host makes."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
from mlx_lm.utils import _get_classes

from mlx_parallm.devices.device import DEVICES
from mlx_parallm.engine.compute.batching import slot_cache
from mlx_parallm.engine.compute.patch import patch_layers
from mlx_parallm.lora.adapter import Adapter
from mlx_parallm.lora.layout import Layout
from mlx_parallm.lora.registry import Registry
from mlx_parallm.lora.row_adapters import RowAdapters
from mlx_parallm.models.forward import Forward
from tests.tiny import SHARED


def nodes_of(*outputs: mx.array) -> Counter[str]:
    """Counts the operations behind arrays that are not computed yet, by kind."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "graph.dot"
        mx.export_to_dot(str(file), *outputs)
        return Counter(re.findall(r'\[label ?="(\w+)"', file.read_text()))


class DecodeGraph:
    """The decode step of a random model, as Metal would have it traced."""

    def __init__(self, model_type: str, layers: int) -> None:
        config = SHARED | {"model_type": model_type, "vocab_size": 300, "num_hidden_layers": layers}
        model_class, args_class = _get_classes(config)
        self._layers = layers
        self._profile = DEVICES["metal"].profile
        module = model_class(args_class.from_dict(config))
        self.layout: Layout = patch_layers(module, self._profile)
        self._forward = Forward(module, self.layout.active)

    def nodes(self, rows: int, adapters: Sequence[Adapter] = ()) -> Counter[str]:
        """Counts the operations of a step of so many rows, which have these adapters in turn."""
        cache = slot_cache(self._layers, rows, 1 << 40, self._profile)
        staged = cache.stage(1, 8)
        mx.eval(self._forward.at(mx.ones((1, 8), mx.int32), staged, mx.array([7])))
        cache.expect(rows)
        cache.join(staged, [(0, 8)] * rows)
        row_adapters = self._row_adapters(rows, adapters) if adapters else None
        mx.eval(cache._state())  # what joined is written
        logits = cache.decode(self._forward, mx.zeros((rows,), mx.int32), [8] * rows, row_adapters)
        return nodes_of(logits, *cache._state())

    def _row_adapters(self, rows: int, adapters: Sequence[Adapter]) -> RowAdapters:
        registry = Registry(self.layout, len(adapters))
        versions = [registry.publish(f"{number}", adapter, "") for number, adapter in enumerate(adapters)]
        row_adapters = registry.row_adapters([versions[row % len(versions)] for row in range(rows)])
        mx.eval(row_adapters.arrays())  # type: ignore[attr-defined]
        return row_adapters
