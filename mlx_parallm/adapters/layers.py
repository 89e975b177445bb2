"""Gives a model's layers room for adapters: each row of a pass through them has its own, or none.

The adapters that a batch needs stand side by side, as one pair of thin matrices per layer: a row's inputs go through
all of them, a mask keeps what is its own, and one more product brings it back. Layers of one shape share an array, so
that adapters come and go in a few large operations. Without an adapter in the batch a layer does what it did before.

`Layout` finds the layers and packs adapters for them, on any thread; `Resident` is a packed adapter on the device,
`Present` those that stand side by side, `Choice` which row has which, `Selection` the choice of the pass under way:
these on the engine thread.
"""

import functools
import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.adapters.weights import Adapter, Array, Target

RANK_STEP = 8  # ranks are padded to multiples of this
BUNDLES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers of a block that read the same inputs


@dataclass(frozen=True, slots=True)
class Group:
    """Layers of one name and shape."""

    kind: Literal["linear", "embedding"]
    lines: int
    size: int
    paths: tuple[str, ...]


@dataclass(slots=True)
class PackedGroup:
    a: Any  # (layers, rank, size)
    b: Any  # (layers, rank, lines)
    m: Array | None  # (layers, lines); NaN where a layer keeps the lengths of its lines


@dataclass(slots=True)
class Packed:
    """An adapter in the shape of the model's groups, ready to be copied to the device."""

    rank: int
    groups: dict[int, PackedGroup]
    digest: str  # of all that it holds: names the blocks that the prefix cache keeps of it

    @property
    def nbytes(self) -> int:
        return sum(group.a.nbytes + group.b.nbytes for group in self.groups.values())


Groups = dict[int, tuple[mx.array, mx.array, mx.array | None]]  # a, b, and DoRA's factors


@dataclass(slots=True, eq=False)
class Resident:
    rank: int
    groups: Groups  # factors (layers, lines)
    nbytes: int = 0


@dataclass(slots=True, eq=False)
class Present:
    """Adapters side by side: for each group a (L, C, size), b (L, C, lines), factors (L, adapters + 1, lines)."""

    members: tuple[Resident, ...]
    rounded: bool = False  # to few different widths, since a traced pass is for one
    groups: Groups = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number in sorted({number for member in self.members for number in member.groups}):
            self.groups[number] = self._joined(number)

    def _joined(self, number: int) -> tuple[mx.array, mx.array, mx.array | None]:
        some_a, some_b, _ = next(member.groups[number] for member in self.members if number in member.groups)
        layers, _, lines = some_b.shape
        ones = mx.ones((layers, 1, lines), some_b.dtype)
        a, b, factors = [], [], [ones]
        for member in self.members:
            part = member.groups.get(number)
            if part is None:
                a.append(mx.zeros((layers, member.rank, some_a.shape[2]), some_a.dtype))
                b.append(mx.zeros((layers, member.rank, lines), some_b.dtype))
                factors.append(ones)
            else:
                a.append(part[0])
                b.append(part[1])
                factors.append(ones if part[2] is None else part[2][:, None])
        scaled = any(factor is not ones for factor in factors)
        columns = sum(member.rank for member in self.members)
        if self.rounded and (unused := (1 << (columns - 1).bit_length()) - columns):
            a.append(mx.zeros((layers, unused, some_a.shape[2]), some_a.dtype))
            b.append(mx.zeros((layers, unused, lines), some_b.dtype))
        if len(a) == 1:
            return a[0], b[0], mx.concatenate(factors, axis=1) if scaled else None
        return (
            mx.concatenate(a, axis=1),
            mx.concatenate(b, axis=1),
            mx.concatenate(factors, axis=1) if scaled else None,
        )

    def mask(self, rows: Sequence[Resident | None]) -> mx.array | None:
        """(B, 1, C): which columns are a row's own; None where all are every row's."""
        if len(self.members) == 1 and all(row is self.members[0] for row in rows):
            return None
        some = next(iter(self.groups.values()))[0]
        mask = np.zeros((len(rows), 1, some.shape[1]), np.float32)
        for line, (begin, rank) in zip(mask, self.spans(rows), strict=True):
            line[:, begin : begin + rank] = 1.0
        return mx.array(mask).astype(some.dtype)

    def spans(self, rows: Sequence[Resident | None]) -> Any:
        """(B, 2): where each row's own columns begin, and how many there are."""
        begins = dict(zip(self.members, np.cumsum([0, *(member.rank for member in self.members)]), strict=False))
        return np.array([(0, 0) if row is None else (begins[row], row.rank) for row in rows], np.int64)

    def parties(self, rows: Sequence[Resident | None]) -> Any:
        """(count, 6): where rows' own columns begin, how many they are, and up to four rows that have them, or -1."""
        users: dict[tuple[int, int], list[int]] = {}
        for number, span in enumerate(self.spans(rows).tolist()):
            users.setdefault(tuple(span), []).append(number)
        found = []
        for span, numbers in users.items():
            for first in range(0, len(numbers), 4):
                some = numbers[first : first + 4]
                found.append([*span, *some, *[-1] * (4 - len(some))])
        return np.array(found, np.int64)

    def numbers(self, rows: Sequence[Resident | None]) -> mx.array:
        """(B,): each row's line among the factors; 0 is the base."""
        return mx.array([0 if row is None else 1 + self.members.index(row) for row in rows], mx.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The adapters of a pass's rows."""

    groups: Groups = field(default_factory=dict)
    mask: mx.array | None = None  # (B, 1, C)
    numbers: mx.array | None = None  # (B,)
    spans: mx.array | None = None  # (B, 2): where each row's own columns begin, and how many there are
    max_rank: int = 0
    parties: Any = None  # (count, 6): where some rows' own columns begin, how many they are, and up to four rows

    @classmethod
    def of(cls, present: Present, rows: Sequence[Resident | None]) -> "Choice":
        return cls(
            present.groups,
            present.mask(rows),
            present.numbers(rows),
            mx.array(present.spans(rows), mx.int32),
            max(member.rank for member in present.members),
            present.parties(rows),
        )

    @property
    def form(self) -> Hashable:
        """Equal for choices that a traced pass can take in turn."""
        groups = tuple((number, a.shape, factors is None) for number, (a, _, factors) in self.groups.items())
        return groups, self.mask is None, self.spans is None, self.max_rank

    def arrays(self) -> list[mx.array]:
        every = [array for group in self.groups.values() for array in group] + [self.mask, self.numbers, self.spans]
        return [array for array in every if array is not None]

    def maker(self) -> "Callable[[Sequence[mx.array]], Choice]":
        """Makes the same of other arrays, given in the order of `arrays`; holds on to none of this one's."""
        factored = {number: factors is not None for number, (_, _, factors) in self.groups.items()}
        given = [array is not None for array in (self.mask, self.numbers, self.spans)]
        max_rank = self.max_rank

        def make(arrays: Sequence[mx.array]) -> Choice:
            rest = iter(arrays)
            groups = {number: (next(rest), next(rest), next(rest) if has else None) for number, has in factored.items()}
            mask, numbers, spans = (next(rest) if has else None for has in given)
            return Choice(groups, mask, numbers, spans, max_rank)

        return make

    def row(self, number: int) -> "Choice":
        """For a pass over one of the rows."""
        mask = None if self.mask is None else self.mask[number : number + 1]
        numbers = None if self.numbers is None else self.numbers[number : number + 1]
        return Choice(self.groups, mask, numbers)


BASE = Choice()


# A kernel that adds rows' own products to what layers of the same inputs x gave: x, (y, a, b, number) of each layer,
# the choice -> each layer's sum; None where MLX's operations should do it.
Adder = Callable[[mx.array, Sequence[tuple[mx.array, mx.array, mx.array, int]], Choice], list[mx.array] | None]


@dataclass(slots=True, eq=False)
class Selection:
    """What the layers read: set before a pass, for its rows."""

    choice: Choice = BASE
    add: Adder | None = None


@dataclass(slots=True, eq=False)
class Bundle:
    """Layers that read the same inputs: the first that is asked finds the others' outputs too, and leaves them here."""

    members: "list[tuple[Seat, Callable[[mx.array], mx.array]]]" = field(default_factory=list)  # and their base passes
    asked: tuple[mx.array, Choice] | None = None  # the inputs and adapters that they are of
    ready: "dict[Seat, mx.array]" = field(default_factory=dict)

    def leave(self, x: mx.array, choice: Choice, outputs: "dict[Seat, mx.array]") -> None:
        self.asked, self.ready = (x, choice) if outputs else None, outputs

    def take(self, seat: "Seat", x: mx.array, choice: Choice) -> mx.array | None:
        if self.asked is None or self.asked[0] is not x or self.asked[1] is not choice:
            return None
        found = self.ready.pop(seat, None)
        if not self.ready:
            self.asked = None
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Seat:
    """Where one layer finds its part of what is selected."""

    selection: Selection
    group: int
    number: int
    bundle: Bundle | None = None

    def linear(self, x: mx.array, base: Callable[[mx.array], mx.array], bias: mx.array | None) -> mx.array:
        """What a linear layer gives for inputs x with each row's adapter, where without it is base(x) (B, T, lines)."""
        choice = self.selection.choice
        chosen = choice.groups.get(self.group)
        if chosen is None:
            return base(x)
        if self.bundle is not None and (ready := self.bundle.take(self, x, choice)) is not None:
            return ready
        y = base(x)
        if (added := self._by_kernel(x, y)) is not None:
            return added
        a, b, factors = chosen
        z = self._own(x @ a[self.number].T) @ b[self.number]
        return self._scaled(y, z, bias, None if factors is None else self._lines(factors))

    def _by_kernel(self, x: mx.array, y: mx.array) -> mx.array | None:
        choice, add = self.selection.choice, self.selection.add
        groups = choice.groups
        if add is None or groups[self.group][2] is not None:
            return None
        others = [
            (seat, base)
            for seat, base in (self.bundle.members if self.bundle is not None else ())
            if seat is not self and seat.group in groups and groups[seat.group][2] is None
        ]
        outputs = [(self, y), *((seat, base(x)) for seat, base in others)]
        parts = [(output, *groups[seat.group][:2], seat.number) for seat, output in outputs]
        added = add(x, parts, choice)
        if added is not None and self.bundle is not None:
            self.bundle.leave(x, choice, {seat: output for (seat, _), output in zip(others, added[1:], strict=True)})
        return None if added is None else added[0]

    def looked_up(self, tokens: mx.array, y: mx.array) -> mx.array:
        """The same for an embedding's vectors y (B, T, size) of tokens (B, T)."""
        chosen = self.selection.choice.groups.get(self.group)
        if chosen is None:
            return y
        a, b, factors = chosen
        z = self._own(mx.take(b[self.number], tokens, axis=1).transpose(1, 2, 0)) @ a[self.number]
        if factors is None:
            return y + z
        lines = factors[self.number].reshape(-1)  # (adapters + 1) * lines
        assert self.selection.choice.numbers is not None
        first = (self.selection.choice.numbers * factors.shape[2])[:, None]
        return self._scaled(y, z, None, lines[first + tokens][..., None])

    def _own(self, z: mx.array) -> mx.array:
        mask = self.selection.choice.mask
        return z if mask is None else z * mask

    def _lines(self, factors: mx.array) -> mx.array:
        assert self.selection.choice.numbers is not None
        return factors[self.number][self.selection.choice.numbers][:, None]  # (B, 1, lines)

    @staticmethod
    def _scaled(y: mx.array, z: mx.array, bias: mx.array | None, factor: mx.array | None) -> mx.array:
        if factor is None:
            return y + z
        return factor * (y + z) if bias is None else factor * (y - bias + z) + bias


class Layout:
    """The layers of a model that adapters may change, in groups."""

    def __init__(self, module: nn.Module, add: Adder | None = None, traced: bool = False) -> None:
        self.selection = Selection(add=add)
        self.traced = traced  # passes are traced once per shape: few shapes, and few kernels
        self._layers = {path: layer for path, layer in module.named_modules() if _kind(layer) is not None}
        self.dtype = _computed_in(self._layers.values())
        self.targets = {path: _target(layer) for path, layer in self._layers.items()}
        members: dict[tuple[str, Target], list[str]] = {}
        for path, target in self.targets.items():
            members.setdefault((path.rsplit(".", 1)[-1], target), []).append(path)
        self.groups = [
            Group(target.kind, target.lines, target.size, tuple(paths)) for (_, target), paths in members.items()
        ]
        self._seats = {
            path: (group, number) for group, one in enumerate(self.groups) for number, path in enumerate(one.paths)
        }

    def attach(self) -> None:
        """From now on the layers add what is selected."""
        bundles: dict[tuple[str, tuple[str, ...]], Bundle] = {}
        for path, layer in self._layers.items():
            kind: Any = type(layer)
            parent, _, name = path.rpartition(".")
            names = next((names for names in BUNDLES if name in names), None) if self.traced else None
            bundle = None if names is None else bundles.setdefault((parent, names), Bundle())
            seat = Seat(self.selection, *self._seats[path], bundle)
            if bundle is not None:
                bundle.members.append((seat, functools.partial(kind.__call__, layer)))
            layer.__class__ = _adapting_class(kind)
            layer.seat = seat

    def present(self, members: tuple[Resident, ...]) -> Present:
        present = Present(members, self.traced)
        if not self.traced:  # where a step runs while it is started, it would wait for these
            mx.eval([array for group in present.groups.values() for array in group if array is not None])
        return present

    def pack(self, adapter: Adapter) -> Packed:
        """NumPy alone: on any thread."""
        rank = -(-adapter.rank // RANK_STEP) * RANK_STEP
        by_group: dict[int, dict[int, str]] = {}
        for path in adapter.parts:
            group, number = self._seats[path]
            by_group.setdefault(group, {})[number] = path
        groups = {group: self._packed(self.groups[group], paths, adapter, rank) for group, paths in by_group.items()}
        return Packed(rank, groups, _digest(rank, groups))

    def _packed(self, group: Group, paths: Mapping[int, str], adapter: Adapter, rank: int) -> PackedGroup:
        layers = len(group.paths)
        a = np.zeros((layers, rank, group.size), np.float32)
        b = np.zeros((layers, rank, group.lines), np.float32)
        m = np.full((layers, group.lines), np.nan, np.float32)
        for number, path in paths.items():
            part = adapter.parts[path]
            a[number, : part.rank], b[number, : part.rank] = part.a, part.b.T
            if part.m is not None:
                m[number] = part.m
        return PackedGroup(_cast(a, self.dtype), _cast(b, self.dtype), None if np.isnan(m).all() else m)

    def place(self, packed: Packed) -> Resident:
        """Copies a packed adapter to the device."""
        groups = {}
        for number, group in packed.groups.items():
            a, b = (_uncast(array, self.dtype) for array in (group.a, group.b))
            factors = None if group.m is None else self._factors(self.groups[number], a, b, group.m)
            groups[number] = (a, b, factors)
        mx.async_eval([array for group in groups.values() for array in group if array is not None])
        return Resident(packed.rank, groups, packed.nbytes)

    def _factors(self, group: Group, a: mx.array, b: mx.array, m: Array) -> mx.array:
        """By what the adapted lines are to be multiplied, for DoRA: (layers, lines)."""
        lengths = []
        for number, path in enumerate(group.paths):
            if np.isnan(m[number]).any():
                lengths.append(mx.ones((group.lines,)))
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
    lines, size = layer["weight"].shape
    kind = _kind(layer)
    assert kind is not None
    return Target(kind, lines, size * 32 // layer.bits if "scales" in layer else size)


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
    """The same layer, which asks its seat what to add."""

    def call(self: Any, x: mx.array) -> mx.array:
        adapted: mx.array = self.seat.linear(x, functools.partial(original.__call__, self), self.get("bias"))
        return adapted

    def embed(self: Any, tokens: mx.array) -> mx.array:
        adapted: mx.array = self.seat.looked_up(tokens, original.__call__(self, tokens))
        return adapted

    def as_linear(self: Any, x: mx.array) -> mx.array:
        adapted: mx.array = self.seat.linear(x, functools.partial(original.as_linear, self), None)
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


def _uncast(bits: Any, dtype: mx.Dtype) -> mx.array:
    array = mx.array(bits)
    return array.view(dtype) if dtype == mx.bfloat16 else array
