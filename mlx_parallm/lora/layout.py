"""The layers of a model that adapters may change, in groups of one name and shape; adapters packed by these groups.

Layers of a group share an array, so that an adapter comes and goes in a few large operations. The registry packs
adapters on any thread and has them placed on the device on the engine's; `compute.patch` gives the layers their hooks.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.lora.adapter import Adapter, AdapterError, Array, Target
from mlx_parallm.lora.hooks import ActiveAdapters, LoRAHook
from mlx_parallm.lora.joint_products import JointStack, Layers
from mlx_parallm.lora.row_adapters import AdapterStack, Groups, Resident
from mlx_parallm.lora.split import Split

RANK_STEP = 8  # ranks are padded to multiples of this


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
    unpadded_rank: int = 0
    unpadded_bytes: int = 0  # of its own weights, without what fills it up to the model's groups
    whole: Adapter | None = None  # where the model is split over ranks: for the others, who pack their own parts

    @property
    def nbytes(self) -> int:
        return sum(group.a.nbytes + group.b.nbytes for group in self.groups.values())


AroundPlace = Callable[[PackedAdapter, Callable[[PackedAdapter], Resident]], Resident]


class Layout:
    """The layers of a model that adapters may change, in groups."""

    def __init__(self, module: nn.Module, traced: bool = False, split: Split | None = None) -> None:
        """`split`: the module is a rank's part of the model."""
        self.active = ActiveAdapters()
        self.around_place: AroundPlace | None = None  # what else is to be done where an adapter is placed
        self.traced = traced  # passes are traced once per shape: few shapes, and few kernels
        self._split = split
        self._layers = _adaptable(module)
        self.dtype = _compute_dtype(self._layers.values())
        self._own_targets = targets_of(module)
        self.targets = self._own_targets if split is None else split.targets  # that adapters are made for
        members: dict[tuple[str, Target], list[str]] = {}
        for path, target in self._own_targets.items():
            members.setdefault((path.rsplit(".", 1)[-1], target), []).append(path)
        self.groups = [
            Group(target.kind, target.out_features, target.size, tuple(paths)) for (_, target), paths in members.items()
        ]
        self._places = {
            path: (group, number) for group, one in enumerate(self.groups) for number, path in enumerate(one.paths)
        }

    def hooks(self) -> Iterator[tuple[nn.Module, LoRAHook]]:
        """Each layer and the hook that it should have."""
        for path, layer in self._layers.items():
            yield layer, LoRAHook(self.active, *self._places[path])

    def stack(self, members: Sequence[Resident], columns: int = 0) -> AdapterStack:
        """Puts the adapters of a batch side by side, at least so many columns wide."""
        kept = tuple(dict.fromkeys(members))
        if self.active.kernels.by_operations:
            return JointStack(kept, columns, inputs=self._inputs)
        return AdapterStack(kept, columns)

    @functools.cached_property
    def _inputs(self) -> Sequence[Layers]:
        """All linear layers, by the inputs that they share."""
        joint = list(self.active.joint_inputs)
        known = {place for layers in joint for place in layers}
        every = [
            (group, number)
            for group, one in enumerate(self.groups)
            if one.kind == "linear"
            for number in range(len(one.paths))
        ]
        return joint + [(place,) for place in every if place not in known]

    def pack(self, adapter: Adapter) -> PackedAdapter:
        """NumPy alone: on any thread."""
        rank = -(-adapter.rank // RANK_STEP) * RANK_STEP
        whole = adapter if self._split is not None else None
        if self._split is not None:
            adapter = self._split.part_of(adapter, self._own_targets)
        by_group: dict[int, dict[int, str]] = {}
        for path in adapter.parts:
            group, number = self._places[path]
            by_group.setdefault(group, {})[number] = path
        groups = {
            group: self._pack_group(self.groups[group], paths, adapter, rank) for group, paths in by_group.items()
        }
        count = sum(part.a.size + part.b.size for part in adapter.parts.values())
        norms = sum(part.m.nbytes for part in adapter.parts.values() if part.m is not None)
        digest = _digest(rank, groups) if whole is None else digest_of(whole)
        unpadded = (adapter if whole is None else whole).rank
        return PackedAdapter(rank, groups, digest, unpadded, count * self.dtype.size + norms, whole)

    def _pack_group(self, group: Group, paths: Mapping[int, str], adapter: Adapter, rank: int) -> PackedGroup:
        layers = len(group.paths)
        a = np.zeros((layers, rank, group.size), np.float32)
        b = np.zeros((layers, rank, group.out_features), np.float32)
        m = np.full((layers, group.out_features), np.nan, np.float32)
        for number, path in paths.items():
            part = adapter.parts[path]
            a[number, : part.rank] = part.a
            b[number, : part.rank] = part.b.T
            if part.m is not None:
                m[number] = part.m
        sides = [_to_bits(side, self.dtype) for side in (a, b)]
        if not all(_is_finite(side) for side in sides):
            raise AdapterError(f"a weight of {group.paths[0]} or its like is too large for the model's {self.dtype}")
        return PackedGroup(sides[0], sides[1], None if np.isnan(m).all() else m)

    def place(self, packed: PackedAdapter) -> Resident:
        """Copies a packed adapter to the device."""
        return self._place(packed) if self.around_place is None else self.around_place(packed, self._place)

    def _place(self, packed: PackedAdapter) -> Resident:
        groups = {}
        for number, group in packed.groups.items():
            a, b = (_from_bits(array, self.dtype) for array in (group.a, group.b))
            factors = None if group.m is None else self._dora_factors(self.groups[number], a, b, group.m)
            groups[number] = (a, b, factors)
        mx.async_eval([array for group in groups.values() for array in group if array is not None])
        return Resident(packed.rank, groups, packed.nbytes)

    def adapter_bytes(self, rank: int) -> int:
        """Returns the bytes of an adapter of that rank on all linear layers."""
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

    def _dora_factors(self, group: Group, a: mx.array, b: mx.array, m: Array) -> mx.array:
        """Returns the factors by which the adapted outputs are multiplied: (layers, out_features)."""
        norms = []
        for number, path in enumerate(group.paths):
            if np.isnan(m[number]).any():
                norms.append(mx.ones((group.out_features,)))
                continue
            adapted = _weight(self._layers[path]).astype(mx.float32) + (b[number].T @ a[number]).astype(mx.float32)
            norms.append(_row_norms(self._layers[path], adapted))
        wanted = mx.array(np.where(np.isnan(m), 1.0, m).astype(np.float32))
        return (wanted / mx.stack(norms)).astype(self.dtype)


def _digest(rank: int, groups: Mapping[int, PackedGroup]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for number, group in sorted(groups.items()):
        digest.update(repr((number, rank, group.a.shape, group.b.shape)).encode())
        for array in (group.a, group.b, group.m):
            if array is not None:
                digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def digest_of(adapter: Adapter) -> str:
    """Returns the digest of an adapter that is not packed: of a packed one, a rank has only a part."""
    digest = hashlib.blake2b(digest_size=16)
    for path, part in sorted(adapter.parts.items()):
        digest.update(repr((path, part.a.shape, part.b.shape)).encode())
        for array in (part.a, part.b, part.m):
            if array is not None:
                digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def targets_of(module: nn.Module) -> dict[str, Target]:
    """The layers of a module that adapters may change, by their paths."""
    return {path: _target(layer) for path, layer in _adaptable(module).items()}


def _adaptable(module: nn.Module) -> dict[str, nn.Module]:
    return {path: layer for path, layer in module.named_modules() if _kind(layer) is not None}


def _kind(layer: object) -> Literal["linear", "embedding"] | None:
    if isinstance(layer, (nn.Linear, nn.QuantizedLinear)):
        return "linear"
    return "embedding" if isinstance(layer, (nn.Embedding, nn.QuantizedEmbedding)) else None


def _compute_dtype(layers: Iterable[nn.Module]) -> mx.Dtype:
    """Returns the precision that the model computes in: that of what its embedding gives."""
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


def _row_norms(layer: nn.Module, weight: mx.array) -> mx.array:
    """Returns the norms of a weight's rows; where a rank has a part of each, those of the whole rows."""
    if not hasattr(layer, "sum_over_ranks"):
        return mx.linalg.norm(weight, axis=1)
    return mx.sqrt(layer.sum_over_ranks(mx.sum(weight * weight, axis=1)))


def _to_bits(array: Array, dtype: mx.Dtype) -> Any:
    """The bits of an array in the model's precision: NumPy has no bfloat16."""
    if dtype == mx.bfloat16:
        bits = array.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return array.astype(np.float16 if dtype == mx.float16 else np.float32)


def _is_finite(bits: Any) -> bool:
    if bits.dtype == np.uint16:
        return bool(((bits & 0x7F80) != 0x7F80).all())
    return bool(np.isfinite(bits).all())


def _from_bits(bits: Any, dtype: mx.Dtype) -> mx.array:
    array = mx.array(bits)
    return array.view(dtype) if dtype == mx.bfloat16 else array
