"""Layers that add each row's own adapter to what they compute.

Each layer has a `LoRAHook`. All hooks of a model share one `ActiveAdapters`, which says what adapters the rows of the
pass in flight have; a kernel or `RowAdapters` itself adds them. Without an adapter in the batch a layer computes what
it did before. `compute.patch` gives layers their hooks; `blocks` computes several layers together.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.lora.row_adapters import BASE, GroupedLoRA, RowAdapters

LayerPlace = tuple[int, int]  # a layer's group, its number there
LayerOutput = tuple[mx.array, int, int]  # y (B, T, out_features) without adapters, the layer's group, its number there
LayerWeights = tuple[nn.Module, int, int]  # the layer, its group, its number there

# Adds rows' own low-rank products to the outputs of layers that read the same inputs x; returns each layer's sum, or
# None where MLX's operations should do it.
Adder = Callable[[mx.array, Sequence[LayerOutput], Any], list[mx.array] | None]
# Computes such layers' own products too.
Multiplier = Callable[[mx.array, Sequence[LayerWeights], Any], list[mx.array] | None]


@dataclass(frozen=True, slots=True, eq=False)
class RopeParams:
    """The way in which RoPE rotates the heads of queries and keys by their positions."""

    inv_freq: mx.array  # (half a head,): the angle of a position …
    in_log2: bool  # … or its logarithm, to the base of 2


@dataclass(frozen=True, slots=True)
class FusedKernels:
    """Kernels that add rows' own products and also do what follows. None where MLX's operations should do it."""

    # The output of one layer, and the residual -> their sum.
    add_residual: Callable[[mx.array, LayerOutput, Any, mx.array], mx.array | None]
    # The outputs of gate and up -> swiglu of both.
    gate: Callable[[mx.array, Sequence[LayerOutput], Any], mx.array | None]
    # Queries, keys and values, how and how far (B,) to rotate -> (B, heads, 1, width) of each.
    rope: Callable[[mx.array, Sequence[LayerOutput], Any, RopeParams, mx.array], list[mx.array] | None]


@dataclass(frozen=True, slots=True)
class AdapterKernels:
    """The kernels for adapters that the device has."""

    add: Adder | None = None
    multiply: Multiplier | None = None
    fused: FusedKernels | None = None
    by_operations: bool = False  # `add` is made of MLX's operations: few of them count, and so does a stack's width

    @property
    def has_adder(self) -> bool:
        """Whether a kernel of ours adds."""
        return self.add is not None and not self.by_operations

    def __bool__(self) -> bool:
        return self.add is not None or self.multiply is not None or self.fused is not None


@dataclass(slots=True, eq=False)
class ActiveAdapters:
    """The state that a model's hooks share: the kernels, set at load, and the rows' adapters, set before each pass."""

    kernels: AdapterKernels = AdapterKernels()
    row_adapters: RowAdapters = BASE
    joint_inputs: list[tuple[LayerPlace, ...]] = field(default_factory=list)  # layers that are computed together


@dataclass(frozen=True, slots=True, eq=False)
class LoRAHook:
    """One layer's place among the adapters: its group, and its number in the group."""

    active: ActiveAdapters
    group: int
    number: int

    def has_lora_alone(self) -> bool:
        """Returns whether some row of the pass has an adapter for this layer, and none of those is DoRA."""
        row_adapters = self.active.row_adapters
        return row_adapters.has(self.group) and row_adapters.without_dora(self.group)

    def linear(self, x: mx.array, layer: Any) -> mx.array:
        """A linear layer's output (B, T, out_features) for inputs x (B, T, size), with each row's adapter."""
        row_adapters = self.active.row_adapters
        multiply = self.active.kernels.multiply
        if multiply is not None and row_adapters.without_dora(self.group):
            products = multiply(x, [(layer, self.group, self.number)], row_adapters)
            if products is not None:
                return products[0]
        return self.add(x, layer.base_product(x), layer)

    def linear_and_residual(self, x: mx.array, layer: Any, residual: mx.array) -> mx.array:
        """residual + the same, by one kernel where there is one."""
        fused = self.active.kernels.fused
        if fused is None or not self.has_lora_alone():
            return residual + self.linear(x, layer)
        y = layer.base_product(x)
        total = fused.add_residual(x, (y, self.group, self.number), self.active.row_adapters, residual)
        return residual + self.add(x, y, layer) if total is None else total

    def add(self, x: mx.array, y: mx.array, layer: Any) -> mx.array:
        """Each row's adapter added to the layer's output y for x."""
        row_adapters = self.active.row_adapters
        add = self.active.kernels.add
        if not row_adapters.has(self.group):
            return y
        if add is not None and row_adapters.without_dora(self.group):
            sums = add(x, [(y, self.group, self.number)], row_adapters)
            if sums is not None:
                return sums[0]
        return self.add_by_operations(x, y, layer)

    def add_by_operations(self, x: mx.array, y: mx.array, layer: Any) -> mx.array:
        """The same without a kernel of ours."""
        return self.active.row_adapters.add_to_linear(self.group, self.number, x, y, layer.get("bias"))

    def embedding(self, tokens: mx.array, y: mx.array) -> mx.array:
        """An embedding's vectors y (B, T, size) of tokens (B, T), with each row's adapter."""
        row_adapters = self.active.row_adapters
        if not row_adapters.has(self.group):
            return y
        return row_adapters.add_to_embedding(self.group, self.number, tokens, y)

    def row_groups(self, tokens: int) -> tuple[Any, int] | None:
        """Returns what rows add in this pass, for CPU kernels, and the layer's number; None where those can't do it."""
        row_adapters = self.active.row_adapters
        if not row_adapters.has(self.group):
            return None, 0
        if not isinstance(row_adapters, GroupedLoRA) or not row_adapters.without_dora(self.group):
            return None
        return row_adapters.row_groups(self.group, tokens), self.number


@functools.cache
def hooked_class(original: Any) -> type:
    """The same layer, which has its hook add the rows' adapters; `base_product` is what it computes without."""
    if hasattr(original, "base_product"):
        return original  # type: ignore[no-any-return]

    def call(self: Any, x: mx.array) -> mx.array:
        adapted: mx.array = self.hook.linear(x, self)
        return adapted

    def embed(self: Any, tokens: mx.array) -> mx.array:
        adapted: mx.array = self.hook.embedding(tokens, original.__call__(self, tokens))
        return adapted

    if issubclass(original, (nn.Embedding, nn.QuantizedEmbedding)):
        members = {"__call__": embed, "as_linear": call, "base_product": original.as_linear}
    else:
        members = {"__call__": call, "base_product": original.__call__}
    return type(original.__name__, (original,), members)
