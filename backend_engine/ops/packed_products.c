/* Products with packed weights on a CPU: some rows of the weight are decoded into a buffer that stays in the first
 * level of the cache, and multiplied with every token. Compiled by native_library.py, called by packed_products.py.
 *
 * float32 throughout. A result is summed in an order that depends on the number of columns alone: not on the other
 * tokens or rows, nor on the number of threads. Vectors are those of GCC and Clang.
 */

#include "packed_weights.h"

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
#define BLOCK_STRIDE (MAX_COLUMNS + 16) /* rows a power of two apart would compete for the same cache lines */
#define SMALL_PRODUCT 100000 /* weights times tokens that one thread multiplies sooner than two agree on it */
#define CHUNKS_PER_THREAD 8
#define CHUNK_ALIGNMENT 32 /* rows, a multiple of BLOCK_ROWS; results of two threads lie on different cache lines */

/* GOMP_parallel of the OpenMP runtime that torch runs on: calls a function in each thread of its team. */
typedef void (*parallel_function)(void (*)(void *), void *, unsigned, unsigned);

/* Columns of a block: as many as make blocks of equal length, in whole vectors. */
INLINE int64_t block_length(int64_t columns) {
    const int64_t num_blocks = (columns + MAX_COLUMNS - 1) / MAX_COLUMNS;
    return ((columns + num_blocks - 1) / num_blocks + 31) / 32 * 32;
}

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
    enum { MAX_GROUPS = MAX_COLUMNS / LANES + 2 };
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

/* Begins to read the codes of the next TILE_ROWS rows: processors do not foresee that rows are read side by side. */
INLINE void fetch_ahead(const packed_weight *w, int64_t row, int64_t begin, int64_t length) {
    const int has_halves = w->codes_kind == INT4 || w->codes_kind == CODEBOOK4;
    for (int64_t next = row; next < row + TILE_ROWS && next < w->rows; next++) {
        const uint8_t *codes = w->codes + ((next * w->columns + begin) >> has_halves);
        for (int64_t i = 0; i < length >> has_halves; i += 64)
            __builtin_prefetch(codes + i);
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
        fetch_ahead(w, row + TILE_ROWS, begin, step);
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
