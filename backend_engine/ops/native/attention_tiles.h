/* What attention does with one tile of keys and values; attention.h says how tiles make up a text.
 */
#ifndef INFLIGHT_ATTENTION_TILES_H
#define INFLIGHT_ATTENTION_TILES_H

#include "kv_numbers.h"

#define KEY_TILE 64
#define KEYS_STRIDE (KEY_TILE + 16) /* rows a power of two apart would compete for the same cache lines */
#define PAD 16                      /* and so would values */
#define BLOCK_ROWS_ATTENDED 6       /* queries that are multiplied together */
#define MAX_ROWS_ATTENDED 192       /* queries that go along a text together */
#define MAX_QUERY_FLOATS 24576

/* q: [num_heads, head_dim] for each token, q_stride floats apart; out the same, out_stride apart. sinks: [num_heads] or
 * NULL. window, softcap: 0 = none.
 */
typedef struct {
    int64_t kind;
    const void *pool;
    const float *pool_scales;
    const float *q, *sinks;
    float *out;
    int64_t pool_dtype, num_heads, num_kv_heads, head_dim, window, q_stride, out_stride;
    float scale, softcap, k_scale, v_scale;
} attend_op;

/* ---- products ------------------------------------------------------------------------------------------------ */

/* c [rows, vecs * LANES] = a [rows, depth] times b [depth, vecs * LANES], each number one sum in order of the depth;
 * adds: to what c holds.
 */
INLINE void product(const int rows, const int vecs, const float *a, int64_t a_stride, const float *b, int64_t b_stride,
                    int64_t depth, float *c, int64_t c_stride, const int adds) {
    vec total[BLOCK_ROWS_ATTENDED][8];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++)
            total[r][v] = adds ? load(c + r * c_stride + v * LANES) : (vec){0};
    for (int64_t i = 0; i < depth; i++, b += b_stride) {
        /* What there is less of stays in registers: the numbers of a, or the vectors of b. */
        vec kept[BLOCK_ROWS_ATTENDED];
        for (int k = 0; k < (rows < vecs ? rows : vecs); k++) {
            kept[k] = rows < vecs ? broadcast(a[k * a_stride + i]) : load(b + k * LANES);
            KEEP(kept[k]);
        }
        if (rows < vecs)
            for (int v = 0; v < vecs; v++) {
                vec row = load(b + v * LANES);
                if (rows > 1)
                    KEEP(row);
                for (int r = 0; r < rows; r++)
                    total[r][v] = multiply_add(kept[r], row, total[r][v]);
            }
        else
            for (int r = 0; r < rows; r++) {
                const vec factor = broadcast(a[r * a_stride + i]);
                for (int v = 0; v < vecs; v++)
                    total[r][v] = multiply_add(factor, kept[v], total[r][v]);
            }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++)
            store(c + r * c_stride + v * LANES, total[r][v]);
}

#define PRODUCT_ARGUMENTS                                                                                              \
    const float *a, int64_t a_stride, const float *b, int64_t b_stride, int64_t depth, float *c, int64_t c_stride,     \
        const int adds
#define DEFINE_PRODUCT(rows, vecs)                                                                                     \
    static __attribute__((noinline)) void product_##rows##_##vecs(PRODUCT_ARGUMENTS) {                                 \
        product(rows, vecs, a, a_stride, b, b_stride, depth, c, c_stride, adds);                                       \
    }
DEFINE_PRODUCT(1, 1) DEFINE_PRODUCT(1, 2) DEFINE_PRODUCT(1, 4) DEFINE_PRODUCT(1, 8)
DEFINE_PRODUCT(2, 1) DEFINE_PRODUCT(2, 2) DEFINE_PRODUCT(2, 4)
DEFINE_PRODUCT(3, 1) DEFINE_PRODUCT(3, 2) DEFINE_PRODUCT(3, 4)
DEFINE_PRODUCT(4, 1) DEFINE_PRODUCT(4, 2)
DEFINE_PRODUCT(5, 1) DEFINE_PRODUCT(5, 2)
DEFINE_PRODUCT(6, 1) DEFINE_PRODUCT(6, 2)

typedef void (*product_function)(PRODUCT_ARGUMENTS);

/* Most vectors at once, so that the sums of few queries do not wait for one another. */
INLINE int most_vecs(int rows) { return rows == 1 ? 8 : rows < 4 ? 4 : 2; }

static product_function product_of(int rows, int vecs) {
    static const product_function functions[BLOCK_ROWS_ATTENDED][4] = {
        {product_1_1, product_1_2, product_1_4, product_1_8}, {product_2_1, product_2_2, product_2_4, 0},
        {product_3_1, product_3_2, product_3_4, 0},           {product_4_1, product_4_2, 0, 0},
        {product_5_1, product_5_2, 0, 0},                     {product_6_1, product_6_2, 0, 0}};
    return functions[rows - 1][vecs == 8 ? 3 : vecs == 4 ? 2 : vecs - 1];
}

INLINE int next_vecs(int rows, int64_t left) {
    int vecs = most_vecs(rows);
    while (vecs > left)
        vecs /= 2;
    return vecs;
}

/* ---- queries and places -------------------------------------------------------------------------------------- */

/* Queries that go along a text together. q: [num_rows, head_dim], scaled; out: [num_rows, out_stride] sums of weighted
 * values; keys: [head_dim, KEYS_STRIDE] and values: [KEY_TILE, values_stride] of a tile; weights: [num_rows, KEY_TILE].
 * Of each query: the positions that it sees, the highest score so far, and the sum of the weights.
 */
typedef struct {
    int num_rows;
    int64_t out_stride, values_stride;
    float *q, *out, *keys, *values, *weights;
    int64_t *first, *end;
    float *highest, *sum;
} attended;

/* Where the keys of a tile lie: vectors of the pool, values `to_values` of them further on. */
typedef struct {
    int64_t at[KEY_TILE], to_values;
} tile_places;

/* What is to be read next, begins to be read while a tile is worked on: of some keys of the next one the vectors of all
 * heads that go along the text, in the order of memory, which is what processors are fastest with.
 */
typedef struct {
    const char *pool;
    const tile_places *places;
    int64_t first, end, vector_bytes, bytes;
} tile_ahead;

INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Of the positions tile + first to tile + end; those behind are filled up with the last. */
static void find_places(const attend_op *op, const native_step *step, const int32_t *table, int64_t head, int64_t tile,
                        int64_t first, int64_t end, tile_places *places) {
    const int64_t size = step->tokens_per_block;
    int64_t block = (tile + first) / size, offset = (tile + first) % size;
    places->to_values = size * op->num_kv_heads;
    for (int64_t i = first; i < end; block++, offset = 0) {
        const int64_t base = (int64_t)table[block] * 2 * size + offset, stop = smaller(end, i + size - offset);
        for (int64_t j = 0; i < stop; i++, j++)
            places->at[i] = (base + j) * op->num_kv_heads + head;
    }
    for (int64_t i = 0; i < first; i++)
        places->at[i] = places->at[first];
    for (int64_t i = end; i < KEY_TILE; i++)
        places->at[i] = places->at[end - 1];
}

#if HAS_AVX2
INLINE void transpose_eight(__m256 r[8]) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
    }
}
#endif

INLINE float factor_at(const int kind, const float *scales, int64_t place, float scale) {
    return kind == KV_INT8 ? scales[place] : kind == KV_E4M3 ? scale * 256 : scale;
}

/* What is read ahead, one plane of `ahead`, in small portions: so many lines at once would keep the processor from going
 * on. To the second level of the cache.
 */
typedef struct {
    const tile_ahead *ahead;
    int64_t plane_offset, key, bytes_left;
    const char *from;
    int lines; /* of a portion */
} fetch_cursor;

INLINE fetch_cursor fetch_in(const tile_ahead *ahead, int64_t plane_offset, int64_t portions) {
    const int64_t lines = (ahead->end - ahead->first) * ((ahead->bytes + 63) / 64);
    return (fetch_cursor){ahead, plane_offset, ahead->first, 0, 0, (int)((lines + portions - 1) / portions)};
}

INLINE void fetch_portion(fetch_cursor *at) {
    for (int line = 0; line < at->lines; line++) {
        if (at->bytes_left <= 0) {
            if (at->key == at->ahead->end)
                return;
            const int64_t vector = at->ahead->places->at[at->key++] + at->plane_offset;
            at->from = at->ahead->pool + vector * at->ahead->vector_bytes;
            at->bytes_left = at->ahead->bytes;
        }
        __builtin_prefetch(at->from, 0, 2);
        at->from += 64;
        at->bytes_left -= 64;
    }
}

/* The keys of a tile, side by side for each number of the head; those of the next begin to be read. */
INLINE void read_keys(const int kind, const attend_op *op, const tile_places *now, const tile_ahead *next,
                      int64_t first, int64_t end, float *keys) {
    const int64_t dim = op->head_dim, bytes = dim * kv_number_bytes(kind);
    const int64_t begin = first / 8 * 8, stop = (end + LANES - 1) / LANES * LANES;
    const char *pool = op->pool;
    fetch_cursor cursor = fetch_in(next, 0, (stop - begin) / 8 * (dim / 8));
    for (int64_t i = begin; i < stop; i += 8) {
        const char *from[8];
        float factors[8];
        for (int j = 0; j < 8; j++) {
            from[j] = pool + now->at[i + j] * bytes;
            factors[j] = factor_at(kind, op->pool_scales, now->at[i + j], op->k_scale);
        }
        for (int64_t d = 0; d < dim; d += 8) {
            fetch_portion(&cursor);
#if HAS_AVX2
            __m256 rows[8];
            for (int j = 0; j < 8; j++)
                rows[j] = eight_kv_numbers(kind, from[j], d, factors[j]);
            transpose_eight(rows);
            for (int j = 0; j < 8; j++)
                _mm256_storeu_ps(keys + (d + j) * KEYS_STRIDE + i, rows[j]);
#else
            for (int j = 0; j < 8; j++)
                for (int k = 0; k < 8; k++)
                    keys[(d + k) * KEYS_STRIDE + i + j] = kv_number(kind, from[j], d + k, factors[j]);
#endif
        }
    }
}

/* The values of a tile; returns whether all are finite. */
INLINE int read_values(const int kind, const attend_op *op, const tile_places *now, const tile_ahead *next,
                       int64_t first, int64_t end, float *values, int64_t values_stride) {
    const int64_t dim = op->head_dim, bytes = dim * kv_number_bytes(kind);
    const char *pool = op->pool;
#if HAS_AVX2
    __m256 differences = _mm256_setzero_ps();
#else
    int32_t differences = 0;
#endif
    fetch_cursor cursor = fetch_in(next, now->to_values, end - first);
    for (int64_t i = first; i < end; i++) {
        const int64_t place = now->at[i] + now->to_values;
        const float factor = factor_at(kind, op->pool_scales, place, op->v_scale);
        fetch_portion(&cursor);
        for (int64_t d = 0; d < dim; d += 8) {
#if HAS_AVX2
            const __m256 some = eight_kv_numbers(kind, pool + place * bytes, d, factor);
            _mm256_storeu_ps(values + i * values_stride + d, some);
            differences = _mm256_or_ps(differences, _mm256_sub_ps(some, some));
#else
            for (int64_t k = d; k < d + 8; k++) {
                const float one = kv_number(kind, pool + place * bytes, k, factor);
                values[i * values_stride + k] = one;
                differences |= one - one != 0;
            }
#endif
        }
    }
#if HAS_AVX2
    return _mm256_testz_si256(_mm256_castps_si256(differences), _mm256_castps_si256(differences));
#else
    return !differences;
#endif
}

/* e to the power of x <= 0, to about one unit in the last place; nothing below e^-87. x = n ln 2 + r, |r| <= ln 2 / 2,
 * and a polynomial for e^r that was fitted to have the least largest relative error. NaN stays.
 */
INLINE vec weight_of(vec x) {
    /* Added and taken away, this rounds to the nearest integer, which is in its lowest bits. */
    const vec magic = broadcast(12582912.0f);
    const vec shifted = multiply_add(x, broadcast(1.44269504f), magic), n = shifted - magic;
    vec r = multiply_add(n, broadcast(-0.693359375f), x);
    r = multiply_add(n, broadcast(2.12194440e-4f), r);
    vec p = multiply_add(broadcast(1.381446674e-3f), r, broadcast(8.368780429e-3f));
    p = multiply_add(p, r, broadcast(4.166839422e-2f));
    p = multiply_add(p, r, broadcast(1.666652011e-1f));
    p = multiply_add(p, r, broadcast(4.999999341e-1f));
    p = multiply_add(p * r, r, r) + broadcast(1.0f);
    p *= (vec)(((ivec)shifted + 127) << 23);
    return choose(x < broadcast(-87.0f), (vec){0}, p);
}

/* c tanh(x / c): near zero by a polynomial that was fitted, elsewhere by the exponential. */
static vec softcapped(vec x, float softcap) {
    const vec y = x / broadcast(softcap), z = y * y, one = broadcast(1.0f);
    const vec magnitude = (vec)((ivec)y & 0x7fffffff);
    vec near = multiply_add(broadcast(-5.648315744e-3f), z, broadcast(2.058982573e-2f));
    near = multiply_add(near, z, broadcast(-5.372512634e-2f));
    near = multiply_add(near, z, broadcast(1.333127443e-1f));
    near = multiply_add(near, z, broadcast(-3.333327606e-1f));
    near = multiply_add(near * z, y, y);
    const vec power = weight_of(broadcast(-2.0f) * magnitude);
    const vec far = (one - power) / (one + power);
    const vec with_sign = (vec)((ivec)far | ((ivec)y & INT32_MIN));
    return choose(magnitude < broadcast(0.625f), near, with_sign) * broadcast(softcap);
}

/* The scores of one query with a tile of num_vecs vectors become weights, relative to the highest score so far. */
static void weigh(const attend_op *op, attended *s, int row, int64_t tile, int64_t num_vecs) {
    float *weights = s->weights + row * KEY_TILE;
    const int64_t first = larger(s->first[row] - tile, 0), end = smaller(s->end[row] - tile, KEY_TILE);
    const vec lowest = broadcast(-INFINITY);
    if (first >= end) {
        memset(weights, 0, (size_t)num_vecs * LANES * sizeof(float));
        return;
    }
    if (op->softcap > 0)
        for (int64_t v = 0; v < num_vecs; v++)
            store(weights + v * LANES, softcapped(load(weights + v * LANES), op->softcap));
    for (int64_t i = 0; i < first; i++)
        weights[i] = -INFINITY;
    for (int64_t i = end; i < num_vecs * LANES; i++)
        weights[i] = -INFINITY;
    vec most = lowest;
    for (int64_t v = 0; v < num_vecs; v++)
        most = vec_max(load(weights + v * LANES), most); /* NaN is none */
    const float in_tile = max_of(most), before = s->highest[row];
    const float highest = in_tile > before ? in_tile : before;
    const vec base = broadcast(highest == -INFINITY ? 0 : highest);
    if (highest > before) {
        const vec less = weight_of(broadcast(before) - base);
        float *out = s->out + row * s->out_stride;
        for (int64_t d = 0; d < s->out_stride; d += LANES)
            store(out + d, load(out + d) * less);
        s->sum[row] *= less[0];
        s->highest[row] = highest;
    }
    vec sum = {0};
    for (int64_t v = 0; v < num_vecs; v++) {
        const vec weight = weight_of(load(weights + v * LANES) - base);
        store(weights + v * LANES, weight);
        sum += weight;
    }
    s->sum[row] += sum_of(sum);
}

/* ---- few queries that see all of a tile: values are taken as they come, nothing is kept --------------------------- */

#define FEW_ROWS 4

#if HAS_AVX2
/* Scores as `product` makes them, of float32 keys, for which a tile of their own would be as large as they are. Several
 * groups of eight keys take turns, so that the sums do not wait.
 */
INLINE void score_floats(const int rows, const attend_op *op, attended *s, const tile_places *now,
                         const tile_ahead *next, int64_t end) {
    enum { MOST_GROUPS = 4 };
    const int groups = rows == 1 ? MOST_GROUPS : 2;
    const int64_t dim = op->head_dim, bytes = dim * (int64_t)sizeof(float);
    fetch_cursor cursor = fetch_in(next, 0, (end + 8 * groups - 1) / (8 * groups) * (dim / 8));
    for (int64_t i = 0; i < end; i += 8 * groups) {
        const char *from[8 * MOST_GROUPS];
        __m256 total[FEW_ROWS][MOST_GROUPS];
        for (int j = 0; j < 8 * groups; j++)
            from[j] = (const char *)op->pool + now->at[i + j] * bytes;
        for (int r = 0; r < rows; r++)
            for (int g = 0; g < groups; g++)
                total[r][g] = _mm256_setzero_ps();
        for (int64_t d = 0; d < dim; d += 8) {
            fetch_portion(&cursor);
            for (int g = 0; g < groups; g++) {
                __m256 keys[8];
                for (int j = 0; j < 8; j++)
                    keys[j] = _mm256_loadu_ps((const float *)from[8 * g + j] + d);
                transpose_eight(keys);
                for (int j = 0; j < 8; j++)
                    for (int r = 0; r < rows; r++)
                        total[r][g] = _mm256_fmadd_ps(_mm256_broadcast_ss(s->q + r * dim + d + j), keys[j], total[r][g]);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int g = 0; g < groups; g++)
                _mm256_storeu_ps(s->weights + r * KEY_TILE + i + 8 * g, total[r][g]);
    }
}

static void score_few_floats(const attend_op *op, attended *s, const tile_places *now, const tile_ahead *next,
                             int64_t end) {
    switch (s->num_rows) {
    case 1: score_floats(1, op, s, now, next, end); break;
    case 2: score_floats(2, op, s, now, next, end); break;
    case 3: score_floats(3, op, s, now, next, end); break;
    default: score_floats(4, op, s, now, next, end);
    }
}

INLINE void add_few_columns(const int kind, const int rows, const int vecs, const attend_op *op, attended *s,
                            const tile_places *now, fetch_cursor *cursor, int64_t first, int64_t end,
                            int64_t column) {
    const int64_t bytes = op->head_dim * kv_number_bytes(kind);
    __m256 total[FEW_ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++)
            total[r][v] = _mm256_loadu_ps(s->out + r * s->out_stride + column + 8 * v);
    for (int64_t i = first; i < end; i++) {
        const int64_t place = now->at[i] + now->to_values;
        const char *values = (const char *)op->pool + place * bytes;
        const float factor = factor_at(kind, op->pool_scales, place, op->v_scale);
        fetch_portion(cursor);
        __m256 weights[FEW_ROWS];
        for (int r = 0; r < rows; r++)
            weights[r] = _mm256_broadcast_ss(s->weights + r * KEY_TILE + i);
        for (int v = 0; v < vecs; v++) {
            const __m256 value = eight_kv_numbers(kind, values, column + 8 * v, factor);
            for (int r = 0; r < rows; r++)
                total[r][v] = _mm256_fmadd_ps(weights[r], value, total[r][v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++)
            _mm256_storeu_ps(s->out + r * s->out_stride + column + 8 * v, total[r][v]);
}

INLINE void add_few(const int kind, const int rows, const attend_op *op, attended *s, const tile_places *now,
                    const tile_ahead *next, int64_t first, int64_t end) {
    int64_t column = 0;
    fetch_cursor cursor = fetch_in(next, now->to_values, (end - first) * (op->head_dim / 32 + 1));
    for (; rows < 4 && column + 32 <= op->head_dim; column += 32)
        add_few_columns(kind, rows, 4, op, s, now, &cursor, first, end, column);
    for (; column + 16 <= op->head_dim; column += 16)
        add_few_columns(kind, rows, 2, op, s, now, &cursor, first, end, column);
    for (; column < op->head_dim; column += 8)
        add_few_columns(kind, rows, 1, op, s, now, &cursor, first, end, column);
}

#define ADD_FEW(kind)                                                                                                  \
    static __attribute__((noinline)) void add_few_##kind(const attend_op *op, attended *s, int64_t first, int64_t end, \
                                                         const tile_places *now, const tile_ahead *next) {             \
        switch (s->num_rows) {                                                                                         \
        case 1: add_few(kind, 1, op, s, now, next, first, end); break;                                                 \
        case 2: add_few(kind, 2, op, s, now, next, first, end); break;                                                 \
        case 3: add_few(kind, 3, op, s, now, next, first, end); break;                                                 \
        default: add_few(kind, 4, op, s, now, next, first, end);                                                       \
        }                                                                                                              \
    }
ADD_FEW(KV_FLOAT32)
ADD_FEW(KV_BFLOAT16)
ADD_FEW(KV_FLOAT16)
ADD_FEW(KV_INT8)
#undef ADD_FEW

/* Whether it was done: numbers that are slow to read are read once for all queries. */
INLINE int add_few_values(const attend_op *op, attended *s, int64_t first, int64_t end, const tile_places *now,
                          const tile_ahead *next) {
    switch (op->pool_dtype) {
    case KV_FLOAT32: add_few_KV_FLOAT32(op, s, first, end, now, next); return 1;
    case KV_BFLOAT16: add_few_KV_BFLOAT16(op, s, first, end, now, next); return 1;
    case KV_FLOAT16: add_few_KV_FLOAT16(op, s, first, end, now, next); return 1;
    case KV_INT8: add_few_KV_INT8(op, s, first, end, now, next); return 1;
    default: return 0;
    }
}
#endif

#endif
