"""A rank's part of a model: of every layer some heads (tensor parallel), or some of the layers (pipeline).

Tensor parallel is mlx-lm's own sharding, with its layers turned into ones that take adapters: a layer split by its
outputs is a plain linear layer, and one split by its inputs sums what the ranks have, their adapters' part included.
Where heads don't divide, or mlx-lm can't shard the model, each rank computes a run of layers and hands its result to
all. The model's own code runs on every rank: a layer that is another rank's passes its input on, and keeps its cache
as long as the others', so that masks and positions are right. `Group` calls this before the weights are read.
"""

import functools
import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers import distributed

from mlx_parallm.errors import ModelLoadError
from mlx_parallm.lora.layout import targets_of
from mlx_parallm.lora.split import Split

Way = Literal["tensor", "pipeline"]
DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


@dataclass(frozen=True, slots=True)
class ModelSplit:
    way: Way
    adapters: Split


def split_model(module: nn.Module, group: mx.distributed.Group) -> ModelSplit:
    """Leaves a module this rank's part; its weights should not have been read yet."""
    targets = targets_of(module)
    way = way_to_split(module, group.size())
    if way == "pipeline":
        split_layers(module, group)
        return ModelSplit(way, Split(group.rank(), targets))
    try:
        module.shard(group)
    except ValueError as error:  # a size that it does not divide by
        raise ModelLoadError(f"the model can't be split over {group.size()} ranks: {error}") from error
    for _, layer in module.named_modules():
        _make_adaptable(layer)
    return ModelSplit(way, Split(group.rank(), targets, _why_adapters_are_refused(module)))


def way_to_split(module: nn.Module, ranks: int) -> Way:
    """Chooses how to split a model: by heads where their number divides, and mlx-lm knows how; else by layers."""
    args: Any = getattr(module, "args", None)
    sizes = [getattr(args, name, None) for name in DIVIDED]
    divides = all(isinstance(size, int) and size % ranks == 0 for size in sizes)
    return "tensor" if hasattr(module, "shard") and divides else "pipeline"


def _why_adapters_are_refused(module: nn.Module) -> str | None:
    if "segments" not in inspect.getsource(type(module).shard):
        return None
    return "this model's fused layers are split piece by piece: adapters can't be served by a tensor-parallel group"


# Tensor parallel.


class _SumsOverRanks:
    """A linear layer that is split by its inputs: each rank has a part of the sum, the rows' adapters included."""

    def sum_over_ranks(self: Any, x: mx.array) -> mx.array:
        return mx.distributed.all_sum(x, group=self.group)

    def __call__(self: Any, x: mx.array) -> mx.array:
        hook = getattr(self, "hook", None)  # it has none while it is loaded
        part = self.base_product(x) if hook is None else hook.linear(x, self)
        total: mx.array = self.sum_over_ranks(part)
        return total + self["bias_of_sum"] if "bias_of_sum" in self else total


class SummedLinear(_SumsOverRanks, nn.Linear):  # type: ignore[misc]
    def base_product(self, x: mx.array) -> mx.array:
        product: mx.array = x @ self["weight"].T
        return product


class SummedQuantizedLinear(_SumsOverRanks, nn.QuantizedLinear):  # type: ignore[misc]
    def base_product(self, x: mx.array) -> mx.array:
        return mx.quantized_matmul(
            x,
            self["weight"],
            scales=self["scales"],
            biases=self.get("biases"),
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )


ADAPTABLE: dict[type, type] = {
    distributed.AllToShardedLinear: nn.Linear,
    distributed.QuantizedAllToShardedLinear: nn.QuantizedLinear,
    distributed.ShardedToAllLinear: SummedLinear,
    distributed.QuantizedShardedToAllLinear: SummedQuantizedLinear,
}


def _make_adaptable(layer: nn.Module) -> None:
    adaptable = ADAPTABLE.get(type(layer))
    if adaptable is None:
        return
    layer.__class__ = adaptable
    if issubclass(adaptable, _SumsOverRanks) and "bias" in layer:
        layer.bias_of_sum = layer.pop("bias")  # is added once, behind the sum


# Pipeline.


def split_layers(module: nn.Module, group: mx.distributed.Group) -> None:
    """Leaves this rank its run of layers; where a run ends, all get its result."""
    layers: Sequence[nn.Module] = getattr(module, "layers", ())
    if len(layers) < group.size():
        raise ModelLoadError(f"the model has {len(layers)} layers: they can't be split over {group.size()} ranks")
    for rank, run in enumerate(runs_of(len(layers), group.size())):
        for number in run:
            layer: Any = layers[number]
            original: Any = type(layer)
            ends = number == run[-1]
            if rank != group.rank():
                layer.clear()
                layer.__class__ = _absent_class(original, group, rank if ends else None)
            elif ends:
                layer.__class__ = _last_class(original, group)


def runs_of(layers: int, ranks: int) -> list[range]:
    """Each rank's layers; the first ranks have one more where they don't divide."""
    base, extra = divmod(layers, ranks)
    starts = [rank * base + min(rank, extra) for rank in range(ranks + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


@functools.cache
def _absent_class(original: type, group: mx.distributed.Group, result_of: int | None) -> type:
    """A layer that another rank computes. `result_of`: it is the last of this rank's, whose result all get."""

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None, *args: Any, **kwargs: Any) -> mx.array:
        if cache is not None:
            x = _with_place_taken(x, cache)
        # Zeros that wait for x: all ranks must come to their sums in one order.
        return x if result_of is None else mx.distributed.all_sum(mx.depends(mx.zeros_like(x), [x]), group=group)

    return type(original.__name__, (original,), {"__call__": call})


def _with_place_taken(x: mx.array, cache: Any) -> mx.array:
    """Keeps a cache as long as those of the layers that are here, at a number a token."""
    if not hasattr(cache, "update_and_fetch"):
        raise ModelLoadError(f"a model with a {type(cache).__name__} can't be split by layers")
    keys, values = (mx.zeros((x.shape[0], 1, x.shape[1], 1), x.dtype) for _ in range(2))
    kept: mx.array = mx.depends(x, list(cache.update_and_fetch(keys, values)))
    return kept


@functools.cache
def _last_class(original: Any, group: mx.distributed.Group) -> type:
    """The last of this rank's layers: all ranks get what it gives."""

    def call(self: Any, *args: Any, **kwargs: Any) -> mx.array:
        hidden = original.__call__(self, *args, **kwargs)
        if not isinstance(hidden, mx.array):
            raise ModelLoadError("a model whose layers give more than hidden states can't be split by layers")
        return mx.distributed.all_sum(hidden, group=group)

    return type(original.__name__, (original,), {"__call__": call})
