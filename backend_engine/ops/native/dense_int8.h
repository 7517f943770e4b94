/* Products of int8 weights with a scale for each row. Each token's numbers are rounded to int16 with one scale for the
 * token, and the sum over up to INT8_BLOCK columns is an exact integer; those of all blocks are added in float32. So a
 * token's result depends on nothing but the token, however it is computed. Part of dense.h.
 *
 * A token with NaN or an infinite number has NaN as its scale, and so in all its results.
 */
#ifndef INFLIGHT_DENSE_INT8_H
#define INFLIGHT_DENSE_INT8_H

#define INT8_BLOCK 512      /* columns: 128 * 32767 * 512 is less than 2^31 */
#define LARGEST_CODE 32767.0f
#define SMALLEST_PEAK 1e-30f /* numbers that are all smaller count as zeros */

/* out: for each token a row of int16 codes, rounded up to an even number, and behind them its scale, a float. */
typedef struct {
    int64_t kind;
    const float *x;
    int64_t x_stride, columns;
    float *out;
    int64_t out_stride;
} round_op;

INLINE int64_t column_pairs(int64_t columns) { return (columns + 1) / 2; }

/* Columns of a block: equal parts, even. */
INLINE int64_t int8_block(int64_t columns) { return (equal_parts(columns, INT8_BLOCK) + 1) / 2 * 2; }

/* The bits of the largest magnitude; they order as the numbers do, with infinity and NaN last. */
static int32_t peak_bits(const float *x, int64_t columns) {
    ivec peaks[2] = {{0}, {0}};
    int64_t i = 0;
    for (; i + 2 * LANES <= columns; i += 2 * LANES)
        for (int k = 0; k < 2; k++) {
            const ivec bits = (ivec)load(x + i + k * LANES) & 0x7fffffff;
            peaks[k] = (ivec)choose(bits > peaks[k], (vec)bits, (vec)peaks[k]);
        }
    int32_t peak = 0;
    for (int k = 0; k < 2; k++)
        for (int lane = 0; lane < LANES; lane++)
            peak = peaks[k][lane] > peak ? peaks[k][lane] : peak;
    for (; i < columns; i++) {
        int32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffff;
        peak = bits > peak ? bits : peak;
    }
    return peak;
}

typedef int16_t code_vec __attribute__((vector_size(2 * LANES)));

/* Codes of a token, rounded to the nearest (ties to even); returns their scale. */
static float round_token(const float *x, int64_t columns, int16_t *codes) {
    const int32_t bits = peak_bits(x, columns);
    float peak;
    memcpy(&peak, &bits, sizeof peak);
    const int is_finite = bits < 0x7f800000;
    const int64_t padded = 2 * column_pairs(columns);
    if (!is_finite || peak < SMALLEST_PEAK) {
        memset(codes, 0, (size_t)padded * sizeof(int16_t));
        return is_finite ? 0.0f : NAN;
    }
    const float factor = LARGEST_CODE / peak, magic = 12582912.0f; /* added, it leaves an integer in the lower bits */
    int64_t i = 0;
    for (; i + LANES <= columns; i += LANES) {
        const ivec shifted = (ivec)(load(x + i) * factor + magic);
        const code_vec rounded = __builtin_convertvector(shifted - 0x4b400000, code_vec);
        memcpy(codes + i, &rounded, sizeof rounded);
    }
    for (; i < columns; i++) {
        const float shifted = x[i] * factor + magic;
        int32_t code;
        memcpy(&code, &shifted, sizeof code);
        codes[i] = (int16_t)(code - 0x4b400000);
    }
    if (padded > columns)
        codes[columns] = 0;
    return peak / LARGEST_CODE;
}

/* One token is rounded by each chunk of its product. */
static int64_t round_chunks(const round_op *op, const native_step *step, int num_threads) {
    return step->num_tokens <= 1 ? 0 : row_chunks(step->num_tokens, op->columns, num_threads);
}

static void round_chunk(const round_op *op, const native_step *step, int64_t chunk, int64_t num_chunks) {
    const int64_t end = chunk_start(step->num_tokens, chunk + 1, num_chunks);
    for (int64_t token = chunk_start(step->num_tokens, chunk, num_chunks); token < end; token++) {
        float *out = op->out + token * op->out_stride;
        out[column_pairs(op->columns)] = round_token(op->x + token * op->x_stride, op->columns, (int16_t *)out);
    }
}

/* ---- eight rows at once ------------------------------------------------------------------------------------------ */

typedef int32_t int_sums __attribute__((vector_size(32)));
typedef float float_sums __attribute__((vector_size(32)));

#define INT_VECS (PANEL / 8)

/* Two columns of eight rows. */
#if HAS_AVX2
typedef __m256i weight_pairs;

INLINE weight_pairs widen_pairs(const int8_t *from) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
}

INLINE int_sums add_products(int_sums sums, weight_pairs w, const int16_t *x) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return sums + (int_sums)_mm256_madd_epi16(w, _mm256_set1_epi32(pair));
}
#else
typedef struct {
    int_sums even, odd;
} weight_pairs;

INLINE weight_pairs widen_pairs(const int8_t *from) {
    weight_pairs w;
    for (int i = 0; i < 8; i++) {
        w.even[i] = from[2 * i];
        w.odd[i] = from[2 * i + 1];
    }
    return w;
}

INLINE int_sums add_products(int_sums sums, weight_pairs w, const int16_t *x) {
    return sums + w.even * (int32_t)x[0] + w.odd * (int32_t)x[1];
}
#endif

INLINE float_sums load_sums(const float *from) {
    float_sums value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE float_sums scaled_sums(const dense_weight *w, int64_t row, float_sums sums, float scale) {
    sums = sums * scale * load_sums(w->scales + row);
    return w->bias ? sums + load_sums(w->bias + row) : sums;
}

/* Tokens as codes. */
typedef struct {
    const int16_t *codes;
    int64_t stride;      /* int16 */
    const float *scales; /* of each token, scale_stride floats apart */
    int64_t scale_stride;
} rounded_tokens;

/* ---- few tokens -------------------------------------------------------------------------------------------------- */

/* Column pairs begin to end of some panels. */
INLINE void direct_pairs(const int tokens, const int panels, const int8_t *data, int64_t panel_bytes,
                         rounded_tokens x, int64_t begin, int64_t end, const int8_t *ahead,
                         int_sums sums[FEW_TOKENS][MAX_SIDE_BY_SIDE][INT_VECS]) {
    int64_t pair = begin;
    for (; pair + 2 <= end; pair += 2) {
        for (int p = 0; p < panels; p++)
            __builtin_prefetch(ahead + p * panel_bytes + pair * 2 * PANEL);
        for (int i = 0; i < 2; i++)
            for (int p = 0; p < panels; p++)
                for (int v = 0; v < INT_VECS; v++) {
                    weight_pairs w = widen_pairs(data + p * panel_bytes + (pair + i) * 2 * PANEL + v * PANEL);
                    KEEP(w);
                    for (int t = 0; t < tokens; t++)
                        sums[t][p][v] = add_products(sums[t][p][v], w, x.codes + t * x.stride + 2 * (pair + i));
                }
    }
    for (; pair < end; pair++)
        for (int p = 0; p < panels; p++)
            for (int v = 0; v < INT_VECS; v++) {
                const weight_pairs w = widen_pairs(data + p * panel_bytes + pair * 2 * PANEL + v * PANEL);
                for (int t = 0; t < tokens; t++)
                    sums[t][p][v] = add_products(sums[t][p][v], w, x.codes + t * x.stride + 2 * pair);
            }
}

INLINE void direct_int8(const int tokens, const int panels, const dense_op *op, rounded_tokens x, int64_t panel) {
    const dense_weight *w = op->w;
    const int64_t pairs = column_pairs(w->columns), panel_bytes = pairs * 2 * PANEL, block = int8_block(w->columns) / 2;
    const int8_t *data = (const int8_t *)w->data + panel * panel_bytes;
    const int64_t ahead = AHEAD / (2 * PANEL), turn = pairs > ahead ? pairs - ahead : 0;
    float_sums totals[FEW_TOKENS][MAX_SIDE_BY_SIDE][INT_VECS];
    for (int t = 0; t < tokens; t++)
        for (int p = 0; p < panels; p++)
            for (int v = 0; v < INT_VECS; v++)
                totals[t][p][v] = (float_sums){0};
    for (int64_t begin = 0; begin < pairs; begin += block) {
        const int64_t end = begin + block < pairs ? begin + block : pairs;
        const int64_t middle = turn < begin ? begin : turn < end ? turn : end;
        int_sums sums[FEW_TOKENS][MAX_SIDE_BY_SIDE][INT_VECS];
        for (int t = 0; t < tokens; t++)
            for (int p = 0; p < panels; p++)
                for (int v = 0; v < INT_VECS; v++)
                    sums[t][p][v] = (int_sums){0};
        direct_pairs(tokens, panels, data, panel_bytes, x, begin, middle, data + AHEAD, sums);
        direct_pairs(tokens, panels, data, panel_bytes, x, middle, end,
                     data + panels * panel_bytes - turn * 2 * PANEL, sums);
        for (int t = 0; t < tokens; t++)
            for (int p = 0; p < panels; p++)
                for (int v = 0; v < INT_VECS; v++) {
                    const float_sums sum = __builtin_convertvector(sums[t][p][v], float_sums);
                    totals[t][p][v] += sum;
                }
    }
    for (int p = 0; p < panels; p++)
        for (int t = 0; t < tokens; t++) {
            float results[PANEL];
            for (int v = 0; v < INT_VECS; v++) {
                const int64_t row = (panel + p) * PANEL + v * 8;
                const float_sums sum = scaled_sums(w, row, totals[t][p][v], x.scales[t * x.scale_stride]);
                memcpy(results + v * 8, &sum, sizeof sum);
            }
            copy_row(op->out + t * op->out_stride + (panel + p) * PANEL, results, rows_of_panel(w, panel + p));
        }
}

#define DIRECT_OF(tokens, panels)                                                                                      \
    static __attribute__((noinline)) void direct_I8_##tokens##_##panels(const dense_op *op, rounded_tokens x,          \
                                                                        int64_t panel) {                               \
        direct_int8(tokens, panels, op, x, panel);                                                                     \
    }
#define DIRECT_SIDE_BY_SIDE(tokens, panels)                                                                            \
    for (; panel + (panels) <= end; panel += (panels))                                                                 \
        direct_I8_##tokens##_##panels(op, x, panel);

DIRECT_OF(1, 4)
DIRECT_OF(1, 1)
DIRECT_OF(2, 2)
DIRECT_OF(2, 1)
DIRECT_OF(3, 2)
DIRECT_OF(3, 1)
DIRECT_OF(4, 1)
DIRECT_OF(5, 1)
DIRECT_OF(6, 1)

static void few_tokens_int8(const dense_op *op, int64_t tokens, rounded_tokens x, int64_t panel, int64_t end) {
    switch (tokens) {
    case 1: DIRECT_SIDE_BY_SIDE(1, 4) DIRECT_SIDE_BY_SIDE(1, 1) break;
    case 2: DIRECT_SIDE_BY_SIDE(2, 2) DIRECT_SIDE_BY_SIDE(2, 1) break;
    case 3: DIRECT_SIDE_BY_SIDE(3, 2) DIRECT_SIDE_BY_SIDE(3, 1) break;
    case 4: DIRECT_SIDE_BY_SIDE(4, 1) break;
    case 5: DIRECT_SIDE_BY_SIDE(5, 1) break;
    default: DIRECT_SIDE_BY_SIDE(6, 1)
    }
}
#undef DIRECT_OF
#undef DIRECT_SIDE_BY_SIDE

/* ---- many tokens ------------------------------------------------------------------------------------------------- */

enum { INT_TILE = 6 }; /* tokens */

/* Column pairs of a panel with some tokens; `w`: where this is the last block, to scale with. */
INLINE void tile_int8(const int tokens, const weight_pairs *panel, rounded_tokens x, int64_t pairs,
                      tile_results results, fetch_plan fetch, const dense_weight *w, int64_t row) {
    int_sums sums[INT_TILE][INT_VECS];
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < INT_VECS; v++)
            sums[t][v] = (int_sums){0};
    for (int64_t pair = 0; pair < pairs; pair++) {
        weight_pairs weights[INT_VECS];
        for (int v = 0; v < INT_VECS; v++) {
            weights[v] = panel[pair * INT_VECS + v];
            KEEP(weights[v]);
        }
        __builtin_prefetch(fetch.from, 0, 2);
        fetch.from += fetch.step;
        for (int t = 0; t < tokens; t++)
            for (int v = 0; v < INT_VECS; v++)
                sums[t][v] = add_products(sums[t][v], weights[v], x.codes + t * x.stride + 2 * pair);
    }
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < INT_VECS; v++) {
            float *to = results.to + t * results.stride + v * 8;
            float_sums sum = __builtin_convertvector(sums[t][v], float_sums);
            if (!results.is_first)
                sum = load_sums(to) + sum;
            if (w)
                sum = scaled_sums(w, row + v * 8, sum, x.scales[t * x.scale_stride]);
            memcpy(to, &sum, sizeof sum);
        }
}

static void tile_int8_of(int tokens, const weight_pairs *panel, rounded_tokens x, int64_t pairs, tile_results results,
                         fetch_plan fetch, const dense_weight *w, int64_t row) {
    switch (tokens) {
    case 1: tile_int8(1, panel, x, pairs, results, fetch, w, row); break;
    case 2: tile_int8(2, panel, x, pairs, results, fetch, w, row); break;
    case 3: tile_int8(3, panel, x, pairs, results, fetch, w, row); break;
    case 4: tile_int8(4, panel, x, pairs, results, fetch, w, row); break;
    case 5: tile_int8(5, panel, x, pairs, results, fetch, w, row); break;
    default: tile_int8(6, panel, x, pairs, results, fetch, w, row);
    }
}

typedef struct {
    weight_pairs panel[INT8_BLOCK / 2 * INT_VECS];
    float last_panel[TOKEN_BLOCK * PANEL];
} int8_memory;

_Static_assert(sizeof(int8_memory) <= SCRATCH_FLOATS * sizeof(float), "what a chunk needs");

/* A panel, column pairs begin to begin + pairs, with tokens from `token` on. */
static void tile_int8_panel(const dense_op *op, int64_t panel, int64_t begin, int64_t pairs, rounded_tokens x,
                            int64_t token, int64_t num_tokens, const int8_t *next, int8_memory *memory) {
    const dense_weight *w = op->w;
    const int64_t all_pairs = column_pairs(w->columns), groups = (num_tokens + INT_TILE - 1) / INT_TILE;
    const int8_t *data = (const int8_t *)w->data + (panel * all_pairs + begin) * 2 * PANEL;
    const int is_last = begin + pairs == all_pairs, rows = rows_of_panel(w, panel);
    for (int64_t i = 0; i < pairs * INT_VECS; i++)
        memory->panel[i] = widen_pairs(data + i * PANEL);
    tile_results results = {op->out + token * op->out_stride + panel * PANEL, op->out_stride, begin == 0, 0};
    if (rows < PANEL) {
        results.to = memory->last_panel;
        results.stride = PANEL;
    }
    for (int64_t group = 0; group < groups; group++) {
        const int64_t start = num_tokens * group / groups, stop = num_tokens * (group + 1) / groups;
        const fetch_plan fetch = {(const char *)next + pairs * group / groups * 2 * PANEL, 2 * PANEL / groups};
        tile_results part = results;
        part.to += start * results.stride;
        rounded_tokens some = x;
        some.codes += (token + start) * x.stride + 2 * begin;
        some.scales += (token + start) * x.scale_stride;
        tile_int8_of((int)(stop - start), memory->panel, some, pairs, part, fetch, is_last ? w : 0, panel * PANEL);
    }
    if (rows < PANEL && is_last)
        for (int64_t t = 0; t < num_tokens; t++)
            copy_row(op->out + (token + t) * op->out_stride + panel * PANEL, memory->last_panel + t * PANEL, rows);
}

static void many_tokens_int8(const dense_op *op, int64_t num_tokens, rounded_tokens x, int64_t first, int64_t end,
                             int8_memory *memory) {
    const int64_t pairs = column_pairs(op->w->columns), most = int8_block(op->w->columns) / 2;
    const int64_t most_tokens = equal_parts(num_tokens, TOKEN_BLOCK);
    for (int64_t token = 0; token < num_tokens; token += most_tokens) {
        const int64_t tokens = num_tokens - token < most_tokens ? num_tokens - token : most_tokens;
        for (int64_t begin = 0; begin < pairs; begin += most) {
            const int64_t length = pairs - begin < most ? pairs - begin : most;
            for (int64_t panel = first; panel < end; panel++) {
                const int64_t next = panel + 1 < end ? panel + 1 : panel;
                tile_int8_panel(op, panel, begin, length, x, token, tokens,
                                (const int8_t *)op->w->data + (next * pairs + begin) * 2 * PANEL, memory);
            }
        }
    }
}

static void dense_int8_chunk(const dense_op *op, int64_t num_tokens, int64_t first, int64_t end, float *scratch) {
    const int64_t pairs = column_pairs(op->w->columns);
    rounded_tokens x = {(const int16_t *)op->rounded, 2 * op->rounded_stride, op->rounded + pairs, op->rounded_stride};
    if (num_tokens == 1) {
        float *scale = scratch + pairs;
        *scale = round_token(op->x, op->w->columns, (int16_t *)scratch);
        x = (rounded_tokens){(const int16_t *)scratch, 0, scale, 0};
    }
    if (num_tokens <= FEW_TOKENS)
        few_tokens_int8(op, num_tokens, x, first, end);
    else
        many_tokens_int8(op, num_tokens, x, first, end, (int8_memory *)scratch);
}

#endif
