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


@dataclass(frozen=True, slots=True)
class JointKernels:
    """Kernels for layers of the same inputs, whose outputs lie side by side. They return None where MLX's operations
    should do it."""

    # Adds rows' own products: x (B, T, size), the outputs, the layers' places, their out_features, the rows' adapters.
    add: Callable[[mx.array, mx.array, Sequence[LayerPlace], Sequence[int], Any], mx.array | None]
    # swiglu of gate and up (B, 2 F) -> (B, F).
    gate: Callable[[mx.array], mx.array | None]


@dataclass(frozen=True, slots=True)
class AdapterKernels:
    """The kernels for adapters that the device has."""

    add: Adder | None = None
    multiply: Multiplier | None = None
    joint: JointKernels | None = None
    by_operations: bool = False  # `add` is made of MLX's operations: few of them count, and so does a stack's width

    @property
    def has_adder(self) -> bool:
        """Whether a kernel of ours adds."""
        return self.add is not None and not self.by_operations

    def __bool__(self) -> bool:
        return self.add is not None or self.multiply is not None or self.joint is not None


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
        """residual + the same. On CUDA the product adds it, and adapters are added to the sum: a row without one has
        the same numbers, whatever the others have."""
        without_dora = self.active.row_adapters.without_dora(self.group)
        if self.active.kernels.joint is None or not without_dora or not is_plain(layer) or "bias" in layer:
            return residual + self.linear(x, layer)
        return self.add(x, mx.addmm(residual, x, layer["weight"].T), layer)

    def add(self, x: mx.array, y: mx.array, layer: Any) -> mx.array:
        """Each row's adapter added to the layer's output y for x (B, T, size), or (B, size) where each row has one
        token and no kernel takes that."""
        row_adapters = self.active.row_adapters
        add = self.active.kernels.add
        if not row_adapters.has(self.group):
            return y
        if x.ndim == 2 and self.active.kernels.joint is not None:
            return self.add(x[:, None], y[:, None], layer)[:, 0]
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


def is_plain(layer: Any) -> bool:
    """Returns whether a layer is linear, with weights that are not quantised."""
    return isinstance(layer, nn.Linear) and "scales" not in layer


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
