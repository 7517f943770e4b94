/* Products of integer weights: int8 with a scale for each row, and int16 with one for each row of a block of columns
 * (block floating point: about as exact as float16, and multiplied faster than floats). Each token's numbers are rounded
 * to integers, too, with a scale for each of its blocks; the sum over a block is an exact integer, and the blocks' sums
 * are scaled and added in float32, one after another. So a token's result depends on nothing but the token, however it
 * is computed. Part of dense.h.
 *
 * A block of a token with NaN or an infinite number has NaN as its scale, and so in all its results.
 */
#ifndef INFLIGHT_DENSE_INT_H
#define INFLIGHT_DENSE_INT_H

/* Columns of a block, and the largest codes of tokens: a block's sums are less than 2^31. */
#define INT8_BLOCK 512 /* at most; 128 * 32767 * 512 */
#define INT8_TOKEN_CODE 32767.0f
#define INT16_BLOCK 64 /* 4095 * 8191 * 64 */
#define INT16_TOKEN_CODE 8191.0f
#define SMALLEST_PEAK 1e-30f /* numbers that are all smaller count as zeros */

#define RANGE_COLUMNS 512           /* of a panel, that stay in the first level of the cache */
#define INT_TOKEN_BYTES (256 << 10) /* codes that stay in the second level */
#define INT_TILE 6                  /* tokens whose sums stay in registers */
#define PAIR_CODES (2 * PANEL)      /* of two columns of a panel */

/* out: tokens in groups of INT_TILE (the last one may be smaller), INT_TILE times out_stride floats apart. A group's
 * int16 codes are [pairs of columns][tokens][2], the way they are read; behind them its scales, floats [blocks][tokens].
 */
typedef struct {
    int64_t kind;
    const float *x;
    int64_t x_stride, columns, weight_kind;
    float *out;
    int64_t out_stride;
} round_op;

INLINE int64_t column_pairs(int64_t columns) { return (columns + 1) / 2; }

/* Columns of a block, even; those of int8 are equal parts. */
INLINE int64_t code_block(int64_t kind, int64_t columns) {
    return kind == DENSE_I16 ? INT16_BLOCK : (equal_parts(columns, INT8_BLOCK) + 1) / 2 * 2;
}

INLINE int64_t num_blocks(int64_t kind, int64_t columns) {
    const int64_t block = code_block(kind, columns);
    return (columns + block - 1) / block;
}

/* ---- tokens ------------------------------------------------------------------------------------------------------ */

/* The bits of the largest magnitude; they order as the numbers do, with infinity and NaN last. */
INLINE int32_t peak_bits(const float *x, int64_t columns) {
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

/* Codes of one block, rounded to the nearest (ties to even); returns their scale. */
INLINE float round_block(const float *x, int64_t columns, float largest, int16_t *codes) {
    const int32_t bits = peak_bits(x, columns);
    float peak;
    memcpy(&peak, &bits, sizeof peak);
    const int is_finite = bits < 0x7f800000;
    if (!is_finite || peak < SMALLEST_PEAK) {
        memset(codes, 0, (size_t)columns * sizeof(int16_t));
        return is_finite ? 0.0f : NAN;
    }
    const float factor = largest / peak, magic = 12582912.0f; /* added, it leaves an integer in the lower bits */
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
    return peak / largest;
}

/* A token of a group of `tokens`; out: the group's first number of this token. */
INLINE void round_token(int64_t weight_kind, const float *x, int64_t columns, float *out, int64_t tokens) {
    const int64_t block = code_block(weight_kind, columns), pairs = column_pairs(columns);
    const float largest = weight_kind == DENSE_I16 ? INT16_TOKEN_CODE : INT8_TOKEN_CODE;
    for (int64_t begin = 0, i = 0; begin < columns; begin += block, i++) {
        const int64_t length = columns - begin < block ? columns - begin : block;
        int16_t codes[INT8_BLOCK];
        codes[2 * column_pairs(length) - 1] = 0; /* where their number is odd */
        out[(pairs + i) * tokens] = round_block(x + begin, length, largest, codes);
        for (int64_t pair = 0; pair < column_pairs(length); pair++)
            memcpy(out + (begin / 2 + pair) * tokens, codes + 2 * pair, 2 * sizeof(int16_t));
    }
}

INLINE int64_t token_groups(int64_t num_tokens) { return (num_tokens + INT_TILE - 1) / INT_TILE; }

INLINE int64_t tokens_of_group(int64_t num_tokens, int64_t group) {
    return num_tokens - group * INT_TILE < INT_TILE ? num_tokens - group * INT_TILE : INT_TILE;
}

/* One token is rounded by each chunk of its product. */
static int64_t round_chunks(const round_op *op, const native_step *step, int num_threads) {
    if (step->num_tokens <= 1)
        return 0;
    return row_chunks(token_groups(step->num_tokens), INT_TILE * op->columns, num_threads);
}

static void round_chunk(const round_op *op, const native_step *step, int64_t chunk, int64_t num_chunks) {
    const int64_t groups = token_groups(step->num_tokens), end = chunk_start(groups, chunk + 1, num_chunks);
    for (int64_t group = chunk_start(groups, chunk, num_chunks); group < end; group++) {
        const int64_t first = group * INT_TILE, tokens = tokens_of_group(step->num_tokens, group);
        for (int64_t t = 0; t < tokens; t++)
            round_token(op->weight_kind, op->x + (first + t) * op->x_stride, op->columns,
                        op->out + first * op->out_stride + t, tokens);
    }
}

/* ---- eight rows at once ------------------------------------------------------------------------------------------ */

typedef int32_t int_sums __attribute__((vector_size(32)));
typedef float float_sums __attribute__((vector_size(32)));

/* Two columns of eight rows: of int8 as they are stored, of int16 also as int8 are widened. add_products adds those of
 * 16 rows and one token. In assembly, since compilers keep neither the sums in registers nor the reads few.
 */
#if HAS_AVX2
typedef __m256i weight_pairs;

INLINE weight_pairs load_pairs(const int kind, const void *data, int64_t index) {
    if (kind == DENSE_I8)
        return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)((const int8_t *)data + index)));
    return _mm256_loadu_si256((const __m256i *)((const int16_t *)data + index));
}

INLINE void add_products(int_sums *low, int_sums *high, weight_pairs w_low, weight_pairs w_high, const int16_t *x) {
    typedef int32_t __attribute__((may_alias, aligned(2))) pair_of_codes;
    __m256i token, product;
    __asm__("vpbroadcastd %[x], %[token]\n\t"
            "vpmaddwd %[token], %[w_low], %[product]\n\t"
            "vpaddd %[product], %[low], %[low]\n\t"
            "vpmaddwd %[token], %[w_high], %[token]\n\t"
            "vpaddd %[token], %[high], %[high]"
            : [low] "+&x"(*low), [high] "+&x"(*high), [token] "=&x"(token), [product] "=&x"(product)
            : [w_low] "x"(w_low), [w_high] "x"(w_high), [x] "m"(*(const pair_of_codes *)x));
}
#else
typedef struct {
    int_sums even, odd;
} weight_pairs;

INLINE weight_pairs load_pairs(const int kind, const void *data, int64_t index) {
    weight_pairs w;
    for (int i = 0; i < 8; i++) {
        const int64_t at = index + 2 * i;
        w.even[i] = kind == DENSE_I8 ? ((const int8_t *)data)[at] : ((const int16_t *)data)[at];
        w.odd[i] = kind == DENSE_I8 ? ((const int8_t *)data)[at + 1] : ((const int16_t *)data)[at + 1];
    }
    return w;
}

INLINE void add_products(int_sums *low, int_sums *high, weight_pairs w_low, weight_pairs w_high, const int16_t *x) {
    *low += w_low.even * (int32_t)x[0] + w_low.odd * (int32_t)x[1];
    *high += w_high.even * (int32_t)x[0] + w_high.odd * (int32_t)x[1];
}
#endif

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

/* ---- a range of a panel with a group of tokens ------------------------------------------------------------------- */

/* Blocks of `block` pairs of columns, the last of which may be shorter; `panel`: int8 or int16; codes [pairs][tokens][2],
 * token_scales [blocks][tokens]; row_scales [blocks][PANEL], or NULL; totals: [tokens][PANEL].
 */
typedef struct {
    const void *panel;
    const float *codes, *token_scales, *row_scales;
    int64_t pairs, block;
    float *totals;
} int_range;

/* The sums have names of their own, for those of an array are not kept in registers. */
INLINE void multiply_range(const int kind, const int tokens, const int_range *range, fetch_plan fetch) {
#define OF_EACH_TOKEN(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5)
#define START(t) int_sums low##t = {0}, high##t = {0};
#define MULTIPLY(t)                                                                                                    \
    if (tokens > t)                                                                                                    \
        add_products(&low##t, &high##t, w_low, w_high, codes + 2 * t);
#define FINISH(t)                                                                                                      \
    if (tokens > t) {                                                                                                  \
        add_scaled(totals + t * PANEL, low##t, token_scales[t], row_scales);                                           \
        add_scaled(totals + t * PANEL + 8, high##t, token_scales[t], row_scales ? row_scales + 8 : 0);                 \
    }
    const int16_t *codes = (const int16_t *)range->codes;
    const float *token_scales = range->token_scales, *row_scales = range->row_scales;
    float *totals = range->totals;
    for (int64_t begin = 0; begin < range->pairs; begin += range->block) {
        const int64_t end = range->pairs - begin < range->block ? range->pairs : begin + range->block;
        OF_EACH_TOKEN(START)
        for (int64_t pair = begin; pair < end; pair++) {
            const weight_pairs w_low = load_pairs(kind, range->panel, pair * PAIR_CODES);
            const weight_pairs w_high = load_pairs(kind, range->panel, pair * PAIR_CODES + PANEL);
            __builtin_prefetch(fetch.from, 0, 2);
            fetch.from += fetch.step;
            OF_EACH_TOKEN(MULTIPLY)
            codes += 2 * tokens;
        }
        OF_EACH_TOKEN(FINISH)
        token_scales += tokens;
        if (row_scales)
            row_scales += PANEL;
    }
#undef OF_EACH_TOKEN
#undef START
#undef MULTIPLY
#undef FINISH
}

#define RANGE_OF(kind, tokens)                                                                                         \
    static __attribute__((noinline)) void range_##kind##_##tokens(const int_range *range, fetch_plan fetch) {          \
        multiply_range(DENSE_##kind, tokens, range, fetch);                                                            \
    }
#define RANGE_KIND(kind)                                                                                               \
    RANGE_OF(kind, 1)                                                                                                  \
    RANGE_OF(kind, 2)                                                                                                  \
    RANGE_OF(kind, 3)                                                                                                  \
    RANGE_OF(kind, 4)                                                                                                  \
    RANGE_OF(kind, 5)                                                                                                  \
    RANGE_OF(kind, 6)

RANGE_KIND(I8)
RANGE_KIND(I16)
#undef RANGE_OF
#undef RANGE_KIND

typedef void (*range_function)(const int_range *, fetch_plan);

#define RANGES(kind)                                                                                                   \
    {range_##kind##_1, range_##kind##_2, range_##kind##_3, range_##kind##_4, range_##kind##_5, range_##kind##_6}
static const range_function int8_ranges[] = RANGES(I8), int16_ranges[] = RANGES(I16);
#undef RANGES

/* One token with `panels` whole panels, side by side, for memory is read faster in several places at once. totals:
 * [panels][PANEL].
 */
INLINE void multiply_panels(const int kind, const int panels, const dense_weight *w, int64_t panel, const float *codes,
                            float *totals) {
#define OF_EACH_PANEL(DO) DO(0) DO(1) DO(2) DO(3)
#define START(p)                                                                                                       \
    int_sums low##p = {0}, high##p = {0};                                                                              \
    const char *data##p = (const char *)w->data + (panel + p) * panel_bytes;
#define MULTIPLY(p)                                                                                                    \
    if (panels > p) {                                                                                                  \
        __builtin_prefetch(data##p + pair * pair_bytes + AHEAD);                                                       \
        add_products(&low##p, &high##p, load_pairs(kind, data##p, pair * PAIR_CODES),                                  \
                     load_pairs(kind, data##p, pair * PAIR_CODES + PANEL), (const int16_t *)(codes + pair));           \
    }
#define FINISH(p)                                                                                                      \
    if (panels > p) {                                                                                                  \
        const float *row_scales = kind == DENSE_I16 ? w->scales + ((panel + p) * blocks + i) * PANEL : 0;              \
        add_scaled(totals + p * PANEL, low##p, scale, row_scales);                                                     \
        add_scaled(totals + p * PANEL + 8, high##p, scale, row_scales ? row_scales + 8 : 0);                           \
    }
    const int64_t pairs = column_pairs(w->columns), block = code_block(kind, w->columns) / 2;
    const int64_t blocks = num_blocks(kind, w->columns), pair_bytes = PAIR_CODES * number_bytes(kind);
    const int64_t panel_bytes = pairs * pair_bytes;
    for (int64_t begin = 0, i = 0; begin < pairs; begin += block, i++) {
        const int64_t end = pairs - begin < block ? pairs : begin + block;
        const float scale = codes[pairs + i];
        OF_EACH_PANEL(START)
        for (int64_t pair = begin; pair < end; pair++) {
            OF_EACH_PANEL(MULTIPLY)
        }
        OF_EACH_PANEL(FINISH)
    }
#undef OF_EACH_PANEL
#undef START
#undef MULTIPLY
#undef FINISH
}

#define PANELS_OF(kind, panels)                                                                                        \
    static __attribute__((noinline)) void panels_##kind##_##panels(const dense_weight *w, int64_t panel,               \
                                                                   const float *codes, float *totals) {                \
        multiply_panels(DENSE_##kind, panels, w, panel, codes, totals);                                                \
    }
PANELS_OF(I8, 1)
PANELS_OF(I8, 4)
PANELS_OF(I16, 1)
PANELS_OF(I16, 4)
#undef PANELS_OF

/* ---- panels with all tokens -------------------------------------------------------------------------------------- */

/* Memory of a chunk. */
typedef struct {
    int16_t panel[RANGE_COLUMNS * PANEL]; /* widened */
    float totals[TOKEN_BLOCK * PANEL];
} int_memory;

_Static_assert(sizeof(int_memory) <= SCRATCH_FLOATS * sizeof(float), "what a chunk needs");
_Static_assert((1 << 16) + (1 << 11) <= SCRATCH_FLOATS, "a token of the most columns");

/* Tokens first to first + count, rounded. */
typedef struct {
    const float *rows;
    int64_t stride, first, count;
} token_range;

/* Pairs begin to end of a panel with all tokens. int8 that is used more than once is widened; meanwhile, what is needed
 * next is fetched.
 */
static void range_of_panel(const dense_weight *w, int64_t panel, int64_t begin, int64_t end, token_range tokens,
                           const char *next, int_memory *memory) {
    const int64_t all_pairs = column_pairs(w->columns), block = code_block(w->kind, w->columns) / 2;
    const int64_t groups = token_groups(tokens.count), pair_bytes = PAIR_CODES * number_bytes(w->kind);
    int_range range = {.pairs = end - begin, .block = block};
    range.panel = (const char *)w->data + (panel * all_pairs + begin) * pair_bytes;
    if (w->kind == DENSE_I16)
        range.row_scales = w->scales + (panel * num_blocks(w->kind, w->columns) + begin / block) * PANEL;
    const range_function *multiply = w->kind == DENSE_I8 ? int8_ranges : int16_ranges;
    if (w->kind == DENSE_I8 && groups > 1) {
        const int8_t *codes = range.panel;
        for (int64_t i = 0; i < range.pairs * PAIR_CODES; i++)
            memory->panel[i] = codes[i];
        range.panel = memory->panel;
        multiply = int16_ranges;
    }
    for (int64_t group = 0; group < groups; group++) {
        const int64_t count = tokens_of_group(tokens.count, group);
        const float *rows = tokens.rows + (tokens.first + group * INT_TILE) * tokens.stride;
        range.codes = rows + begin * count;
        range.token_scales = rows + (all_pairs + begin / block) * count;
        range.totals = memory->totals + group * INT_TILE * PANEL;
        const fetch_plan fetch = {next + range.pairs * group / groups * pair_bytes, pair_bytes / groups};
        multiply[count - 1](&range, fetch);
    }
}

/* Totals of a panel, scaled by row where blocks were not, and with the bias. */
INLINE void finish_panel(const dense_op *op, int64_t panel, token_range tokens, float *totals) {
    const dense_weight *w = op->w;
    for (int64_t t = 0; t < tokens.count; t++) {
        float *results = totals + t * PANEL;
        for (int64_t row = 0; row < PANEL; row += 8) {
            float_sums sum = load_sums(results + row);
            if (w->kind == DENSE_I8)
                sum = sum * load_sums(w->scales + panel * PANEL + row);
            if (w->bias)
                sum = sum + load_sums(w->bias + panel * PANEL + row);
            store_sums(results + row, sum);
        }
        copy_row(op->out + (tokens.first + t) * op->out_stride + panel * PANEL, results, rows_of_panel(w, panel));
    }
}

static void int_panels(const dense_op *op, token_range tokens, int64_t first, int64_t end, int_memory *memory) {
    const dense_weight *w = op->w;
    const int64_t pairs = column_pairs(w->columns), block = code_block(w->kind, w->columns) / 2;
    const int64_t most = RANGE_COLUMNS / 2 / block * block, pair_bytes = PAIR_CODES * number_bytes(w->kind);
    for (int64_t panel = first; panel < end; panel++) {
        memset(memory->totals, 0, (size_t)tokens.count * PANEL * sizeof(float));
        for (int64_t begin = 0; begin < pairs; begin += most) {
            const int64_t stop = begin + most < pairs ? begin + most : pairs;
            const char *next = (const char *)w->data + (panel * pairs + stop) * pair_bytes;
            if (tokens.count <= INT_TILE)
                next += AHEAD - (stop - begin) * pair_bytes;
            range_of_panel(w, panel, begin, stop, tokens, next, memory);
        }
        finish_panel(op, panel, tokens, memory->totals);
    }
}

static void one_int_token(const dense_op *op, int64_t panel, int64_t end, float *scratch) {
    const dense_weight *w = op->w;
    const token_range token = {.count = 1};
    float totals[MAX_SIDE_BY_SIDE * PANEL];
    round_token(w->kind, op->x, w->columns, scratch, 1);
    while (panel < end) {
        const int panels = end - panel < MAX_SIDE_BY_SIDE ? 1 : MAX_SIDE_BY_SIDE;
        memset(totals, 0, sizeof totals);
        if (w->kind == DENSE_I8)
            (panels == 1 ? panels_I8_1 : panels_I8_4)(w, panel, scratch, totals);
        else
            (panels == 1 ? panels_I16_1 : panels_I16_4)(w, panel, scratch, totals);
        for (int p = 0; p < panels; p++, panel++)
            finish_panel(op, panel, token, totals + p * PANEL);
    }
}

static void dense_int_chunk(const dense_op *op, int64_t num_tokens, int64_t first, int64_t end, float *scratch) {
    if (num_tokens == 1) {
        one_int_token(op, first, end, scratch);
        return;
    }
    int_memory *memory = (int_memory *)scratch;
    token_range tokens = {op->rounded, op->rounded_stride, 0, 0};
    int64_t groups = INT_TOKEN_BYTES / (2 * INT_TILE * op->w->columns);
    groups = groups < 1 ? 1 : groups < TOKEN_BLOCK / INT_TILE ? groups : TOKEN_BLOCK / INT_TILE;
    const int64_t most = equal_parts(token_groups(num_tokens), groups) * INT_TILE;
    for (; tokens.first < num_tokens; tokens.first += most) {
        tokens.count = num_tokens - tokens.first < most ? num_tokens - tokens.first : most;
        int_panels(op, tokens, first, end, memory);
    }
}

#endif
