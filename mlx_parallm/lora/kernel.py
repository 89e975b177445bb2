"""Adds each row's own low-rank product to what layers gave, as one CUDA kernel for all layers of the same inputs.

A pass over few tokens is bound by the number of kernels that it starts. With MLX's operations an adapter costs five
per layer; here it is one for q, k and v together, and none more where the kernel takes the place of others:
`add_and_residual` also adds the block's residual to a layer's output, `add_and_gate` also computes swiglu, and
`add_and_rope`, in passes of one token a row, also applies RoPE. `layers.LoRAHook` calls them through `ActiveAdapters`.
They round between one and the other as separate kernels would; within swiglu they don't.
"""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.activations import swiglu

from mlx_parallm.host import to_numpy
from mlx_parallm.lora.layers import Adder, Fused, RopeParams
from mlx_parallm.lora.mixtures import Groups, StackedLoRA

log = logging.getLogger(__name__)

WARPS = 16
MAX_RANK = 512
BYTES = 16  # that a thread reads at once
ENOUGH_BLOCKS = 128  # about as many as a large device runs side by side
# Tokens times rank: each token reads its own columns, which in longer prompts takes longer than to start MLX's kernels.
MOST_READ = 1 << 13

Layer = tuple[mx.array, int, int]  # what it gave, its group, its number in it
# y (B, T, out_features), a (L, C, size), b (L, C, out_features), the first of the L * C
Part = tuple[mx.array, mx.array, mx.array, int]

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
__device__ Piece<T> adapted(const T* y, const T* b, int out_features, int rank, const float* z) {{
    constexpr int N = BYTES / sizeof(T);
    Piece<T> found = *as_piece(y);
    float sum[N] = {{}};
    #pragma unroll 8
    for (int r = 0; r < rank; ++r) {{
        const Piece<T> line = *as_piece(b + size_t(r) * out_features);
        for (int n = 0; n < N; ++n)
            sum[n] += z[r] * float(line.of[n]);
    }}
    for (int n = 0; n < N; ++n)
        found.of[n] = T(float(found.of[n]) + sum[n]);
    return found;
}}
"""

# A block is one token, one layer (or a gate and its like) and a share of the layer's outputs. Every block of a token
# computes all of z, which is little beside waiting for one another.
BEGIN = """
    constexpr int N = BYTES / sizeof(T);
    const int token = blockIdx.z, row = token / x_shape[1], size = x_shape[2], rank = spans[2 * row + 1];
    const int begin = (blockIdx.x * WARPS * 32 + threadIdx.x) * N, step = gridDim.x * WARPS * 32 * N;
    const T* inputs = x + size_t(token) * size;
"""
WHICH = """
    const T *y, *a, *b;
    T* out;
    int out_features;
    switch (blockIdx.y) {{ {cases} }}
"""
ADD = (
    WHICH
    + BEGIN
    + """
    const size_t first = size_t(firsts[blockIdx.y]) + spans[2 * row];
    __shared__ float z[MAX_RANK];
    project(a + first * size, inputs, size, rank, z);
    __syncthreads();
    for (int i = begin; i < out_features; i += step)
        *reinterpret_cast<Piece<T>*>(out + size_t(token) * out_features + i) =
            adapted(y + size_t(token) * out_features + i, b + first * out_features + i, out_features, rank, z);
"""
)
CASE = "case {i}: y = y{i}; a = a{i}; b = b{i}; out = out{i}; out_features = y{i}_shape[2]; break;"
CLOSE = (
    BEGIN
    + """
    const int out_features = y0_shape[2];
    const size_t first = size_t(firsts[0]) + spans[2 * row], line = size_t(token) * out_features;
    __shared__ float z[MAX_RANK];
    project(a0 + first * size, inputs, size, rank, z);
    __syncthreads();
    for (int i = begin; i < out_features; i += step) {
        Piece<T> found = adapted(y0 + line + i, b0 + first * out_features + i, out_features, rank, z);
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
    const int out_features = y0_shape[2];
    const size_t left = size_t(firsts[0]) + spans[2 * row], right = size_t(firsts[1]) + spans[2 * row];
    const size_t line = size_t(token) * out_features;
    __shared__ float z[2 * MAX_RANK];
    project(a0 + left * size, inputs, size, rank, z);
    project(a1 + right * size, inputs, size, rank, z + MAX_RANK);
    __syncthreads();
    for (int i = begin; i < out_features; i += step) {
        Piece<T> found = adapted(y0 + line + i, b0 + left * out_features + i, out_features, rank, z);
        const Piece<T> beside = adapted(y1 + line + i, b1 + right * out_features + i, out_features, rank, z + MAX_RANK);
        for (int n = 0; n < N; ++n) {
            const float gate = found.of[n], small = 1.0f / (1.0f + expf(fabsf(gate)));
            const T open = T(gate < 0.0f ? small : 1.0f - small), let = T(gate * float(open));
            found.of[n] = T(float(let) * float(beside.of[n]));
        }
        *reinterpret_cast<Piece<T>*>(out0 + line + i) = found;
    }
"""
)

ROPE = (
    WHICH
    + BEGIN
    + """
    const bool adapts = firsts[blockIdx.y] >= 0, rotates = blockIdx.y < 2;
    const int own = adapts ? rank : 0, half = inv_freq_shape[0], pieces = half / N;
    const size_t first = adapts ? size_t(firsts[blockIdx.y]) + spans[2 * row] : 0, line = size_t(token) * out_features;
    const float position = offsets[row];
    __shared__ float z[MAX_RANK];
    project(a + first * size, inputs, size, own, z);
    __syncthreads();
    for (int piece = begin / N; piece < out_features / N / 2; piece += step / N) {{
        const int place = piece % pieces * N;
        const size_t i = size_t(piece / pieces) * 2 * half + place, j = i + half;
        Piece<T> left = adapted(y + line + i, b + first * out_features + i, out_features, own, z);
        Piece<T> right = adapted(y + line + j, b + first * out_features + j, out_features, own, z);
        for (int n = 0; rotates && n < N; ++n) {{
            const float wave = inv_freq[place + n], angle = position * (IN_LOG2 ? exp2f(wave) : wave);
            const float c = cosf(angle), s = sinf(angle), one = float(left.of[n]), other = float(right.of[n]);
            left.of[n] = T(one * c - other * s);
            right.of[n] = T(one * s + other * c);
        }}
        *reinterpret_cast<Piece<T>*>(out + line + i) = left;
        *reinterpret_cast<Piece<T>*>(out + line + j) = right;
    }}
"""
)


def add_own(x: mx.array, layers: Sequence[Layer], choice: StackedLoRA) -> list[mx.array] | None:
    """For each layer's y + x (B, T, size) · the row's own columns of a[number] · its own of b[number].

    None where MLX's operations should do it.
    """
    parts = _parts(x, layers, choice)
    return None if parts is None else _run(_adding(len(parts)), x, parts, choice, [y.shape for y, *_ in parts])


def add_and_residual(x: mx.array, layer: Layer, choice: StackedLoRA, residual: mx.array) -> mx.array | None:
    """The same for one layer, and then added to residual (B, T, out_features)."""
    parts = _parts(x, [layer], choice)
    if parts is None or residual.shape != layer[0].shape or residual.dtype != x.dtype:
        return None
    return _run(_residual_kernel(), x, parts, choice, [residual.shape], [residual])[0]


def add_and_gate(x: mx.array, layers: Sequence[Layer], choice: StackedLoRA) -> mx.array | None:
    """The same for two layers, and then swiglu of the first and the second."""
    parts = _parts(x, layers, choice)
    if parts is None or layers[0][0].shape != layers[1][0].shape:
        return None
    return _run(_gating(), x, parts, choice, [layers[0][0].shape])[0]


def add_and_rope(
    x: mx.array, layers: Sequence[Layer], choice: StackedLoRA, rope: RopeParams, offsets: mx.array
) -> list[mx.array] | None:
    """The same for queries, keys and values, of which the first two are then with_rope; not all need have adapters."""
    parts, half = _parts(x, layers, choice), rope.inv_freq.shape[0]
    if parts is None or half * x.dtype.size % BYTES or any(y.shape[2] % (2 * half) for y, *_ in parts):
        return None
    if x.shape[1] != 1 or offsets.shape != x.shape[:1] or offsets.dtype != mx.int32:
        return None
    shapes = [(len(x), y.shape[2] // (2 * half), 1, 2 * half) for y, *_ in parts]
    return _run(_rope_kernel(), x, parts, choice, shapes, [offsets, rope.inv_freq], [("IN_LOG2", rope.in_log2)])


def _parts(x: mx.array, layers: Sequence[Layer], choice: StackedLoRA) -> list[Part] | None:
    """What the kernels need of layers; None where they can't do it."""
    if choice.spans is None or choice.max_rank > MAX_RANK or x.ndim != 3:
        return None
    if x.shape[1] > 1 and x.shape[0] * x.shape[1] * choice.max_rank > MOST_READ:
        return None
    some = next(choice.groups[group] for _, group, _ in layers if choice.has(group))
    parts: list[Part] = []
    for y, group, number in layers:
        a, b, _ = choice.groups.get(group, some)
        parts.append((y, a, b, number * a.shape[1] if choice.has(group) else -1))
    return parts if _aligned(x, parts) else None


def _run(
    kernel: Any,
    x: mx.array,
    parts: Sequence[Part],
    choice: StackedLoRA,
    shapes: Sequence[tuple[int, ...]],
    more: Sequence[mx.array] = (),
    template: Sequence[tuple[str, Any]] = (),
) -> list[mx.array]:
    ys, a, b, firsts = zip(*parts, strict=True)
    threads, tokens = WARPS * 32, x.shape[0] * x.shape[1]
    shares = max(1, min(4, ENOUGH_BLOCKS // (len(shapes) * tokens)))
    found: list[mx.array] = kernel(
        inputs=[x, choice.spans, _numbers(firsts), *more, *ys, *a, *b],
        template=[("T", x.dtype), *template],
        grid=(threads * shares, len(shapes), tokens),
        threadgroup=(threads, 1, 1),
        output_shapes=list(shapes),
        output_dtypes=[x.dtype] * len(shapes),
    )
    return found


def _aligned(x: mx.array, parts: Sequence[Part]) -> bool:
    of_one_kind = all(array.dtype == x.dtype for y, a, b, _ in parts for array in (y, a, b))
    whole = all(array.shape[-1] * array.dtype.size % BYTES == 0 for array in (x, *(part[0] for part in parts)))
    return of_one_kind and whole and x.dtype in (mx.float32, mx.float16, mx.bfloat16)


@functools.cache
def _numbers(numbers: tuple[int, ...]) -> mx.array:
    return mx.array(numbers, mx.int32)


@functools.cache
def _adding(count: int) -> Any:
    return _kernel(f"add_own_{count}", ADD.format(cases=_cases(count)), count, count)


@functools.cache
def _residual_kernel() -> Any:
    return _kernel("add_and_residual", CLOSE, 1, 1, ["residual"])


@functools.cache
def _gating() -> Any:
    return _kernel("add_and_gate", GATE, 2, 1)


@functools.cache
def _rope_kernel() -> Any:
    return _kernel("add_and_rope", ROPE.format(cases=_cases(3)), 3, 3, ["offsets", "inv_freq"])


def _cases(count: int) -> str:
    return " ".join(CASE.format(i=i) for i in range(count))


def _kernel(name: str, source: str, count: int, outputs: int, more: Sequence[str] = ()) -> Any:
    names = ["x", "spans", "firsts", *more, *(f"{side}{i}" for side in "yab" for i in range(count))]
    return mx.fast.cuda_kernel(name, names, [f"out{i}" for i in range(outputs)], source, HEADER)


def adder(dtype: mx.Dtype, most: int = 3) -> Adder | None:
    """The kernel for up to so many layers, once it is built and proven right; None where it can't be."""
    sizes = [[32 * (i + 1) for i in range(count)] for count in range(1, most + 1)]

    def right() -> bool:
        return all(_adds(dtype, out_features, add_own, tokens=tokens) for out_features in sizes for tokens in (1, 3))

    return add_own if _proven(right) else None


def fused(dtype: mx.Dtype) -> Fused | None:
    """The kernels that do more, likewise."""
    residual = mx.random.normal((2, 3, 32), key=mx.random.key(1)).astype(dtype)
    offsets, base, width = mx.array([7, 300], mx.int32), 500.0, 32
    freqs = base ** (mx.arange(0, width, 2) / width)

    def rotates(rope: RopeParams, **how: Any) -> bool:
        def with_rope(sums: list[mx.array]) -> list[mx.array]:
            heads = [one.reshape(2, -1, 1, width) for one in sums]
            rope = [mx.fast.rope(one, width, traditional=False, scale=1.0, offset=offsets, **how) for one in heads[:2]]
            return [*rope, heads[2]]

        return _adds(
            dtype, [96, 32, 32], lambda x, layers, choice: add_and_rope(x, layers, choice, rope, offsets), with_rope
        )

    def right() -> bool:
        return (
            _adds(
                dtype,
                [32],
                lambda x, layers, choice: _listed(add_and_residual(x, layers[0], choice, residual)),
                lambda sums: [residual + sums[0]],
                tokens=3,
            )
            and _adds(
                dtype,
                [32, 32],
                lambda x, layers, choice: _listed(add_and_gate(x, layers, choice)),
                lambda sums: [swiglu(sums[0], sums[1])],
                tokens=3,
            )
            and rotates(RopeParams(log2_inv_freq(base, width // 2), in_log2=True), base=base)
            and rotates(RopeParams(1.0 / freqs, in_log2=False), base=None, freqs=freqs)
        )

    return Fused(add_and_residual, add_and_gate, add_and_rope) if _proven(right) else None


def _proven(right: Callable[[], bool]) -> bool:
    try:
        if right():
            return True
        log.warning("a CUDA kernel for adapters gives wrong results, and is not used")
    except (RuntimeError, ValueError) as error:
        log.warning("a CUDA kernel for adapters can't be used: %s", str(error)[:300])
    return False


def log2_inv_freq(base: float, half: int) -> mx.array:
    """To which 2 is to be raised for the angles by which RoPE rotates a position: as MLX's own kernel has them."""
    share = np.arange(half, dtype=np.float32) / np.float32(half)
    return mx.array(-share * np.float32(math.log2(base)))


def _listed(found: mx.array | None) -> list[mx.array] | None:
    return None if found is None else [found]


def _adds(
    dtype: mx.Dtype,
    out_features: Sequence[int],
    kernel: Callable[[mx.array, Sequence[Layer], StackedLoRA], list[mx.array] | None],
    then: Callable[[list[mx.array]], list[mx.array]] = lambda sums: sums,
    tokens: int = 1,
) -> bool:
    """Whether it gives what layers of some sizes should, for a row without an adapter and one with.

    The products are NumPy's: MLX's own on CUDA are in fewer bits than float32 has.
    """
    random = np.random.default_rng(0)

    def normal(*shape: int) -> mx.array:
        return mx.array(random.standard_normal(shape).astype(np.float32) * 0.25).astype(dtype)

    x = normal(2, tokens, 64)
    ys = [normal(2, tokens, count) for count in out_features]
    groups: Groups = {i: (normal(2, 24, 64), normal(2, 24, count), None) for i, count in enumerate(out_features)}
    choice = StackedLoRA(groups, spans=mx.array([[0, 0], [8, 16]], mx.int32), max_rank=16)
    found = kernel(x, [(y, i, 1) for i, y in enumerate(ys)], choice)
    assert found is not None
    added = []
    for y, (a, b, _) in zip(ys, groups.values(), strict=True):
        given, thin, back, whole = (to_numpy(one.astype(mx.float32)) for one in (x, a[1, 8:], b[1, 8:], y))
        whole[1] += given[1] @ thin.T @ back
        added.append(mx.array(whole).astype(dtype))
    bound = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 0.1}[dtype]
    return all(mx.allclose(one, other, atol=bound).item() for one, other in zip(found, then(added), strict=True))
