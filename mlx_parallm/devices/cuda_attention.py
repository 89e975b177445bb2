"""Attention of one query per row over slots of different lengths, as one CUDA kernel.

MLX on CUDA has no fused attention with a mask: it computes every row as far as the longest, in half a dozen kernels.
This one reads each row to its own length, and puts the row's new key and value into the slots in place, as
`inplace` does: the step before it, on whose tokens it depends, is the last that wrote there.
`slots.SlotLayer.attend` calls it; on other devices, and for shapes that it does not know, attention goes through MLX's
own operations.
"""

import functools
from typing import Any

import mlx.core as mx

WARPS = 8
MIN_BLOCKS = 64  # fewer rows and heads would leave most of the device idle
MAX_SHARING = 8
WIDTHS = (64, 128, 256)

# A block is one row and one head of keys and values, with the query heads that share it. Each group of LANES threads
# takes every GROUPS-th token; what the groups have found is joined at the end.
SOURCE = """
    constexpr int PER = D / LANES;  // elements of a head that a thread holds
    constexpr int GROUPS = WARPS * 32 / LANES;
    const int head = blockIdx.y, row = blockIdx.z;
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const int heads = gridDim.y, capacity = k_shape[2];
    const int length = offsets[row] + 1;
    const T* keys = k + (size_t(row) * heads + head) * capacity * D + lane * PER;
    const T* values = v + (size_t(row) * heads + head) * capacity * D + lane * PER;
    const T* fresh_key = new_k + (size_t(row) * heads + head) * D + lane * PER;
    const T* fresh_value = new_v + (size_t(row) * heads + head) * D + lane * PER;
    const T* queries = q + (size_t(row) * heads + head) * SHARING * D + lane * PER;

    if (group == 0) {
        const size_t last = size_t(length - 1) * D;
        *reinterpret_cast<Piece<T, PER>*>(const_cast<T*>(keys) + last) = *as_piece<T, PER>(fresh_key);
        *reinterpret_cast<Piece<T, PER>*>(const_cast<T*>(values) + last) = *as_piece<T, PER>(fresh_value);
    }
    float asked[SHARING][PER], sum[SHARING][PER], top[SHARING], total[SHARING];
    for (int h = 0; h < SHARING; ++h) {
        top[h] = -1e30f;
        total[h] = 0.0f;
        for (int i = 0; i < PER; ++i) {
            asked[h][i] = float(queries[h * D + i]) * SCALE;
            sum[h][i] = 0.0f;
        }
    }
    // Threads of a warp stay together: a group past the end computes its last token again, and drops it.
    for (int begin = 0; begin < length; begin += GROUPS * AT_ONCE) {
        Piece<T, PER> key[AT_ONCE], value[AT_ONCE];
        for (int n = 0; n < AT_ONCE; ++n) {
            const int token = min(begin + n * GROUPS + group, length - 1);
            const bool fresh = token == length - 1;
            key[n] = *as_piece<T, PER>(fresh ? fresh_key : keys + size_t(token) * D);
            value[n] = *as_piece<T, PER>(fresh ? fresh_value : values + size_t(token) * D);
        }
        for (int n = 0; n < AT_ONCE; ++n) {
            const bool inside = begin + n * GROUPS + group < length;
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
            out[((size_t(row) * heads + head) * SHARING + h) * D + d] = T(above / below);
        }
        __syncthreads();
    }
"""
HEADER = """
template <typename T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Piece {{ T of[N]; }};
template <typename T, int N>
__device__ const Piece<T, N>* as_piece(const T* from) {{ return reinterpret_cast<const Piece<T, N>*>(from); }}
constexpr int WARPS = {warps};
constexpr float SCALE = {scale}f;
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
    """Queries (S, H, 1, D) over slots (S, K, C, D), of which row s has offsets[s] tokens: (S, H, 1, D).

    Row s's new token, `fresh` (keys and values (S, K, 1, D)), is written in place behind them and attended to.
    None, and nothing written, when the shapes are not for this kernel, or rows are not in the slots in order.
    """
    rows, heads, _, width = queries.shape
    shared = keys.shape[1]
    sharing = heads // shared
    known = width in WIDTHS and keys.shape == values.shape and queries.dtype == keys.dtype == values.dtype
    if slots is not None or not known or sharing > MAX_SHARING or rows * shared < MIN_BLOCKS:
        return None
    lanes = width // 8 if sharing <= 4 else 32  # more would leave too few registers
    out = _kernel(scale)(
        inputs=[queries, keys, values, *fresh, offsets],
        template=[("T", queries.dtype), ("D", width), ("SHARING", sharing), ("LANES", lanes), ("AT_ONCE", 4)],
        grid=(WARPS * 32, shared, rows),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
    )
    result: mx.array = out[0]
    return result


@functools.cache
def _kernel(scale: float) -> Any:
    binary = scale * 1.4426950408889634  # exp2 in place of exp
    header = HEADER.format(warps=WARPS, scale=repr(float(binary)))
    name = f"slot_attention_{hash(binary) & 0xFFFFFFFF:x}"
    return mx.fast.cuda_kernel(name, ["q", "k", "v", "new_k", "new_v", "offsets"], ["out"], SOURCE, header)
