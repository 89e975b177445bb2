"""Attention of one query per row over slots of different lengths, as one CUDA kernel.

MLX on CUDA has no fused attention with a mask: it computes every row as far as the longest, in half a dozen kernels.
These read each row to its own length, and put the row's new key and value into the slots in place, as
`cuda_placing` does: the step before it, on whose tokens it depends, is the last that wrote there. What a row's sum is
does not depend on the other rows. `attend` takes queries and keys that are rotated; `rotate_and_attend` takes them as
one product gives them, side by side, and norms and rotates them first. `slot_layer.SlotLayer` calls both; elsewhere,
and for shapes that they do not know, attention goes through MLX's own operations.
"""

import functools
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

WARPS = 8
MAX_SHARING = 8
SPAN = 1024  # tokens that a block reads: longer rows are read by several, so that one row is enough for the device
WIDTHS = (64, 128, 256)


@dataclass(frozen=True, slots=True, eq=False)
class RopeParams:
    """The way in which RoPE rotates the heads of queries and keys by their positions."""

    inv_freq: mx.array  # (half a head,): the angle of a position …
    in_log2: bool  # … or its logarithm, to the base of 2


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """RMS norms of the heads of queries and keys, before they are rotated."""

    queries: mx.array  # (head,)
    keys: mx.array
    eps: float


# A block is one row and one head of keys and values, with the query heads that share it, and a span of the tokens.
# Each group of LANES threads takes every GROUPS-th of them; what the groups have found is joined at the end. Where
# slots have room for more than one span, blocks leave what they have found, and a second kernel joins that: in the
# same order and with the same numbers for a row, whatever room there is for others.
BEGIN = """
    constexpr int PER = D / LANES;  // elements of a head that a thread holds
    constexpr int GROUPS = WARPS * 32 / LANES;
    const int head = blockIdx.y, row = blockIdx.z;
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const int heads = gridDim.y, capacity = k_shape[2];
    if (row >= k_shape[0]) {  // it has no slot: it is computed for the shape of the pass alone
        for (int d = threadIdx.x; WHOLE && d < SHARING * D; d += WARPS * 32)
            out[(size_t(row) * heads + head) * SHARING * D + d] = 0.0f;
        return;
    }
    const int length = offsets[row] + 1, from = blockIdx.x * SPAN, end = min(length, from + SPAN);
    if (from >= length) return;
    const T* keys = k + (size_t(row) * heads + head) * capacity * D + lane * PER;
    const T* values = v + (size_t(row) * heads + head) * capacity * D + lane * PER;
    float asked[SHARING][PER], sum[SHARING][PER], top[SHARING], total[SHARING];
    Piece<T, PER> fresh_key, fresh_value;
"""
GIVEN = """
    fresh_key = *as_piece<T, PER>(new_k + (size_t(row) * heads + head) * D + lane * PER);
    fresh_value = *as_piece<T, PER>(new_v + (size_t(row) * heads + head) * D + lane * PER);
    const T* queries = q + (size_t(row) * heads + head) * SHARING * D + lane * PER;
    for (int h = 0; h < SHARING; ++h)
        for (int i = 0; i < PER; ++i)
            asked[h][i] = float(queries[h * D + i]) * SCALE;
"""
# Of a line with all heads of queries, those of keys, those of values. Roundings are those of MLX's norm and RoPE.
ROTATED = """
    const T* line = y + size_t(row) * y_shape[1];
    float cosine[PER], sine[PER];
    for (int i = 0; i < PER; ++i) {
        const float wave = inv_freq[(lane * PER + i) % (D / 2)];
        const float angle = float(length - 1) * (IN_LOG2 ? exp2f(wave) : wave);
        cosine[i] = cosf(angle);
        sine[i] = sinf(angle);
    }
    for (int h = 0; h < SHARING; ++h) {
        const Piece<T, PER> query = rotated<T, D, LANES, NORMS>(
            line + (head * SHARING + h) * D, q_norm, eps[0], lane, cosine, sine);
        for (int i = 0; i < PER; ++i)
            asked[h][i] = float(query.of[i]) * SCALE;
    }
    fresh_key = rotated<T, D, LANES, NORMS>(line + (heads * SHARING + head) * D, k_norm, eps[0], lane, cosine, sine);
    fresh_value = *as_piece<T, PER>(line + (heads * (SHARING + 1) + head) * D + lane * PER);
"""
ATTEND = """
    if (group == 0 && end == length) {
        const size_t last = size_t(length - 1) * D;
        *reinterpret_cast<Piece<T, PER>*>(const_cast<T*>(keys) + last) = fresh_key;
        *reinterpret_cast<Piece<T, PER>*>(const_cast<T*>(values) + last) = fresh_value;
    }
    for (int h = 0; h < SHARING; ++h) {
        top[h] = -1e30f;
        total[h] = 0.0f;
        for (int i = 0; i < PER; ++i)
            sum[h][i] = 0.0f;
    }
    // Threads of a warp stay together: a group past the end computes its last token again, and drops it.
    for (int begin = from; begin < end; begin += GROUPS * AT_ONCE) {
        Piece<T, PER> key[AT_ONCE], value[AT_ONCE];
        for (int n = 0; n < AT_ONCE; ++n) {
            const int token = min(begin + n * GROUPS + group, end - 1);
            const bool fresh = token == length - 1;
            key[n] = fresh ? fresh_key : *as_piece<T, PER>(keys + size_t(token) * D);
            value[n] = fresh ? fresh_value : *as_piece<T, PER>(values + size_t(token) * D);
        }
        for (int n = 0; n < AT_ONCE; ++n) {
            const bool inside = begin + n * GROUPS + group < end;
            for (int h = 0; h < SHARING; ++h) {
                float score = 0.0f;
                for (int i = 0; i < PER; ++i)
                    score += asked[h][i] * float(key[n].of[i]);
                for (int step = LANES / 2; step; step /= 2)
                    score += __shfl_xor_sync(0xffffffff, score, step);
                score = inside ? score : -1e30f;
                const float before = top[h];
                top[h] = fmaxf(before, score);
                const float keep = exp2f(before - top[h]);
                const float weight = inside ? exp2f(score - top[h]) : 0.0f;
                total[h] = total[h] * keep + weight;
                for (int i = 0; i < PER; ++i)
                    sum[h][i] = sum[h][i] * keep + weight * float(value[n].of[i]);
            }
        }
    }
    __shared__ float tops[GROUPS], totals[GROUPS], sums[GROUPS][D];
    for (int h = 0; h < SHARING; ++h) {
        if (lane == 0) {
            tops[group] = top[h];
            totals[group] = total[h];
        }
        for (int i = 0; i < PER; ++i)
            sums[group][lane * PER + i] = sum[h][i];
        __syncthreads();
        for (int d = threadIdx.x; d < D; d += WARPS * 32) {
            float highest = tops[0];
            for (int g = 1; g < GROUPS; ++g)
                highest = fmaxf(highest, tops[g]);
            float above = 0.0f, below = 0.0f;
            for (int g = 0; g < GROUPS; ++g) {
                const float share = exp2f(tops[g] - highest);
                above += share * sums[g][d];
                below += share * totals[g];
            }
            if (WHOLE) {
                out[((size_t(row) * heads + head) * SHARING + h) * D + d] = T(above / below);
                continue;
            }
            auto* part = out + (((size_t(row) * heads + head) * gridDim.x + blockIdx.x) * SHARING + h) * (D + 2);
            part[d] = above;
            if (d == 0) {
                part[D] = highest;
                part[D + 1] = below;
            }
        }
        __syncthreads();
    }
"""
JOIN = """
    const int head = blockIdx.y, row = blockIdx.z, heads = gridDim.y, spans = parts_shape[2];
    const int count = row < k_shape[0] ? offsets[row] / SPAN + 1 : 0;
    for (int i = threadIdx.x; i < SHARING * D; i += blockDim.x) {
        const int h = i / D, d = i % D;
        const float* part = parts + ((size_t(row) * heads + head) * spans * SHARING + h) * (D + 2);
        float highest = -1e30f, above = 0.0f, below = 0.0f;
        for (int n = 0; n < count; ++n)
            highest = fmaxf(highest, part[size_t(n) * SHARING * (D + 2) + D]);
        for (int n = 0; n < count; ++n) {
            const float* one = part + size_t(n) * SHARING * (D + 2);
            const float share = exp2f(one[D] - highest);
            above += share * one[d];
            below += share * one[D + 1];
        }
        out[((size_t(row) * heads + head) * SHARING + h) * D + d] = T(count ? above / below : 0.0f);
    }
"""
HEADER = """
template <typename T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Piece {{ T of[N]; }};
template <typename T, int N>
__device__ const Piece<T, N>* as_piece(const T* from) {{ return reinterpret_cast<const Piece<T, N>*>(from); }}
constexpr int WARPS = {warps}, SPAN = {span};
constexpr float SCALE = {scale}f;

// A thread's piece of a head, rotated, and before that normed where NORMS says so.
template <typename T, int D, int LANES, bool NORMS>
__device__ Piece<T, D / LANES> rotated(const T* head, const T* norm, float eps, int lane, const float* cosine,
                                       const float* sine) {{
    constexpr int PER = D / LANES;
    const int first = lane * PER, second = (first + D / 2) % D;
    Piece<T, PER> own = *as_piece<T, PER>(head + first), other = *as_piece<T, PER>(head + second);
    if (NORMS) {{
        float squares = 0.0f;
        for (int i = 0; i < PER; ++i)
            squares += float(own.of[i]) * float(own.of[i]);
        for (int step = LANES / 2; step; step /= 2)
            squares += __shfl_xor_sync(0xffffffff, squares, step);
        const float share = rsqrtf(squares / D + eps);
        for (int i = 0; i < PER; ++i) {{
            own.of[i] = T(float(T(float(own.of[i]) * share)) * float(norm[first + i]));
            other.of[i] = T(float(T(float(other.of[i]) * share)) * float(norm[second + i]));
        }}
    }}
    for (int i = 0; i < PER; ++i) {{
        const float one = float(own.of[i]), pair = float(other.of[i]);
        own.of[i] = T(lane < LANES / 2 ? one * cosine[i] - pair * sine[i] : pair * sine[i] + one * cosine[i]);
    }}
    return own;
}}
"""


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    fresh: tuple[mx.array, mx.array],
    offsets: mx.array,
    scale: float,
    slots: mx.array | None = None,
) -> mx.array | None:
    """Queries (S, H, 1, D) over slots (S, K, C, D), of which row s has offsets[s] tokens: (S, H, 1, D). Where there are
    more rows than slots, the others get zeros.

    Row s's new token, `fresh` (keys and values (S, K, 1, D)), is written in place behind them and attended to.
    None, and nothing written, when the shapes are not for this kernel, or rows are not in the slots in order.
    """
    rows, heads, _, width = queries.shape
    if slots is not None or queries.dtype != keys.dtype or not _suits(rows, heads, width, keys, values):
        return None
    return _run(_kernel(scale), [queries, keys, values, offsets, *fresh], heads, queries.shape, [])


def rotate_and_attend(
    y: mx.array,
    heads: int,
    keys: mx.array,
    values: mx.array,
    offsets: mx.array,
    rope: RopeParams,
    norms: HeadNorms | None,
    scale: float,
) -> mx.array | None:
    """The same of lines y (S, (H + 2 K) D): the heads of queries, of keys and of values, as they are before the norms
    of heads and RoPE: (S, H D)."""
    rows, columns = y.shape
    width = keys.shape[3]
    if y.dtype != keys.dtype or not _suits(rows, heads, width, keys, values) or rope.inv_freq.size != width // 2:
        return None
    assert columns == (heads + 2 * keys.shape[1]) * width
    weights = [y, y] if norms is None else [norms.queries, norms.keys]
    if any(weight.dtype != y.dtype for weight in weights):
        return None
    eps = mx.array([0.0 if norms is None else norms.eps])
    inputs = [y, keys, values, offsets, rope.inv_freq, *weights, eps]
    template = [("IN_LOG2", rope.in_log2), ("NORMS", norms is not None)]
    return _run(_rotating_kernel(scale), inputs, heads, (rows, heads * width), template)


def _suits(rows: int, heads: int, width: int, keys: mx.array, values: mx.array) -> bool:
    shared = keys.shape[1]
    known = width in WIDTHS and keys.shape == values.shape and keys.dtype == values.dtype and rows >= keys.shape[0]
    return known and heads // shared <= MAX_SHARING


def _run(
    kernel: Any,
    inputs: list[mx.array],
    heads: int,
    shape: tuple[int, ...],
    template: list[tuple[str, Any]],
) -> mx.array:
    """`inputs`: the second are the slots' keys, the fourth the offsets. `shape`: of the output, a line for each row."""
    keys = inputs[1]
    _, shared, capacity, width = keys.shape
    sharing = heads // shared
    lanes = width // 8 if sharing <= 4 else 32  # more would leave too few registers
    spans = -(-capacity // SPAN)
    whole = spans == 1
    rows = shape[0]
    sizes = [("T", keys.dtype), ("D", width), ("SHARING", sharing)]
    found: list[mx.array] = kernel(
        inputs=inputs,
        template=[*sizes, ("LANES", lanes), ("AT_ONCE", 4), ("WHOLE", whole), *template],
        grid=(WARPS * 32 * spans, shared, rows),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[shape if whole else (rows, shared, spans, sharing * (width + 2))],
        output_dtypes=[keys.dtype if whole else mx.float32],
    )
    if whole:
        return found[0]
    joined: list[mx.array] = _joining_kernel()(
        inputs=[found[0], keys, inputs[3]],
        template=sizes,
        grid=(WARPS * 32, shared, rows),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[shape],
        output_dtypes=[keys.dtype],
    )
    return joined[0]


@functools.cache
def _kernel(scale: float) -> Any:
    return _built("slot_attention", ["q", "k", "v", "offsets", "new_k", "new_v"], BEGIN + GIVEN + ATTEND, scale)


@functools.cache
def _rotating_kernel(scale: float) -> Any:
    names = ["y", "k", "v", "offsets", "inv_freq", "q_norm", "k_norm", "eps"]
    return _built("rotating_slot_attention", names, BEGIN + ROTATED + ATTEND, scale)


@functools.cache
def _joining_kernel() -> Any:
    header = f"constexpr int SPAN = {SPAN};\n"
    return mx.fast.cuda_kernel("join_slot_attention", ["parts", "k", "offsets"], ["out"], JOIN, header)


def _built(name: str, inputs: list[str], source: str, scale: float) -> Any:
    binary = scale * 1.4426950408889634  # exp2 in place of exp
    header = HEADER.format(warps=WARPS, span=SPAN, scale=repr(float(binary)))
    return mx.fast.cuda_kernel(f"{name}_{hash(binary) & 0xFFFFFFFF:x}", inputs, ["out"], source, header)
