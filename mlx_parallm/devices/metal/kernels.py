"""Builds and starts the Metal kernels: a row's own LoRA, attention over slots, and the least logit that is kept.

They take arrays and know nothing of adapters or requests. Inputs are never written to: MLX runs kernels side by side.
Arrays that the host makes for each step have at least `SMALLEST` numbers, for MLX would pass shorter ones in another
way, and compile the kernel anew.
"""

import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_parallm.devices.metal import sources
from mlx_parallm.devices.metal.sources import AT_ONCE, LANES

SMALLEST = 8  # numbers of an array in device memory
LORA_SIMDGROUPS = 8
ATTENTION_SIMDGROUPS = 8
CUT_SIMDGROUPS = 32
WINDOW = 24  # below the highest logit: a token there has a share of 4e-11
ENOUGH_GROUPS = 64  # threadgroups: about what keeps a large GPU busy
HEAD_WIDTHS = (64, 96, 128, 256)
MOST_NUMBERS = 64  # of queries and sums that a thread holds
SPLIT_LENGTH = 256  # tokens that a threadgroup should have at least
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def add_own_lora(
    x: mx.array, a: mx.array, layers: Sequence[tuple[mx.array, mx.array]], spans: mx.array
) -> list[mx.array] | None:
    """Each layer's y (B, N) + x (B, K) · the row's own columns of a (layers * C, K) · its own of b (C, N).

    `spans` (B or more, 2): where a row's own columns begin, and how many there are, at most `MAX_RANK`. None where the
    shapes are not for this kernel.
    """
    rows, size = x.shape
    of_one_dtype = all(array.dtype == x.dtype for layer in layers for array in layer) and a.dtype == x.dtype
    if size % AT_ONCE or spans.size < SMALLEST or x.dtype not in DTYPES or not of_one_dtype:
        return None
    threads = LORA_SIMDGROUPS * LANES
    widest = max(b.shape[1] for _, b in layers)
    shares = max(1, min(-(-widest // threads), ENOUGH_GROUPS // (rows * len(layers))))
    sums: list[mx.array] = _lora_kernel(len(layers))(
        inputs=[x, spans, a, *(y for y, _ in layers), *(b for _, b in layers)],
        template=[("T", x.dtype), ("SIMDGROUPS", LORA_SIMDGROUPS)],
        grid=(threads * shares, len(layers), rows),
        threadgroup=(threads, 1, 1),
        output_shapes=[y.shape for y, _ in layers],
        output_dtypes=[x.dtype] * len(layers),
    )
    return sums


def attend(queries: mx.array, keys: mx.array, values: mx.array, offsets: mx.array, scale: float) -> mx.array | None:
    """Queries (S, H, 1, D) over slots (S, K, C, D), of which row s has offsets[s] + 1 tokens: (S, H, 1, D).

    `offsets` (S or more,). None where the shapes are not for this kernel.
    """
    rows, heads, _, width = queries.shape
    shared = keys.shape[1]
    sharing = heads // shared
    of_one_dtype = queries.dtype == keys.dtype == values.dtype and queries.dtype in DTYPES
    if width not in HEAD_WIDTHS or keys.shape != values.shape or not of_one_dtype or offsets.size < SMALLEST:
        return None
    if 2 * sharing * width // LANES > MOST_NUMBERS:
        return None
    # By the shapes of buffers alone, so that a trace is right for all lengths.
    splits = max(1, min(ENOUGH_GROUPS // (rows * shared), keys.shape[2] // SPLIT_LENGTH))
    splits = 1 << (splits.bit_length() - 1)
    threads = ATTENTION_SIMDGROUPS * LANES
    template = [("D", width), ("SPLITS", splits)]
    outputs: list[mx.array] = _attention_kernel(scale)(
        inputs=[queries, keys, values, offsets],
        template=[
            ("T", queries.dtype),
            ("O", queries.dtype if splits == 1 else mx.float32),
            ("SHARING", sharing),
            ("SIMDGROUPS", ATTENTION_SIMDGROUPS),
            *template,
        ],
        grid=(threads * splits, shared, rows),
        threadgroup=(threads, 1, 1),
        output_shapes=[queries.shape if splits == 1 else (rows, heads, splits, width + 2)],
        output_dtypes=[queries.dtype if splits == 1 else mx.float32],
    )
    if splits > 1:
        outputs = _attention_sum_kernel(scale)(
            inputs=outputs,
            template=[("T", queries.dtype), *template],
            grid=(width, rows * heads, 1),
            threadgroup=(width, 1, 1),
            output_shapes=[queries.shape],
            output_dtypes=[queries.dtype],
        )
    return outputs[0]


def least_kept(logits: mx.array, limits: mx.array) -> mx.array:
    """The least logit that top-k, then top-p, keep: (R, V) -> (R, 1).

    `limits` (R or more, 2): each row's top-p, above 1 for all, and its top-k, the vocabulary or more for all.
    """
    rows = logits.shape[0]
    assert limits.size >= SMALLEST
    threads = CUT_SIMDGROUPS * LANES
    outputs: list[mx.array] = _cut_kernel()(
        inputs=[logits, limits],
        template=[("SIMDGROUPS", CUT_SIMDGROUPS), ("WINDOW", WINDOW)],
        grid=(threads * rows, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows, 1)],
        output_dtypes=[mx.float32],
    )
    return outputs[0]


@functools.cache
def _lora_kernel(layers: int) -> Any:
    cases = " ".join(sources.LORA_CASE.format(i=i) for i in range(1, layers))
    names = ["x", "spans", "a", *(f"{side}{i}" for side in "yb" for i in range(layers))]
    return mx.fast.metal_kernel(
        name=f"parallm_add_own_lora_{layers}",
        input_names=names,
        output_names=[f"out{i}" for i in range(layers)],
        source=sources.LORA.format(cases=cases, lanes=LANES),
        header=sources.LORA_HEADER,
    )


@functools.cache
def _attention_kernel(scale: float) -> Any:
    return mx.fast.metal_kernel(
        name=f"parallm_attend_{_in_name(scale)}",
        input_names=["queries", "keys", "values", "offsets"],
        output_names=["out"],
        source=sources.ATTENTION,
        header=sources.ATTENTION_HEADER.format(scale=float(scale)),
    )


@functools.cache
def _attention_sum_kernel(scale: float) -> Any:
    return mx.fast.metal_kernel(
        name=f"parallm_attend_sum_{_in_name(scale)}",
        input_names=["parts"],
        output_names=["out"],
        source=sources.ATTENTION_SUM,
        header=sources.ATTENTION_HEADER.format(scale=float(scale)),
    )


@functools.cache
def _cut_kernel() -> Any:
    return mx.fast.metal_kernel(
        name="parallm_least_kept",
        input_names=["logits", "limits"],
        output_names=["out"],
        source=sources.CUT,
        header=sources.CUT_HEADER,
    )


def _in_name(scale: float) -> str:
    return f"{float(scale):.9g}".replace(".", "_").replace("-", "m").replace("+", "")
