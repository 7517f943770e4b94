/* Products with packed weights on a CPU: some rows of the weight are decoded into a buffer that stays in the first
 * level of the cache, and multiplied with every token. Compiled by native_library.py, called by packed_products.py.
 *
 * float32 throughout. A decoded number equals that of the reference bit for bit (compile with -ffp-contract=off). A
 * result is summed in an order that depends on the number of columns alone: not on the other tokens or rows, nor on
 * the number of threads. Plain C with vectors of GCC and Clang; parts that matter are written for AVX2 as well.
 */

#include <stddef.h>
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

#define BLOCK_ROWS 32      /* most rows that are decoded together: in the second level of the cache */
#define TILE_ROWS 4        /* of them, so many are multiplied together: in its first level */
#define MANY_TOKENS 32     /* from so many on, BLOCK_ROWS rows are decoded together, otherwise TILE_ROWS */
#define X_BLOCK_BYTES 196608 /* of the second level, for the tokens that are multiplied with a block's rows */
#define BLOCK_COLUMNS 640  /* most columns whose sum is taken before it is added to a result */
#define BLOCK_STRIDE (BLOCK_COLUMNS + 16) /* rows a power of two apart would compete for the same cache lines */
#define SMALL_PRODUCT 100000 /* weights times tokens that one thread multiplies sooner than two agree on it */
#define CHUNKS_PER_THREAD 8
#define CHUNK_ALIGNMENT 32 /* rows, a multiple of BLOCK_ROWS; results of two threads lie on different cache lines */

#define INLINE static inline __attribute__((always_inline))

enum { INT4, INT8, CODEBOOK4, E4M3, E5M2 };                                /* codes */
enum { SCALE_FLOAT32, SCALE_FLOAT16, SCALE_BFLOAT16, SCALE_E4M3, SCALE_E8M0 }; /* scales */

enum { NOTHING, ADD, MULTIPLY };                                            /* with a last factor or term */

typedef struct {
    int64_t rows, columns, group_size, num_groups;
    const uint8_t *codes;   /* [rows, columns], or [rows, columns / 2]: the first of two in the lower half */
    const void *scales;     /* [rows, num_groups] */
    const uint8_t *zeros;   /* [rows, num_groups] or NULL: midpoint */
    const float *offsets;   /* [rows, num_groups] or NULL; of integers, added last */
    const float *row_scale; /* [rows] or NULL; of a codebook, multiplied with last */
    float values[16];       /* of a codebook */
    float midpoint;         /* of integers: subtracted from each */
    int32_t codes_kind, scales_kind;
} packed_weight;

/* GOMP_parallel of the OpenMP runtime that torch runs on: calls a function in each thread of its team. */
typedef void (*parallel_function)(void (*)(void *), void *, unsigned, unsigned);

INLINE float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE float from_float16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = (half >> 10) & 31, mantissa = half & 0x3ff;
    if (exponent == 0) {
        float value = (float)mantissa * 0x1p-24f;
        return sign ? -value : value;
    }
    if (exponent == 31)
        return from_bits(sign | 0x7f800000 | mantissa << 13);
    return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

/* 1 bit of sign, 5 of exponent, 2 of mantissa: the upper half of a float16. */
INLINE float from_e5m2(uint8_t code) { return from_float16((uint16_t)(code << 8)); }

/* 1 bit of sign, 4 of exponent, 3 of mantissa; no infinity. */
INLINE float from_e4m3(uint8_t code) {
    if ((code & 0x7f) == 0x7f)
        return from_bits(0x7fc00000);
    return from_float16((uint16_t)((code & 0x80) << 8 | (code & 0x7f) << 7)) * 256.0f;
}

/* A power of two with bias 127. */
INLINE float from_e8m0(uint8_t code) {
    if (code == 255)
        return from_bits(0x7fc00000);
    return from_bits(code ? (uint32_t)code << 23 : 0x00400000);
}

/* ---- codes to numbers --------------------------------------------------------------------------------------- */

INLINE float one_value(const int kind, const uint8_t *codes, int64_t column, const float *values) {
    if (kind == INT4 || kind == CODEBOOK4) {
        int code = codes[column / 2] >> (column % 2 ? 4 : 0) & 15;
        return kind == INT4 ? (float)code : values[code];
    }
    if (kind == INT8)
        return (float)codes[column];
    return kind == E4M3 ? from_e4m3(codes[column]) : from_e5m2(codes[column]);
}

#if HAS_AVX2
INLINE __m256 e4m3_to_float(__m128i codes) {
    __m128i magnitude = _mm_and_si128(codes, _mm_set1_epi16(0x7f));
    __m128i is_nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f));
    __m128i sign = _mm_slli_epi16(_mm_and_si128(codes, _mm_set1_epi16(0x80)), 8);
    __m128i half = _mm_or_si128(_mm_or_si128(_mm_slli_epi16(magnitude, 7), sign), is_nan);
    return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
}

/* Eight columns, the first of them even; ``codes``: its byte. */
INLINE __m256 eight_values(const int kind, const uint8_t *codes, __m256 low, __m256 high) {
    if (kind == INT4 || kind == CODEBOOK4) {
        int32_t packed;
        memcpy(&packed, codes, sizeof packed);
        const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
        __m256i code = _mm256_srlv_epi32(_mm256_set1_epi32(packed), shifts);
        if (kind == INT4)
            return _mm256_cvtepi32_ps(_mm256_and_si256(code, _mm256_set1_epi32(15)));
        /* A permutation looks at three bits of an index; the fourth, moved to the sign, chooses the half. */
        __m256 is_high = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, code), _mm256_permutevar8x32_ps(high, code), is_high);
    }
    __m128i bytes = _mm_loadl_epi64((const __m128i *)codes);
    if (kind == INT8)
        return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
    __m128i wide = _mm_cvtepu8_epi16(bytes);
    return kind == E4M3 ? e4m3_to_float(wide) : _mm256_cvtph_ps(_mm_slli_epi16(wide, 8));
}
#endif

/* Columns of one group: (value - zero) * scale, then + last or * last. */
INLINE void decode_run(const int kind, const int tail, const uint8_t *codes, int64_t column, int64_t end, float zero,
                       float scale, float last, const float *values, float *restrict out) {
    const int is_int = kind == INT4 || kind == INT8, has_halves = kind == INT4 || kind == CODEBOOK4;
#if HAS_AVX2
    if (!(has_halves && column & 1)) {
        const uint8_t *at = codes + (has_halves ? column >> 1 : column);
        const __m256 zeros = _mm256_set1_ps(zero), scales = _mm256_set1_ps(scale), lasts = _mm256_set1_ps(last);
        const __m256 low = kind == CODEBOOK4 ? _mm256_loadu_ps(values) : zeros;
        const __m256 high = kind == CODEBOOK4 ? _mm256_loadu_ps(values + 8) : zeros;
        for (; column + 8 <= end; column += 8, out += 8, at += has_halves ? 4 : 8) {
            __m256 value = eight_values(kind, at, low, high);
            if (is_int)
                value = _mm256_sub_ps(value, zeros);
            value = _mm256_mul_ps(value, scales);
            if (tail == ADD)
                value = _mm256_add_ps(value, lasts);
            if (tail == MULTIPLY)
                value = _mm256_mul_ps(value, lasts);
            _mm256_storeu_ps(out, value);
        }
    }
#endif
    for (; column < end; column++, out++) {
        float value = one_value(kind, codes, column, values);
        if (is_int)
            value -= zero;
        value *= scale;
        if (tail == ADD)
            value += last;
        if (tail == MULTIPLY)
            value *= last;
        *out = value;
    }
}

static void decode_scales(const packed_weight *w, int64_t first, int64_t count, float *out) {
    const uint8_t *bytes = (const uint8_t *)w->scales + first;
    const uint16_t *halves = (const uint16_t *)w->scales + first;
    int64_t i = 0;
    switch (w->scales_kind) {
    case SCALE_FLOAT32:
        memcpy(out, (const float *)w->scales + first, (size_t)count * sizeof(float));
        break;
    case SCALE_FLOAT16:
#if HAS_AVX2
        for (; i + 8 <= count; i += 8)
            _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(halves + i))));
#endif
        for (; i < count; i++)
            out[i] = from_float16(halves[i]);
        break;
    case SCALE_BFLOAT16:
        for (; i < count; i++)
            out[i] = from_bits((uint32_t)halves[i] << 16);
        break;
    case SCALE_E4M3:
#if HAS_AVX2
        for (; i + 8 <= count; i += 8)
            _mm256_storeu_ps(out + i,
                             e4m3_to_float(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(bytes + i)))));
#endif
        for (; i < count; i++)
            out[i] = from_e4m3(bytes[i]);
        break;
    default:
        for (; i < count; i++)
            out[i] = from_e8m0(bytes[i]);
    }
}

/* Columns begin to end of one row; begin is even. */
INLINE void decode_kind(const int kind, const int tail, const packed_weight *w, int64_t row, int64_t begin, int64_t end,
                        float *restrict out) {
    const int64_t size = w->group_size, first = begin / size, num_groups = (end - 1) / size - first + 1;
    const int64_t group = row * w->num_groups + first;
    const uint8_t *codes = w->codes + row * (kind == INT4 || kind == CODEBOOK4 ? w->columns / 2 : w->columns);
    const uint8_t *zeros = w->zeros ? w->zeros + group : NULL;
    const float *offsets = tail == ADD ? w->offsets + group : NULL, *values = w->values;
    const float midpoint = w->midpoint, row_scale = tail == MULTIPLY ? w->row_scale[row] : 1.0f;
    float scales[BLOCK_COLUMNS];
    decode_scales(w, group, num_groups, scales);
    for (int64_t i = 0, column = begin; i < num_groups; i++) {
        const int64_t next = (first + i + 1) * size < end ? (first + i + 1) * size : end;
        decode_run(kind, tail, codes, column, next, zeros ? (float)zeros[i] : midpoint, scales[i],
                   tail == ADD ? offsets[i] : row_scale, values, out + (column - begin));
        column = next;
    }
}

/* Calls ``run(kind, tail)`` with the constants that belong to the weight. */
#define FOR_TAIL(run, kind, has_tail, tail) \
    if (has_tail) \
        run(kind, tail); \
    else \
        run(kind, NOTHING); \
    break;
#define FOR_KIND_AND_TAIL(w, run) \
    switch ((w)->codes_kind) { \
    case INT4: FOR_TAIL(run, INT4, (w)->offsets, ADD) \
    case INT8: FOR_TAIL(run, INT8, (w)->offsets, ADD) \
    case CODEBOOK4: FOR_TAIL(run, CODEBOOK4, (w)->row_scale, MULTIPLY) \
    case E4M3: run(E4M3, NOTHING); break; \
    default: run(E5M2, NOTHING); \
    }

static void decode_row(const packed_weight *w, int64_t row, int64_t begin, int64_t end, float *out) {
#define DECODE(kind, tail) decode_kind(kind, tail, w, row, begin, end, out)
    FOR_KIND_AND_TAIL(w, DECODE)
#undef DECODE
}

/* Columns of a block: as many as make blocks of equal length, in whole vectors. */
INLINE int64_t block_length(int64_t columns) {
    const int64_t num_blocks = (columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
    return ((columns + num_blocks - 1) / num_blocks + 31) / 32 * 32;
}

/* ---- products ------------------------------------------------------------------------------------------------ */

typedef float vec __attribute__((vector_size(4 * LANES)));

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

/* Sums of the lanes of TILE_ROWS vectors. */
INLINE void sum_lanes(const vec rows[TILE_ROWS], float *sums) {
#if HAS_AVX2 && LANES >= 8
    __m256 halves[TILE_ROWS];
    for (int r = 0; r < TILE_ROWS; r++) {
        float lanes[LANES];
        memcpy(lanes, &rows[r], sizeof lanes);
        halves[r] = _mm256_loadu_ps(lanes);
        for (int i = 8; i < LANES; i += 8)
            halves[r] = _mm256_add_ps(halves[r], _mm256_loadu_ps(lanes + i));
    }
    __m256 four = _mm256_hadd_ps(_mm256_hadd_ps(halves[0], halves[1]), _mm256_hadd_ps(halves[2], halves[3]));
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1)));
#else
    for (int r = 0; r < TILE_ROWS; r++) {
        float sum = 0;
        for (int i = 0; i < LANES; i++)
            sum += rows[r][i];
        sums[r] = sum;
    }
#endif
}

/* Rows of a block with ``tokens`` tokens: sums[token][row]. ``length`` is a multiple of LANES. */
INLINE void tile(const int tokens, const float *weight, const float *x, int64_t x_stride, int64_t length,
                 float sums[][TILE_ROWS]) {
    vec total[3][TILE_ROWS];
    for (int t = 0; t < tokens; t++)
        for (int r = 0; r < TILE_ROWS; r++)
            total[t][r] = (vec){0};
    for (int64_t column = 0; column < length; column += LANES) {
        vec token[3];
        for (int t = 0; t < tokens; t++) {
            vec kept = load(x + t * x_stride + column);
            KEEP(kept);
            token[t] = kept;
        }
        for (int r = 0; r < TILE_ROWS; r++) {
            vec row = load(weight + r * BLOCK_STRIDE + column);
            if (tokens > 1)
                KEEP(row);
            for (int t = 0; t < tokens; t++)
                total[t][r] = multiply_add(row, token[t], total[t][r]);
        }
    }
    for (int t = 0; t < tokens; t++)
        sum_lanes(total[t], sums[t]);
}

static void tile_of(int tokens, const float *weight, const float *x, int64_t x_stride, int64_t length,
                    float sums[][TILE_ROWS]) {
    switch (tokens) {
    case 1: tile(1, weight, x, x_stride, length, sums); break;
    case 2: tile(2, weight, x, x_stride, length, sums); break;
    default: tile(3, weight, x, x_stride, length, sums);
    }
}

#if HAS_AVX2 && LANES == 8
/* As decode_row and tile(1, ...) for TILE_ROWS rows, without the way through memory; every group is whole vectors. */
INLINE void one_token(const int kind, const int tail, const packed_weight *w, const int64_t rows[TILE_ROWS],
                      int64_t begin, int64_t end, const float *x, float *sums) {
    enum { MAX_GROUPS = BLOCK_COLUMNS / LANES + 2 };
    const int is_int = kind == INT4 || kind == INT8, has_halves = kind == INT4 || kind == CODEBOOK4;
    const int64_t size = w->group_size, first = begin / size, num_groups = (end - 1) / size - first + 1;
    const __m256 low = kind == CODEBOOK4 ? _mm256_loadu_ps(w->values) : _mm256_setzero_ps();
    const __m256 high = kind == CODEBOOK4 ? _mm256_loadu_ps(w->values + 8) : _mm256_setzero_ps();
    float scales[TILE_ROWS][MAX_GROUPS], zeros[TILE_ROWS][MAX_GROUPS], lasts[TILE_ROWS][MAX_GROUPS];
    const uint8_t *codes[TILE_ROWS];
    vec total[TILE_ROWS];
    for (int r = 0; r < TILE_ROWS; r++) {
        const int64_t group = rows[r] * w->num_groups + first, at = rows[r] * w->columns + begin;
        decode_scales(w, group, num_groups, scales[r]);
        if (is_int)
            for (int64_t i = 0; i < num_groups; i++)
                zeros[r][i] = w->zeros ? (float)w->zeros[group + i] : w->midpoint;
        if (tail != NOTHING)
            for (int64_t i = 0; i < num_groups; i++)
                lasts[r][i] = tail == ADD ? w->offsets[group + i] : w->row_scale[rows[r]];
        codes[r] = w->codes + (has_halves ? at / 2 : at);
        total[r] = (vec){0};
    }
    for (int64_t i = 0, column = begin; i < num_groups; i++) {
        const int64_t next = (first + i + 1) * size < end ? (first + i + 1) * size : end;
        for (; column < next; column += LANES) {
            const vec token = load(x + column);
            const int64_t at = has_halves ? (column - begin) >> 1 : column - begin;
            for (int r = 0; r < TILE_ROWS; r++) {
                __m256 value = eight_values(kind, codes[r] + at, low, high);
                if (is_int)
                    value = _mm256_sub_ps(value, _mm256_set1_ps(zeros[r][i]));
                value = _mm256_mul_ps(value, _mm256_set1_ps(scales[r][i]));
                if (tail == ADD)
                    value = _mm256_add_ps(value, _mm256_set1_ps(lasts[r][i]));
                if (tail == MULTIPLY)
                    value = _mm256_mul_ps(value, _mm256_set1_ps(lasts[r][i]));
                total[r] = multiply_add((vec)value, token, total[r]);
            }
        }
    }
    sum_lanes(total, sums);
}

static void one_token_of(const packed_weight *w, const int64_t rows[TILE_ROWS], int64_t begin, int64_t end,
                         const float *x, float *sums) {
#define ONE_TOKEN(kind, tail) one_token(kind, tail, w, rows, begin, end, x, sums)
    FOR_KIND_AND_TAIL(w, ONE_TOKEN)
#undef ONE_TOKEN
}
#endif

typedef struct {
    const packed_weight *w;
    const float *x; /* [num_tokens, x_stride], zeros behind the columns */
    int64_t num_tokens, x_stride;
    float *out; /* [num_tokens, rows], or of decode [rows, columns] */
    int64_t chunk_rows, next_row;
} job;

INLINE void add_sums(float *out, const float *sums, int count, int has_some) {
    for (int r = 0; r < count; r++)
        out[r] = has_some ? out[r] + sums[r] : sums[r];
}

/* Up to TILE_ROWS decoded rows with tokens first_token to stop. */
static void multiply_tokens(const job *j, const float *weight, int64_t row, int num_rows, int64_t begin,
                            int64_t length, int64_t first_token, int64_t stop) {
    for (int64_t token = first_token; token < stop;) {
        const int64_t left = stop - token;
        const int tokens = left == 4 || left == 2 ? 2 : left < 3 ? 1 : 3;
        float sums[3][TILE_ROWS];
        tile_of(tokens, weight, j->x + token * j->x_stride + begin, j->x_stride, length, sums);
        for (int t = 0; t < tokens; t++)
            add_sums(j->out + (token + t) * j->w->rows + row, sums[t], num_rows, begin > 0);
        token += tokens;
    }
}

static void multiply_block(const job *j, int64_t row, int num_rows, float *weight) {
    const packed_weight *w = j->w;
    const int64_t step = block_length(w->columns);
    for (int64_t begin = 0; begin < w->columns; begin += step) {
        const int64_t end = begin + step < w->columns ? begin + step : w->columns;
        const int64_t length = (end - begin + LANES - 1) / LANES * LANES;
        for (int r = 0; r < num_rows; r++) {
            float *decoded = weight + r * BLOCK_STRIDE;
            decode_row(w, row + r, begin, end, decoded);
            for (int64_t column = end - begin; column < length; column++)
                decoded[column] = 0;
        }
        const int64_t token_step = X_BLOCK_BYTES / (int64_t)sizeof(float) / length;
        for (int64_t token = 0; token < j->num_tokens; token += token_step) {
            const int64_t stop = token + token_step < j->num_tokens ? token + token_step : j->num_tokens;
            for (int first = 0; first < num_rows; first += TILE_ROWS) {
                const int rows = num_rows - first < TILE_ROWS ? num_rows - first : TILE_ROWS;
                multiply_tokens(j, weight + first * BLOCK_STRIDE, row + first, rows, begin, length, token, stop);
            }
        }
    }
}

/* The same of up to TILE_ROWS rows for one token, where that is faster: false where it isn't. */
static int multiply_block_with_one(const job *j, int64_t row, int num_rows) {
#if HAS_AVX2 && LANES == 8
    const packed_weight *w = j->w;
    if (j->num_tokens != 1 || w->columns % LANES || (w->group_size % LANES && w->num_groups > 1))
        return 0;
    const int64_t step = block_length(w->columns);
    int64_t rows[TILE_ROWS];
    for (int r = 0; r < TILE_ROWS; r++)
        rows[r] = row + (r < num_rows ? r : 0);
    for (int64_t begin = 0; begin < w->columns; begin += step) {
        float sums[TILE_ROWS];
        one_token_of(w, rows, begin, begin + step < w->columns ? begin + step : w->columns, j->x, sums);
        add_sums(j->out + row, sums, num_rows, begin > 0);
    }
    return 1;
#else
    (void)j, (void)row, (void)num_rows;
    return 0;
#endif
}

static void multiply_chunks(void *data) {
    job *j = data;
    /* Rows behind the last of a block are multiplied too, and their results left out. */
    float weight[BLOCK_ROWS * BLOCK_STRIDE] __attribute__((aligned(64)));
    const int block_rows = j->num_tokens < MANY_TOKENS ? TILE_ROWS : BLOCK_ROWS;
    memset(weight, 0, (size_t)block_rows * BLOCK_STRIDE * sizeof(float));
    for (;;) {
        const int64_t start = __atomic_fetch_add(&j->next_row, j->chunk_rows, __ATOMIC_RELAXED);
        const int64_t end = start + j->chunk_rows < j->w->rows ? start + j->chunk_rows : j->w->rows;
        if (start >= end)
            return;
        for (int64_t row = start; row < end; row += block_rows) {
            const int num_rows = end - row < block_rows ? (int)(end - row) : block_rows;
            if (!multiply_block_with_one(j, row, num_rows))
                multiply_block(j, row, num_rows, weight);
        }
    }
}

static void decode_chunks(void *data) {
    job *j = data;
    const int64_t step = block_length(j->w->columns);
    for (;;) {
        const int64_t start = __atomic_fetch_add(&j->next_row, j->chunk_rows, __ATOMIC_RELAXED);
        const int64_t end = start + j->chunk_rows < j->w->rows ? start + j->chunk_rows : j->w->rows;
        if (start >= end)
            return;
        for (int64_t row = start; row < end; row++)
            for (int64_t begin = 0; begin < j->w->columns; begin += step) {
                const int64_t stop = begin + step < j->w->columns ? begin + step : j->w->columns;
                decode_row(j->w, row, begin, stop, j->out + row * j->w->columns + begin);
            }
    }
}

static void in_parallel(void (*run)(void *), job *j, int num_threads, parallel_function parallel) {
    const int64_t work = j->w->rows * j->w->columns * (j->num_tokens ? j->num_tokens : 1);
    const int64_t threads = parallel && work > SMALL_PRODUCT ? num_threads : 1;
    const int64_t wanted = j->w->rows / (threads * CHUNKS_PER_THREAD);
    j->chunk_rows = (wanted < CHUNK_ALIGNMENT ? 1 : wanted / CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT;
    j->next_row = 0;
    if (threads == 1 || j->w->rows <= j->chunk_rows)
        run(j);
    else
        parallel(run, j, (unsigned)threads, 0);
}

int packed_lanes(void) { return LANES; }

void packed_multiply(const packed_weight *w, const float *x, int64_t num_tokens, int64_t x_stride, float *out,
                     int num_threads, parallel_function parallel) {
    job j = {w, x, num_tokens, x_stride, out, 0, 0};
    in_parallel(multiply_chunks, &j, num_threads, parallel);
}

void packed_decode(const packed_weight *w, float *out, int num_threads, parallel_function parallel) {
    job j = {w, 0, 0, 0, out, 0, 0};
    in_parallel(decode_chunks, &j, num_threads, parallel);
}
