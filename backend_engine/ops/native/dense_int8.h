/* Weights and tokens of int8 codes (W8A8): four columns at once. Part of dense_int.h.
 *
 * Bytes are multiplied faster than int16 codes, but their sums have to be widened, by a multiplication. That gives a
 * token's numbers finer scales than a block's at no cost: 32 columns have a factor of their own, a whole number, with
 * which their sums are multiplied as they are widened.
 *
 * A weight's codes are kept 128 higher, so that they have no sign, as the instruction wants it. What that adds, 128 times
 * the sum of a token's codes times factors, is taken away before: with it the sums begin.
 */
#ifndef INFLIGHT_DENSE_INT8_H
#define INFLIGHT_DENSE_INT8_H

#define BYTE_TILE 5               /* tokens whose sums stay in registers */
#define BYTE_CODE 64              /* largest of a token: 2 * 255 * 64 fits 16 bits */
#define BYTE_FACTOR 511           /* largest: see INT8_BLOCK */
#define PART_WORDS (1 + PART / 4) /* a factor, twice, as an int16; the codes of 32 columns */

/* Words before those of a unit, the first of a part or the end. */
INLINE int64_t byte_words(int64_t unit) { return unit + (unit + PART / 4 - 1) / (PART / 4); }

/* ---- tokens ------------------------------------------------------------------------------------------------------ */

/* Codes of a part, rounded to the nearest (ties to even); returns what add up to their sum. codes: [PART], zeros behind
 * the last.
 */
INLINE ivec round_part(const float *x, int64_t columns, float factor, int8_t *codes) {
    const float magic = 12582912.0f; /* added, it leaves an integer in the lower bits */
    ivec wide[PART / LANES], sums = {0};
    float some[PART] = {0};
    if (columns < PART)
        x = memcpy(some, x, (size_t)columns * sizeof(float));
    for (int i = 0; i < PART / LANES; i++) {
        wide[i] = (ivec)(load(x + i * LANES) * factor + magic) - 0x4b400000;
        sums += wide[i];
    }
#if HAS_AVX2 && LANES == 8
    const __m256i halves[2] = {_mm256_packs_epi32((__m256i)wide[0], (__m256i)wide[1]),
                               _mm256_packs_epi32((__m256i)wide[2], (__m256i)wide[3])};
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(halves[0], halves[1]), order);
    _mm256_storeu_si256((__m256i *)codes, bytes);
#elif HAS_VNNI
    for (int i = 0; i < 2; i++)
        _mm_storeu_si128((__m128i *)codes + i, _mm512_cvtepi32_epi8((__m512i)wide[i]));
#else
    for (int i = 0; i < PART; i++)
        codes[i] = (int8_t)wide[i / LANES][i % LANES];
#endif
    return sums;
}

/* A block of a token of a group of `tokens`; out: its first word; scale: where its scale goes, and behind it what the
 * sums begin with. A part's codes are its numbers over scale * factor, factors being as small as they can be.
 */
INLINE void round_block_to_bytes(const float *x, int64_t columns, float *out, int64_t tokens, float *scale) {
    const int64_t parts = (columns + PART - 1) / PART;
    int32_t peaks[INT8_BLOCK / PART], top = 0;
    for (int64_t p = 0; p < parts; p++) {
        peaks[p] = peak_bits(x + p * PART, columns - p * PART < PART ? columns - p * PART : PART);
        top = peaks[p] > top ? peaks[p] : top;
    }
    const int is_finite = top < 0x7f800000, is_zero = !is_finite || float_of_bits((uint32_t)top) < SMALLEST_PEAK;
    const float peak = is_zero ? 1.0f : float_of_bits((uint32_t)top);
    const float of_peak = BYTE_FACTOR / peak, all = (float)(BYTE_CODE * BYTE_FACTOR) / peak;
    ivec sums = {0};
    for (int64_t p = 0; p < parts; p++) {
        const int64_t length = columns - p * PART < PART ? columns - p * PART : PART;
        const float wanted = is_zero ? 1.0f : ceilf(float_of_bits((uint32_t)peaks[p]) * of_peak);
        const int32_t factor = wanted < 1.0f ? 1 : wanted > BYTE_FACTOR ? BYTE_FACTOR : (int32_t)wanted;
        const int16_t twice[2] = {(int16_t)factor, (int16_t)factor};
        int8_t codes[PART] = {0};
        if (!is_zero)
            sums += round_part(x + p * PART, length, all / (float)factor, codes) * factor;
        float *words = out + p * PART_WORDS * tokens;
        memcpy(words, twice, sizeof twice);
        for (int64_t i = 0; i < num_units(DENSE_W8A8, length); i++)
            memcpy(words + (1 + i) * tokens, codes + 4 * i, 4);
    }
    uint32_t start = 0;
    for (int lane = 0; lane < LANES; lane++)
        start -= 128u * (uint32_t)sums[lane];
    scale[0] = is_zero ? (is_finite ? 0.0f : NAN) : peak / (float)(BYTE_CODE * BYTE_FACTOR);
    memcpy(scale + tokens, &start, sizeof start);
}

/* A token of a group of `tokens`: [words][tokens], and behind them [blocks][scale, start][tokens]. */
INLINE void round_to_bytes(const float *x, int64_t columns, float *out, int64_t tokens) {
    const int64_t block = code_block(DENSE_W8A8, columns);
    float *scale = out + byte_words(num_units(DENSE_W8A8, columns)) * tokens;
    for (int64_t begin = 0; begin < columns; begin += block, scale += 2 * tokens)
        round_block_to_bytes(x + begin, columns - begin < block ? columns - begin : block,
                             out + byte_words(begin / 4) * tokens, tokens, scale);
}

/* ---- eight rows at once ------------------------------------------------------------------------------------------ */

/* Four columns of eight rows. add_byte_products adds those of 16 rows and one token; sums wrap around, their end is
 * within 32 bits. In assembly for the reason that add_products has.
 */
#if HAS_AVX2
typedef __m256i weight_quads;

INLINE weight_quads load_quads(const void *data) { return _mm256_loadu_si256((const __m256i *)data); }

typedef int32_t __attribute__((may_alias)) token_word;

INLINE void add_byte_products(int_sums *low, int_sums *high, weight_quads w_low, weight_quads w_high,
                              const float *codes, const float *factor) {
    __m256i token, product, factors;
    __asm__("vpbroadcastd %[codes], %[token]\n\t"
            "vpbroadcastd %[factor], %[factors]\n\t"
            "vpmaddubsw %[token], %[w_low], %[product]\n\t"
            "vpmaddubsw %[token], %[w_high], %[token]\n\t"
            "vpmaddwd %[factors], %[product], %[product]\n\t"
            "vpmaddwd %[factors], %[token], %[token]\n\t"
            "vpaddd %[product], %[low], %[low]\n\t"
            "vpaddd %[token], %[high], %[high]"
            : [low] "+&x"(*low), [high] "+&x"(*high), [token] "=&x"(token), [product] "=&x"(product),
              [factors] "=&x"(factors)
            : [w_low] "x"(w_low), [w_high] "x"(w_high), [codes] "m"(*(const token_word *)codes),
              [factor] "m"(*(const token_word *)factor));
}
#else
typedef struct {
    const uint8_t *codes;
} weight_quads;

INLINE weight_quads load_quads(const void *data) { return (weight_quads){data}; }

INLINE void add_byte_products(int_sums *low, int_sums *high, weight_quads w_low, weight_quads w_high,
                              const float *codes, const float *factor) {
    int8_t x[4];
    int16_t by;
    memcpy(x, codes, sizeof x);
    memcpy(&by, factor, sizeof by);
    for (int i = 0; i < 8; i++) {
        int32_t sums[2] = {0};
        for (int c = 0; c < 4; c++) {
            sums[0] += w_low.codes[4 * i + c] * x[c];
            sums[1] += w_high.codes[4 * i + c] * x[c];
        }
        (*low)[i] = (int32_t)((uint32_t)(*low)[i] + (uint32_t)(sums[0] * by));
        (*high)[i] = (int32_t)((uint32_t)(*high)[i] + (uint32_t)(sums[1] * by));
    }
}
#endif

INLINE int_sums sums_from(const float *start) {
    int32_t first;
    memcpy(&first, start, sizeof first);
    return first - (int_sums){0};
}

/* ---- a range of a panel with a group of tokens ------------------------------------------------------------------- */

INLINE void multiply_byte_range(const int tokens, const int_range *range, fetch_plan fetch) {
#define OF_EACH_TOKEN(DO) DO(0) DO(1) DO(2) DO(3) DO(4)
#define START(t)                                                                                                       \
    int_sums low##t = {0}, high##t = {0};                                                                              \
    if (tokens > t)                                                                                                    \
        low##t = high##t = sums_from(scales + tokens + t);
#define MULTIPLY(t)                                                                                                    \
    if (tokens > t)                                                                                                    \
        add_byte_products(&low##t, &high##t, w_low, w_high, codes + t, factors + t);
#define FINISH(t)                                                                                                      \
    if (tokens > t) {                                                                                                  \
        add_scaled(totals + t * PANEL, low##t, scales[t], 0);                                                          \
        add_scaled(totals + t * PANEL + 8, high##t, scales[t], 0);                                                     \
    }
    const float *codes = range->codes, *scales = range->token_scales;
    const char *panel = range->panels[0].codes;
    float *totals = range->panels[0].totals;
    for (int64_t begin = 0; begin < range->units; begin += range->block, scales += 2 * tokens) {
        const int64_t end = range->units - begin < range->block ? range->units : begin + range->block;
        OF_EACH_TOKEN(START)
        for (int64_t part = begin; part < end; part += PART / 4) {
            const int64_t stop = end - part < PART / 4 ? end : part + PART / 4;
            const float *factors = codes;
            codes += tokens;
            for (int64_t unit = part; unit < stop; unit++, panel += 4 * PANEL, codes += tokens) {
                const weight_quads w_low = load_quads(panel), w_high = load_quads(panel + 2 * PANEL);
                fetch_some(1, &fetch);
                OF_EACH_TOKEN(MULTIPLY)
            }
        }
        OF_EACH_TOKEN(FINISH)
    }
#undef OF_EACH_TOKEN
#undef START
#undef MULTIPLY
#undef FINISH
}

#define BYTE_RANGE_OF(tokens)                                                                                          \
    static __attribute__((noinline)) void byte_range_##tokens(const int_range *range, fetch_plan fetch) {              \
        multiply_byte_range(tokens, range, fetch);                                                                     \
    }
BYTE_RANGE_OF(1)
BYTE_RANGE_OF(2)
BYTE_RANGE_OF(3)
BYTE_RANGE_OF(4)
BYTE_RANGE_OF(5)
#undef BYTE_RANGE_OF

static const range_function byte_ranges[] = {byte_range_1, byte_range_2, byte_range_3, byte_range_4, byte_range_5};

/* One token with `panels` whole panels, side by side. totals: [panels][PANEL]. */
INLINE void multiply_byte_panels(const int panels, const dense_weight *w, int64_t panel, const float *codes,
                                 float *totals) {
#define OF_EACH_PANEL(DO) DO(0) DO(1) DO(2) DO(3)
#define START(p)                                                                                                       \
    int_sums low##p = sums_from(scales + 1), high##p = low##p;                                                         \
    const char *data##p = (const char *)w->data + (panel + p) * panel_bytes;
#define MULTIPLY(p)                                                                                                    \
    if (panels > p) {                                                                                                  \
        const char *from = data##p + unit * 4 * PANEL;                                                                 \
        __builtin_prefetch(from + AHEAD);                                                                              \
        add_byte_products(&low##p, &high##p, load_quads(from), load_quads(from + 2 * PANEL), codes, factor);           \
    }
#define FINISH(p)                                                                                                      \
    if (panels > p) {                                                                                                  \
        add_scaled(totals + p * PANEL, low##p, scales[0], 0);                                                          \
        add_scaled(totals + p * PANEL + 8, high##p, scales[0], 0);                                                     \
    }
    const int64_t units = num_units(DENSE_W8A8, w->columns), block = code_block(DENSE_W8A8, w->columns) / 4;
    const int64_t panel_bytes = units * 4 * PANEL;
    const float *scales = codes + byte_words(units);
    for (int64_t begin = 0; begin < units; begin += block, scales += 2) {
        const int64_t end = units - begin < block ? units : begin + block;
        OF_EACH_PANEL(START)
        for (int64_t part = begin; part < end; part += PART / 4) {
            const int64_t stop = end - part < PART / 4 ? end : part + PART / 4;
            const float *factor = codes++;
            for (int64_t unit = part; unit < stop; unit++, codes++) {
                OF_EACH_PANEL(MULTIPLY)
            }
        }
        OF_EACH_PANEL(FINISH)
    }
#undef OF_EACH_PANEL
#undef START
#undef MULTIPLY
#undef FINISH
}

static __attribute__((noinline)) void byte_panels_1(const dense_weight *w, int64_t panel, const float *codes,
                                                    float *totals) {
    multiply_byte_panels(1, w, panel, codes, totals);
}

static __attribute__((noinline)) void byte_panels_4(const dense_weight *w, int64_t panel, const float *codes,
                                                    float *totals) {
    multiply_byte_panels(4, w, panel, codes, totals);
}

#endif
