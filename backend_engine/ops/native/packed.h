/* Products with packed weights: some rows of the weight are decoded into a buffer that stays in the first level of the
 * cache, and multiplied with every token.
 *
 * float32 throughout. A result is summed in an order that depends on the number of columns alone.
 */
#ifndef INFLIGHT_PACKED_H
#define INFLIGHT_PACKED_H

#include "packed_weights.h"

#define BLOCK_ROWS 32      /* most rows that are decoded together: in the second level of the cache */
#define TILE_ROWS 4        /* of them, so many are multiplied together: in its first level */
#define MANY_TOKENS 32     /* from so many on, BLOCK_ROWS rows are decoded together, otherwise TILE_ROWS */
#define X_BLOCK_BYTES 196608 /* of the second level, for the tokens that are multiplied with a block's rows */
#define BLOCK_STRIDE (MAX_COLUMNS + 16) /* rows a power of two apart would compete for the same cache lines */
#define SMALL_PRODUCT 100000 /* weights times tokens that one thread multiplies sooner than two agree on it */
#define PACKED_CHUNKS_PER_THREAD 8
#define CHUNK_ALIGNMENT 32 /* rows, a multiple of BLOCK_ROWS; results of two threads lie on different cache lines */

/* Columns of a block: as many as make blocks of equal length, in whole vectors. */
INLINE int64_t block_length(int64_t columns) {
    const int64_t num_blocks = (columns + MAX_COLUMNS - 1) / MAX_COLUMNS;
    return ((columns + num_blocks - 1) / num_blocks + 31) / 32 * 32;
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

/* out [num_tokens, rows] = x [num_tokens, columns], zeros behind them up to whole vectors, times the weight */
typedef struct {
    int64_t kind;
    const packed_weight *w;
    const float *x;
    int64_t x_stride;
    float *out;
} packed_op;

INLINE void add_sums(float *out, const float *sums, int count, int has_some) {
    for (int r = 0; r < count; r++)
        out[r] = has_some ? out[r] + sums[r] : sums[r];
}

/* Up to TILE_ROWS decoded rows with tokens first_token to stop. */
static void multiply_tokens(const packed_op *j, const float *weight, int64_t row, int num_rows, int64_t begin,
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

static void multiply_block(const packed_op *j, int64_t num_tokens, int64_t row, int num_rows, float *weight) {
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
        for (int64_t token = 0; token < num_tokens; token += token_step) {
            const int64_t stop = token + token_step < num_tokens ? token + token_step : num_tokens;
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
static int multiply_block_with_one(const packed_op *j, int64_t num_tokens, int64_t row, int num_rows) {
#if HAS_AVX2 && LANES == 8
    const packed_weight *w = j->w;
    if (num_tokens != 1 || w->columns % LANES || (w->group_size % LANES && w->num_groups > 1))
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
    (void)j, (void)num_tokens, (void)row, (void)num_rows;
    return 0;
#endif
}

/* Rows of a chunk. */
INLINE int64_t packed_chunk_rows(int64_t rows, int64_t num_chunks) {
    const int64_t each = (rows + num_chunks - 1) / num_chunks;
    return (each + CHUNK_ALIGNMENT - 1) / CHUNK_ALIGNMENT * CHUNK_ALIGNMENT;
}

INLINE int64_t chunks_of_weight(const packed_weight *w, int64_t num_tokens, int num_threads) {
    if (num_tokens == 0 || w->rows == 0)
        return 0;
    if (num_threads < 2 || w->rows * w->columns * num_tokens < SMALL_PRODUCT)
        return 1;
    const int64_t most = (w->rows + CHUNK_ALIGNMENT - 1) / CHUNK_ALIGNMENT;
    const int64_t wanted = (int64_t)num_threads * PACKED_CHUNKS_PER_THREAD;
    return wanted < most ? wanted : most;
}

static int64_t packed_chunks(const packed_op *op, const native_step *step, int num_threads) {
    return chunks_of_weight(op->w, step->num_tokens, num_threads);
}

static void packed_chunk(const packed_op *op, const native_step *step, int64_t chunk, int64_t num_chunks,
                         float *scratch) {
    /* Rows behind the last of a block are multiplied too, and their results left out. */
    const int64_t num_tokens = step->num_tokens, rows = packed_chunk_rows(op->w->rows, num_chunks);
    const int64_t start = chunk * rows, end = start + rows < op->w->rows ? start + rows : op->w->rows;
    const int block_rows = num_tokens < MANY_TOKENS ? TILE_ROWS : BLOCK_ROWS;
    memset(scratch, 0, (size_t)block_rows * BLOCK_STRIDE * sizeof(float));
    for (int64_t row = start; row < end; row += block_rows) {
        const int num_rows = end - row < block_rows ? (int)(end - row) : block_rows;
        if (!multiply_block_with_one(op, num_tokens, row, num_rows))
            multiply_block(op, num_tokens, row, num_rows, scratch);
    }
}

/* out [rows, columns] = the weight as the product reads it */
typedef struct {
    int64_t kind;
    const packed_weight *w;
    float *out;
} packed_decode_op;

static int64_t packed_decode_chunks(const packed_decode_op *op, int num_threads) {
    return chunks_of_weight(op->w, 1, num_threads);
}

static void packed_decode_chunk(const packed_decode_op *op, int64_t chunk, int64_t num_chunks) {
    const packed_weight *w = op->w;
    const int64_t step = block_length(w->columns), rows = packed_chunk_rows(w->rows, num_chunks);
    const int64_t start = chunk * rows, end = start + rows < w->rows ? start + rows : w->rows;
    for (int64_t row = start; row < end; row++)
        for (int64_t begin = 0; begin < w->columns; begin += step) {
            const int64_t stop = begin + step < w->columns ? begin + step : w->columns;
            decode_row(w, row, begin, stop, op->out + row * w->columns + begin);
        }
}

#endif
