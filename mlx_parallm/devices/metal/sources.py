"""The text of the Metal kernels that `kernels` builds and starts.

Each is the body of a function whose parameters `mx.fast.metal_kernel` writes: the inputs, their shapes where the body
names them, and what Metal tells a thread about its place. `tests/support/metal_shim.h` compiles the same text as C++.
"""

LANES = 32  # threads of a simdgroup

# Numbers that a thread multiplies at a time; what is read is a multiple of this.
AT_ONCE = 4
MAX_RANK = 512

LORA_HEADER = f"""
constexpr constant int AT_ONCE = {AT_ONCE}, MAX_RANK = {MAX_RANK};
"""
# A threadgroup is one row, one layer and a share of the layer's outputs. Each computes all of z, the row's inputs
# times its own columns of a, which is little beside waiting for one another.
LORA = """
    const uint lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
    const uint row = threadgroup_position_in_grid.z, layer = threadgroup_position_in_grid.y;
    const int size = a_shape[1], columns = b0_shape[0], begin = spans[2 * row], rank = spans[2 * row + 1];
    const device T* inputs = x + size_t(row) * size;
    const device T* y = y0;
    const device T* b = b0;
    device T* out = out0;
    int out_features = b0_shape[1];
    {cases}
    threadgroup float z[MAX_RANK];
    for (int r = group; r < rank; r += SIMDGROUPS) {{
        const device T* column = a + size_t(layer * columns + begin + r) * size;
        float sum = 0.0f;
        for (int i = lane * AT_ONCE; i < size; i += {lanes} * AT_ONCE)
            for (int n = 0; n < AT_ONCE; ++n)
                sum += float(column[i + n]) * float(inputs[i + n]);
        sum = metal::simd_sum(sum);
        if (lane == 0) z[r] = sum;
    }}
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    const device T* own = b + size_t(begin) * out_features;
    for (int i = thread_position_in_grid.x; i < out_features; i += threads_per_grid.x) {{
        float sum = 0.0f;
        for (int r = 0; r < rank; ++r)
            sum += z[r] * float(own[size_t(r) * out_features + i]);
        const size_t place = size_t(row) * out_features + i;
        out[place] = T(float(y[place]) + sum);
    }}
"""
LORA_CASE = "if (layer == {i}) {{ y = y{i}; b = b{i}; out = out{i}; out_features = b{i}_shape[1]; }}"

# A threadgroup is one row, the queries that share one head of keys, and one of SPLITS shares of the row's tokens; a
# simdgroup takes every SIMDGROUPS-th of those. Softmax is computed as it goes, with the highest score so far.
ATTENTION_HEADER = """
constexpr constant float SCALE = {scale}f, LOWEST = -1e38f;
"""
ATTENTION = """
    constexpr int E = D / 32, EVERY = SIMDGROUPS * SPLITS;
    const uint lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
    const uint row = threadgroup_position_in_grid.z, head = threadgroup_position_in_grid.y;
    const uint split = threadgroup_position_in_grid.x;
    const int length = offsets[row] + 1;
    const size_t line = (size_t(row) * keys_shape[1] + head) * keys_shape[2] * D + lane * E;
    const size_t first = (size_t(row) * keys_shape[1] + head) * SHARING;
    float query[SHARING][E], sum[SHARING][E], highest[SHARING], total[SHARING];
    for (int h = 0; h < SHARING; ++h) {
        highest[h] = LOWEST;
        total[h] = 0.0f;
        for (int e = 0; e < E; ++e) {
            query[h][e] = SCALE * float(queries[(first + h) * D + lane * E + e]);
            sum[h][e] = 0.0f;
        }
    }
    for (int i = split * SIMDGROUPS + group; i < length; i += EVERY) {
        const device T* key = keys + line + size_t(i) * D;
        const device T* value = values + line + size_t(i) * D;
        float k[E], v[E];
        for (int e = 0; e < E; ++e) {
            k[e] = float(key[e]);
            v[e] = float(value[e]);
        }
        for (int h = 0; h < SHARING; ++h) {
            float score = 0.0f;
            for (int e = 0; e < E; ++e)
                score += query[h][e] * k[e];
            score = metal::simd_sum(score);
            const float higher = metal::max(highest[h], score);
            const float before = metal::exp(highest[h] - higher), weight = metal::exp(score - higher);
            highest[h] = higher;
            total[h] = total[h] * before + weight;
            for (int e = 0; e < E; ++e)
                sum[h][e] = sum[h][e] * before + weight * v[e];
        }
    }
    threadgroup float tops[SIMDGROUPS], totals[SIMDGROUPS], sums[SIMDGROUPS * D];
    for (int h = 0; h < SHARING; ++h) {
        if (lane == 0) {
            tops[group] = highest[h];
            totals[group] = total[h];
        }
        for (int e = 0; e < E; ++e)
            sums[group * D + lane * E + e] = sum[h][e];
        metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
        float top = LOWEST, below = 0.0f;
        for (int g = 0; g < SIMDGROUPS; ++g)
            top = metal::max(top, tops[g]);
        for (int g = 0; g < SIMDGROUPS; ++g)
            below += metal::exp(tops[g] - top) * totals[g];
        for (int d = thread_index_in_threadgroup; d < D; d += SIMDGROUPS * 32) {
            float above = 0.0f;
            for (int g = 0; g < SIMDGROUPS; ++g)
                above += metal::exp(tops[g] - top) * sums[g * D + d];
            if (SPLITS == 1) {
                out[(first + h) * D + d] = O(above / below);
            } else {
                const size_t place = ((first + h) * SPLITS + split) * (D + 2);
                out[place + d] = above;
                if (d == 0) {
                    out[place + D] = below;
                    out[place + D + 1] = top;
                }
            }
        }
        metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }
"""
# A thread is one number of one query: its shares are put together as simdgroups' are above.
ATTENTION_SUM = """
    const uint d = thread_position_in_grid.x;
    const size_t line = size_t(thread_position_in_grid.y) * SPLITS * (D + 2);
    float top = LOWEST, above = 0.0f, below = 0.0f;
    for (int split = 0; split < SPLITS; ++split)
        top = metal::max(top, parts[line + split * (D + 2) + D + 1]);
    for (int split = 0; split < SPLITS; ++split) {
        const size_t place = line + split * (D + 2);
        const float share = metal::exp(parts[place + D + 1] - top);
        above += share * parts[place + d];
        below += share * parts[place + D];
    }
    out[size_t(thread_position_in_grid.y) * D + d] = T(above / below);
"""

# A threadgroup is one row of logits. Thresholds are found by halving the range of keys, 32-bit numbers in the order of
# the logits: nothing is sorted, and sums are added in one order.
CUT_HEADER = """
constexpr constant int KEPT = 4;  // logits of the window that a thread keeps

inline uint key_of(float logit) {
    const uint bits = as_type<uint>(logit);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

inline float logit_of(uint key) {
    return as_type<float>(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

template <int SIMDGROUPS>
float sum_of_threads(float mine, threadgroup float* shared, uint group, uint lane) {
    const float sum = metal::simd_sum(mine);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (lane == 0) shared[group] = sum;
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    float total = 0.0f;
    for (int g = 0; g < SIMDGROUPS; ++g)
        total += shared[g];
    return total;
}

template <int SIMDGROUPS>
float max_of_threads(float mine, threadgroup float* shared, uint group, uint lane) {
    const float top = metal::simd_max(mine);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (lane == 0) shared[group] = top;
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    float highest = shared[0];
    for (int g = 1; g < SIMDGROUPS; ++g)
        highest = metal::max(highest, shared[g]);
    return highest;
}

// How many of the logits that this thread reads are above a key: of the window's, or of all.
template <int THREADS>
float count_above(
    uint key, bool whole, const device float* line, int size, threadgroup float* window, int kept, uint me) {
    float count = 0.0f;
    if (whole) {
        for (int i = me; i < size; i += THREADS)
            count += key_of(line[i]) > key ? 1.0f : 0.0f;
    } else {
        for (int k = 0; k < kept; ++k)
            count += key_of(window[k * THREADS + me]) > key ? 1.0f : 0.0f;
    }
    return count;
}

// The sum of their exponentials.
template <int THREADS>
float mass_above(
    uint key, float top, bool whole, const device float* line, int size, threadgroup float* window, int kept,
    uint me) {
    float mass = 0.0f;
    if (whole) {
        for (int i = me; i < size; i += THREADS)
            mass += key_of(line[i]) > key ? metal::exp(line[i] - top) : 0.0f;
    } else {
        for (int k = 0; k < kept; ++k) {
            const float logit = window[k * THREADS + me];
            mass += key_of(logit) > key ? metal::exp(logit - top) : 0.0f;
        }
    }
    return mass;
}
"""
CUT = """
    constexpr int THREADS = SIMDGROUPS * 32;
    const uint lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
    const uint me = thread_index_in_threadgroup, row = threadgroup_position_in_grid.x;
    const int size = logits_shape[1];
    const device float* line = logits + size_t(row) * size;
    const float top_p = limits[2 * row], top_k = limits[2 * row + 1];
    const bool counts = top_k < float(size), weighs = top_p <= 1.0f;
    threadgroup float shared[SIMDGROUPS], window[KEPT * THREADS];

    float mine = -INFINITY;
    for (int i = me; i < size; i += THREADS)
        mine = metal::max(mine, line[i]);
    const float top = max_of_threads<SIMDGROUPS>(mine, shared, group, lane);
    if (!(top > -INFINITY)) {  // nothing is possible: the same for all threads
        if (me == 0) out[row] = -INFINITY;
        return;
    }

    // The window: logits near the highest, as far down as each thread has room for its own.
    bool whole = true;
    int kept = 0;
    uint floor_key = 0;
    for (float depth = WINDOW; whole && depth >= WINDOW / 4; depth /= 2) {
        const float lowest = top - depth;
        kept = 0;
        for (int i = me; i < size; i += THREADS)
            if (line[i] >= lowest) {
                if (kept < KEPT) window[kept * THREADS + me] = line[i];
                ++kept;
            }
        whole = max_of_threads<SIMDGROUPS>(float(kept), shared, group, lane) > float(KEPT);
        floor_key = key_of(lowest);
    }
    if (!whole && counts)  // the k-th must be in it
        whole = sum_of_threads<SIMDGROUPS>(float(kept), shared, group, lane) < top_k;
    float all = 0.0f;
    if (weighs && !counts) {
        all = sum_of_threads<SIMDGROUPS>(
            mass_above<THREADS>(0u, top, true, line, size, window, kept, me), shared, group, lane);
        if (!whole)  // and so must be whatever top-p keeps
            whole = sum_of_threads<SIMDGROUPS>(
                mass_above<THREADS>(0u, top, false, line, size, window, kept, me), shared, group, lane) < top_p * all;
    }

    // The k-th highest: the least key with fewer than k above it.
    uint least = whole ? 0u : floor_key, most = key_of(top);
    if (counts) {
        while (least < most) {
            const uint middle = least + (most - least) / 2;
            const float above = sum_of_threads<SIMDGROUPS>(
                count_above<THREADS>(middle, whole, line, size, window, kept, me), shared, group, lane);
            if (above < top_k) most = middle; else least = middle + 1;
        }
        if (weighs) {  // of equals at the k-th place only as many count as there is room for
            const float above = sum_of_threads<SIMDGROUPS>(
                count_above<THREADS>(least, whole, line, size, window, kept, me), shared, group, lane);
            all = sum_of_threads<SIMDGROUPS>(
                mass_above<THREADS>(least, top, whole, line, size, window, kept, me), shared, group, lane)
                + (top_k - above) * metal::exp(logit_of(least) - top);
        }
        most = key_of(top);
    }
    // The least of those that top-p keeps: the least key with less than its share above it.
    if (weighs) {
        while (least < most) {
            const uint middle = least + (most - least) / 2;
            const float above = sum_of_threads<SIMDGROUPS>(
                mass_above<THREADS>(middle, top, whole, line, size, window, kept, me), shared, group, lane);
            if (above < top_p * all) most = middle; else least = middle + 1;
        }
    }
    if (me == 0) out[row] = counts || weighs ? logit_of(least) : -INFINITY;
"""
