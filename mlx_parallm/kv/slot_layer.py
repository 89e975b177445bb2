"""One layer's slots, as mlx-lm's models see them: where a step's tokens are written, and how they are attended to.

`slots.SlotCache` makes them; they share the state of the step under way.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_parallm.devices.profile import SLOT_STEPS
from mlx_parallm.kv.batch import Attend, AttendWritten, RotateAndAttend

LEAST_OFFSETS = 8


@dataclass(frozen=True, slots=True)
class SlotMethod:
    """How a device computes over slots."""

    view_step: int  # attention reads whole multiples of so many tokens
    compiled: bool = False  # trace a decode step once per shape, instead of building its graph every time
    mask_rank: int = 4  # axes of an attention mask
    in_place: bool = False  # prompts join by a CUDA kernel
    attend: Attend | None = None  # attention over a layer's slots in one kernel, which also writes there
    attend_written: AttendWritten | None = None  # the same once a step's tokens are written
    rotate_and_attend: RotateAndAttend | None = None  # the same of queries and keys before RoPE
    slot_steps: tuple[int, ...] = SLOT_STEPS
    pass_rows: tuple[int, ...] = ()  # numbers of rows that a pass computes, those without a slot too; (): the slots

    def padding(self, rows: int) -> int:
        """Returns how many rows without a slot a pass over so many has."""
        return next((count - rows for count in self.pass_rows if count >= rows), 0)


class SlotStep:
    """The state that all layers share in one decode step: where each row writes, and how far is read."""

    __slots__ = (
        "_mask_shape",
        "attend",
        "attend_written",
        "index",
        "length",
        "mask",
        "offset",
        "offsets",
        "padding",
        "rotate_and_attend",
        "slots",
    )

    def __init__(self, mask_rank: int, method: SlotMethod) -> None:
        self.attend = method.attend
        self.attend_written = method.attend_written
        self.rotate_and_attend = method.rotate_and_attend
        self._mask_shape = (-1, *[1] * (mask_rank - 2))
        self.offset = self.offsets = self.index = self.mask = mx.zeros((0,), mx.int32)
        self.length = 0
        self.padding = 0  # rows at the end that have no slot
        self.slots: mx.array | None = None  # in which each token is, where rows have several; else they are in order

    def set(self, offset: mx.array, length: int, padding: int, slots: mx.array | None = None) -> None:
        self.offset = offset
        self.padding = padding
        self.slots = slots
        missing = LEAST_OFFSETS - len(offset) if self.attend_written is not None else 0
        self.offsets = mx.pad(offset, (0, missing)) if missing > 0 else offset  # for kernels, which want so many
        self.index = offset[:, None, None, None]
        self.length = length
        self.mask = self.masked(mx.arange(length) <= offset[:, None])

    def masked(self, visible: mx.array) -> mx.array:
        """(S, L) -> (S, 1, 1, L), or with one axis more for models that keep grouped heads apart."""
        return visible.reshape(*self._mask_shape, visible.shape[-1])


class SlotLayer:
    """One layer's slots, in the shape of an mlx-lm cache."""

    __slots__ = ("_before", "_step", "keys", "values")

    def __init__(self, step: SlotStep) -> None:
        self._step = step
        self._before: tuple[mx.array, ...] = ()  # for a kernel: the slots without the step's tokens, and those tokens
        self.keys = self.values = mx.zeros((0, 1, 0, 1))

    @property
    def offset(self) -> mx.array:
        return self._step.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        step = self._step
        self._before = (self.keys, self.values, keys, values) if step.attend is not None else ()
        self.keys = self._written(self.keys, keys)
        self.values = self._written(self.values, values)
        return self.keys[:, :, : step.length], self.values[:, :, : step.length]

    def _written(self, slots: mx.array, new: mx.array) -> mx.array:
        """(S, K, C, D), (S + E, K, 1, D) -> (S, K, C, D)"""
        step = self._step
        rows = slots.shape[0]
        written = mx.put_along_axis(slots, step.index[:rows], new[:rows], axis=2)
        if step.slots is None:
            return written
        heads = mx.arange(slots.shape[1])
        end = len(step.slots)
        written[step.slots[rows:, None], heads, step.offset[rows:end, None]] = new[rows:end, :, 0]
        return written

    def attend(self, queries: mx.array, scale: float, mask: Any) -> mx.array | None:
        """Attention over this layer in one kernel; None where it must go through the mask."""
        step = self._step
        if mask is not step.mask:
            return None
        padded = step.padding > 0
        if step.attend_written is not None and step.slots is None and not padded:
            return step.attend_written(queries, self.keys, self.values, step.offsets, scale)
        attended = None
        if step.attend is not None and self._before:
            keys, values, *fresh = self._before
            attended = step.attend(queries, keys, values, (fresh[0], fresh[1]), step.offset, scale, step.slots)
            if attended is not None:  # and put the new tokens in place: what was to put them there is never computed
                self.keys = keys
                self.values = values
            self._before = ()
        return (
            self._attend_rows(queries, scale) if attended is None and (padded or step.slots is not None) else attended
        )

    def rotate_and_attend(
        self, y: mx.array, heads: int, rope: Any, norms: Any, scale: float, mask: Any
    ) -> mx.array | None:
        """Attention of a step whose queries, keys and values lie side by side, (B, E), as they are before RoPE, in one
        kernel, which also writes them here; None, with nothing written, where it must go another way."""
        step = self._step
        if step.rotate_and_attend is None or mask is not step.mask or step.slots is not None:
            return None
        return step.rotate_and_attend(y, heads, self.keys, self.values, step.offset, rope, norms, scale)

    def _attend_rows(self, queries: mx.array, scale: float) -> mx.array:
        """Attention of all the tokens of a step, (S + E, H, 1, D), once they are written: of the slots' own, of drafts,
        and nothing for rows that have no slot."""
        step = self._step
        rows = self.keys.shape[0]
        end = len(queries) - step.padding
        keys = self.keys[:, :, : step.length]
        values = self.values[:, :, : step.length]
        attend = mx.fast.scaled_dot_product_attention
        attended = [self._attend_own(queries[:rows], keys, values, scale)]
        if step.slots is not None:
            drafts = step.slots[rows:]
            attended.append(
                attend(queries[rows:end], keys[drafts], values[drafts], scale=scale, mask=step.mask[rows:end])
            )
        if step.padding:
            attended.append(mx.zeros((step.padding, *queries.shape[1:3], values.shape[-1]), queries.dtype))
        return mx.concatenate(attended)

    def _attend_own(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        step = self._step
        if step.attend_written is not None:
            attended = step.attend_written(queries, self.keys, self.values, step.offsets, scale)
            if attended is not None:
                return attended
        mask = step.mask[: len(queries)]
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)

    def places(self, mask: Any) -> tuple[mx.array, mx.array, mx.array, mx.array | None] | None:
        """Keys and values that a kernel may write a step's tokens to, where, and their slots where those are not in
        order; None where it must go by the mask."""
        step = self._step
        if step.attend is None or mask is not step.mask or step.padding:
            return None
        return self.keys, self.values, step.offset, step.slots

    def make_mask(self, tokens: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        assert tokens == 1, "slots decode one token a row"
        if not window_size:
            return self._step.mask
        near = mx.arange(self._step.length) > (self._step.offset - window_size)[:, None]
        return self._step.mask & self._step.masked(near)
