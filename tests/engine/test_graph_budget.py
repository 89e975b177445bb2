"""How many operations a decode step is made of where it is traced, on Metal: a budget that changes must not exceed."""

from collections import Counter
from functools import cache

import pytest

from mlx_parallm.lora.adapter import Adapter
from tests.support.graph_nodes import DecodeGraph
from tests.unit.test_adapters import random_adapter

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LAYERS = 8
# Of a layer, with MLX's fused operations written out as the CPU has them; the step's own beside them.
WITHOUT = {"qwen3": 83, "llama": 77}
OWN = 12


@cache
def graph(model_type: str) -> DecodeGraph:
    return DecodeGraph(model_type, LAYERS)


def adapters(model_type: str, names: tuple[str, ...]) -> list[Adapter]:
    return [random_adapter(graph(model_type).layout, names, seed) for seed in range(4)]


@pytest.mark.parametrize("model_type", WITHOUT)
@pytest.mark.parametrize("rows", [1, 8, 32])
def test_adapters_on_all_layers_add_few_operations(model_type: str, rows: int) -> None:
    without = graph(model_type).nodes(rows)
    total = sum(without.values())
    assert total <= LAYERS * WITHOUT[model_type] + OWN, without.most_common()
    for names in (ALL, ("q_proj", "v_proj")):
        for count in (1, 4):
            found = graph(model_type).nodes(rows, adapters(model_type, names)[:count])
            assert sum(found.values()) <= 1.35 * total, (found - without).most_common()
            assert gathers(found) == gathers(without), "a layer looks something up"


def gathers(nodes: Counter[str]) -> int:
    return sum(count for kind, count in nodes.items() if "Gather" in kind)
