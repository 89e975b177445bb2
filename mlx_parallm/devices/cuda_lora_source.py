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

# A block is one token, one layer and a share of the layer's outputs, which lie side by side in y. Every block of a
# token computes all of z, which is little beside waiting for one another.
ADD = """
    constexpr int N = BYTES / sizeof(T);
    const int token = blockIdx.z, row = token / x_shape[1], size = x_shape[2], total = y_shape[2], layer = blockIdx.y;
    const int column = layer ? ends[layer - 1] : 0, out_features = ends[layer] - column;
    const bool adapts = firsts[layer] >= 0;
    const int rank = adapts ? spans[2 * row + 1] : 0;
    const size_t first = adapts ? size_t(firsts[layer]) + spans[2 * row] : 0, line = size_t(token) * total + column;
    const int begin = (blockIdx.x * WARPS * 32 + threadIdx.x) * N, step = gridDim.x * WARPS * 32 * N;
    const T *a, *b;
    switch (layer) {{ {cases} }}
    __shared__ float z[MAX_RANK];
    project(a + first * size, x + size_t(token) * size, size, rank, z);
    __syncthreads();
    for (int i = begin; i < out_features; i += step)
        *reinterpret_cast<Piece<T>*>(out + line + i) =
            adapted(y + line + i, b + first * out_features + i, out_features, rank, z);
"""
CASE = "case {i}: a = a{i}; b = b{i}; break;"

# swiglu of the two halves of each line, with the roundings of MLX's own.
GATE = """
    constexpr int N = BYTES / sizeof(T);
    const int width = y_shape[1] / 2, row = blockIdx.y, i = (blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (i >= width) return;
    const T* line = y + size_t(row) * 2 * width + i;
    Piece<T> found = *as_piece(line);
    const Piece<T> beside = *as_piece(line + width);
    for (int n = 0; n < N; ++n) {
        const float gate = found.of[n], small = 1.0f / (1.0f + expf(fabsf(gate)));
        const T open = T(gate < 0.0f ? small : 1.0f - small), let = T(gate * float(open));
        found.of[n] = T(float(let) * float(beside.of[n]));
    }
    *reinterpret_cast<Piece<T>*>(out + size_t(row) * width + i) = found;
"""
