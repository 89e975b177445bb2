/* What MLX's CPU backend computes one element at a time: exponentials, small attentions, rotations, norms.
 *
 * Built by native/__init__.py with the machine's C compiler, called through ctypes by native/layers.py. All arrays
 * are float32; strides are in elements; the last axis of every array is contiguous. Plain loops over fixed numbers
 * of lanes, which GCC and Clang turn into vector instructions on any machine.
 */

#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define NEVER -1e30f
#define SPAN 32 /* keys whose values are read at a time */

/* Helpers share the work of one call at a time; they sleep in between, but not at once: the next call is usually near,
 * and waking takes as long as a small one. A call that finds them busy does without. */
#define SPINS 20000
typedef int (*work_fn)(const void *context, int64_t first, int64_t end);

static struct {
    pthread_mutex_t busy, lock;
    pthread_cond_t wake, done;
    work_fn work;
    const void *context;
    int64_t count;
    atomic_long next;
    atomic_int failed;
    int helpers;
    atomic_int left;
    atomic_uint round;
} crew = {.busy = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER,
          .done = PTHREAD_COND_INITIALIZER};

static inline void pause_(void) {
#if defined(__aarch64__)
    __asm__ volatile("yield");
#elif defined(__x86_64__)
    __asm__ volatile("pause");
#endif
}

/* Large pieces first, small ones at the end: nobody waits long for the last. */
static void take_pieces(void) {
    for (;;) {
        long first = atomic_load(&crew.next), end;
        do {
            if (first >= crew.count) return;
            end = first + 1 + (crew.count - first) / (3 * (crew.helpers + 1));
        } while (!atomic_compare_exchange_weak(&crew.next, &first, end));
        if (crew.work(crew.context, first, end)) atomic_store(&crew.failed, 1);
    }
}

static void *help(void *unused) {
    (void)unused;
    for (unsigned seen = 0;;) {
        for (int i = 0; i < SPINS && atomic_load(&crew.round) == seen; i++) pause_();
        if (atomic_load(&crew.round) == seen) {
            pthread_mutex_lock(&crew.lock);
            while (atomic_load(&crew.round) == seen) pthread_cond_wait(&crew.wake, &crew.lock);
            pthread_mutex_unlock(&crew.lock);
        }
        seen = atomic_load(&crew.round);
        take_pieces();
        if (atomic_fetch_sub(&crew.left, 1) == 1) {
            pthread_mutex_lock(&crew.lock);
            pthread_cond_signal(&crew.done);
            pthread_mutex_unlock(&crew.lock);
        }
    }
    return NULL;
}

/* Starts helpers; called once, when the library is loaded. */
int hire(int helpers) {
    for (int i = 0; i < helpers; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, NULL)) break;
        pthread_detach(thread);
        crew.helpers++;
    }
    return crew.helpers;
}

/* work(context, first, end) over 0..count, shared when `worth` says that it takes longer than to wake somebody. */
static int share(work_fn work, const void *context, int64_t count, int worth) {
    if (!worth || !crew.helpers || count < 2 || pthread_mutex_trylock(&crew.busy)) return work(context, 0, count);
    pthread_mutex_lock(&crew.lock);
    crew.work = work;
    crew.context = context;
    crew.count = count;
    atomic_store(&crew.next, 0);
    atomic_store(&crew.failed, 0);
    atomic_store(&crew.left, crew.helpers);
    atomic_fetch_add(&crew.round, 1);
    pthread_cond_broadcast(&crew.wake);
    pthread_mutex_unlock(&crew.lock);
    take_pieces();
    for (int i = 0; i < SPINS && atomic_load(&crew.left); i++) pause_();
    pthread_mutex_lock(&crew.lock);
    while (atomic_load(&crew.left)) pthread_cond_wait(&crew.done, &crew.lock);
    pthread_mutex_unlock(&crew.lock);
    const int failed = atomic_load(&crew.failed);
    pthread_mutex_unlock(&crew.busy);
    return failed;
}

#define WORTH_SHARING 20000 /* exponentials, or as much of something else */

/* Cephes' expf: within two units in the last place between its clamps. */
static inline float exp_(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float n = floorf(x * 1.44269504088896341f + 0.5f);
    float r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.0f);
    union { int32_t bits; float value; } power = {.bits = ((int32_t)n + 127) << 23};
    return p * power.value;
}

typedef float vec __attribute__((vector_size(16), aligned(4), may_alias));

static inline vec at(const float *x) { return *(const vec *)x; }

static inline float dot(const float *a, const float *b, int64_t size) {
    vec s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
    float sum = 0;
    int64_t i = 0;
    for (; i + 16 <= size; i += 16) {
        s0 += at(a + i) * at(b + i);
        s1 += at(a + i + 4) * at(b + i + 4);
        s2 += at(a + i + 8) * at(b + i + 8);
        s3 += at(a + i + 12) * at(b + i + 12);
    }
    for (; i < size; i++) sum += a[i] * b[i];
    s0 = (s0 + s1) + (s2 + s3);
    return sum + ((s0[0] + s0[2]) + (s0[1] + s0[3]));
}

static float largest(const float *x, int64_t size) {
    float lanes[LANES], top = x[0];
    for (int j = 0; j < LANES; j++) lanes[j] = x[0];
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        for (int j = 0; j < LANES; j++) lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
    for (; i < size; i++) top = x[i] > top ? x[i] : top;
    for (int j = 0; j < LANES; j++) top = lanes[j] > top ? lanes[j] : top;
    return top;
}

static float total(const float *x, int64_t size) {
    vec s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
    float sum = 0;
    int64_t i = 0;
    for (; i + 16 <= size; i += 16) {
        s0 += at(x + i);
        s1 += at(x + i + 4);
        s2 += at(x + i + 8);
        s3 += at(x + i + 12);
    }
    for (; i < size; i++) sum += x[i];
    s0 = (s0 + s1) + (s2 + s3);
    return sum + ((s0[0] + s0[2]) + (s0[1] + s0[3]));
}

/* The softmax of scale * x, in place. */
static void softmax_(float *x, int64_t size, float scale) {
    const float top = largest(x, size);
    for (int64_t i = 0; i < size; i++) x[i] = exp_((x[i] - top) * scale);
    const float share = 1.0f / total(x, size);
    for (int64_t i = 0; i < size; i++) x[i] *= share;
}

/* What one query may see: all up to `last`, or a row of a mask. Returns the first and one past the last. */
static void visible(const uint8_t *mask, int64_t last, int64_t keys, int64_t *first, int64_t *end) {
    *first = 0;
    *end = last + 1;
    if (!mask) return;
    for (*end = keys; *end > 0 && !mask[*end - 1];) --*end;
    while (*first < *end && !mask[*first]) ++*first;
}

static void hide(const uint8_t *mask, float *scores, int64_t first, int64_t end) {
    if (!mask) return;
    for (int64_t i = first; i < end; i++)
        if (!mask[i]) scores[i] = NEVER;
}

/* out[d] += sum over n of weights[n] * values[n][d] */
static void mix(const float *weights, const float *values, int64_t stride, int64_t size, int64_t dims, float *out) {
    int64_t d = 0;
    for (; d + 32 <= dims; d += 32) {
        vec sums[8];
        memcpy(sums, out + d, sizeof sums);
        for (int64_t n = 0; n < size; n++) {
            const float *value = values + n * stride + d;
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) sums[j] += weights[n] * at(value + 4 * j);
        }
        memcpy(out + d, sums, sizeof sums);
    }
    for (; d < dims; d++)
        for (int64_t n = 0; n < size; n++) out[d] += weights[n] * values[n * stride + d];
}

enum { WIDE = 16 }; /* columns at a time */

/* The same of WIDE columns for four rows at once, whose weights lie side by side: (size, 4). */
static inline void mix_four(const float *weights, const float *values, int64_t stride, int64_t size, float *const *out) {
    vec sums[4][4];
    for (int i = 0; i < 4; i++) memcpy(sums[i], out[i], sizeof sums[i]);
    for (int64_t n = 0; n < size; n++) {
        const float *value = values + n * stride, *weight = weights + 4 * n;
        __builtin_prefetch(value + 2 * WIDE); /* lines are far apart: no prefetcher follows so many */
        const vec v0 = at(value), v1 = at(value + 4), v2 = at(value + 8), v3 = at(value + 12);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            sums[i][0] += weight[i] * v0;
            sums[i][1] += weight[i] * v1;
            sums[i][2] += weight[i] * v2;
            sums[i][3] += weight[i] * v3;
        }
    }
    for (int i = 0; i < 4; i++) memcpy(out[i], sums[i], sizeof sums[i]);
}

/* sums[i][j] = x[i] · lines[j] for four of each. */
static void sixteen_dots(const float *const *x, const float *lines, int64_t size, float sums[4][4]) {
    vec s[4][4];
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) s[i][j] = (vec){0};
    int64_t k = 0;
    for (; k + 4 <= size; k += 4) {
        vec line[4];
        for (int j = 0; j < 4; j++) line[j] = at(lines + j * size + k);
        for (int i = 0; i < 4; i++) {
            const vec row = at(x[i] + k);
            for (int j = 0; j < 4; j++) s[i][j] += row * line[j];
        }
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            sums[i][j] = (s[i][j][0] + s[i][j][2]) + (s[i][j][1] + s[i][j][3]);
            for (int64_t rest = k; rest < size; rest++) sums[i][j] += x[i][rest] * lines[j * size + rest];
        }
}

struct attention {
    const float *q, *k, *v;
    const uint8_t *mask;
    float *out;
    const int64_t *sizes, *strides;
    float scale;
};

/* The heads `first` to `end` of B * K, each with the queries that share it. */
static int attend_some(const void *context, int64_t first_head, int64_t end_head) {
    const struct attention *a = context;
    const int64_t H = a->sizes[1], K = a->sizes[2], T = a->sizes[3], N = a->sizes[4], D = a->sizes[5], V = a->sizes[6];
    const int64_t R = H / K, *strides = a->strides;
    float *scores = malloc(sizeof(float) * R * N);
    if (!scores) return 1;
    for (int64_t head = first_head; head < end_head; head++)
        for (int64_t t = 0; t < T; t++) {
            const int64_t b = head / K, g = head % K;
            const uint8_t *line = a->mask ? a->mask + b * strides[9] + t * strides[10] : NULL;
            const float *query = a->q + b * strides[0] + g * R * strides[1] + t * strides[2];
            const float *keys = a->k + b * strides[3] + g * strides[4];
            const float *values = a->v + b * strides[6] + g * strides[7];
            float *answer = a->out + ((b * T + t) * H + g * R) * V;
            int64_t first, end;
            visible(line, N - T + t, N, &first, &end);
            memset(answer, 0, sizeof(float) * R * V);
            for (int64_t n = first; n < end; n++)
                for (int64_t r = 0; r < R; r++)
                    scores[r * N + n] = dot(query + r * strides[1], keys + n * strides[5], D);
            for (int64_t r = 0; r < R && first < end; r++) {
                hide(line, scores + r * N, first, end);
                softmax_(scores + r * N + first, end - first, a->scale);
            }
            for (int64_t n = first; n < end; n += SPAN)
                for (int64_t r = 0; r < R; r++)
                    mix(scores + r * N + n, values + n * strides[8], strides[8], n + SPAN < end ? SPAN : end - n, V,
                        answer + r * V);
        }
    free(scores);
    return 0;
}

/* Attention of few queries over many keys: q (B, H, T, D), k and v (B, K, N, *) -> out (B, T, H, V).
 * sizes: B, H, K, T, N, D, V. strides: q's b, h, t; k's b, h, n; v's b, h, n; mask's b, t. Without a mask, query t
 * sees keys up to N - T + t. */
int attend(const float *q, const float *k, const float *v, const uint8_t *mask, float *out, const int64_t *sizes,
           const int64_t *strides, float scale) {
    const struct attention a = {q, k, v, mask, out, sizes, strides, scale};
    const int64_t heads = sizes[0] * sizes[2], work = sizes[0] * sizes[1] * sizes[3] * sizes[4];
    return share(attend_some, &a, heads, work > WORTH_SHARING / 4);
}

struct slots {
    const float *q;
    float *k, *v;
    const int32_t *lengths, *slots;
    float *out;
    const int64_t *sizes, *strides;
    float scale;
};

/* The softmax of scale * x (size, 4) of each of the four, in place. */
static void softmax_four(float *x, int64_t size, float scale) {
    vec top = at(x), sum = {0};
    for (int64_t n = 1; n < size; n++)
        for (int i = 0; i < 4; i++) top[i] = x[4 * n + i] > top[i] ? x[4 * n + i] : top[i];
    for (int64_t n = 0; n < size; n++)
        for (int i = 0; i < 4; i++) x[4 * n + i] = exp_((x[4 * n + i] - top[i]) * scale);
    for (int64_t n = 0; n < size; n++) sum += at(x + 4 * n);
    for (int64_t n = 0; n < size; n++) *(vec *)(x + 4 * n) /= sum;
}

static int attend_slots_some(const void *context, int64_t first_head, int64_t end_head) {
    const struct slots *a = context;
    const int64_t H = a->sizes[1], K = a->sizes[2], C = a->sizes[3], D = a->sizes[4], *strides = a->strides;
    const int64_t R = H / K;
    int64_t longest = 0;
    for (int64_t head = first_head; head < end_head; head++)
        longest = a->lengths[head / K] > longest ? a->lengths[head / K] : longest;
    float *scores = malloc(sizeof(float) * (4 * (longest + 1) + D));
    if (!scores) return 1;
    float *unused = scores + 4 * (longest + 1);
    for (int64_t head = first_head; head < end_head; head++) {
        const int64_t b = head / K, g = head % K, N = a->lengths[b] + 1;
        const int64_t slot_head = (a->slots ? a->slots[b] : b) * K + g;
        const float *keys = a->k + slot_head * C * D, *values = a->v + slot_head * C * D;
        for (int64_t r = 0; r < R; r += 4) {
            const float *queries[4];
            float *out[4], sums[4][4];
            for (int i = 0; i < 4; i++) {
                queries[i] = a->q + b * strides[0] + (g * R + (r + i < R ? r + i : r)) * strides[1];
                out[i] = r + i < R ? a->out + (b * H + g * R + r + i) * D : unused;
                memset(out[i], 0, sizeof(float) * D);
            }
            int64_t n = 0;
            for (; n + 4 <= N; n += 4) {
                sixteen_dots(queries, keys + n * D, D, sums);
                for (int i = 0; i < 4; i++)
                    for (int j = 0; j < 4; j++) scores[4 * (n + j) + i] = sums[i][j];
            }
            for (; n < N; n++)
                for (int i = 0; i < 4; i++) scores[4 * n + i] = dot(queries[i], keys + n * D, D);
            softmax_four(scores, N, a->scale);
            for (int64_t d = 0; d < D; d += WIDE) {
                mix_four(scores, values + d, D, N, out);
                for (int i = 0; i < 4; i++) out[i] += WIDE;
            }
        }
    }
    free(scores);
    return 0;
}

/* Attention of one query a row over slots of different lengths, q (B, H, 1, D) and k, v (S, K, C, D) -> out (B, H, D);
 * the row's new key and value are put behind what it has, and attended to. Row b is in slot slots[b], or in slot b
 * where there are none; several rows may be in one slot, at different lengths, and see what those before them put there.
 * sizes: B, H, K, C, D, a multiple of WIDE. strides: q's b, h; fresh_k's b, h; fresh_v's b, h. */
int attend_slots(const float *q, float *k, float *v, const float *fresh_k, const float *fresh_v, const int32_t *lengths,
                 const int32_t *slots, float *out, const int64_t *sizes, const int64_t *strides, float scale) {
    const int64_t B = sizes[0], K = sizes[2], C = sizes[3], D = sizes[4];
    for (int64_t b = 0; b < B; b++)
        for (int64_t g = 0; g < K; g++) {
            const int64_t place = (((slots ? slots[b] : b) * K + g) * C + lengths[b]) * D;
            memcpy(k + place, fresh_k + b * strides[2] + g * strides[3], sizeof(float) * D);
            memcpy(v + place, fresh_v + b * strides[4] + g * strides[5], sizeof(float) * D);
        }
    const struct slots a = {q, k, v, lengths, slots, out, sizes, strides, scale};
    return share(attend_slots_some, &a, B * K, B * sizes[1] > 8);
}

struct scores {
    float *scores;
    const uint8_t *mask;
    const int64_t *sizes, *strides;
    float scale;
};

static int softmax_some(const void *context, int64_t first_line, int64_t end_line) {
    const struct scores *s = context;
    const int64_t H = s->sizes[1], T = s->sizes[2], N = s->sizes[3];
    for (int64_t i = first_line; i < end_line; i++) {
        const int64_t b = i / (H * T), t = i % T;
        float *line = s->scores + i * N;
        const uint8_t *seen = s->mask ? s->mask + b * s->strides[0] + t * s->strides[1] : NULL;
        int64_t first, end;
        visible(seen, N - T + t, N, &first, &end);
        if (end > first) {
            hide(seen, line, first, end);
            softmax_(line + first, end - first, s->scale);
        }
        memset(line, 0, sizeof(float) * first);
        memset(line + end, 0, sizeof(float) * (N - end));
    }
    return 0;
}

/* Masked softmax of scores (B, H, T, N), in place. sizes: B, H, T, N. strides: mask's b, t. */
int softmax(float *scores, const uint8_t *mask, const int64_t *sizes, const int64_t *strides, float scale) {
    const struct scores s = {scores, mask, sizes, strides, scale};
    const int64_t lines = sizes[0] * sizes[1] * sizes[2];
    return share(softmax_some, &s, lines, lines * sizes[3] > WORTH_SHARING);
}

struct gated {
    const float *gate, *up;
    float *out;
};

static int swiglu_some(const void *context, int64_t first, int64_t end) {
    const struct gated *g = context;
    const float *restrict gate = g->gate, *restrict up = g->up;
    float *restrict out = g->out;
    for (int64_t i = first; i < end; i++) out[i] = gate[i] / (1.0f + exp_(-gate[i])) * up[i];
    return 0;
}

/* out = gate * sigmoid(gate) * up */
int swiglu(const float *gate, const float *up, float *out, int64_t size) {
    const struct gated g = {gate, up, out};
    return share(swiglu_some, &g, size, size > WORTH_SHARING);
}

/* Rotates the first `dims` of x (B, H, T, D) -> out (B, H, T, D); row b begins at position offsets[b].
 * sizes: B, H, T, D, dims. strides: x's b, h, t. waves: (positions, 2, dims / 2), cosines before sines. */
int rope(const float *x, float *out, const int64_t *offsets, const float *waves, const int64_t *sizes,
         const int64_t *strides) {
    const int64_t B = sizes[0], H = sizes[1], T = sizes[2], D = sizes[3], dims = sizes[4], half = dims / 2;
    for (int64_t b = 0; b < B; b++)
        for (int64_t h = 0; h < H; h++)
            for (int64_t t = 0; t < T; t++) {
                const float *from = x + b * strides[0] + h * strides[1] + t * strides[2];
                const float *cosine = waves + (offsets[b] + t) * dims, *sine = cosine + half;
                float *restrict to = out + ((b * H + h) * T + t) * D;
                for (int64_t i = 0; i < half; i++) to[i] = from[i] * cosine[i] - from[half + i] * sine[i];
                for (int64_t i = 0; i < half; i++) to[half + i] = from[i] * sine[i] + from[half + i] * cosine[i];
                memcpy(to + dims, from + dims, sizeof(float) * (D - dims));
            }
    return 0;
}

/* out = x / sqrt(mean(x²) + eps) * weight, for each of `rows` rows. */
int rms_norm(const float *x, const float *weight, float *out, int64_t rows, int64_t dims, float eps) {
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * dims;
        float *restrict to = out + row * dims;
        const float share = 1.0f / sqrtf(dot(from, from, dims) / dims + eps);
        for (int64_t i = 0; i < dims; i++) to[i] = from[i] * share * weight[i];
    }
    return 0;
}

/* Matrix products of a few rows with weights as they are stored, (N, K). A BLAS copies all weights into the order that
 * its inner loop wants before it multiplies, which for a few dozen rows takes a third of the time. Here the rows are
 * copied instead: eight or sixteen side by side, to be multiplied by one weight at a time. */
#define TILE 8

#ifdef __clang__
#define PICK(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
typedef int32_t places __attribute__((vector_size(16)));
#define PICK(a, b, i, j, k, l) __builtin_shuffle(a, b, (places){i, j, k, l})
#endif

/* Rows that lie side by side: as many as a register has numbers, where that is more than TILE and that many are left. */
#ifdef __AVX512F__
#define PANEL_ROWS 16
#else
#define PANEL_ROWS TILE
#endif

static inline int64_t panel_of(int64_t rows) { return rows > TILE ? PANEL_ROWS : TILE; }

/* to[k][i] = from[i][k] for `lines` of `panel` lines and zeros for the others; `size` is a multiple of four. */
static void interleave(const float *from, int64_t lines, int64_t size, int64_t panel, float *to) {
    for (int64_t half = 0; half < panel; half += 4)
        for (int64_t k = 0; k < size; k += 4) {
            vec x[4];
            for (int i = 0; i < 4; i++) x[i] = half + i < lines ? at(from + (half + i) * size + k) : (vec){0};
            const vec low01 = PICK(x[0], x[1], 0, 4, 1, 5), low23 = PICK(x[2], x[3], 0, 4, 1, 5);
            const vec high01 = PICK(x[0], x[1], 2, 6, 3, 7), high23 = PICK(x[2], x[3], 2, 6, 3, 7);
            float *out = to + k * panel + half;
            *(vec *)out = PICK(low01, low23, 0, 1, 4, 5);
            *(vec *)(out + panel) = PICK(low01, low23, 2, 3, 6, 7);
            *(vec *)(out + 2 * panel) = PICK(high01, high23, 0, 1, 4, 5);
            *(vec *)(out + 3 * panel) = PICK(high01, high23, 2, 3, 6, 7);
        }
}

#ifdef __AVX512F__
typedef float vec16 __attribute__((vector_size(64), aligned(4), may_alias));

static __attribute__((noinline)) void sixteen(const float *rows, const float *w, int64_t K, vec *out, const float *soon,
                                              int64_t pace) {
    vec16 sums[TILE];
    for (int j = 0; j < TILE; j++) sums[j] = (vec16){0};
    for (int64_t k = 0; k < K; k += 4, rows += 4 * PANEL_ROWS) {
        __builtin_prefetch(soon, 0, 3);
        soon += pace;
#pragma GCC unroll 4
        for (int q = 0; q < 4; q++) {
            const vec16 a = *(const vec16 *)(rows + q * PANEL_ROWS);
#pragma GCC unroll 8
            for (int j = 0; j < TILE; j++) sums[j] += a * w[j * K + k + q];
        }
    }
    memcpy(out, sums, sizeof sums);
}
#endif

#if defined(__AVX2__) && defined(__FMA__)
/* Sixteen registers of eight, and one number of a weight for all of them as cheap as a load. A row's sum is the same in
 * both: number after number. */
typedef float vec8 __attribute__((vector_size(32), aligned(4), may_alias));

static __attribute__((noinline)) void eight(const float *rows, const float *w, int64_t K, vec *out, const float *soon,
                                            int64_t pace) {
    vec8 sums[TILE];
    for (int j = 0; j < TILE; j++) sums[j] = (vec8){0};
    for (int64_t k = 0; k < K; k += 4, rows += 4 * TILE) {
        __builtin_prefetch(soon, 0, 3);
        soon += pace;
#pragma GCC unroll 4
        for (int q = 0; q < 4; q++) {
            const vec8 a = *(const vec8 *)(rows + q * TILE);
#pragma GCC unroll 8
            for (int j = 0; j < TILE; j++) sums[j] += a * w[j * K + k + q];
        }
    }
    memcpy(out, sums, sizeof sums);
}

static __attribute__((noinline)) void four(const float *rows, const float *w, int64_t K, vec *out, const float *soon,
                                           int64_t pace) {
    vec sums[TILE];
    for (int j = 0; j < TILE; j++) sums[j] = (vec){0};
    for (int64_t k = 0; k < K; k += 4, rows += 4 * TILE) {
        __builtin_prefetch(soon, 0, 3);
        soon += pace;
#pragma GCC unroll 4
        for (int q = 0; q < 4; q++) {
            const vec a = at(rows + q * TILE);
#pragma GCC unroll 8
            for (int j = 0; j < TILE; j++) sums[j] += a * w[j * K + k + q];
        }
    }
    for (int j = 0; j < TILE; j++) out[2 * j] = sums[j];
}
#else
/* out[j][i] = the product of row i of 4 * vectors and line j of TILE, for K a multiple of four. */
static inline __attribute__((always_inline)) void multiply(const float *rows, const float *w, int64_t K, vec *out,
                                                           const float *soon, int64_t pace, const int vectors) {
    vec sums[TILE][2];
    for (int j = 0; j < TILE; j++) sums[j][0] = sums[j][1] = (vec){0};
    for (int64_t k = 0; k < K; k += 4, rows += 4 * TILE) {
        __builtin_prefetch(soon, 0, 3);
        soon += pace;
        vec a[4][2];
        for (int q = 0; q < 4; q++)
            for (int i = 0; i < vectors; i++) a[q][i] = at(rows + q * TILE + 4 * i);
#pragma GCC unroll 8
        for (int j = 0; j < TILE; j++) {
            const vec line = at(w + j * K + k);
#pragma GCC unroll 4
            for (int q = 0; q < 4; q++)
#pragma GCC unroll 2
                for (int i = 0; i < vectors; i++) sums[j][i] += a[q][i] * line[q];
        }
    }
    for (int j = 0; j < TILE; j++)
        for (int i = 0; i < vectors; i++) out[2 * j + i] = sums[j][i];
}

static __attribute__((noinline)) void eight(const float *rows, const float *w, int64_t K, vec *out, const float *soon,
                                            int64_t pace) {
    multiply(rows, w, K, out, soon, pace, 2);
}

static __attribute__((noinline)) void four(const float *rows, const float *w, int64_t K, vec *out, const float *soon,
                                           int64_t pace) {
    multiply(rows, w, K, out, soon, pace, 1);
}
#endif

/* For how many rows `products` is at least as fast as a BLAS; 0 where it is not written for the processor. */
int most_rows(void) {
#if defined(__aarch64__)
    return 192;
#elif defined(__AVX512F__)
    return 64;
#elif defined(__AVX2__) && defined(__FMA__)
    return 40;
#else
    return 0;
#endif
}

/* Which rows have which adapter, four rows at a time: (count, 7) numbers. Where the first layer's a (rank, K) and
 * b (rank, N) lie, of which this is the number-th after, their rank, a multiple of four, and the rows, or -1. */
struct parties {
    const int64_t *list;
    int64_t count, number;
    float *z; /* (columns, 4): x · aᵀ of each party's rows, one party after another */
    const int64_t *begins; /* where each party's lines of z begin */
};

struct product {
    const float *x, *rows, *weights, *bias; /* rows: x with TILE of its lines side by side */
    float *out;
    int64_t M, N, K;
    struct parties parties;
};

static int reduce_some(const void *context, int64_t first, int64_t end) {
    const struct product *p = context;
    const int64_t K = p->K;
    for (int64_t k = first; k < end; k++) {
        const int64_t *party = p->parties.list + 7 * k, rank = party[2], *rows = party + 3;
        const float *a = (const float *)(intptr_t)party[0] + p->parties.number * rank * K, *x[4];
        float *z = p->parties.z + 4 * p->parties.begins[k], sums[4][4];
        for (int i = 0; i < 4; i++) x[i] = p->x + (rows[i] < 0 ? rows[0] : rows[i]) * K;
        for (int64_t r = 0; r < rank; r += 4) {
            sixteen_dots(x, a + r * K, K, sums);
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) z[4 * (r + j) + i] = sums[i][j];
        }
    }
    return 0;
}

/* Adds z · b to the columns n to n + TILE of all rows that have an adapter. */
static void add_columns(const struct product *p, int64_t n) {
    for (int64_t k = 0; k < p->parties.count; k++) {
        const int64_t *party = p->parties.list + 7 * k, rank = party[2], *rows = party + 3;
        const float *b = (const float *)(intptr_t)party[1] + p->parties.number * rank * p->N + n;
        const float *z = p->parties.z + 4 * p->parties.begins[k];
        vec sums[4][2];
        for (int i = 0; i < 4; i++) sums[i][0] = sums[i][1] = (vec){0};
        for (int64_t r = 0; r < rank; r++, z += 4, b += p->N) {
            const vec low = at(b), high = at(b + 4);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                sums[i][0] += z[i] * low;
                sums[i][1] += z[i] * high;
            }
        }
        for (int i = 0; i < 4 && rows[i] >= 0 && rank; i++) {
            float *out = p->out + rows[i] * p->N + n;
            *(vec *)out += sums[i][0];
            *(vec *)(out + 4) += sums[i][1];
        }
    }
}

/* The same of one column. */
static void add_column(const struct product *p, int64_t n) {
    for (int64_t k = 0; k < p->parties.count; k++) {
        const int64_t *party = p->parties.list + 7 * k, rank = party[2], *rows = party + 3;
        const float *b = (const float *)(intptr_t)party[1] + p->parties.number * rank * p->N + n;
        const float *z = p->parties.z + 4 * p->parties.begins[k];
        for (int i = 0; i < 4 && rows[i] >= 0; i++)
            for (int64_t r = 0; r < rank; r++) p->out[rows[i] * p->N + n] += z[4 * r + i] * b[r * p->N];
    }
}

#if defined(__AVX2__) && defined(__FMA__)
#ifdef __AVX512F__
typedef vec16 wide;
#else
typedef vec8 wide;
#endif
enum { NUMBERS = sizeof(wide) / sizeof(float) };

/* out[j * panel] = x · line j of TILE: with one row alone, to read the weights is all there is to do. */
static __attribute__((noinline)) void single(const float *x, const float *w, int64_t K, float *out, int64_t panel) {
    wide sums[TILE];
    for (int j = 0; j < TILE; j++) sums[j] = (wide){0};
    int64_t k = 0;
    for (; k + NUMBERS <= K; k += NUMBERS) {
        const wide a = *(const wide *)(x + k);
#pragma GCC unroll 8
        for (int j = 0; j < TILE; j++) sums[j] += a * *(const wide *)(w + j * K + k);
    }
    for (int j = 0; j < TILE; j++) {
        float sum = 0;
        for (int i = 0; i < NUMBERS; i++) sum += sums[j][i];
        for (int64_t rest = k; rest < K; rest++) sum += x[rest] * w[j * K + rest];
        out[j * panel] = sum;
    }
}
#endif

/* out[j][i] = the product of row i of a panel and line j of TILE; `soon`: what to bring near meanwhile. */
static inline void panel_product(const float *rows, int64_t count, const float *w, int64_t K, vec *out, const float *soon,
                                 int64_t pace) {
#ifdef __AVX512F__
    if (count > TILE) {
        sixteen(rows, w, K, out, soon, pace);
        return;
    }
#endif
    (count > 4 ? eight : four)(rows, w, K, out, soon, pace);
}

/* Tiles of columns. What is left over when N is no multiple of TILE is done by `products`. */
static int product_some(const void *context, int64_t first, int64_t end) {
    const struct product *p = context;
    const int64_t M = p->M, N = p->N, K = p->K, panels = (M + PANEL_ROWS - 1) / PANEL_ROWS;
    for (int64_t n = first * TILE; n < end * TILE; n += TILE) {
        const float *soon = p->weights + (n + TILE) * K;
        for (int64_t m = 0, panel; m < M; m += panel, soon += TILE * K / panels) {
            panel = panel_of(M - m);
            const int64_t rows = m + panel < M ? panel : M - m;
            float sums[TILE * PANEL_ROWS];
#if defined(__AVX2__) && defined(__FMA__)
            if (M == 1)
                single(p->x, p->weights + n * K, K, sums, panel);
            else
#endif
                panel_product(p->rows + m * K, rows, p->weights + n * K, K, (vec *)sums, soon, 4 * TILE / panels);
            for (int64_t i = 0; i < rows; i++)
                for (int64_t j = 0; j < TILE; j++)
                    p->out[(m + i) * N + n + j] = sums[j * panel + i] + (p->bias ? p->bias[n + j] : 0.0f);
        }
        add_columns(p, n);
    }
    return 0;
}

struct products {
    const struct product *each;
    int64_t count;
};

/* Tiles of all products, one product after another. */
static int products_some(const void *context, int64_t first, int64_t end) {
    const struct products *p = context;
    for (int64_t i = 0; i < p->count && first < end; i++) {
        const int64_t tiles = p->each[i].N / TILE;
        if (first < tiles) product_some(&p->each[i], first, end < tiles ? end : tiles);
        first = first < tiles ? 0 : first - tiles;
        end -= tiles;
    }
    return 0;
}

#define MAX_PRODUCTS 8

/* Products of the same x (M, K) with `count` weights (N, K), K a multiple of four: out (M, N) = x · weightsᵀ + bias, and
 * for the rows of each party, + (x · aᵀ) · b. `table` (count, 7): where weights, bias or 0, and out lie, N, where the
 * parties lie or 0, how many, and the layer's number among theirs. */
int products(const float *x, int64_t M, int64_t K, const int64_t *table, int64_t count) {
    int64_t columns = 0, parties = 0, tiles = 0, lines = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t *list = (const int64_t *)(intptr_t)table[7 * i + 4];
        for (int64_t k = 0; k < table[7 * i + 5]; k++) columns += list[7 * k + 2];
        parties += table[7 * i + 5];
        lines += table[7 * i + 3];
    }
    int64_t *begins = malloc(sizeof(int64_t) * (parties + 1)), *next_begin = begins;
    float *rows = aligned_alloc(64, sizeof(float) * ((M + PANEL_ROWS) * (K + 16) + 16 * columns));
    struct product each[MAX_PRODUCTS];
    int failed = !begins || !rows || count > MAX_PRODUCTS;
    if (!failed) {
        float *z = rows + (M + PANEL_ROWS) * (K + 16);
        for (int64_t m = 0, panel; m < M; m += panel) {
            panel = panel_of(M - m);
            interleave(x + m * K, m + panel < M ? panel : M - m, K, panel, rows + m * K);
        }
        for (int64_t i = 0; i < count; i++) {
            const int64_t *line = table + 7 * i, *list = (const int64_t *)(intptr_t)line[4];
            const struct parties own = {list, line[5], line[6], z, next_begin};
            int64_t used = 0;
            for (int64_t k = 0; k < line[5]; k++) {
                *next_begin++ = used;
                used += list[7 * k + 2];
            }
            each[i] = (struct product){x, rows, (const float *)(intptr_t)line[0], (const float *)(intptr_t)line[1],
                                       (float *)(intptr_t)line[2], M, line[3], K, own};
            failed |= share(reduce_some, &each[i], line[5], 4 * used * K > 10 * WORTH_SHARING);
            z += 4 * used;
            tiles += line[3] / TILE;
        }
        const struct products all = {each, count};
        failed |= share(products_some, &all, tiles, M * lines * K > 10 * WORTH_SHARING);
        for (int64_t i = 0; i < count; i++)
            for (int64_t n = each[i].N / TILE * TILE; n < each[i].N; n++) {
                const struct product *p = &each[i];
                for (int64_t m = 0; m < M; m++)
                    p->out[m * p->N + n] = dot(x + m * K, p->weights + n * K, K) + (p->bias ? p->bias[n] : 0.0f);
                add_column(p, n);
            }
    }
    free(rows);
    free(begins);
    return failed;
}

struct added {
    const float *x;
    float *y;
    const int64_t *parties;
    int64_t N, K, number;
};

/* Parties that use the same lines: what is read of those serves all of them while it is near. */
static int add_run(const struct added *p, const int64_t *parties, int64_t count) {
    const int64_t rank = parties[2], N = p->N, K = p->K, *last = parties + 7 * (count - 1) + 3;
    const int64_t whole = last[3] < 0 ? count - 1 : count; /* parties of four */
    const float *a = (const float *)(intptr_t)parties[0] + p->number * rank * K;
    const float *b = (const float *)(intptr_t)parties[1] + p->number * rank * N;
    float *z = malloc(sizeof(float) * rank * (4 * count + 1)), *own = z + 4 * rank * count;
    if (!z) return 1;
    for (int64_t r = 0; r < rank; r += 4)
        for (int64_t k = 0; k < count; k++) {
            const int64_t *rows = parties + 7 * k + 3;
            const float *x[4];
            float sums[4][4];
            for (int i = 0; i < 4; i++) x[i] = p->x + (rows[i] < 0 ? rows[0] : rows[i]) * K;
            sixteen_dots(x, a + r * K, K, sums);
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) z[4 * (rank * k + r + j) + i] = sums[i][j];
        }
    int64_t d = 0;
    for (; d + WIDE <= N; d += WIDE)
        for (int64_t k = 0; k < whole; k++) {
            float *out[4];
            for (int i = 0; i < 4; i++) out[i] = p->y + parties[7 * k + 3 + i] * N + d;
            mix_four(z + 4 * rank * k, b + d, N, rank, out);
        }
    for (int64_t k = 0; k < count; k++)
        for (int i = 0; i < 4 && parties[7 * k + 3 + i] >= 0; i++) {
            const int64_t from = k < whole ? d : 0;
            for (int64_t r = 0; r < rank; r++) own[r] = z[4 * (rank * k + r) + i];
            mix(own, b + from, N, rank, N - from, p->y + parties[7 * k + 3 + i] * N + from);
        }
    free(z);
    return 0;
}

static int add_some(const void *context, int64_t first, int64_t end) {
    const struct added *p = context;
    while (first < end) {
        const int64_t *parties = p->parties + 7 * first;
        int64_t count = 1;
        while (first + count < end && parties[7 * count] == parties[0]) count++;
        if (parties[2] && add_run(p, parties, count)) return 1;
        first += count;
    }
    return 0;
}

/* y (M, N) += (x (M, K) · aᵀ) · b, with each row's own a (rank, K) and b (rank, N). `parties` (count, 7) says where the
 * first layer's lie, of which this is the number-th after, their rank, a multiple of four, and which rows use them: up
 * to four, then -1. */
int add_low_rank(const float *x, float *y, const int64_t *parties, int64_t count, int64_t N, int64_t K, int64_t number) {
    const struct added p = {x, y, parties, N, K, number};
    return share(add_some, &p, count, count > 1);
}

/* Draws of tokens. Counters become random bits as they do in MLX (Threefry, 20 rounds), so that both ways of drawing
 * give the same tokens. */
#define BLOCK 64

typedef uint32_t words __attribute__((vector_size(16), may_alias));

/* a and b: BLOCK counters each, replaced by the bits that they stand for. Four vectors at a time, since each waits for
 * itself. */
static void threefry(const uint32_t *key, uint32_t *a, uint32_t *b) {
    static const int by[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
    const uint32_t keys[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA};
    for (int first = 0; first < BLOCK; first += 16) {
        words x[4], y[4];
        for (int j = 0; j < 4; j++) {
            memcpy(&x[j], a + first + 4 * j, sizeof x[j]);
            memcpy(&y[j], b + first + 4 * j, sizeof y[j]);
            x[j] += keys[0];
            y[j] += keys[1];
        }
#pragma GCC unroll 5
        for (int i = 0; i < 5; i++) {
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) {
                const int turn = by[i % 2][r];
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) {
                    x[j] += y[j];
                    y[j] = (y[j] << turn | y[j] >> (32 - turn)) ^ x[j];
                }
            }
            for (int j = 0; j < 4; j++) {
                x[j] += keys[(i + 1) % 3];
                y[j] += keys[(i + 2) % 3] + i + 1;
            }
        }
        memcpy(a + first, x, sizeof x);
        memcpy(b + first, y, sizeof y);
    }
}

/* Cephes' logf, for positive x. */
static inline float log_(float x) {
    union { float value; int32_t bits; } u = {.value = x};
    const int32_t exponent = ((u.bits >> 23) & 255) - 126;
    u.bits = (u.bits & 0x7fffff) | 0x3f000000;
    const int small = u.value < 0.707106781186547524f;
    const float n = (float)(exponent - small), m = (small ? u.value + u.value : u.value) - 1.0f, z = m * m;
    float y = 7.0376836292e-2f;
    y = y * m - 1.1514610310e-1f;
    y = y * m + 1.1676998740e-1f;
    y = y * m - 1.2420140846e-1f;
    y = y * m + 1.4249322787e-1f;
    y = y * m - 1.6668057665e-1f;
    y = y * m + 2.0000714765e-1f;
    y = y * m - 2.4999993993e-1f;
    y = y * m + 3.3333331174e-1f;
    y = y * m * z - 2.12194440e-4f * n - 0.5f * z;
    return m + y + 0.693359375f * n;
}

struct best {
    float value;
    int64_t place;
};

static inline float gumbel(uint32_t bits) {
    const float chance = (float)bits * 0x1p-32f;
    return -log_(-log_(chance > 0x1.fffffep-1f ? 0x1.fffffep-1f : chance));
}

/* logits / heat + noise, of up to BLOCK tokens from `first` on. Most blocks can't hold the best: not with the highest of
 * their logits and the most of their noise together. */
static void try_block(const float *logits, float heat, const uint32_t *bits, int64_t first, int64_t size,
                      struct best *best) {
    uint32_t most = 0;
    for (int64_t j = 0; j < size; j++) most = bits[j] > most ? bits[j] : most;
    if (largest(logits + first, size) / heat + gumbel(most) + 1e-3f < best->value) return;
    float values[BLOCK];
    for (int64_t j = 0; j < size; j++) values[j] = logits[first + j] / heat + gumbel(bits[j]);
    const float top = largest(values, size);
    if (top < best->value || (top == best->value && first > best->place)) return;
    for (int64_t j = 0; j < size; j++)
        if (values[j] == top) {
            *best = (struct best){top, first + j};
            return;
        }
}

static float log_sum_exp(const float *x, int64_t size, float heat, float top) {
    double sum = 0;
    for (int64_t i = 0; i < size; i += BLOCK) {
        const int64_t count = i + BLOCK < size ? BLOCK : size - i;
        float values[BLOCK];
        for (int64_t j = 0; j < count; j++) values[j] = exp_((x[i + j] - top) / heat);
        sum += total(values, count);
    }
    return (float)(log(sum) + top / heat);
}

struct draws {
    const float *logits, *heats;
    const uint32_t *keys;
    int32_t *tokens;
    float *scores;
    int64_t V;
};

static int draw_some(const void *context, int64_t first_row, int64_t end_row) {
    const struct draws *d = context;
    const int64_t V = d->V, half = V / 2, second = half + V % 2;
    for (int64_t row = first_row; row < end_row; row++) {
        const float *logits = d->logits + row * V, top = largest(logits, V);
        const float heat = d->heats[row] > 0 ? d->heats[row] : 1.0f;
        struct best best = {-INFINITY, 0};
        if (d->heats[row] > 0) {
            best.value = -3e38f;
            for (int64_t i = 0; i < half; i += BLOCK) {
                const int64_t count = i + BLOCK < half ? BLOCK : half - i;
                uint32_t a[BLOCK], b[BLOCK];
                for (int j = 0; j < BLOCK; j++) {
                    a[j] = (uint32_t)(i + j);
                    b[j] = (uint32_t)(second + i + j);
                }
                threefry(d->keys + 2 * row, a, b);
                try_block(logits, heat, a, i, count, &best);
                try_block(logits, heat, b, second + i, count, &best);
            }
            if (V % 2) {
                uint32_t a[BLOCK] = {(uint32_t)half}, b[BLOCK] = {0};
                threefry(d->keys + 2 * row, a, b);
                try_block(logits, heat, a, half, 1, &best);
            }
        } else {
            while (best.place < V - 1 && logits[best.place] != top) best.place++;
        }
        d->tokens[row] = (int32_t)best.place;
        if (d->scores) d->scores[row] = logits[best.place] / heat - log_sum_exp(logits, V, heat, top);
    }
    return 0;
}

/* For each row of logits (R, V) a token, drawn at its heat with its key (R, 2), or the likeliest where the heat is 0;
 * and, if `scores` is not NULL, its log-probability at that heat, or at 1. */
int draw(const float *logits, const float *heats, const uint32_t *keys, int32_t *tokens, float *scores, int64_t R,
         int64_t V) {
    const struct draws d = {logits, heats, keys, tokens, scores, V};
    return share(draw_some, &d, R, R * V > WORTH_SHARING);
}

/* Encoders: sequences of different lengths lie one after the other, without padding. */

#define QUERIES 4 /* at a time */
#define KEYS 32

struct packed {
    const float *qkv;
    float *out;
    const int64_t *starts, *sizes;
    float scale;
};

/* sums (QUERIES, KEYS) = queries · keys, these a column each: (dims, stride) */
static inline void score_block(const float *const *queries, const float *keys, int64_t stride, int64_t dims,
                               float *const *out) {
    float sums[QUERIES][KEYS] = {{0}};
    for (int64_t d = 0; d < dims; d++) {
        const float *line = keys + d * stride;
#pragma GCC unroll 4
        for (int i = 0; i < QUERIES; i++) {
            const float x = queries[i][d];
            for (int j = 0; j < KEYS; j++) sums[i][j] += x * line[j];
        }
    }
    for (int i = 0; i < QUERIES; i++) memcpy(out[i], sums[i], sizeof sums[i]);
}

/* out (QUERIES, KEYS columns) = weights · values */
static inline void mix_block(float *const *weights, const float *values, int64_t stride, int64_t size, float *const *out) {
    float sums[QUERIES][KEYS] = {{0}};
    for (int64_t n = 0; n < size; n++) {
        const float *line = values + n * stride;
#pragma GCC unroll 4
        for (int i = 0; i < QUERIES; i++) {
            const float x = weights[i][n];
            for (int j = 0; j < KEYS; j++) sums[i][j] += x * line[j];
        }
    }
    for (int i = 0; i < QUERIES; i++) memcpy(out[i], sums[i], sizeof sums[i]);
}

/* The same for what is left of a head's columns. */
static void mix_rest(float *const *weights, const float *values, int64_t stride, int64_t size, int64_t columns,
                     float *const *out) {
    for (int i = 0; i < QUERIES; i++) {
        memset(out[i], 0, sizeof(float) * columns);
        for (int64_t n = 0; n < size; n++)
            for (int64_t j = 0; j < columns; j++) out[i][j] += weights[i][n] * values[n * stride + j];
    }
}

/* One head of one sequence of T tokens; `columns`: room for its keys, `scores`: for QUERIES lines of scores. */
static void attend_sequence(const float *qkv, float *out, int64_t T, int64_t H, int64_t D, int64_t window, float scale,
                            float *columns, float *scores, float *unused) {
    const int64_t stride = 3 * H * D, padded = (T + KEYS - 1) / KEYS * KEYS;
    const float *keys = qkv + H * D, *values = qkv + 2 * H * D;
    for (int64_t d = 0; d < D; d++) memset(columns + d * padded + T, 0, sizeof(float) * (padded - T));
    for (int64_t t = 0; t < T; t++)
        for (int64_t d = 0; d < D; d++) columns[d * padded + t] = keys[t * stride + d];
    for (int64_t t = 0; t < T; t += QUERIES) {
        const float *queries[QUERIES];
        float *lines[QUERIES], *weights[QUERIES], *answers[QUERIES];
        const int64_t last = t + QUERIES - 1 < T - 1 ? t + QUERIES - 1 : T - 1;
        const int64_t first = t - window > 0 ? (t - window) / KEYS * KEYS : 0;
        const int64_t end = last + window + 1 < T ? last + window + 1 : T;
        for (int i = 0; i < QUERIES; i++) {
            queries[i] = qkv + (t + i < T ? t + i : last) * stride;
            answers[i] = t + i < T ? out + (t + i) * H * D : unused;
            weights[i] = scores + i * padded + first;
        }
        for (int64_t n = first; n < end; n += KEYS) {
            for (int i = 0; i < QUERIES; i++) lines[i] = scores + i * padded + n;
            score_block(queries, columns + n, padded, D, lines);
        }
        for (int i = 0; i < QUERIES; i++) {
            const int64_t at = t + i < T ? t + i : last;
            const int64_t from = at - window > first ? at - window : first, to = at + window + 1 < end ? at + window + 1 : end;
            memset(scores + i * padded + first, 0, sizeof(float) * (from - first));
            softmax_(scores + i * padded + from, to - from, scale);
            memset(scores + i * padded + to, 0, sizeof(float) * (end - to));
        }
        int64_t d = 0;
        for (; d + KEYS <= D; d += KEYS) {
            mix_block(weights, values + first * stride + d, stride, end - first, answers);
            for (int i = 0; i < QUERIES; i++) answers[i] += KEYS;
        }
        if (d < D) mix_rest(weights, values + first * stride + d, stride, end - first, D - d, answers);
    }
}

static int attend_packed_some(const void *context, int64_t first, int64_t end) {
    const struct packed *a = context;
    const int64_t H = a->sizes[1], D = a->sizes[2], window = a->sizes[3], longest = a->sizes[4] + KEYS;
    float *room = malloc(sizeof(float) * (longest * (D + QUERIES) + D));
    if (!room) return 1;
    for (int64_t i = first; i < end; i++) {
        const int64_t from = a->starts[i / H], T = a->starts[i / H + 1] - from, head = i % H;
        attend_sequence(a->qkv + from * 3 * H * D + head * D, a->out + from * H * D + head * D, T, H, D, window, a->scale,
                        room, room + longest * D, room + longest * (D + QUERIES));
    }
    free(room);
    return 0;
}

/* Attention within each sequence, both ways: qkv (N, 3, H, D) -> out (N, H, D). Sequence b is starts[b] to starts[b + 1].
 * sizes: B, H, D, how far away a key may be, length of the longest sequence. */
int attend_packed(const float *qkv, float *out, const int64_t *starts, const int64_t *sizes, float scale) {
    const struct packed a = {qkv, out, starts, sizes, scale};
    return share(attend_packed_some, &a, sizes[0] * sizes[1], starts[sizes[0]] * sizes[1] > 64);
}

/* Rotates queries and keys of qkv (N, 3, H, D) in place; waves as `rope` has them, row n is at positions[n]. */
int rope_packed(float *qkv, const int64_t *positions, const float *waves, const int64_t *sizes) {
    const int64_t N = sizes[0], H = sizes[1], D = sizes[2], dims = sizes[3], half = dims / 2;
    for (int64_t n = 0; n < N; n++)
        for (int64_t h = 0; h < 2 * H; h++) {
            float *x = qkv + n * 3 * H * D + h * D;
            const float *cosine = waves + positions[n] * dims, *sine = cosine + half;
            for (int64_t i = 0; i < half; i++) {
                const float a = x[i], b = x[half + i];
                x[i] = a * cosine[i] - b * sine[i];
                x[half + i] = a * sine[i] + b * cosine[i];
            }
        }
    return 0;
}

/* Abramowitz and Stegun 7.1.26: within 2e-7. */
static inline float erf_(float x) {
    const float size = fabsf(x), t = 1.0f / (1.0f + 0.3275911f * size);
    float p = 1.061405429f;
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    return copysignf(1.0f - p * t * exp_(-size * size), x);
}

enum { GELU, GELU_TANH, RELU, SILU };

static inline __attribute__((always_inline)) float activated(float x, int kind) {
    if (kind == GELU) return 0.5f * x * (1.0f + erf_(x * 0.70710678118654752f));
    if (kind == GELU_TANH) return x / (1.0f + exp_(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
    if (kind == RELU) return x > 0.0f ? x : 0.0f;
    return x / (1.0f + exp_(-x));
}

struct activation {
    const float *x, *bias;
    float *out;
    int64_t size;
    int kind, gated;
};

static inline __attribute__((always_inline)) void activate_line(const struct activation *a, int64_t row, int kind) {
    const int64_t size = a->size;
    const float *restrict x = a->x + row * size * (1 + a->gated), *restrict bias = a->bias;
    float *restrict out = a->out + row * size;
    if (a->gated && bias)
        for (int64_t i = 0; i < size; i++) out[i] = activated(x[i] + bias[i], kind) * (x[size + i] + bias[size + i]);
    else if (a->gated)
        for (int64_t i = 0; i < size; i++) out[i] = activated(x[i], kind) * x[size + i];
    else if (bias)
        for (int64_t i = 0; i < size; i++) out[i] = activated(x[i] + bias[i], kind);
    else
        for (int64_t i = 0; i < size; i++) out[i] = activated(x[i], kind);
}

static int activate_some(const void *context, int64_t first, int64_t end) {
    const struct activation *a = context;
    for (int64_t row = first; row < end; row++)
        switch (a->kind) { /* a loop for each, so that it becomes vector instructions */
        case GELU: activate_line(a, row, GELU); break;
        case GELU_TANH: activate_line(a, row, GELU_TANH); break;
        case RELU: activate_line(a, row, RELU); break;
        default: activate_line(a, row, SILU);
        }
    return 0;
}

/* out (rows, size) = activation(x + bias); gated: x (rows, 2 * size), and the second half is multiplied with it. */
int activate(const float *x, const float *bias, float *out, int64_t rows, int64_t size, int64_t kind, int64_t gated) {
    const struct activation a = {x, bias, out, size, (int)kind, (int)gated};
    return share(activate_some, &a, rows, rows * size > WORTH_SHARING);
}

struct normalisation {
    const float *x, *bias, *residual, *weight, *shift;
    float *sum, *out;
    int64_t dims;
    float eps;
};

static int add_norm_some(const void *context, int64_t first, int64_t end) {
    const struct normalisation *a = context;
    const int64_t dims = a->dims;
    for (int64_t row = first; row < end; row++) {
        const float *restrict x = a->x + row * dims;
        float *to = (a->sum ? a->sum : a->out) + row * dims;
        for (int64_t i = 0; i < dims; i++) to[i] = x[i];
        if (a->bias)
            for (int64_t i = 0; i < dims; i++) to[i] += a->bias[i];
        if (a->residual)
            for (int64_t i = 0; i < dims; i++) to[i] += a->residual[row * dims + i];
        if (!a->weight) continue;
        float *out = a->out + row * dims;
        const float mean = total(to, dims) / dims;
        for (int64_t i = 0; i < dims; i++) out[i] = to[i] - mean;
        const float share = 1.0f / sqrtf(dot(out, out, dims) / dims + a->eps);
        for (int64_t i = 0; i < dims; i++) out[i] = out[i] * share * a->weight[i];
        if (a->shift)
            for (int64_t i = 0; i < dims; i++) out[i] += a->shift[i];
    }
    return 0;
}

/* sum = x + bias + residual, out = its layer normalisation; what is NULL is left out. All but x must be others' arrays. */
int add_norm(const float *x, const float *bias, const float *residual, const float *weight, const float *shift, float *sum,
             float *out, int64_t rows, int64_t dims, float eps) {
    const struct normalisation a = {x, bias, residual, weight, shift, sum, out, dims, eps};
    return share(add_norm_some, &a, rows, rows * dims > WORTH_SHARING);
}
