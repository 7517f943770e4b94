/* Products of integer weights: int8 with a scale for each row, and int16 with one for each row of a block of columns
 * (block floating point: about as exact as float16, and multiplied faster than floats). Each token's numbers are rounded
 * to integers, too, with a scale for each of its blocks; the sum over a block is an exact integer, and the blocks' sums
 * are scaled and added in float32, one after another. So a token's result depends on nothing but the token, however it
 * is computed. Part of dense.h.
 *
 * Tokens have 16 bits or somewhat less (dense_int16.h), of W8A8 7 (dense_int8.h). A unit is what 32 bits of a token
 * are multiplied with: two columns of a panel, of W8A8 four.
 *
 * A block of a token with NaN or an infinite number has NaN as its scale, and so in all its results.
 */
#ifndef INFLIGHT_DENSE_INT_H
#define INFLIGHT_DENSE_INT_H

/* Columns of a block, and the largest codes of tokens: a block's sums are less than 2^31. */
#define INT8_BLOCK 512 /* at most; 128 * 32767 * 512, of W8A8 128 * 64 * 511 * 512 */
#define TOKEN_CODE_OF_INT8 32767.0f
#define INT16_BLOCK 64 /* 4095 * 8191 * 64 */
#define TOKEN_CODE_OF_INT16 8191.0f
#define SMALLEST_PEAK 1e-30f /* numbers that are all smaller count as zeros */

#define RANGE_UNITS 256             /* of a panel, that stay in the first level of the cache */
#define INT_TOKEN_BYTES (256 << 10) /* codes that stay in the second level */
#define PAIR_CODES (2 * PANEL)      /* of two columns of a panel */

/* out: tokens in groups of equal size (the last one may be smaller), so many times out_stride floats apart. A group's
 * codes lie the way they are read, [words][tokens]; behind them its scales.
 */
typedef struct {
    int64_t kind;
    const float *x;
    int64_t x_stride, columns, weight_kind;
    float *out;
    int64_t out_stride;
} round_op;

typedef int32_t int_sums __attribute__((vector_size(32)));
typedef float float_sums __attribute__((vector_size(32)));

/* ---- blocks and units -------------------------------------------------------------------------------------------- */

INLINE int64_t unit_columns(int64_t kind) { return kind == DENSE_W8A8 ? 4 : 2; }

INLINE int64_t unit_bytes(int64_t kind) { return unit_columns(kind) * PANEL * number_bytes(kind); }

INLINE int64_t num_units(int64_t kind, int64_t columns) {
    return (columns + unit_columns(kind) - 1) / unit_columns(kind);
}

#define PART 32 /* columns of a block of W8A8 that have a factor of their own */

/* Columns of a block, whole units and parts; those of int8 are equal parts. */
INLINE int64_t code_block(int64_t kind, int64_t columns) {
    if (kind == DENSE_I16)
        return INT16_BLOCK;
    const int64_t whole = kind == DENSE_W8A8 ? PART : 2;
    return (equal_parts(columns, INT8_BLOCK) + whole - 1) / whole * whole;
}

INLINE int64_t num_blocks(int64_t kind, int64_t columns) {
    const int64_t block = code_block(kind, columns);
    return (columns + block - 1) / block;
}

/* A range of a panel: its codes, row_scales [blocks][PANEL] or NULL, and totals [tokens][PANEL]. */
typedef struct {
    const void *codes;
    const float *row_scales;
    float *totals;
} panel_range;

/* Some panels (with VNNI up to two) with a group of tokens. Blocks of `block` units, the last of which may be shorter;
 * codes: [words][tokens], of these units; token_scales: what a token has for each block.
 */
typedef struct {
    panel_range panels[2];
    const float *codes, *token_scales;
    int64_t units, block;
} int_range;

typedef void (*range_function)(const int_range *, fetch_plan);

/* ---- what both share --------------------------------------------------------------------------------------------- */

INLINE int32_t largest_of(ivec v) {
#if HAS_AVX2 && LANES == 8
    const __m128i four = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
#elif HAS_VNNI
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    int32_t largest = v[0];
    for (int lane = 1; lane < LANES; lane++)
        largest = v[lane] > largest ? v[lane] : largest;
    return largest;
#endif
}

/* The bits of the largest magnitude; they order as the numbers do, with infinity and NaN last. */
INLINE int32_t peak_bits(const float *x, int64_t columns) {
    ivec peaks[2] = {{0}, {0}};
    int64_t i = 0;
    for (; i + 2 * LANES <= columns; i += 2 * LANES)
        for (int k = 0; k < 2; k++) {
            const ivec bits = (ivec)load(x + i + k * LANES) & 0x7fffffff;
            peaks[k] = (ivec)choose(bits > peaks[k], (vec)bits, (vec)peaks[k]);
        }
    int32_t peak = largest_of((ivec)choose(peaks[0] > peaks[1], (vec)peaks[0], (vec)peaks[1]));
    for (; i < columns; i++) {
        int32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffff;
        peak = bits > peak ? bits : peak;
    }
    return peak;
}

INLINE float_sums load_sums(const float *from) {
    float_sums value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE void store_sums(float *to, float_sums value) { memcpy(to, &value, sizeof value); }

/* Adds a block's sums of eight rows; row_scales: of the rows in this block, or NULL. */
INLINE void add_scaled(float *totals, int_sums sums, float token_scale, const float *row_scales) {
    float_sums scale = token_scale - (float_sums){0};
    if (row_scales)
        scale = load_sums(row_scales) * scale;
    const float_sums product = __builtin_convertvector(sums, float_sums) * scale;
    store_sums(totals, load_sums(totals) + product);
}

#include "dense_int16.h"
#include "dense_int8.h"
#include "dense_vnni.h"

/* ---- groups of tokens -------------------------------------------------------------------------------------------- */

/* Tokens of a group: as many as have their sums in registers, or fewer if that makes groups of equal size. */
INLINE int64_t group_size(int64_t kind, int64_t num_tokens) {
    return equal_parts(num_tokens, HAS_VNNI ? VNNI_TILE : kind == DENSE_W8A8 ? BYTE_TILE : INT_TILE);
}

/* How ranges of one panel or a pair are multiplied with so many tokens less one. */
INLINE const range_function *ranges_of(int64_t kind, int is_pair) {
#if HAS_VNNI
    return vnni_ranges[kind - DENSE_I8][is_pair];
#else
    (void)is_pair;
    return kind == DENSE_W8A8 ? byte_ranges : kind == DENSE_I8 ? int8_ranges : int16_ranges;
#endif
}

INLINE int64_t tokens_of_group(int64_t num_tokens, int64_t size, int64_t group) {
    return num_tokens - group * size < size ? num_tokens - group * size : size;
}

INLINE void round_token(int64_t weight_kind, const float *x, int64_t columns, float *out, int64_t tokens) {
    if (weight_kind == DENSE_W8A8)
        round_to_bytes(x, columns, out, tokens);
    else
        round_to_words(weight_kind, x, columns, out, tokens);
}

/* One token is rounded by each chunk of its product. */
static int64_t round_chunks(const round_op *op, const native_step *step, int num_threads) {
    if (step->num_tokens <= 1)
        return 0;
    const int64_t size = group_size(op->weight_kind, step->num_tokens);
    return row_chunks((step->num_tokens + size - 1) / size, size * op->columns, num_threads);
}

static void round_chunk(const round_op *op, const native_step *step, int64_t chunk, int64_t num_chunks) {
    const int64_t size = group_size(op->weight_kind, step->num_tokens);
    const int64_t groups = (step->num_tokens + size - 1) / size, end = chunk_start(groups, chunk + 1, num_chunks);
    for (int64_t group = chunk_start(groups, chunk, num_chunks); group < end; group++) {
        const int64_t first = group * size, tokens = tokens_of_group(step->num_tokens, size, group);
        for (int64_t t = 0; t < tokens; t++)
            round_token(op->weight_kind, op->x + (first + t) * op->x_stride, op->columns,
                        op->out + first * op->out_stride + t, tokens);
    }
}

/* ---- panels with all tokens -------------------------------------------------------------------------------------- */

/* Memory of a chunk. */
typedef struct {
    int16_t panel[RANGE_UNITS * PAIR_CODES]; /* int8, widened */
    float totals[TOKEN_BLOCK * PANEL], others[TOKEN_BLOCK * PANEL]; /* of the second of two panels */
} int_memory;

_Static_assert(sizeof(int_memory) <= SCRATCH_FLOATS * sizeof(float), "what a chunk needs");
_Static_assert((1 << 16) + (1 << 11) <= SCRATCH_FLOATS, "a token of the most columns");

/* Tokens first to first + count, rounded, in groups of `size`. */
typedef struct {
    const float *rows;
    int64_t stride, first, count, size;
} token_range;

/* Panels that are multiplied together, and their totals; the second is -1 where there is only one. */
typedef struct {
    int64_t panels[2];
    float *totals[2];
} panel_pair;

/* Units begin to end of a panel, before any token. int8 that is used more than once is widened, if it is not by the
 * multiplication.
 */
INLINE panel_range range_of_panel(const dense_weight *w, int64_t panel, int64_t begin, int64_t units, int widens,
                                  int_memory *memory) {
    const int64_t all_units = num_units(w->kind, w->columns), columns = begin * unit_columns(w->kind);
    panel_range range = {(const char *)w->data + (panel * all_units + begin) * unit_bytes(w->kind), 0, 0};
    if (w->kind == DENSE_I16)
        range.row_scales = w->scales + (panel * num_blocks(w->kind, w->columns) + columns / INT16_BLOCK) * PANEL;
    if (widens) {
        const int8_t *codes = range.codes;
        for (int64_t i = 0; i < units * PAIR_CODES; i++)
            memory->panel[i] = codes[i];
        range.codes = memory->panel;
    }
    return range;
}

/* Units begin to end of some panels with all tokens; meanwhile, what is needed next is fetched. */
static void multiply_units(const dense_weight *w, panel_pair pair, int64_t begin, int64_t end, token_range tokens,
                           const char *next, int_memory *memory) {
    const int is_bytes = w->kind == DENSE_W8A8;
    const int64_t all_units = num_units(w->kind, w->columns), block = code_block(w->kind, w->columns);
    const int64_t groups = (tokens.count + tokens.size - 1) / tokens.size, bytes = unit_bytes(w->kind);
    const int64_t first_word = is_bytes ? byte_words(begin) : begin;
    const int64_t block_index = begin * unit_columns(w->kind) / block, scales_of_block = is_bytes ? 2 : 1;
    const int64_t first_scale = (is_bytes ? byte_words(all_units) : all_units) + block_index * scales_of_block;
    const int widens = w->kind == DENSE_I8 && groups > 1 && !HAS_VNNI, is_pair = pair.panels[1] >= 0;
    int_range range = {.units = end - begin, .block = block / unit_columns(w->kind)};
    for (int p = 0; p <= is_pair; p++)
        range.panels[p] = range_of_panel(w, pair.panels[p], begin, range.units, widens, memory);
    const range_function *multiply = ranges_of(widens ? DENSE_I16 : w->kind, is_pair);
    for (int64_t group = 0; group < groups; group++) {
        const int64_t count = tokens_of_group(tokens.count, tokens.size, group);
        const float *rows = tokens.rows + (tokens.first + group * tokens.size) * tokens.stride;
        range.codes = rows + first_word * count;
        range.token_scales = rows + first_scale * count;
        for (int p = 0; p <= is_pair; p++)
            range.panels[p].totals = pair.totals[p] + group * tokens.size * PANEL;
        const fetch_plan fetch = {next + range.units * group / groups * bytes, bytes / groups,
                                  (pair.panels[1] - pair.panels[0]) * all_units * bytes};
        multiply[count - 1](&range, fetch);
    }
}

/* Totals of a panel with a token, scaled by row where blocks were not, and with the bias. */
INLINE void finish_results(const dense_weight *w, int64_t panel, float *results) {
    for (int64_t row = 0; row < PANEL; row += 8) {
        float_sums sum = load_sums(results + row);
        if (w->kind != DENSE_I16)
            sum = sum * load_sums(w->scales + panel * PANEL + row);
        if (w->bias)
            sum = sum + load_sums(w->bias + panel * PANEL + row);
        store_sums(results + row, sum);
    }
}

/* totals: [tokens][PANEL]; up: those of the panel that it gates. */
INLINE void finish_panel(const dense_op *op, int64_t panel, token_range tokens, float *totals, float *up) {
    const dense_weight *w = op->w;
    for (int64_t t = 0; t < tokens.count; t++) {
        float *out = op->out + (tokens.first + t) * op->out_stride + panel * PANEL;
        finish_results(w, panel, totals + t * PANEL);
        if (op->gated) {
            finish_results(w, panel + out_panels(op), up + t * PANEL);
            activate(op->gated, totals + t * PANEL, up + t * PANEL, PANEL, out);
        } else
            copy_row(out, totals + t * PANEL, rows_of_panel(w, panel));
    }
}

/* Adds up panels with all tokens; meanwhile, the next one is fetched. */
static void int_panel(const dense_weight *w, token_range tokens, panel_pair pair, int64_t next_panel,
                      int_memory *memory) {
    const int64_t units = num_units(w->kind, w->columns), bytes = unit_bytes(w->kind);
    const int64_t block = code_block(w->kind, w->columns) / unit_columns(w->kind), most = RANGE_UNITS / block * block;
    for (int p = 0; p < 2 && pair.panels[p] >= 0; p++)
        memset(pair.totals[p], 0, (size_t)tokens.count * PANEL * sizeof(float));
    for (int64_t begin = 0; begin < units; begin += most) {
        const int64_t stop = begin + most < units ? begin + most : units;
        const int64_t next_unit = stop < units ? pair.panels[0] * units + stop : next_panel * units;
        const char *next = (const char *)w->data + next_unit * bytes;
        if (tokens.count <= tokens.size)
            next += AHEAD - (stop - begin) * bytes;
        multiply_units(w, pair, begin, stop, tokens, next, memory);
    }
}

/* Two panels at once are the ones that gate and the gated, or neighbours. */
static void int_panels(const dense_op *op, token_range tokens, int64_t first, int64_t end, int_memory *memory) {
    int64_t panels;
    for (int64_t panel = first; panel < end; panel += panels) {
        panels = !op->gated && HAS_VNNI && panel + 1 < end ? 2 : 1;
        const int64_t other = op->gated ? panel + out_panels(op) : panels == 2 ? panel + 1 : -1;
        panel_pair pair = {{panel, other}, {memory->totals, memory->others}};
        if (other >= 0 && !HAS_VNNI) {
            pair.panels[1] = -1;
            int_panel(op->w, tokens, pair, other, memory);
            pair = (panel_pair){{other, -1}, {memory->others, 0}};
        }
        int_panel(op->w, tokens, pair, panel + panels, memory);
        finish_panel(op, panel, tokens, memory->totals, memory->others);
        if (panels == 2)
            finish_panel(op, other, tokens, memory->others, 0);
    }
}

static void one_int_token(const dense_op *op, int64_t panel, int64_t end, float *scratch) {
    static const panels_function functions[][2] = {
        {panels_I8_1, panels_I8_4}, {panels_I16_1, panels_I16_4}, {byte_panels_1, byte_panels_4}};
    const dense_weight *w = op->w;
    const token_range token = {.count = 1};
    float totals[MAX_SIDE_BY_SIDE * PANEL], up[MAX_SIDE_BY_SIDE * PANEL] = {0};
    round_token(w->kind, op->x, w->columns, scratch, 1);
    while (panel < end) {
        const int panels = end - panel < MAX_SIDE_BY_SIDE ? 1 : MAX_SIDE_BY_SIDE;
        const panels_function multiply = functions[w->kind - DENSE_I8][panels > 1];
        memset(totals, 0, sizeof totals);
        multiply(w, panel, scratch, totals);
        if (op->gated) {
            memset(up, 0, sizeof up);
            multiply(w, panel + out_panels(op), scratch, up);
        }
        for (int p = 0; p < panels; p++, panel++)
            finish_panel(op, panel, token, totals + p * PANEL, up + p * PANEL);
    }
}

static void dense_int_chunk(const dense_op *op, int64_t num_tokens, int64_t first, int64_t end, float *scratch) {
    if (num_tokens == 1) {
        one_int_token(op, first, end, scratch);
        return;
    }
    const int64_t size = group_size(op->w->kind, num_tokens), groups = (num_tokens + size - 1) / size;
    const int64_t in_cache = INT_TOKEN_BYTES / (size * op->rounded_stride * (int64_t)sizeof(float));
    const int64_t in_memory = TOKEN_BLOCK / size, most = in_cache < in_memory ? in_cache : in_memory;
    token_range tokens = {op->rounded, op->rounded_stride, .size = size};
    const int64_t at_once = equal_parts(groups, most < 1 ? 1 : most) * size;
    for (; tokens.first < num_tokens; tokens.first += at_once) {
        tokens.count = num_tokens - tokens.first < at_once ? num_tokens - tokens.first : at_once;
        int_panels(op, tokens, first, end, (int_memory *)scratch);
    }
}

#endif
