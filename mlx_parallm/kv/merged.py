"""Caches that are not plain keys and values: sliding windows, recurrent states, and mixtures of them.

`MergedCache` batches rows through mlx-lm's own batch caches: a row is prefilled alone in the caches that the model
makes for itself, then merged. `SerialCache` is for models whose caches mlx-lm can't batch: each row keeps its own,
and a step is one forward pass per row. Both serve the runner as `slots.SlotCache` does.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_parallm.kv.batch import ForwardPass, RowContext, Verify
from mlx_parallm.kv.block_store import Side


class _RowCaches:
    """The base of both caches here: positions, and a memory limit by measured size."""

    stages_many = False
    method = None
    verify: Verify | None = None
    sides: Sequence[Side] = ()  # states that can't be cut into blocks
    sizes: tuple[int, ...] = ()

    def __init__(self, make_cache: Callable[[], list[Any]], max_slots: int, max_bytes: int) -> None:
        self._make_cache = make_cache
        self._max_slots = max_slots
        self.max_bytes = max_bytes
        self._used: list[bool] = []
        self._bytes_per_row = 0.0  # the largest seen at a join
        self._bytes_per_token = 0.0

    @property
    def positions(self) -> int:
        return len(self._used)

    @property
    def free(self) -> int:
        return self._max_slots - sum(self._used)

    def padding(self, rows: int) -> int:
        return 0

    def stage(self, rows: int, capacity: int) -> list[Any]:
        assert rows == 1, "these caches are prefilled one prompt at a time"
        return self._make_cache()

    def fits(self, rows: int, longest: int) -> bool:
        return rows * max(self._bytes_per_row, longest * self._bytes_per_token) <= self.max_bytes

    def max_length(self, rows: int) -> int:
        if rows * self._bytes_per_row > self.max_bytes:
            return 0
        return int(self.max_bytes / (rows * self._bytes_per_token)) if self._bytes_per_token else 1 << 62

    @property
    def smallest_bytes(self) -> int:
        return int(self._bytes_per_row)

    def adopt_sizes(self, sizes: Sequence[int]) -> None:
        """Rows are appended one by one, in the same order everywhere."""

    def expect(self, rows: int) -> None:
        """Rows are appended one by one: there is nothing to prepare."""

    def leave(self, position: int) -> None:
        assert self._used[position], f"position {position} is free already"
        self._used[position] = False

    def reset(self) -> None:
        self._used = []

    def _entered(self, staged: list[Any], length: int) -> int:
        """Takes note of a row that was added, and returns its position."""
        size = sum(cache.nbytes for cache in staged)
        self._bytes_per_row = max(self._bytes_per_row, size)
        self._bytes_per_token = size / max(length, 256)
        self._used.append(True)
        return len(self._used) - 1


class MergedCache(_RowCaches):
    described = "in mlx-lm's batch caches"
    batches = True

    def __init__(self, make_cache: Callable[[], list[Any]], max_slots: int, max_bytes: int) -> None:
        super().__init__(make_cache, max_slots, max_bytes)
        self.layers: list[Any] = []

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def join(self, staged: list[Any], prompts: Sequence[tuple[int, int]]) -> list[int]:
        return [self._add(staged, length) for _, length in prompts]

    def _add(self, staged: list[Any], length: int) -> int:
        merged = [type(cache).merge([cache]) for cache in staged]
        if self.layers:
            for layer, other in zip(self.layers, merged, strict=True):
                layer.extend(other)
        else:
            self.layers = merged
        return self._entered(staged, length)

    def compact(self, longest: int) -> list[int] | None:
        """These caches can't reuse a row's place, so every leave ends in a filter."""
        if all(self._used):
            return None
        keep = [position for position, taken in enumerate(self._used) if taken]
        if keep:
            index = mx.array(keep)
            for layer in self.layers:
                layer.filter(index)
        else:
            self.layers = []
        self._used = [True] * len(keep)
        return keep

    def decode(
        self, forward: ForwardPass, tokens: mx.array, lengths: Sequence[int], context: RowContext | None = None
    ) -> mx.array:
        return forward(tokens[:, None], self.layers, context)[:, 0]

    def pending(self) -> list[mx.array]:
        return held_arrays(self.layers)

    def reset(self) -> None:
        super().reset()
        self.layers = []

    def check_integrity(self) -> None:
        assert bool(self.layers) == bool(self._used), "caches without rows, or rows without caches"


class SerialCache(_RowCaches):
    described = "computed one by one: this model can't be batched"
    batches = False

    def __init__(self, make_cache: Callable[[], list[Any]], max_slots: int, max_bytes: int) -> None:
        super().__init__(make_cache, max_slots, max_bytes)
        self._rows: list[list[Any]] = []

    @property
    def layers(self) -> Sequence[Any]:
        return self._rows

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for row in self._rows for cache in row)

    def join(self, staged: list[Any], prompts: Sequence[tuple[int, int]]) -> list[int]:
        self._rows += [[copied(cache) for cache in staged] for _ in prompts]
        return [self._entered(staged, length) for _, length in prompts]

    def compact(self, longest: int) -> list[int] | None:
        if all(self._used):
            return None
        keep = [position for position, taken in enumerate(self._used) if taken]
        self._rows = [self._rows[position] for position in keep]
        self._used = [True] * len(keep)
        return keep

    def decode(
        self, forward: ForwardPass, tokens: mx.array, lengths: Sequence[int], context: RowContext | None = None
    ) -> mx.array:
        contexts = [None if context is None else context.row(i) for i in range(len(self._rows))]
        return mx.concatenate(
            [forward(tokens[i : i + 1, None], row, contexts[i])[:, 0] for i, row in enumerate(self._rows)]
        )

    def pending(self) -> list[mx.array]:
        return [array for row in self._rows for array in held_arrays(row)]

    def reset(self) -> None:
        super().reset()
        self._rows = []

    def check_integrity(self) -> None:
        assert len(self._rows) == len(self._used)


def copied(cache: Any) -> Any:
    """A cache of its own for each choice of one prompt: memory is shared until either is written."""
    return copy.deepcopy(cache)


def state_arrays(caches: list[Any]) -> list[mx.array]:
    """Every array held by a list of caches, for evaluation."""
    return [array for _, array in tree_flatten([cache.state for cache in caches]) if isinstance(array, mx.array)]


def held_arrays(caches: Iterable[Any]) -> list[mx.array]:
    """The arrays themselves that caches hold, not views of them, which would keep them from being written in place."""
    found: list[mx.array] = []
    waiting = [value for cache in caches for value in (vars(cache).values() if hasattr(cache, "__dict__") else ())]
    while waiting:
        value = waiting.pop()
        if isinstance(value, mx.array):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif hasattr(value, "state") and hasattr(value, "__dict__"):  # a cache made of caches
            waiting += vars(value).values()
    return found
