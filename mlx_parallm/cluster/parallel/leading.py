"""What rank 0 does with its part of a model, told to the other ranks as it is done. Engine thread only.

The scheduler, the runner and the sampler know nothing of it: what they call on the forward pass, the rows' caches, the
prefix cache and the adapters is sent as plain values, and then done. Objects that live on every rank have numbers; when
one is freed here, the others are told.
"""

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlx_parallm.cluster.parallel.channel import Array, Message
from mlx_parallm.host import to_numpy
from mlx_parallm.kv.batch import BatchCache, ForwardPass, RowContext, Verify
from mlx_parallm.kv.block_store import Side
from mlx_parallm.lora.layout import PackedAdapter
from mlx_parallm.lora.row_adapters import GroupedLoRA, Resident
from mlx_parallm.models.forward import Forward


class Staged(list[Any]):
    """The caches of prompts under way, which all ranks know by a number."""

    number = 0


class Leading:
    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._freed: deque[int] = deque()

    def send(self, name: str, *values: Any, arrays: Sequence[Array] = ()) -> None:
        freed = [self._freed.popleft() for _ in range(len(self._freed))]
        if freed:
            self._send(Message("free", (freed,)))
        self._send(Message(name, values, tuple(arrays)))

    def new_number(self) -> int:
        return next(self._numbers)

    def stage(self, caches: list[Any]) -> Staged:
        staged = Staged(caches)
        staged.number = self.new_number()
        self._follow(staged, staged.number)
        return staged

    def keep(self, thing: Any, number: int) -> None:
        self._known[thing] = number
        self._follow(thing, number)

    def number_of(self, thing: Any) -> int:
        return self._known[thing]

    def adapters_of(self, context: Any) -> list[int | None] | None:
        """The rows' adapters by their numbers."""
        if context is None:
            return None
        assert isinstance(context, GroupedLoRA), "a group serves adapters, and no images"
        return [None if row is None else self.number_of(row) for row in context.rows]

    def _follow(self, thing: Any, number: int) -> None:
        weakref.finalize(thing, self._freed.append, number).atexit = False


def staged_number(caches: Sequence[Any]) -> int:
    """Returns the number by which every rank knows the caches of some prompts."""
    assert isinstance(caches, Staged)
    return caches.number


def place_everywhere(leading: Leading, packed: PackedAdapter, place: Callable[[PackedAdapter], Resident]) -> Resident:
    """Every rank gets an adapter whole, and packs the part that is its own; placing it, they compute together."""
    assert packed.whole is not None
    parts = packed.whole.parts
    number = leading.new_number()
    arrays = [array for part in parts.values() for array in (part.a, part.b, part.m) if array is not None]
    leading.send("adapter", number, [(path, part.m is not None) for path, part in parts.items()], arrays=arrays)
    resident = place(packed)
    leading.keep(resident, number)
    return resident


class LedForward(Forward):
    """Forward passes over prompts; those of decode steps belong to the cache's `decode`."""

    def __init__(self, forward: Forward, leading: Leading) -> None:
        forward.forget()
        super().__init__(forward.module, forward.adapters, forward.in_order)
        self._leading = leading

    def __call__(self, tokens: mx.array, caches: list[Any], context: Any = None) -> mx.array:
        self._tell(tokens, caches, None, context)
        return super().__call__(tokens, caches, context)

    def at(self, tokens: mx.array, caches: list[Any], index: mx.array, context: Any = None) -> mx.array:
        if not self.cuts:
            return super().at(tokens, caches, index, context)  # which calls the one above
        self._tell(tokens, caches, to_numpy(index).tolist(), context)
        return super().at(tokens, caches, index, context)

    def decode(self, tokens: mx.array, caches: list[Any], context: Any = None) -> mx.array:
        """A pass that the other ranks know of."""
        return super().__call__(tokens, caches, context)

    def _tell(self, tokens: mx.array, caches: list[Any], index: list[int] | None, context: Any) -> None:
        adapters = self._leading.adapters_of(context)
        self._leading.send("prompt", staged_number(caches), index, adapters, arrays=[to_numpy(tokens)])


class LedCache:
    """The running rows' caches: what changes them is sent as it is called."""

    def __init__(self, cache: BatchCache, forward: LedForward, leading: Leading) -> None:
        self.verify: Verify | None = None  # drafts are rank 0's alone
        self._own = cache
        self._forward = forward
        self._leading = leading

    @property
    def described(self) -> str:
        return self._own.described

    @property
    def batches(self) -> bool:
        return self._own.batches

    @property
    def stages_many(self) -> bool:
        return self._own.stages_many

    @property
    def method(self) -> Any:
        return self._own.method

    @property
    def max_bytes(self) -> int:
        return self._own.max_bytes

    @max_bytes.setter
    def max_bytes(self, value: int) -> None:
        self._own.max_bytes = value

    @property
    def layers(self) -> Sequence[Any]:
        return self._own.layers

    @property
    def sides(self) -> Sequence[Side]:
        return self._own.sides

    @property
    def sizes(self) -> tuple[int, ...]:
        return self._own.sizes

    def adopt_sizes(self, sizes: Sequence[int]) -> None:
        self._own.adopt_sizes(sizes)

    @property
    def positions(self) -> int:
        return self._own.positions

    @property
    def free(self) -> int:
        return self._own.free

    def padding(self, rows: int) -> int:
        return self._own.padding(rows)

    @property
    def nbytes(self) -> int:
        return self._own.nbytes

    @property
    def smallest_bytes(self) -> int:
        return self._own.smallest_bytes

    def fits(self, rows: int, longest: int) -> bool:
        return self._own.fits(rows, longest)

    def max_length(self, rows: int) -> int:
        return self._own.max_length(rows)

    def pending(self) -> list[mx.array]:
        return self._own.pending()

    def check_integrity(self) -> None:
        self._own.check_integrity()

    def stage(self, rows: int, capacity: int) -> list[Any]:
        staged = self._leading.stage(self._own.stage(rows, capacity))
        self._leading.send("stage", staged.number, rows, capacity)
        return staged

    def join(self, staged: list[Any], prompts: Sequence[tuple[int, int]]) -> list[int]:
        self._leading.send("join", staged_number(staged), prompts)
        return self._own.join(staged, prompts)

    def decode(
        self, forward: ForwardPass, tokens: mx.array, lengths: Sequence[int], context: RowContext | None = None
    ) -> mx.array:
        self._leading.send("decode", lengths, self._leading.adapters_of(context), arrays=[to_numpy(tokens)])
        return self._own.decode(self._forward.decode, tokens, lengths, context)

    def expect(self, rows: int) -> None:
        self._leading.send("rows.expect", rows)
        self._own.expect(rows)

    def leave(self, position: int) -> None:
        self._leading.send("rows.leave", position)
        self._own.leave(position)

    def compact(self, longest: int) -> list[int] | None:
        self._leading.send("rows.compact", longest)
        return self._own.compact(longest)

    def reset(self) -> None:
        self._leading.send("rows.reset")
        self._own.reset()
