/* What all sources of the native library share: the step, the kinds of operations, and vectors.
 *
 * Every operation is a struct that begins with its kind, and two functions: how many chunks of work it has in a step,
 * and one of these chunks, in any thread and any order. Activations are float32, some floats between two tokens. No
 * number of a token's result depends on other tokens, on chunks or on threads.
 */
#ifndef INFLIGHT_NATIVE_H
#define INFLIGHT_NATIVE_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define HAS_AVX2 1
#else
#define HAS_AVX2 0
#endif

#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))

/* Numbers of a vector. */
#ifndef LANES
#if defined(__AVX512F__)
#define LANES 16
#elif HAS_AVX2
#define LANES 8
#else
#define LANES 4
#endif
#endif

/* Whether there are vectors of 16 integers, and instructions that multiply and add their halves or quarters. */
#if LANES == 16 && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define HAS_VNNI 1
#else
#define HAS_VNNI 0
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));

#define SCRATCH_FLOATS 131072 /* of each thread, for one chunk */
#define ROWS_PER_CHUNK 8192   /* numbers that a thread works on sooner than two agree on them */
#define CHUNKS_PER_THREAD 4

enum {
    OP_DENSE = 1,
    OP_APPEND_KV = 2,
    OP_ATTEND = 3,
    OP_RMS_NORM = 4,
    OP_ADD_RMS_NORM = 5,
    OP_ROPE = 6,
    OP_ACTIVATION = 7,
    OP_LAYER_NORM = 8,
    OP_PACKED = 9,
    OP_ROUND = 10,
    OP_SCALE = 11,
    OP_ADD = 12,
    OP_PACKED_DECODE = 13,
    OP_PACK = 14,
};

/* What differs from step to step. items: [num_items, 4], pieces of attention: row of the batch, its first token within
 * the step, number of tokens, position of the first in its text. kv_lens: [num_rows] tokens in the cache after the
 * step. block_tables: [num_rows, table_stride]. slot_mapping: [num_tokens] block * tokens_per_block + offset.
 */
typedef struct {
    int64_t num_tokens;
    int64_t num_items;
    const int32_t *items;
    const int32_t *kv_lens;
    const int32_t *block_tables;
    const int32_t *slot_mapping;
    int64_t table_stride;
    int64_t tokens_per_block;
} native_step;

/* Keeps a vector in a register: compilers would rather read it anew for every product, and reads are scarce. */
#if LANES == 16 && defined(__AVX512F__)
#define KEEP(vector) __asm__("" : "+v"(vector))
#elif LANES == 8 && HAS_AVX2
#define KEEP(vector) __asm__("" : "+x"(vector))
#else
#define KEEP(vector) (void)(vector)
#endif

INLINE vec load(const float *from) {
    vec value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE void store(float *to, vec value) { memcpy(to, &value, sizeof value); }

INLINE float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE vec broadcast(float value) { return value - (vec){0}; }

INLINE vec multiply_add(vec a, vec b, vec c) {
#if LANES == 16 && defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8 && HAS_AVX2
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif LANES == 4 && defined(__ARM_NEON) && defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* Where mask is all ones a, where it is zero b. */
INLINE vec choose(ivec mask, vec a, vec b) { return (vec)(((ivec)a & mask) | ((ivec)b & ~mask)); }

/* Of a NaN and a number, b. */
#if LANES == 8 && HAS_AVX2
INLINE vec vec_max(vec a, vec b) { return (vec)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vec vec_min(vec a, vec b) { return (vec)_mm256_min_ps((__m256)a, (__m256)b); }
#else
INLINE vec vec_max(vec a, vec b) { return choose(a > b, a, b); }
INLINE vec vec_min(vec a, vec b) { return choose(a < b, a, b); }
#endif

/* The sum of all lanes, halves first. */
INLINE float sum_of(vec v) {
    float lanes[LANES];
    memcpy(lanes, &v, sizeof lanes);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++)
            lanes[i] += lanes[i + width];
    return lanes[0];
}

INLINE float max_of(vec v) {
    float lanes[LANES];
    memcpy(lanes, &v, sizeof lanes);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++)
            lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    return lanes[0];
}

/* e to the power of x, to about one unit in the last place: x = n ln 2 + r, a polynomial for e^r (its Taylor series, of
 * |r| <= ln 2 / 2), and n added to the exponent in two steps, so that small results fade away and large ones become
 * infinite as they should. NaN stays NaN.
 */
INLINE vec exp_of(vec x) {
    const vec low = broadcast(-104.0f), high = broadcast(89.0f);
    const ivec is_nan = x != x;
    vec bounded = vec_min(vec_max(x, low), high);
    /* Added and taken away, this rounds to the nearest integer. */
    const vec magic = broadcast(12582912.0f);
    const vec shifted = multiply_add(bounded, broadcast(1.44269504f), magic);
    const vec n = shifted - magic;
    vec r = multiply_add(n, broadcast(-0.693359375f), bounded);
    r = multiply_add(n, broadcast(2.12194440e-4f), r);
    vec p = broadcast(1.0f / 5040);
    p = multiply_add(p, r, broadcast(1.0f / 720));
    p = multiply_add(p, r, broadcast(1.0f / 120));
    p = multiply_add(p, r, broadcast(1.0f / 24));
    p = multiply_add(p, r, broadcast(1.0f / 6));
    p = multiply_add(p, r, broadcast(0.5f));
    p = multiply_add(p * r, r, r) + broadcast(1.0f);
    const ivec exponent = (ivec)shifted - (ivec)magic;
    const ivec half = exponent >> 1, rest = exponent - half;
    p = p * (vec)((half + 127) << 23) * (vec)((rest + 127) << 23);
    return choose(is_nan, x, p);
}

/* Chunks for rows of `width` numbers, and the first row of a chunk. */
INLINE int64_t row_chunks(int64_t num_rows, int64_t width, int num_threads) {
    const int64_t most = (int64_t)num_threads * CHUNKS_PER_THREAD, wanted = num_rows * width / ROWS_PER_CHUNK;
    const int64_t chunks = wanted < 1 || num_threads == 1 ? 1 : wanted < most ? wanted : most;
    return num_rows == 0 ? 0 : chunks < num_rows ? chunks : num_rows;
}

INLINE int64_t chunk_start(int64_t num_rows, int64_t chunk, int64_t num_chunks) { return num_rows * chunk / num_chunks; }

#endif
