// What CUDA kernels need of their language, in C++, over the fibers of `metal_shim.h`: `cuda_shim.py` compiles both.
#include <math.h>
#undef INFINITY
#include "metal_shim.h"

#define __device__
#define __nv_bfloat16 bfloat16_t
#define __half float16_t
#define threadIdx shim::place_in_group()
#define blockIdx shim::group_place
#define blockDim shim::group_size
#define gridDim shim::groups

struct int4 { int x, y, z, w; };

inline void __syncthreads() { shim::meet(shim::whole); }

inline float __shfl_xor_sync(unsigned, float mine, int step) {
    shim::Meeting& meeting = shim::simdgroups[shim::current / 32];
    const uint lane = shim::current % 32;
    const int side = meeting.round % 2;
    meeting.told[side][lane].f = mine;
    shim::meet(meeting);
    return meeting.told[side][lane ^ step].f;
}

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
