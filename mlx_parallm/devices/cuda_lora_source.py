"""The text of the CUDA kernels that `kernel` builds and starts."""

WARPS = 16
MAX_RANK = 512
BYTES = 16  # that a thread reads at once

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
ADD_RESIDUAL = (
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
