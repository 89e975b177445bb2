"""Gives a model's layers room for adapters: each row of a pass through them has its own, or none.

`Layout` finds the layers and packs adapters for them, on any thread. Each layer has a `LoRAHook`, which asks
`ActiveAdapters` what the rows of the pass in flight have, and a kernel or `RowAdapters` itself to add it. Without an
adapter in the batch a layer does what it did before.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.lora.mixtures import BASE, GroupedLoRA, Groups, Resident, RowAdapters
from mlx_parallm.lora.weights import Adapter, AdapterError, Array, Target

RANK_STEP = 8  # ranks are padded to multiples of this
BUNDLES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers of a block that read the same inputs


@dataclass(frozen=True, slots=True)
class Group:
    """Layers of one name and shape."""

    kind: Literal["linear", "embedding"]
    out_features: int
    size: int
    paths: tuple[str, ...]


@dataclass(slots=True)
class PackedGroup:
    a: Any  # (layers, rank, size)
    b: Any  # (layers, rank, out_features)
    m: Array | None  # (layers, out_features); NaN where a layer keeps its norms


@dataclass(slots=True)
class PackedAdapter:
    """An adapter in the shape of the model's groups, ready to be copied to the device."""

    rank: int  # padded
    groups: dict[int, PackedGroup]
    digest: str  # of all that it holds: names the blocks that the prefix cache keeps of it
    given_rank: int = 0
    given_bytes: int = 0  # as it came, without what fills it up to the model's groups

    @property
    def nbytes(self) -> int:
        return sum(group.a.nbytes + group.b.nbytes for group in self.groups.values())


# A kernel that adds rows' own products to what layers of the same inputs x gave: x, (y, group, number in it) of each
# layer, the choice -> each layer's sum; None where MLX's operations should do it.
Adder = Callable[[mx.array, Sequence[tuple[mx.array, int, int]], Any], list[mx.array] | None]


@dataclass(frozen=True, slots=True, eq=False)
class RopeParams:
    """How RoPE turns the heads of queries and keys by their positions."""

    inv_freq: mx.array  # (half a head,): the angle of a position …
    in_log2: bool  # … or its logarithm, to the base of 2


@dataclass(frozen=True, slots=True)
class Fused:
    """Kernels that also do what comes behind such layers."""

    # What one layer gave, and what its output is added to -> the sum.
    add_residual: Callable[[mx.array, tuple[mx.array, int, int], Any, mx.array], mx.array | None]
    # What a gate and the layer beside it gave -> swiglu of both.
    gate: Callable[[mx.array, Sequence[tuple[mx.array, int, int]], Any], mx.array | None]
    # What the layers of queries, keys and values gave, how and how far (B,) to rotate -> (B, heads, 1, width) of each.
    rope: Callable[[mx.array, Sequence[tuple[mx.array, int, int]], Any, RopeParams, mx.array], list[mx.array] | None]


# A kernel that does the layers' own products too: x, each layer with its group and number in it, the choice.
Multiplier = Callable[[mx.array, Sequence[tuple[nn.Module, int, int]], Any], list[mx.array] | None]


@dataclass(slots=True, eq=False)
class ActiveAdapters:
    """What the layers read: set before a pass, for its rows."""

    choice: RowAdapters = BASE
    add: Adder | None = None
    fused: Fused | None = None
    multiply: Multiplier | None = None


@dataclass(slots=True, eq=False)
class Residual:
    """What a block adds to the output of its last layer, unless that layer's kernel has."""

    given: mx.array | None = None

    def sum(self, output: mx.array) -> mx.array:
        given, self.given = self.given, None
        return output if given is None else given + output


@dataclass(slots=True, eq=False)
class Bundle:
    """Layers that read the same inputs: the first that is asked finds the others' outputs too, and leaves them here."""

    members: "list[tuple[LoRAHook, Callable[[mx.array], mx.array], nn.Module]]" = field(
        default_factory=list
    )  # as named
    asked: tuple[mx.array, RowAdapters] | None = None  # the inputs and adapters that they are of
    ready: "dict[LoRAHook, mx.array]" = field(default_factory=dict)
    gate: "LoRAHook | None" = None  # of two layers whose outputs only swiglu reads, the first

    def with_rope(self, x: mx.array, rope: RopeParams, offsets: mx.array) -> list[mx.array] | None:
        """Queries, keys and values at their positions, by one kernel; None where there is none for this pass."""
        selection = self.members[0][0].selection
        groups, choice = [hook.group for hook, _, _ in self.members], selection.choice
        plain = all(_is_plain(choice, group) for group in groups)
        if selection.fused is None or not plain or not any(choice.has(group) for group in groups):
            return None
        outputs = [(base(x), hook.group, hook.number) for hook, base, _ in self.members]
        return selection.fused.rope(x, outputs, choice, rope, offsets)

    def leave(self, x: mx.array, choice: RowAdapters, outputs: "dict[LoRAHook, mx.array]") -> None:
        self.asked, self.ready = (x, choice) if outputs else None, outputs

    def take(self, hook: "LoRAHook", x: mx.array, choice: RowAdapters) -> mx.array | None:
        if self.asked is None or self.asked[0] is not x or self.asked[1] is not choice:
            return None
        found = self.ready.pop(hook, None)
        if not self.ready:
            self.asked = None
        return found


@dataclass(frozen=True, slots=True, eq=False)
class LoRAHook:
    """Where one layer finds its part of what is selected."""

    selection: ActiveAdapters
    group: int
    number: int
    bundle: Bundle | None = None
    residual: Residual | None = None  # its output goes nowhere but into a sum with this

    def with_residual(self, residual: Residual) -> "LoRAHook":
        return LoRAHook(self.selection, self.group, self.number, self.bundle, residual)

    def linear(self, x: mx.array, base: Callable[[mx.array], mx.array], layer: nn.Module) -> mx.array:
        """A linear layer's output for inputs x with each row's adapter; without one it is base(x), (B, T, N)."""
        choice = self.selection.choice
        if self.bundle is not None and (ready := self.bundle.take(self, x, choice)) is not None:
            return ready
        whole = self._multiplied(x, layer)
        if whole is not None:
            return whole
        if not choice.has(self.group):
            return base(x)
        y = base(x)
        added = self._by_kernel(x, y) if choice.without_dora(self.group) else None
        return choice.added(self.group, self.number, x, y, layer.get("bias")) if added is None else added

    def row_groups(self, tokens: int) -> tuple[Any, int] | None:
        """For kernels on the CPU: what rows add in this pass, and the layer's number; None where they can't."""
        choice = self.selection.choice
        if not choice.has(self.group):
            return None, 0
        return (
            (choice.row_groups(self.group, tokens), self.number)
            if isinstance(choice, GroupedLoRA) and choice.without_dora(self.group)
            else None
        )

    def _multiplied(self, x: mx.array, layer: nn.Module) -> mx.array | None:
        choice, multiply = self.selection.choice, self.selection.multiply
        if multiply is None or not _is_plain(choice, self.group):
            return None
        members = [] if self.bundle is None else self.bundle.members
        others = [(hook, one) for hook, _, one in members if hook is not self and _is_plain(choice, hook.group)]
        layers = [(layer, self.group, self.number), *((one, hook.group, hook.number) for hook, one in others)]
        found = multiply(x, layers, choice)
        if found is None:
            return None
        if self.bundle is not None:
            self.bundle.leave(x, choice, {hook: output for (hook, _), output in zip(others, found[1:], strict=True)})
        return found[0]

    def _by_kernel(self, x: mx.array, y: mx.array) -> mx.array | None:
        choice, add = self.selection.choice, self.selection.add
        if add is None:
            return None
        if self.bundle is None:
            summed = self._closed(x, y)
            if summed is not None:
                return summed
            alone = add(x, [(y, self.group, self.number)], choice)
            return None if alone is None else alone[0]
        others = [
            (hook, base)
            for hook, base, _ in self.bundle.members
            if hook is not self and choice.has(hook.group) and choice.without_dora(hook.group)
        ]
        outputs = [(self, y), *((hook, base(x)) for hook, base in others)]
        if self.bundle.gate is self and len(others) == 1 and self.selection.fused is not None:
            gated = self.selection.fused.gate(
                x, [(output, hook.group, hook.number) for hook, output in outputs], choice
            )
            if gated is not None:
                self.bundle.leave(x, choice, {others[0][0]: gated})
                return gated
        added = add(x, [(output, hook.group, hook.number) for hook, output in outputs], choice)
        if added is None:
            return None
        self.bundle.leave(x, choice, {hook: output for (hook, _), output in zip(others, added[1:], strict=True)})
        return added[0]

    def _closed(self, x: mx.array, y: mx.array) -> mx.array | None:
        residual, fused = self.residual, self.selection.fused
        if residual is None or residual.given is None or fused is None:
            return None
        summed = fused.add_residual(x, (y, self.group, self.number), self.selection.choice, residual.given)
        if summed is not None:
            residual.given = None
        return summed

    def looked_up(self, tokens: mx.array, y: mx.array) -> mx.array:
        """The same for an embedding's vectors y (B, T, size) of tokens (B, T)."""
        choice = self.selection.choice
        return choice.looked_up(self.group, self.number, tokens, y) if choice.has(self.group) else y


def _is_plain(choice: RowAdapters, group: int) -> bool:
    return not choice.has(group) or choice.without_dora(group)


class Layout:
    """The layers of a model that adapters may change, in groups."""

    def __init__(self, module: nn.Module, add: Adder | None = None, traced: bool = False) -> None:
        self.selection = ActiveAdapters(add=add)
        self.traced = traced  # passes are traced once per shape: few shapes, and few kernels
        self._layers = {path: layer for path, layer in module.named_modules() if _kind(layer) is not None}
        self.dtype = _computed_in(self._layers.values())
        self.targets = {path: _target(layer) for path, layer in self._layers.items()}
        members: dict[tuple[str, Target], list[str]] = {}
        for path, target in self.targets.items():
            members.setdefault((path.rsplit(".", 1)[-1], target), []).append(path)
        self.groups = [
            Group(target.kind, target.out_features, target.size, tuple(paths)) for (_, target), paths in members.items()
        ]
        self._seats = {
            path: (group, number) for group, one in enumerate(self.groups) for number, path in enumerate(one.paths)
        }

    def attach(self) -> None:
        """From now on the layers add what is selected."""
        bundles: dict[tuple[str, tuple[str, ...]], Bundle] = {}
        order: dict[LoRAHook, int] = {}
        for path, layer in self._layers.items():
            kind: Any = type(layer)
            parent, _, name = path.rpartition(".")
            bundled = self.traced or self.selection.multiply is not None
            names = next((names for names in BUNDLES if name in names), None) if bundled else None
            bundle = None if names is None else bundles.setdefault((parent, names), Bundle())
            hook = LoRAHook(self.selection, *self._seats[path], bundle)
            if bundle is not None and names is not None:
                bundle.members.append((hook, functools.partial(kind.__call__, layer), layer))
                order[hook] = names.index(name)
            layer.__class__ = _adapting_class(kind)
            layer.hook = hook
        for bundle in bundles.values():
            bundle.members.sort(key=lambda member: order[member[0]])

    def pack(self, adapter: Adapter) -> PackedAdapter:
        """NumPy alone: on any thread."""
        rank = -(-adapter.rank // RANK_STEP) * RANK_STEP
        by_group: dict[int, dict[int, str]] = {}
        for path in adapter.parts:
            group, number = self._seats[path]
            by_group.setdefault(group, {})[number] = path
        groups = {group: self._packed(self.groups[group], paths, adapter, rank) for group, paths in by_group.items()}
        count = sum(part.a.size + part.b.size for part in adapter.parts.values())
        lengths = sum(part.m.nbytes for part in adapter.parts.values() if part.m is not None)
        return PackedAdapter(rank, groups, _digest(rank, groups), adapter.rank, count * self.dtype.size + lengths)

    def _packed(self, group: Group, paths: Mapping[int, str], adapter: Adapter, rank: int) -> PackedGroup:
        layers = len(group.paths)
        a = np.zeros((layers, rank, group.size), np.float32)
        b = np.zeros((layers, rank, group.out_features), np.float32)
        m = np.full((layers, group.out_features), np.nan, np.float32)
        for number, path in paths.items():
            part = adapter.parts[path]
            a[number, : part.rank], b[number, : part.rank] = part.a, part.b.T
            if part.m is not None:
                m[number] = part.m
        sides = [_cast(side, self.dtype) for side in (a, b)]
        if not all(_is_finite(side) for side in sides):
            raise AdapterError(f"a weight of {group.paths[0]} or its like is too large for the model's {self.dtype}")
        return PackedGroup(sides[0], sides[1], None if np.isnan(m).all() else m)

    def place(self, packed: PackedAdapter) -> Resident:
        """Copies a packed adapter to the device."""
        groups = {}
        for number, group in packed.groups.items():
            a, b = (_uncast(array, self.dtype) for array in (group.a, group.b))
            factors = None if group.m is None else self._factors(self.groups[number], a, b, group.m)
            groups[number] = (a, b, factors)
        mx.async_eval([array for group in groups.values() for array in group if array is not None])
        return Resident(packed.rank, groups, packed.nbytes)

    def adapter_bytes(self, rank: int) -> int:
        """Of an adapter of that rank on all linear layers."""
        linear = [group for group in self.groups if group.kind == "linear"]
        return sum(len(group.paths) * rank * (group.size + group.out_features) for group in linear) * self.dtype.size

    def blank(self) -> Resident:
        """An adapter that changes nothing, on all linear layers."""
        groups: Groups = {
            number: (
                mx.zeros((len(group.paths), RANK_STEP, group.size), self.dtype),
                mx.zeros((len(group.paths), RANK_STEP, group.out_features), self.dtype),
                None,
            )
            for number, group in enumerate(self.groups)
            if group.kind == "linear"
        }
        return Resident(RANK_STEP, groups)

    def _factors(self, group: Group, a: mx.array, b: mx.array, m: Array) -> mx.array:
        """What the adapted outputs are multiplied by, for DoRA: (layers, out_features)."""
        lengths = []
        for number, path in enumerate(group.paths):
            if np.isnan(m[number]).any():
                lengths.append(mx.ones((group.out_features,)))
                continue
            adapted = _weight(self._layers[path]).astype(mx.float32) + (b[number].T @ a[number]).astype(mx.float32)
            lengths.append(mx.linalg.norm(adapted, axis=1))
        wanted = mx.array(np.where(np.isnan(m), 1.0, m).astype(np.float32))
        return (wanted / mx.stack(lengths)).astype(self.dtype)


def _digest(rank: int, groups: Mapping[int, PackedGroup]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for number, group in sorted(groups.items()):
        digest.update(repr((number, rank, group.a.shape, group.b.shape)).encode())
        for array in (group.a, group.b, group.m):
            if array is not None:
                digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _kind(layer: object) -> Literal["linear", "embedding"] | None:
    if isinstance(layer, (nn.Linear, nn.QuantizedLinear)):
        return "linear"
    return "embedding" if isinstance(layer, (nn.Embedding, nn.QuantizedEmbedding)) else None


def _computed_in(layers: Iterable[nn.Module]) -> mx.Dtype:
    """What the model computes in: what its embedding gives."""
    embedding = next((layer for layer in layers if _kind(layer) == "embedding"), None)
    if embedding is None:
        return mx.float32
    dtype: mx.Dtype = embedding(mx.zeros((1, 1), mx.int32)).dtype  # never computed
    return dtype


def _target(layer: nn.Module) -> Target:
    out_features, size = layer["weight"].shape
    kind = _kind(layer)
    assert kind is not None
    return Target(kind, out_features, size * 32 // layer.bits if "scales" in layer else size)


def _weight(layer: nn.Module) -> mx.array:
    if "scales" not in layer:
        weight: mx.array = layer["weight"]
        return weight
    return mx.dequantize(
        layer["weight"],
        layer["scales"],
        layer.get("biases"),
        group_size=layer.group_size,
        bits=layer.bits,
        mode=getattr(layer, "mode", "affine"),
    )


@functools.cache
def _adapting_class(original: Any) -> type:
    """The same layer, which asks its hook what to add."""

    def call(self: Any, x: mx.array) -> mx.array:
        adapted: mx.array = self.hook.linear(x, functools.partial(original.__call__, self), self)
        return adapted

    def embed(self: Any, tokens: mx.array) -> mx.array:
        adapted: mx.array = self.hook.looked_up(tokens, original.__call__(self, tokens))
        return adapted

    def as_linear(self: Any, x: mx.array) -> mx.array:
        adapted: mx.array = self.hook.linear(x, functools.partial(original.as_linear, self), self)
        return adapted

    if issubclass(original, (nn.Embedding, nn.QuantizedEmbedding)):
        return type(original.__name__, (original,), {"__call__": embed, "as_linear": as_linear})
    return type(original.__name__, (original,), {"__call__": call})


def _cast(array: Array, dtype: mx.Dtype) -> Any:
    """The bits of an array in the model's precision: NumPy has no bfloat16."""
    if dtype == mx.bfloat16:
        bits = array.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return array.astype(np.float16 if dtype == mx.float16 else np.float32)


def _is_finite(bits: Any) -> bool:
    if bits.dtype == np.uint16:
        return bool(((bits & 0x7F80) != 0x7F80).all())
    return bool(np.isfinite(bits).all())


def _uncast(bits: Any, dtype: mx.Dtype) -> mx.array:
    array = mx.array(bits)
    return array.view(dtype) if dtype == mx.bfloat16 else array
