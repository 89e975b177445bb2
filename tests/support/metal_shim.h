// What Metal kernels need of their language, in C++, to run them on a CPU: `metal_shim.py` compiles both together.
//
// The threads of a threadgroup are fibers of one thread. They take turns in an order that differs from group to group,
// and give way at barriers and at simdgroups' operations alone, so that a barrier that is missing shows. Whoever waits
// where others never come is an error, as on a GPU.
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define INFINITY __builtin_inff()
#define device
#define constant
#define thread

typedef uint32_t uint;
struct uint3 { uint x, y, z; };

template <typename To, typename From>
To as_type(From from) {
    static_assert(sizeof(To) == sizeof(From), "as_type changes no size");
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
}

struct bfloat16_t {
    uint16_t bits;
    bfloat16_t() = default;
    bfloat16_t(float value) {
        uint32_t word = as_type<uint32_t>(value);
        if (value != value) bits = uint16_t(word >> 16) | 0x40;
        else bits = uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);
    }
    operator float() const { return as_type<float>(uint32_t(bits) << 16); }
};

struct float16_t {
    uint16_t bits;
    float16_t() = default;
    float16_t(float value) {
        const uint32_t word = as_type<uint32_t>(value), sign = (word >> 16) & 0x8000u, size = word & 0x7fffffffu;
        if (size >= 0x7f800000u) bits = uint16_t(sign | (size > 0x7f800000u ? 0x7e00u : 0x7c00u));
        else if (size >= 0x477ff000u) bits = uint16_t(sign | 0x7c00u);  // rounds to infinity
        else if (size >= 0x38800000u) bits = uint16_t(sign | ((size - 0x38000000u + 0xfffu + ((size >> 13) & 1)) >> 13));
        else bits = uint16_t(sign | uint32_t(__builtin_nearbyintf(__builtin_ldexpf(__builtin_fabsf(value), 24))));  // subnormal
    }
    operator float() const {
        const uint32_t sign = uint32_t(bits & 0x8000) << 16, rest = bits & 0x7fffu;
        if (rest >= 0x7c00u) return as_type<float>(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
        if (rest < 0x400u) return (sign ? -1.0f : 1.0f) * __builtin_ldexpf(float(rest), -24);
        return as_type<float>(sign | ((rest << 13) + 0x38000000u));
    }
};

namespace shim {

struct Fiber {
    ucontext_t context;
    jmp_buf place;
    char* stack = nullptr;
    bool begun, ended;
};

struct Meeting {  // of the fibers of a group, or of a simdgroup
    uint arrived = 0, expected = 0;
    uint64_t round = 0;
    union { float f; uint u; } told[2][32];  // by lane, of this round and the one before
};

const size_t STACK = 64 << 10;
const uint MOST = 1024;  // threads of a group
Fiber fibers[MOST];
uint order[MOST];
Meeting simdgroups[MOST / 32];
Meeting whole;
jmp_buf scheduler;
ucontext_t entrance;
uint current;
uint64_t progress;
void (*body)();
uint3 group_place, group_size, full_size, grid, groups;
uint random_state = 1;

inline uint least(uint a, uint b) { return a < b ? a : b; }

inline uint next_random() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 17;
    return random_state ^= random_state << 5;
}

__attribute__((noinline)) void give_way() {
    if (!_setjmp(fibers[current].place)) _longjmp(scheduler, 1);
}

__attribute__((noinline)) uint64_t meet(Meeting& meeting) {
    const uint64_t round = meeting.round;
    ++progress;
    if (++meeting.arrived == meeting.expected) {
        meeting.arrived = 0;
        ++meeting.round;
    } else {
        while (meeting.round == round) give_way();
    }
    return round;
}

void begin() {
    body();
    fibers[current].ended = true;
    ++progress;
    _longjmp(scheduler, 1);
}

__attribute__((noinline)) void turn(uint number) {
    current = number;
    if (_setjmp(scheduler)) return;
    Fiber& fiber = fibers[number];
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, begin, 0);
    swapcontext(&entrance, &fiber.context);
}

bool run_group() {
    const uint count = group_size.x * group_size.y * group_size.z;
    if (count > MOST) return false;
    whole = Meeting();
    whole.expected = count;
    for (uint i = 0; i < count; ++i) {
        if (!fibers[i].stack) fibers[i].stack = static_cast<char*>(malloc(STACK));
        fibers[i].begun = fibers[i].ended = false;
        if (i % 32 == 0) simdgroups[i / 32] = Meeting();
        simdgroups[i / 32].expected = least(32, count - i / 32 * 32);
        order[i] = i;
    }
    for (uint i = count; i > 1; --i) {
        const uint other = next_random() % i, last = order[i - 1];
        order[i - 1] = order[other];
        order[other] = last;
    }
    for (uint left = count; left;) {
        const uint64_t before = progress;
        left = 0;
        for (uint i = 0; i < count; ++i)
            if (!fibers[order[i]].ended) {
                turn(order[i]);
                left += !fibers[order[i]].ended;
            }
        if (left && progress == before) return false;  // some wait for those that never come
    }
    return true;
}

bool run(void (*function)(), const uint* grid_size, const uint* threads, uint seed) {
    body = function;
    random_state = seed | 1;
    grid = {grid_size[0], grid_size[1], grid_size[2]};
    full_size = {least(threads[0], grid.x), least(threads[1], grid.y), least(threads[2], grid.z)};
    auto share = [](uint all, uint each) { return (all + each - 1) / each; };
    groups = {share(grid.x, full_size.x), share(grid.y, full_size.y), share(grid.z, full_size.z)};
    for (uint z = 0; z < groups.z; ++z)
        for (uint y = 0; y < groups.y; ++y)
            for (uint x = 0; x < groups.x; ++x) {
                group_place = {x, y, z};
                group_size = {
                    least(full_size.x, grid.x - x * full_size.x), least(full_size.y, grid.y - y * full_size.y),
                    least(full_size.z, grid.z - z * full_size.z)};
                if (!run_group()) return false;
            }
    return true;
}

inline uint3 place_in_group() {
    return {current % group_size.x, current / group_size.x % group_size.y, current / group_size.x / group_size.y};
}

inline uint3 place_in_grid() {
    const uint3 place = place_in_group();
    return {group_place.x * full_size.x + place.x, group_place.y * full_size.y + place.y,
            group_place.z * full_size.z + place.z};
}

template <typename Join>
float over_simdgroup(float mine, Join join) {
    Meeting& meeting = simdgroups[current / 32];
    const uint lane = current % 32;
    const int side = meeting.round % 2;
    meeting.told[side][lane].f = mine;
    meet(meeting);
    float values[32];
    const uint count = meeting.expected;
    for (uint i = 0; i < count; ++i) values[i] = meeting.told[side][i].f;
    for (uint step = 16; step; step /= 2)
        for (uint i = 0; i < step && i + step < count; ++i) values[i] = join(values[i], values[i + step]);
    return values[0];
}

}  // namespace shim

namespace metal {

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
inline void threadgroup_barrier(mem_flags) { shim::meet(shim::whole); }
inline float simd_sum(float mine) { return shim::over_simdgroup(mine, [](float a, float b) { return a + b; }); }
inline float simd_max(float mine) { return shim::over_simdgroup(mine, [](float a, float b) { return a > b ? a : b; }); }
inline float exp(float x) { return __builtin_expf(x); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline float min(float a, float b) { return __builtin_fminf(a, b); }

}  // namespace metal
