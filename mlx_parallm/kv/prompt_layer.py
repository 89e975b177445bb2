"""Keys and values of prompts while they are prefilled, apart from the batch that their rows will join."""

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask


class PromptLayer:
    """One layer's keys and values of prompts that are prefilled together, all at one offset."""

    __slots__ = ("capacity", "keys", "offset", "values")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.offset = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        start = self.offset
        self.offset = self.offset + keys.shape[2]
        self.keys = self._added(self.keys, keys, start)
        self.values = self._added(self.values, values, start)
        if self.offset == self.keys.shape[2]:
            return self.keys, self.values
        return self.keys[:, :, : self.offset], self.values[:, :, : self.offset]

    def _added(self, old: mx.array | None, new: mx.array, start: int) -> mx.array:
        if self.offset >= self.capacity and (old is None or old.shape[2] == start):
            return new if old is None else mx.concatenate([old, new], axis=2)
        if old is None or old.shape[2] < self.capacity:
            buffer = mx.zeros((*new.shape[:2], self.capacity, new.shape[3]), new.dtype)
            if old is not None:
                buffer[:, :, :start] = old
            old = buffer
        old[:, :, start : self.offset] = new
        return old

    def make_mask(self, tokens: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if tokens == 1 and not window_size:
            return None
        if return_array or (window_size and self.offset + tokens > window_size):
            return create_causal_mask(tokens, self.offset, window_size=window_size)
        return "causal"

    def restore(self, keys: mx.array, values: mx.array, length: int) -> None:
        """Begins with what is known already: the first `length` tokens."""
        self.keys = keys
        self.values = values
        self.offset = length

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None]:
        return self.keys, self.values
