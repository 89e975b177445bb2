"""Adds each row's own low-rank product to what layers gave, as one CUDA kernel for all layers of the same inputs.

A decode step is bound by the number of kernels that it starts. With MLX's operations an adapter costs five per layer;
here it is one for q, k and v together, and none more where the kernel takes the place of another: `add_and_close` also
adds what a block adds to a layer's output, `add_and_gate` also computes swiglu. `layers.Seat` calls them through its
selection, for passes of one token a row. They round wherever separate kernels would.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.activations import swiglu

from mlx_parallm.adapters.mixtures import Groups, SideBySide

log = logging.getLogger(__name__)

WARPS = 16
MAX_RANK = 512
BYTES = 16  # that a thread reads at once
ENOUGH_BLOCKS = 128  # about as many as a large device runs side by side

Layer = tuple[mx.array, int, int]  # what it gave, its group, its number in it
Part = tuple[mx.array, mx.array, mx.array, int]  # y (B, 1, lines), a (L, C, size), b (L, C, lines), which of the L

HEADER = f"""
constexpr int BYTES = {BYTES}, WARPS = {WARPS}, MAX_RANK = {MAX_RANK};
template <typename T> struct alignas(BYTES) Piece {{ T of[BYTES / sizeof(T)]; }};
template <typename T>
__device__ const Piece<T>* as_piece(const T* from) {{ return reinterpret_cast<const Piece<T>*>(from); }}

// z: what the row's columns of a, which begin here, make of its inputs. A warp takes one column at a time.
template <typename T>
__device__ void project(const T* a, const T* inputs, int size, int rank, float* z) {{
    constexpr int N = BYTES / sizeof(T);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int r = warp; r < rank; r += WARPS) {{
        const T* column = a + size_t(r) * size;
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
}}

// Some numbers of y with the row's own added: z times its columns of b, which begin here.
template <typename T>
__device__ Piece<T> adapted(const T* y, const T* b, int lines, int rank, const float* z) {{
    constexpr int N = BYTES / sizeof(T);
    Piece<T> found = *as_piece(y);
    float sum[N] = {{}};
    #pragma unroll 8
    for (int r = 0; r < rank; ++r) {{
        const Piece<T> line = *as_piece(b + size_t(r) * lines);
        for (int n = 0; n < N; ++n)
            sum[n] += z[r] * float(line.of[n]);
    }}
    for (int n = 0; n < N; ++n)
        found.of[n] = T(float(found.of[n]) + sum[n]);
    return found;
}}
"""

# A block is one row, one layer (or a gate and its like) and a share of the layer's lines. Every block of a row computes
# all of z, which is little beside waiting for one another.
BEGIN = """
    constexpr int N = BYTES / sizeof(T);
    const int row = blockIdx.z, size = x_shape[2], rank = spans[2 * row + 1];
    const int begin = (blockIdx.x * WARPS * 32 + threadIdx.x) * N, step = gridDim.x * WARPS * 32 * N;
    const T* inputs = x + size_t(row) * size;
"""
ADD = (
    """
    const T *y, *a, *b;
    T* out;
    int lines;
    switch (blockIdx.y) {{ {cases} }}
"""
    + BEGIN
    + """
    const size_t first = size_t(firsts[blockIdx.y]) + spans[2 * row];
    __shared__ float z[MAX_RANK];
    project(a + first * size, inputs, size, rank, z);
    __syncthreads();
    for (int i = begin; i < lines; i += step)
        *reinterpret_cast<Piece<T>*>(out + size_t(row) * lines + i) =
            adapted(y + size_t(row) * lines + i, b + first * lines + i, lines, rank, z);
"""
)
CASE = "case {i}: y = y{i}; a = a{i}; b = b{i}; out = out{i}; lines = y{i}_shape[2]; break;"
CLOSE = (
    BEGIN
    + """
    const int lines = y0_shape[2];
    const size_t first = size_t(firsts[0]) + spans[2 * row], line = size_t(row) * lines;
    __shared__ float z[MAX_RANK];
    project(a0 + first * size, inputs, size, rank, z);
    __syncthreads();
    for (int i = begin; i < lines; i += step) {
        Piece<T> found = adapted(y0 + line + i, b0 + first * lines + i, lines, rank, z);
        const Piece<T> more = *as_piece(residual + line + i);
        for (int n = 0; n < N; ++n)
            found.of[n] = T(float(found.of[n]) + float(more.of[n]));
        *reinterpret_cast<Piece<T>*>(out0 + line + i) = found;
    }
"""
)
GATE = (
    BEGIN
    + """
    const int lines = y0_shape[2];
    const size_t left = size_t(firsts[0]) + spans[2 * row], right = size_t(firsts[1]) + spans[2 * row];
    const size_t line = size_t(row) * lines;
    __shared__ float z[2 * MAX_RANK];
    project(a0 + left * size, inputs, size, rank, z);
    project(a1 + right * size, inputs, size, rank, z + MAX_RANK);
    __syncthreads();
    for (int i = begin; i < lines; i += step) {
        Piece<T> found = adapted(y0 + line + i, b0 + left * lines + i, lines, rank, z);
        const Piece<T> beside = adapted(y1 + line + i, b1 + right * lines + i, lines, rank, z + MAX_RANK);
        for (int n = 0; n < N; ++n) {
            const float gate = found.of[n], small = 1.0f / (1.0f + expf(fabsf(gate)));
            const T open = T(gate < 0.0f ? small : 1.0f - small), let = T(gate * float(open));
            found.of[n] = T(float(let) * float(beside.of[n]));
        }
        *reinterpret_cast<Piece<T>*>(out0 + line + i) = found;
    }
"""
)


def add_own(x: mx.array, layers: Sequence[Layer], choice: SideBySide) -> list[mx.array] | None:
    """For each layer's y + x (B, 1, size) · the row's own lines of a[number] · its own of b[number].

    None where MLX's operations should do it.
    """
    return _added(_adding(len(layers)), x, layers, choice, outputs=len(layers))


def add_and_close(x: mx.array, layer: Layer, choice: SideBySide, residual: mx.array) -> mx.array | None:
    """The same for one layer, and then added to residual (B, 1, lines)."""
    if residual.shape != layer[0].shape or residual.dtype != x.dtype:
        return None
    found = _added(_closing(), x, [layer], choice, [residual])
    return None if found is None else found[0]


def add_and_gate(x: mx.array, layers: Sequence[Layer], choice: SideBySide) -> mx.array | None:
    """The same for two layers, and then swiglu of the first and the second."""
    if layers[0][0].shape != layers[1][0].shape:
        return None
    found = _added(_gating(), x, layers, choice)
    return None if found is None else found[0]


def _added(
    kernel: Any,
    x: mx.array,
    layers: Sequence[Layer],
    choice: SideBySide,
    more: Sequence[mx.array] = (),
    outputs: int = 1,
) -> list[mx.array] | None:
    spans = choice.spans
    parts = [(y, *choice.groups[group][:2], number) for y, group, number in layers]
    if spans is None or choice.max_rank > MAX_RANK or x.ndim != 3 or x.shape[1] != 1 or not _aligned(x, parts):
        return None
    ys, thin = [y for y, *_ in parts], [(a, b) for _, a, b, _ in parts]
    firsts = mx.array([number * a.shape[1] for _, a, _, number in parts], mx.int32)
    threads = WARPS * 32
    shares = max(1, min(4, ENOUGH_BLOCKS // (outputs * x.shape[0])))
    added: list[mx.array] = kernel(
        inputs=[x, spans, firsts, *more, *ys, *(a for a, _ in thin), *(b for _, b in thin)],
        template=[("T", x.dtype)],
        grid=(threads * shares, outputs, x.shape[0]),
        threadgroup=(threads, 1, 1),
        output_shapes=[y.shape for y in ys[:outputs]],
        output_dtypes=[y.dtype for y in ys[:outputs]],
    )
    return added


def _aligned(x: mx.array, parts: Sequence[Part]) -> bool:
    of_one_kind = all(array.dtype == x.dtype for y, a, b, _ in parts for array in (y, a, b))
    whole = all(array.shape[-1] * array.dtype.size % BYTES == 0 for array in (x, *(part[0] for part in parts)))
    return of_one_kind and whole and x.dtype in (mx.float32, mx.float16, mx.bfloat16)


@functools.cache
def _adding(count: int) -> Any:
    return _kernel(f"add_own_{count}", ADD.format(cases=" ".join(CASE.format(i=i) for i in range(count))), count, count)


@functools.cache
def _closing() -> Any:
    return _kernel("add_and_close", CLOSE, 1, 1, ["residual"])


@functools.cache
def _gating() -> Any:
    return _kernel("add_and_gate", GATE, 2, 1)


def _kernel(name: str, source: str, count: int, outputs: int, more: Sequence[str] = ()) -> Any:
    names = ["x", "spans", "firsts", *more, *(f"{side}{i}" for side in "yab" for i in range(count))]
    return mx.fast.cuda_kernel(name, names, [f"out{i}" for i in range(outputs)], source, HEADER)


def tried(dtype: mx.Dtype, most: int = 3) -> bool:
    """Builds the kernels, for up to so many layers, and says whether they are right."""
    try:
        for count in range(1, most + 1):
            if not _is_right(dtype, [32 * (i + 1) for i in range(count)], add_own):
                return False
        residual = mx.random.normal((2, 1, 32), key=mx.random.key(1)).astype(dtype)
        return _is_right(
            dtype,
            [32],
            lambda x, layers, choice: _listed(add_and_close(x, layers[0], choice, residual)),
            lambda sums: [residual + sums[0]],
        ) and _is_right(
            dtype,
            [32, 32],
            lambda x, layers, choice: _listed(add_and_gate(x, layers, choice)),
            lambda sums: [swiglu(sums[0], sums[1])],
        )
    except (RuntimeError, ValueError) as error:
        log.warning("the CUDA kernels for adapters can't be used: %s", str(error)[:300])
        return False


def _listed(found: mx.array | None) -> list[mx.array] | None:
    return None if found is None else [found]


def _is_right(
    dtype: mx.Dtype,
    lines: Sequence[int],
    kernel: Callable[[mx.array, Sequence[Layer], SideBySide], list[mx.array] | None],
    then: Callable[[list[mx.array]], list[mx.array]] = lambda sums: sums,
) -> bool:
    """Whether it gives what MLX's operations give for layers of some sizes, a row without an adapter and one with."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> mx.array:
        return mx.array(random.standard_normal(shape).astype(np.float32) * 0.25).astype(dtype)

    x = normal(2, 1, 64)
    ys = [normal(2, 1, count) for count in lines]
    groups: Groups = {i: (normal(2, 24, 64), normal(2, 24, count), None) for i, count in enumerate(lines)}
    choice = SideBySide(groups, spans=mx.array([[0, 0], [8, 16]], mx.int32), max_rank=16)
    found = kernel(x, [(y, i, 1) for i, y in enumerate(ys)], choice)
    assert found is not None
    own = [
        x.astype(mx.float32) @ a[1, 8:].astype(mx.float32).T @ b[1, 8:].astype(mx.float32)
        for a, b, _ in groups.values()
    ]
    added = [(y + mx.concatenate([mx.zeros_like(o[:1]), o[1:]])).astype(dtype) for y, o in zip(ys, own, strict=True)]
    bound = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 0.1}[dtype]
    right = all(mx.allclose(one, other, atol=bound) for one, other in zip(found, then(added), strict=True))
    if not right:
        log.warning("the CUDA kernels for adapters give wrong results, and are not used")
    return right
