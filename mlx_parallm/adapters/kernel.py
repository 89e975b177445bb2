"""Adds each row's own low-rank product to what layers gave, as one CUDA kernel for all layers of the same inputs.

A decode step is bound by the number of kernels that it starts. With MLX's operations an adapter costs five per layer;
here it is one for q, k and v together. `layers.Seat` calls it through its selection, for passes of one token a row.
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.adapters.mixtures import Groups, SideBySide

log = logging.getLogger(__name__)

WARPS = 16
MAX_RANK = 512
BYTES = 16  # that a thread reads at once
ENOUGH_BLOCKS = 128  # about as many as a large device runs side by side

Part = tuple[mx.array, mx.array, mx.array, int]  # y (B, 1, lines), a (L, C, size), b (L, C, lines), which of the L


# A block is one row, one layer and a share of the layer's lines. A warp takes one column of a at a time; every block of
# a row computes all of them, which is little beside waiting for one another.
SOURCE = """
    constexpr int N = BYTES / sizeof(T);
    const T *y, *a, *b;
    T* out;
    int lines, columns;
    switch (blockIdx.y) {{ {cases} }}
    const int row = blockIdx.z, lane = threadIdx.x % 32, warp = threadIdx.x / 32, size = x_shape[2];
    const int rank = spans[2 * row + 1];
    const size_t first = size_t(numbers[blockIdx.y]) * columns + spans[2 * row];
    __shared__ float z[MAX_RANK];
    const T* inputs = x + size_t(row) * size;
    for (int r = warp; r < rank; r += WARPS) {{
        const T* column = a + (first + r) * size;
        float sum = 0.0f;
        #pragma unroll 4
        for (int i = lane * N; i < size; i += 32 * N) {{
            const Piece<T> left = *as_piece(column + i), right = *as_piece(inputs + i);
            for (int n = 0; n < N; ++n)
                sum += float(left.of[n]) * float(right.of[n]);
        }}
        for (int step = 16; step; step /= 2)
            sum += __shfl_xor_sync(0xffffffff, sum, step);
        if (lane == 0) z[r] = sum;
    }}
    __syncthreads();
    for (int i = (blockIdx.x * WARPS * 32 + threadIdx.x) * N; i < lines; i += gridDim.x * WARPS * 32 * N) {{
        Piece<T> found = *as_piece(y + size_t(row) * lines + i);
        float sum[N] = {{}};
        #pragma unroll 8
        for (int r = 0; r < rank; ++r) {{
            const Piece<T> line = *as_piece(b + (first + r) * lines + i);
            for (int n = 0; n < N; ++n)
                sum[n] += z[r] * float(line.of[n]);
        }}
        for (int n = 0; n < N; ++n)
            found.of[n] = T(float(found.of[n]) + sum[n]);
        *reinterpret_cast<Piece<T>*>(out + size_t(row) * lines + i) = found;
    }}
"""
CASE = "case {i}: y = y{i}; a = a{i}; b = b{i}; out = out{i}; lines = y{i}_shape[2]; columns = a{i}_shape[1]; break;"
HEADER = f"""
constexpr int BYTES = {BYTES}, WARPS = {WARPS}, MAX_RANK = {MAX_RANK};
template <typename T> struct alignas(BYTES) Piece {{ T of[BYTES / sizeof(T)]; }};
template <typename T>
__device__ const Piece<T>* as_piece(const T* from) {{ return reinterpret_cast<const Piece<T>*>(from); }}
"""


def add_own(x: mx.array, layers: Sequence[tuple[mx.array, int, int]], choice: SideBySide) -> list[mx.array] | None:
    """For each layer's y + x (B, 1, size) · the row's own lines of a[number] · its own of b[number].

    None where MLX's operations should do it.
    """
    spans = choice.spans
    parts = [(y, *choice.groups[group][:2], number) for y, group, number in layers]
    if spans is None or choice.max_rank > MAX_RANK or x.ndim != 3 or x.shape[1] != 1 or not _aligned(x, parts):
        return None
    ys, thin, numbers = [y for y, *_ in parts], [(a, b) for _, a, b, _ in parts], [number for *_, number in parts]
    threads = WARPS * 32
    shares = max(1, min(4, ENOUGH_BLOCKS // (len(parts) * x.shape[0])))
    added: list[mx.array] = _kernel(len(parts))(
        inputs=[x, spans, mx.array(numbers, mx.int32), *ys, *(a for a, _ in thin), *(b for _, b in thin)],
        template=[("T", x.dtype)],
        grid=(threads * shares, len(parts), x.shape[0]),
        threadgroup=(threads, 1, 1),
        output_shapes=[y.shape for y in ys],
        output_dtypes=[y.dtype for y in ys],
    )
    return added


def _aligned(x: mx.array, parts: Sequence[Part]) -> bool:
    of_one_kind = all(array.dtype == x.dtype for y, a, b, _ in parts for array in (y, a, b))
    whole = all(array.shape[-1] * array.dtype.size % BYTES == 0 for array in (x, *(part[0] for part in parts)))
    return of_one_kind and whole and x.dtype in (mx.float32, mx.float16, mx.bfloat16)


@functools.cache
def _kernel(count: int) -> Any:
    names = [f"{side}{i}" for side in "yab" for i in range(count)]
    source = SOURCE.format(cases=" ".join(CASE.format(i=i) for i in range(count)))
    outputs = [f"out{i}" for i in range(count)]
    return mx.fast.cuda_kernel(f"add_own_{count}", ["x", "spans", "numbers", *names], outputs, source, HEADER)


def tried(dtype: mx.Dtype, most: int = 3) -> bool:
    """Builds the kernels for up to so many layers, and says whether they are right."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> mx.array:
        return mx.array(random.standard_normal(shape).astype(np.float32) * 0.25).astype(dtype)

    try:
        for count in range(1, most + 1):
            x = normal(2, 1, 64)
            parts = [
                (normal(2, 1, 32 * (i + 1)), normal(2, 24, 64), normal(2, 24, 32 * (i + 1)), 1) for i in range(count)
            ]
            groups: Groups = {i: (a, b, None) for i, (_, a, b, _) in enumerate(parts)}
            choice = SideBySide(groups, spans=mx.array([[0, 0], [8, 16]], mx.int32), max_rank=16)
            added = add_own(x, [(y, i, number) for i, (y, _, _, number) in enumerate(parts)], choice)
            assert added is not None
            for (y, a, b, number), found in zip(parts, added, strict=True):
                right, left, base, given = (side.astype(mx.float32) for side in (b[number, 8:], a[number, 8:], y, x))
                expected = base[1] + given[1] @ left.T @ right
                if not mx.allclose(found[1], expected, atol=0.1) or not mx.array_equal(found[0], y[0]):
                    log.warning("the CUDA kernel for adapters gives wrong results, and is not used")
                    return False
    except (RuntimeError, ValueError) as error:
        log.warning("the CUDA kernel for adapters can't be used: %s", str(error)[:300])
        return False
    return True
