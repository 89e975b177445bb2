"""What the runner and the rows' caches ask of each other: `BatchCache`, and the passes that go over it."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import mlx.core as mx

from mlx_parallm.kv.block_store import Side


class RowContext(Protocol):
    """The context of a pass beside its tokens and caches: which adapter each row has."""

    def row(self, number: int) -> "RowContext":
        """Returns the context of a pass over one of the rows."""
        ...


class Attend(Protocol):
    """A kernel for a step's attention, which puts the new tokens in place first; None where it can't."""

    def __call__(
        self,
        queries: mx.array,  # (B, H, 1, D)
        keys: mx.array,  # (S, K, C, D)
        values: mx.array,
        fresh: tuple[mx.array, mx.array],  # (B, K, 1, D): the rows' new ones
        offsets: mx.array,  # (B,): how many tokens each row has
        scale: float,
        slots: mx.array | None = None,  # (B,): in which each row is; None: in order
        /,
    ) -> mx.array | None: ...


# The same over slots that hold the new ones already: queries, slots' keys and values, how many tokens each row had, of
# more rows maybe, the scale.
AttendWritten = Callable[[mx.array, mx.array, mx.array, mx.array, float], mx.array | None]


# The same as `Attend` of queries, keys and values side by side, (B, E), as they are before RoPE: how many heads of
# queries, slots' keys and values, how many tokens each row has, how to rotate, norms of heads or None, the scale.
RotateAndAttend = Callable[[mx.array, int, mx.array, mx.array, mx.array, Any, Any, float], mx.array | None]


class Traceable(RowContext, Protocol):
    """The same, where passes are traced."""

    @property
    def form(self) -> Hashable:
        """Equal for those that a traced pass can take in turn."""
        ...

    def arrays(self) -> list[mx.array]: ...

    def maker(self) -> "Callable[[Sequence[mx.array]], RowContext]":
        """Makes the same of other arrays, given in the order of `arrays`."""
        ...


# A step over drafted tokens too: the pass, tokens (S + E,), how many tokens come before each, the slots of the last E,
# the context -> logits (S + E, V). A slot's drafts follow its own token, in order.
Verify = Callable[["ForwardPass", mx.array, Sequence[int], Sequence[int], RowContext | None], mx.array]


class ForwardPass(Protocol):
    """A pass through the model: tokens (B, T), caches -> logits (B, T, V)."""

    def __call__(self, tokens: mx.array, caches: list[Any], context: Any = None, /) -> mx.array: ...


class BatchCache(Protocol):
    """The running rows' caches as the runner needs them, whatever the model keeps in them."""

    max_bytes: int  # may change while rows run: those beyond it are preempted
    verify: Verify | None  # computes several tokens of a row in one step; None where that can't be done

    @property
    def described(self) -> str:
        """The way in which rows run, for people."""
        ...

    @property
    def batches(self) -> bool:
        """Whether a step computes its rows together."""
        ...

    @property
    def stages_many(self) -> bool:
        """Whether several prompts can be prefilled in one pass."""
        ...

    @property
    def method(self) -> Any:
        """The `SlotMethod` of rows that run in slots; None of others, of which nothing is to be tuned."""
        ...

    @property
    def layers(self) -> Sequence[Any]:
        """The caches of the running rows, one for each layer."""
        ...

    @property
    def sides(self) -> Sequence[Side]:
        """Each layer's keys and values, where they can be cut into blocks; else none. Known once a row has joined."""
        ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes by which places for rows are reckoned; ranks that share a model must have the same."""
        ...

    def adopt_sizes(self, sizes: Sequence[int]) -> None:
        """Reckons with another rank's."""
        ...

    def padding(self, rows: int) -> int:
        """Returns how many rows that belong to nobody a step over so many computes as well."""
        ...

    @property
    def positions(self) -> int: ...  # rows in the batch, free ones among them

    @property
    def free(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def stage(self, rows: int, capacity: int) -> list[Any]:
        """Caches for prefilling `rows` prompts together, one per layer."""
        ...

    def fits(self, rows: int, longest: int) -> bool:
        """Returns whether that many rows, the longest of that many tokens, stay within the memory limit."""
        ...

    def max_length(self, rows: int) -> int:
        """The longest that `rows` rows may get when nothing else runs."""
        ...

    @property
    def smallest_bytes(self) -> int:
        """The bytes of the shortest row that can run; known once a row has joined."""
        ...

    def expect(self, rows: int) -> None:
        """Takes note of how many rows will soon run, so that growth happens once."""
        ...

    def join(self, staged: list[Any], prompts: Sequence[tuple[int, int]]) -> list[int]:
        """Copies prefilled prompts, (place in `staged`, length) each, into the batch and returns their positions."""
        ...

    def leave(self, position: int) -> None: ...

    def compact(self, longest: int) -> list[int] | None:
        """Drops free positions when that pays; returns the kept old positions in their new order."""
        ...

    def decode(
        self, forward: ForwardPass, tokens: mx.array, lengths: Sequence[int], context: RowContext | None = None
    ) -> mx.array:
        """One token per row: tokens (S,), cached lengths (S,) -> logits (S, V).

        They must be on their way to be computed before anything else is asked: the step may write in place.
        """
        ...

    def pending(self) -> list[mx.array]:
        """Arrays that a step has changed and that its logits may not depend on: to be evaluated with it.

        A model may never read some of them, such as an offset; left alone, each step would keep a buffer alive.
        """
        ...

    def reset(self) -> None:
        """Forgets all rows and frees their memory."""
        ...

    def check_integrity(self) -> None: ...
