"""Keys and values of full-attention models: a dense buffer per layer, a row per slot, an offset per row.

`PromptLayer` holds the keys and values of prompts while they are prefilled, apart from the batch, so that a long
prompt costs the running rows nothing before it joins. `SlotCache` is the batch: `(slots, kv_heads, capacity,
head_dim)` per layer. A join copies the joining row alone; a leave copies nothing. The number of slots and the
capacity grow in steps. Both are made by the runner and handed to mlx-lm's models as their cache.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import mlx.core as mx

from mlx_parallm.devices.cuda_placing import Placer, placer
from mlx_parallm.kv.batch import ForwardPass, RowContext, Traceable, Verify
from mlx_parallm.kv.block_store import Side, groups_of
from mlx_parallm.kv.prompt_layer import PromptLayer
from mlx_parallm.kv.slot_layer import SlotLayer, SlotMethod, SlotStep

CAPACITY_STEP = 256
MAX_TRACES = 64


class SlotCache:
    """The running rows of a full-attention model."""

    described = "in slots of one batch"
    batches = True
    stages_many = True

    def __init__(
        self,
        layers: int,
        max_slots: int,
        max_bytes: int,
        method: SlotMethod,
    ) -> None:
        self._method = method
        self.verify: Verify | None = self._decode
        # By how far attention reads, drafts, rows without a slot, a context's form.
        self._traces: dict[tuple[int, int, int, Hashable], Any] = {}
        self._step = SlotStep(method.mask_rank, method)
        self.layers = [SlotLayer(self._step) for _ in range(layers)]
        self._used: list[bool] = []
        self._capacity = 0
        self._longest = 0
        self._expected = 0
        self._max_slots = max_slots
        self.max_bytes = max_bytes
        self._idle_steps = 0
        self.bytes_per_token = 0  # of one row, all layers; known once a row has joined
        self.sides: list[Side] = []  # each layer's keys and values; known from then on too
        self._groups: list[list[int]] = []  # sides of one shape
        self._placers: list[Placer | None] = []

    @property
    def method(self) -> SlotMethod:
        return self._method

    def adopt_method(self, method: SlotMethod) -> None:
        """Goes on in another way, from the next row on: nothing may run."""
        assert not self._used, "rows run"
        self._method = method

    def padding(self, rows: int) -> int:
        return self._method.padding(rows)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.bytes_per_token, self.max_bytes

    def adopt_sizes(self, sizes: Sequence[int]) -> None:
        self.bytes_per_token, self.max_bytes = sizes

    @property
    def positions(self) -> int:
        return len(self._used)

    @property
    def free(self) -> int:
        return self._max_slots - sum(self._used)

    @property
    def nbytes(self) -> int:
        return len(self._used) * self._capacity * self.bytes_per_token

    def stage(self, rows: int, capacity: int) -> list[Any]:
        return [PromptLayer(capacity) for _ in self.layers]

    def fits(self, rows: int, longest: int) -> bool:
        return longest <= self.max_length(rows)

    def max_length(self, rows: int) -> int:
        per_token = self._slots_for(rows) * self.bytes_per_token
        return self.max_bytes // per_token // CAPACITY_STEP * CAPACITY_STEP if per_token else 1 << 62

    @property
    def smallest_bytes(self) -> int:
        return CAPACITY_STEP * self._slots_for(1) * self.bytes_per_token

    def expect(self, rows: int) -> None:
        self._expected = rows

    def join(self, staged: list[Any], prompts: Sequence[tuple[int, int]]) -> list[int]:
        longest = max(self._longest, *(length + 1 for _, length in prompts))
        taken = sum(self._used)
        if taken + len(prompts) > len(self._used):
            expected = max(taken + len(prompts), self._expected)
            slots = self._slots_for(expected if self.fits(expected, longest) else taken + len(prompts))
            self._resize(slots, longest, staged)
        elif longest > self._capacity:
            self._resize(len(self._used), longest, staged)
        self._longest = longest
        positions = [position for position, used in enumerate(self._used) if not used][: len(prompts)]
        for position in positions:
            self._used[position] = True
        chosen = [(source, position, length) for (source, length), position in zip(prompts, positions, strict=True)]
        sides = self._state()
        others = [side for layer in staged for side in (layer.keys, layer.values)]
        for members, place in zip(self._groups, self._placers, strict=True):
            if place is not None:
                place([others[i] for i in members], [sides[i] for i in members], chosen)
            else:
                for source, position, length in chosen:
                    for i in members:
                        sides[i][position : position + 1, :, :length] = others[i][source : source + 1, :, :length]
        return positions

    def leave(self, position: int) -> None:
        assert self._used[position], f"slot {position} is free already"
        self._used[position] = False

    def compact(self, longest: int) -> list[int] | None:
        used = [position for position, taken in enumerate(self._used) if taken]
        if not used:
            return self._clear() if self._used else None
        # Patience: a hole is usually filled by the next request, for nothing. Growth would copy the holes too.
        growing = longest > self._capacity
        needed = self._slots_for(len(used) if growing else max(len(used), self._expected))
        self._idle_steps = self._idle_steps + 1 if needed < len(self._used) else 0
        if not self._idle_steps or (self._idle_steps < 8 and not growing):
            return None
        self._idle_steps = 0
        keep = used + [position for position, taken in enumerate(self._used) if not taken]
        keep = keep[:needed]
        index = mx.array(keep)
        for layer in self.layers:
            layer.keys = layer.keys[index]
            layer.values = layer.values[index]
        self._used = [self._used[position] for position in keep]
        return keep

    def decode(
        self, forward: ForwardPass, tokens: mx.array, lengths: Sequence[int], context: RowContext | None = None
    ) -> mx.array:
        return self._decode(forward, tokens, lengths, (), context)

    def _decode(
        self,
        forward: ForwardPass,
        tokens: mx.array,
        lengths: Sequence[int],
        slots: Sequence[int],
        context: RowContext | None,
    ) -> mx.array:
        self._longest = longest = max(lengths) + 1
        if longest > self._capacity:
            self._resize(len(self._used), longest, None)
        length = min(_round_up(longest, self._method.view_step), self._capacity)
        padding = self._method.padding(len(lengths))
        offset = mx.array([*lengths, *[0] * padding], mx.int32)
        if padding:
            tokens = mx.pad(tokens, (0, padding))
        places = [mx.array([*range(len(self._used)), *slots], mx.int32)] if slots else []
        if not self._method.compiled:
            self._step.set(offset, length, padding, *places)
            return forward(tokens[:, None], self.layers, context)[: len(lengths), 0]
        traced = cast(Traceable | None, context)
        key = (length, len(slots), padding, None if traced is None else traced.form)
        if key not in self._traces:
            if len(self._traces) >= MAX_TRACES:
                del self._traces[next(iter(self._traces))]
            self._traces[key] = mx.compile(self._traceable(forward, length, padding, traced))
        arrays = [] if traced is None else traced.arrays()
        logits, state = self._traces[key](tokens, [offset, *places], self._state(), arrays)
        self._set_state(state)
        result: mx.array = logits
        return result

    def _traceable(
        self, forward: ForwardPass, length: int, padding: int, context: Traceable | None
    ) -> Callable[..., Any]:
        make = None if context is None else context.maker()

        def step(
            tokens: mx.array, places: list[mx.array], state: list[mx.array], context_arrays: list[mx.array]
        ) -> tuple[mx.array, list[mx.array]]:
            self._set_state(state)
            offset, *slots = places
            self._step.set(offset, length, padding, *slots)
            logits = forward(tokens[:, None], self.layers, make and make(context_arrays))
            return logits[: len(tokens) - padding, 0], self._state()

        return step

    def _state(self) -> list[mx.array]:
        return [array for layer in self.layers for array in (layer.keys, layer.values)]

    def _set_state(self, state: list[mx.array]) -> None:
        for layer, keys, values in zip(self.layers, state[::2], state[1::2], strict=True):
            layer.keys = keys
            layer.values = values

    def check_integrity(self) -> None:
        assert len(self._used) <= self._max_slots
        for layer in self.layers:
            assert layer.keys.shape[0] == len(self._used), "a layer has lost or gained rows"
            assert not self._used or layer.keys.shape[2] == self._capacity, "a layer's capacity differs"

    def _slots_for(self, rows: int) -> int:
        return min(next((step for step in self._method.slot_steps if step >= rows), self._max_slots), self._max_slots)

    def _resize(self, slots: int, longest: int, staged: list[Any] | None) -> None:
        """Buffers for `longest` tokens and some more (a quarter on long rows, so that growth stays rare)."""
        generous = _round_up(longest + max(CAPACITY_STEP // 2, longest // 4), CAPACITY_STEP)
        capacity = max(min(generous, self.max_length(slots)), _round_up(longest, CAPACITY_STEP))
        for number, layer in enumerate(self.layers):
            like = staged[number] if staged is not None else layer
            layer.keys = _grown(layer.keys, like.keys, slots, capacity)
            layer.values = _grown(layer.values, like.values, slots, capacity)
        self._used += [False] * (slots - len(self._used))
        self._capacity = capacity
        arrays = [array for layer in self.layers for array in (layer.keys, layer.values)]
        if not self.sides:
            self._know([Side(array.shape[1], array.shape[3], array.dtype) for array in arrays])

    def _know(self, sides: list[Side]) -> None:
        self.sides = sides
        self.bytes_per_token = sum(side.heads * side.width * side.dtype.size for side in sides)
        groups = groups_of(sides)
        self._groups = list(groups.values())
        self._placers = [
            placer(len(members), side.heads, side.width, side.dtype) if self._method.in_place else None
            for side, members in groups.items()
        ]

    def pending(self) -> list[mx.array]:
        return []  # every layer reads and writes all it has

    def reset(self) -> None:
        self._clear()
        self._idle_steps = 0

    def _clear(self) -> list[int]:
        """Nothing runs: give the memory back."""
        for layer in self.layers:
            layer.keys = layer.values = mx.zeros((0, 1, 0, 1))
        self._used = []
        self._capacity = 0
        self._longest = 0
        return []


def _grown(old: mx.array, like: mx.array, slots: int, capacity: int) -> mx.array:
    """A buffer of zeros (masked reads must stay finite) with the old rows at its start."""
    new = mx.zeros((slots, like.shape[1], capacity, like.shape[3]), like.dtype)
    if old.size:
        kept = min(old.shape[2], capacity)
        new[: old.shape[0], :, :kept] = old[:, :, :kept]
    return new


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
