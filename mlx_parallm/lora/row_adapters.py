"""Which adapter each row of a pass has, and what that adds to a layer's output.

Two ways. `StackedLoRA` is for devices where passes are traced and kernels cost: the adapters that a batch needs stand
side by side, as one pair of thin matrices per layer; a row's inputs go through all of them, a mask keeps what is its
own, and one more product brings it back. Layers of one shape share an array, so that adapters come and go in a few
large operations. `GroupedLoRA` is for the CPU, where putting them together would cost more than it saves: rows are
gathered by their adapter. Engine thread only.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from mlx_parallm.host import numpy_view

Arrays = tuple[mx.array, mx.array, mx.array | None]  # a, b, and DoRA's factors
Groups = dict[int, Arrays]  # of the layout's groups of layers


@dataclass(slots=True, eq=False, weakref_slot=True)
class Resident:
    """An adapter on the device: of each group a (L, rank, K), b (L, rank, N), factors (L, N); N is out_features."""

    rank: int
    groups: Groups
    nbytes: int = 0


Rows = Sequence[Resident | None]


class RowAdapters(Protocol):
    """The adapters of a pass's rows."""

    def has(self, group: int) -> bool:
        """Returns whether any of them changes these layers."""
        ...

    def without_dora(self, group: int) -> bool:
        """Returns whether none of them changes these layers by DoRA, which has factors."""
        ...

    def add_to_linear(self, group: int, number: int, x: mx.array, y: mx.array, bias: mx.array | None) -> mx.array:
        """A linear layer's output for x (B, T, size), which is y (B, T, out_features) without adapters."""
        ...

    def add_to_embedding(self, group: int, number: int, tokens: mx.array, y: mx.array) -> mx.array:
        """An embedding's vectors of tokens (B, T), which are y (B, T, size) without adapters."""
        ...

    def row(self, number: int) -> "RowAdapters":
        """Returns the adapters of a pass over one of the rows."""
        ...


class TracedLoRA(RowAdapters, Protocol):
    """The same for passes that are traced."""

    @property
    def form(self) -> Hashable:
        """Equal for those that a traced pass can take in turn."""
        ...

    def arrays(self) -> list[mx.array]: ...

    def maker(self) -> "Callable[[Sequence[mx.array]], RowAdapters]":
        """Makes the same of other arrays, given in the order of `arrays`; holds on to none of this one's."""
        ...


class Base:
    """No row has an adapter: the base model alone."""

    def has(self, group: int) -> bool:
        return False

    def without_dora(self, group: int) -> bool:
        return True

    def add_to_linear(self, group: int, number: int, x: mx.array, y: mx.array, bias: mx.array | None) -> mx.array:
        return y

    def add_to_embedding(self, group: int, number: int, tokens: mx.array, y: mx.array) -> mx.array:
        return y

    def row(self, number: int) -> "Base":
        return self


BASE = Base()


@dataclass(slots=True, eq=False)
class AdapterStack:
    """The adapters of a batch, side by side.

    For each group a (L, C, K), b (L, C, N), factors (L, adapters + 1, N), where N is out_features. C is
    a power of two, and no less than `columns`: a traced pass is for one width, so there must be few.
    """

    members: tuple[Resident, ...]
    columns: int = 0
    groups: Groups = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.columns = width_of(self.members, self.columns)
        for number in sorted({number for member in self.members for number in member.groups}):
            self.groups[number] = self._stacked(number)

    def _stacked(self, number: int) -> Arrays:
        first_a, first_b, _ = next(member.groups[number] for member in self.members if number in member.groups)
        layers, _, out_features = first_b.shape
        ones = mx.ones((layers, 1, out_features), first_b.dtype)
        a = []
        b = []
        factors = [ones]
        for member in self.members:
            part = member.groups.get(number)
            if part is None:
                a.append(mx.zeros((layers, member.rank, first_a.shape[2]), first_a.dtype))
                b.append(mx.zeros((layers, member.rank, out_features), first_b.dtype))
                factors.append(ones)
            else:
                a.append(part[0])
                b.append(part[1])
                factors.append(ones if part[2] is None else part[2][:, None])
        scaled = any(factor is not ones for factor in factors)
        if unused := self.columns - sum(member.rank for member in self.members):
            a.append(mx.zeros((layers, unused, first_a.shape[2]), first_a.dtype))
            b.append(mx.zeros((layers, unused, out_features), first_b.dtype))
        sides = (a[0], b[0]) if len(a) == 1 else (mx.concatenate(a, axis=1), mx.concatenate(b, axis=1))
        return *sides, mx.concatenate(factors, axis=1) if scaled else None

    def for_rows(self, rows: Rows, masked: bool = False) -> "TracedLoRA":
        """`masked`: also where all columns are every row's, so that a traced pass is the same for both."""
        max_rank = max(member.rank for member in self.members)
        spans = mx.array(self.spans(rows))
        return StackedLoRA(self.groups, self.mask(rows, masked), self.numbers(rows), spans, max_rank)

    def mask(self, rows: Rows, always: bool = False) -> mx.array | None:
        """(B, 1, C): which columns are a row's own; None where all are every row's."""
        if not always and len(self.members) == 1 and all(row is self.members[0] for row in rows):
            return None
        first_a = next(iter(self.groups.values()))[0]
        mask = np.zeros((len(rows), 1, first_a.shape[1]), np.bool_)
        for row_mask, (begin, rank) in zip(mask, self.spans(rows), strict=True):
            row_mask[:, begin : begin + rank] = True
        return mx.array(mask)

    def spans(self, rows: Rows) -> Any:
        """(B, 2): where each row's own columns begin, and how many there are."""
        begins = dict(zip(self.members, np.cumsum([0, *(member.rank for member in self.members)]), strict=False))
        return np.array([(0, 0) if row is None else (begins[row], row.rank) for row in rows], np.int32)

    def numbers(self, rows: Rows) -> mx.array:
        """(B,): each row's place among the factors; 0 is the base."""
        return mx.array([0 if row is None else 1 + self.members.index(row) for row in rows], mx.int32)


def width_of(members: Sequence[Resident], least: int = 0) -> int:
    return _power_of_two(max(least, sum(member.rank for member in members)))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True, slots=True, eq=False)
class StackedLoRA:
    """Rows over a stack of adapters, each of which has its own columns of it, for passes that are traced."""

    groups: Groups = field(default_factory=dict)
    mask: mx.array | None = None  # (B, 1, C)
    numbers: mx.array | None = None  # (B,)
    spans: mx.array | None = None  # (B, 2): where each row's own columns begin, and how many there are
    max_rank: int = 0  # of the adapters

    def has(self, group: int) -> bool:
        return group in self.groups

    def without_dora(self, group: int) -> bool:
        return group not in self.groups or self.groups[group][2] is None

    def add_to_linear(self, group: int, number: int, x: mx.array, y: mx.array, bias: mx.array | None) -> mx.array:
        a, b, factors = self.groups[group]
        z = self._masked(x @ _of_layer(a, number).T) @ _of_layer(b, number)
        if factors is None:
            return y + z
        assert self.numbers is not None
        return _scaled(y, z, bias, _of_layer(factors, number)[self.numbers][:, None])  # (B, 1, out_features)

    def add_to_embedding(self, group: int, number: int, tokens: mx.array, y: mx.array) -> mx.array:
        a, b, factors = self.groups[group]
        z = self._masked(_embedding_columns(_of_layer(b, number), tokens)) @ _of_layer(a, number)
        if factors is None:
            return y + z
        assert self.numbers is not None
        flat = _of_layer(factors, number).reshape(-1)  # (adapters + 1) * out_features
        first = (self.numbers * factors.shape[2])[:, None]
        return _scaled(y, z, None, flat[first + tokens][..., None])

    def _masked(self, z: mx.array) -> mx.array:
        return z if self.mask is None else mx.where(self.mask, z, 0.0)  # what is not its own may be infinite

    @property
    def form(self) -> Hashable:
        """Equal for those that a traced pass can take in turn."""
        groups = tuple((number, a.shape, factors is None) for number, (a, _, factors) in self.groups.items())
        return groups, self.mask is None, self.spans is None, _power_of_two(max(64, self.max_rank))

    def arrays(self) -> list[mx.array]:
        every = [array for group in self.groups.values() for array in group] + [self.mask, self.numbers, self.spans]
        return [array for array in every if array is not None]

    def maker(self) -> "Callable[[Sequence[mx.array]], StackedLoRA]":
        """Makes the same of other arrays, given in the order of `arrays`; holds on to none of this one's."""
        factored = {number: factors is not None for number, (_, _, factors) in self.groups.items()}
        optional = [array is not None for array in (self.mask, self.numbers, self.spans)]
        max_rank = self.max_rank

        def make(arrays: Sequence[mx.array]) -> StackedLoRA:
            rest = iter(arrays)
            groups = {number: (next(rest), next(rest), next(rest) if has else None) for number, has in factored.items()}
            mask, numbers, spans = (next(rest) if has else None for has in optional)
            return StackedLoRA(groups, mask, numbers, spans, max_rank)

        return make

    def row(self, number: int) -> "StackedLoRA":
        mask, numbers, spans = (
            None if one is None else one[number : number + 1] for one in (self.mask, self.numbers, self.spans)
        )
        return StackedLoRA(self.groups, mask, numbers, spans, self.max_rank)


class GroupedLoRA:
    """Rows gathered by their adapter, for the CPU."""

    def __init__(self, rows: Rows) -> None:
        self.rows = list(rows)
        self._members: dict[Resident | None, list[int]] = {}
        for number, row in enumerate(rows):
            self._members.setdefault(row, []).append(number)
        self._index = {member: mx.array(numbers) for member, numbers in self._members.items()}
        order = [number for numbers in self._members.values() for number in numbers]
        self._to_batch_order = mx.array(np.argsort(order))
        self._row_groups: dict[tuple[int, int], Any] = {}
        parts = [part for member in self._members if member is not None for part in member.groups.items()]
        self._groups = {group for group, _ in parts}
        self._dora_groups = {group for group, arrays in parts if arrays[2] is not None}

    def has(self, group: int) -> bool:
        return group in self._groups

    def without_dora(self, group: int) -> bool:
        return group not in self._dora_groups

    def add_to_linear(self, group: int, number: int, x: mx.array, y: mx.array, bias: mx.array | None) -> mx.array:
        def adapted(part: Arrays, x: mx.array, y: mx.array) -> mx.array:
            a, b, factors = part
            z = (x @ _of_layer(a, number).T) @ _of_layer(b, number)
            return y + z if factors is None else _scaled(y, z, bias, _of_layer(factors, number))

        return self._gathered(group, x, y, adapted)

    def add_to_embedding(self, group: int, number: int, tokens: mx.array, y: mx.array) -> mx.array:
        def adapted(part: Arrays, tokens: mx.array, y: mx.array) -> mx.array:
            a, b, factors = part
            z = _embedding_columns(_of_layer(b, number), tokens) @ _of_layer(a, number)
            return y + z if factors is None else _scaled(y, z, None, _of_layer(factors, number)[tokens][..., None])

        return self._gathered(group, tokens, y, adapted)

    def _parts(self, group: int) -> dict[Resident | None, Arrays | None]:
        return {member: None if member is None else member.groups.get(group) for member in self._members}

    def _gathered(
        self, group: int, x: mx.array, y: mx.array, adapted: Callable[[Arrays, mx.array, mx.array], mx.array]
    ) -> mx.array:
        parts = self._parts(group)
        if len(parts) == 1:
            part = next(iter(parts.values()))
            return y if part is None else adapted(part, x, y)
        pieces = []
        for member, part in parts.items():
            index = self._index[member]
            pieces.append(y[index] if part is None else adapted(part, x[index], y[index]))
        return mx.concatenate(pieces)[self._to_batch_order]

    def row_groups(self, group: int, tokens: int = 1) -> Any:
        """(count, 7): where a and b of some rows' adapter lie in memory, its rank, and up to four rows, or -1.

        `tokens`: of each row, which count as so many rows.
        """
        if (group, tokens) not in self._row_groups:
            groups = []
            for member, part in self._parts(group).items():
                numbers = [tokens * row + token for row in self._members[member] for token in range(tokens)]
                weights = [0, 0, 0] if part is None or member is None else [*map(_address, part[:2]), member.rank]
                for first in range(0, len(numbers), 4):
                    four = numbers[first : first + 4]
                    groups.append([*weights, *four, *[-1] * (4 - len(four))])
            self._row_groups[group, tokens] = np.array(groups, np.int64)
        return self._row_groups[group, tokens]

    def row(self, number: int) -> "GroupedLoRA":
        return GroupedLoRA(self.rows[number : number + 1])


def _of_layer(array: mx.array, number: int) -> mx.array:
    """Returns one layer's part of a group's array: a view, where `array[number]` would copy it."""
    return array[number : number + 1].reshape(array.shape[1:])


def _address(array: mx.array) -> int:
    view = numpy_view(array)
    assert view.flags.c_contiguous
    address: int = view.__array_interface__["data"][0]
    return address


def _embedding_columns(b: mx.array, tokens: mx.array) -> mx.array:
    """(rank, out_features), (B, T) -> (B, T, rank)"""
    return mx.take(b, tokens, axis=1).transpose(1, 2, 0)


def _scaled(y: mx.array, z: mx.array, bias: mx.array | None, factor: mx.array) -> mx.array:
    return factor * (y + z) if bias is None else factor * (y - bias + z) + bias
