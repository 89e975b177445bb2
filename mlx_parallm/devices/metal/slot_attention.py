"""Attention over slots on Metal: by a kernel that reads each row's own tokens, where that is faster than MLX's."""

import mlx.core as mx

from mlx_parallm.devices.metal.check import is_worth_using
from mlx_parallm.devices.metal.kernels import SMALLEST, attend

TRIED_ROWS = 8
TRIED_LENGTHS = (1024, 900, 40, 700, 300, 12, 512, 200)  # of rows that share a batch


class SlotAttention:
    """Call it with what `kernels.attend` takes. The first call with heads of one kind says whether it is worth it."""

    def __init__(self) -> None:
        self._worth: dict[tuple[mx.Dtype, int, int, int], bool] = {}

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, offsets: mx.array, scale: float
    ) -> mx.array | None:
        form = (queries.dtype, queries.shape[1], keys.shape[1], queries.shape[3])
        if form not in self._worth:
            self._worth[form] = self._is_worth(*form, scale)
        return attend(queries, keys, values, offsets, scale) if self._worth[form] else None

    def _is_worth(self, dtype: mx.Dtype, heads: int, shared: int, width: int, scale: float) -> bool:
        capacity = max(TRIED_LENGTHS)

        def normal(*shape: int) -> mx.array:
            return mx.random.normal(shape, key=mx.random.key(sum(shape))).astype(dtype)

        queries = normal(TRIED_ROWS, heads, 1, width)
        keys, values = (normal(TRIED_ROWS, shared, capacity, width) for _ in "kv")
        offsets = mx.array(TRIED_LENGTHS, mx.int32) - 1
        assert offsets.size >= SMALLEST
        mask = (mx.arange(capacity) <= offsets[:, None])[:, None, None]

        def by_kernel() -> list[mx.array]:
            attended = attend(queries, keys, values, offsets, scale)
            if attended is None:
                raise ValueError(f"it has no form for {heads} heads of {width} over {shared}")
            return [attended]

        def by_operations() -> list[mx.array]:
            return [mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)]

        return is_worth_using("attention", by_kernel, by_operations)
