"""How many operations a decode step is made of where it is traced, on Metal: a budget that changes must not exceed."""

from collections import Counter
from functools import cache

import mlx.core as mx
import pytest

from mlx_parallm.engine.compute.batching import sampling_probes
from mlx_parallm.engine.compute.sampling import History, Sampler
from mlx_parallm.engine.rows import Row
from mlx_parallm.lora.adapter import Adapter
from mlx_parallm.sampling_params import SamplingParams
from tests.support.graph_nodes import DecodeGraph, nodes_of
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


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_p=0.5),
        SamplingParams(temperature=0.7, top_k=3),
        SamplingParams(temperature=0.7, top_k=3, top_p=0.5),
        SamplingParams(temperature=0.7, min_p=0.1),
        SamplingParams(logit_bias={1: 2.0}, logprobs=3),
        SamplingParams(presence_penalty=0.1, repetition_penalty=1.2),
        SamplingParams(temperature=0.7, min_tokens=2, logprobs=1, processed_logprobs=True),
    ],
)
def test_a_start_uses_every_operation_that_sampling_is_made_of(params: SamplingParams) -> None:
    """Where kernels are built at their first use, no request waits for that."""
    used: Counter[str] = Counter()
    for arrays in sampling_probes(96):
        used += nodes_of(*arrays)
    rows = [Row([1, 2, 3], params, 0, seed=0, max_tokens=8, stop_ids=frozenset({2})) for _ in range(2)]
    sampler = Sampler(rows, 96)
    history = History(rows) if sampler.penalized else None
    assert set(nodes_of(*sampler(mx.zeros((2, 96)), [0, 1], history).arrays())) <= set(used)
