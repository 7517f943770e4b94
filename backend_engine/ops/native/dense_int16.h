/* Tokens of int16 codes, with weights of int8 and int16: two columns at once. Part of dense_int.h. */
#ifndef INFLIGHT_DENSE_INT16_H
#define INFLIGHT_DENSE_INT16_H

#define INT_TILE 6 /* tokens whose sums stay in registers */

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

/* A token of a group of `tokens`, int16 codes [pairs of columns][tokens][2] and behind them float scales
 * [blocks][tokens]; out: the group's first number of this token.
 */
INLINE void round_to_words(int64_t weight_kind, const float *x, int64_t columns, float *out, int64_t tokens) {
    const int64_t block = code_block(weight_kind, columns), pairs = num_units(weight_kind, columns);
    const float largest = weight_kind == DENSE_I16 ? TOKEN_CODE_OF_INT16 : TOKEN_CODE_OF_INT8;
    for (int64_t begin = 0, i = 0; begin < columns; begin += block, i++) {
        const int64_t length = columns - begin < block ? columns - begin : block;
        int16_t codes[INT8_BLOCK];
        codes[2 * num_units(weight_kind, length) - 1] = 0; /* where their number is odd */
        out[(pairs + i) * tokens] = round_block(x + begin, length, largest, codes);
        for (int64_t pair = 0; pair < num_units(weight_kind, length); pair++)
            memcpy(out + (begin / 2 + pair) * tokens, codes + 2 * pair, 2 * sizeof(int16_t));
    }
}

/* ---- eight rows at once ------------------------------------------------------------------------------------------ */

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

/* ---- a range of a panel with a group of tokens ------------------------------------------------------------------- */

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
    const float *token_scales = range->token_scales, *row_scales = range->panels[0].row_scales;
    const void *panel = range->panels[0].codes;
    float *totals = range->panels[0].totals;
    for (int64_t begin = 0; begin < range->units; begin += range->block) {
        const int64_t end = range->units - begin < range->block ? range->units : begin + range->block;
        OF_EACH_TOKEN(START)
        for (int64_t pair = begin; pair < end; pair++) {
            const weight_pairs w_low = load_pairs(kind, panel, pair * PAIR_CODES);
            const weight_pairs w_high = load_pairs(kind, panel, pair * PAIR_CODES + PANEL);
            fetch_some(1, &fetch);
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

#define RANGES(kind)                                                                                                   \
    {range_##kind##_1, range_##kind##_2, range_##kind##_3, range_##kind##_4, range_##kind##_5, range_##kind##_6}
static const range_function int8_ranges[] = RANGES(I8), int16_ranges[] = RANGES(I16);
#undef RANGES

typedef void (*panels_function)(const dense_weight *, int64_t, const float *, float *);

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
    const int64_t pairs = num_units(kind, w->columns), block = code_block(kind, w->columns) / 2;
    const int64_t blocks = num_blocks(kind, w->columns), pair_bytes = unit_bytes(kind);
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

#endif
