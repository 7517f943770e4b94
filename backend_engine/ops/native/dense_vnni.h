/* Integer products by AVX-512's instructions for them (VNNI): 16 rows and two or four columns at once. The same sums as
 * in dense_int16.h and dense_int8.h, of one panel or two, for groups of more tokens. Part of dense_int.h.
 */
#ifndef INFLIGHT_DENSE_VNNI_H
#define INFLIGHT_DENSE_VNNI_H

#define VNNI_TILE 12 /* tokens whose sums, of two panels, stay in registers */

#if HAS_VNNI
typedef int32_t __attribute__((may_alias)) code_word;

INLINE __m512i word_of_token(const float *codes) { return _mm512_set1_epi32(*(const code_word *)codes); }

/* As add_scaled, of 16 rows. */
INLINE void add_all_scaled(float *totals, __m512i sums, float token_scale, const float *row_scales) {
    vec scale = broadcast(token_scale);
    if (row_scales)
        scale = load(row_scales) * scale;
    store(totals, load(totals) + (vec)_mm512_cvtepi32_ps(sums) * scale);
}

/* Adds the products of a token's word with one panel's or with two's. In assembly, since a compiler moves the sums from
 * register to register between these instructions, and into memory; for the same reason each sum has a name of its own.
 */
#define ADD_PRODUCTS(instruction)                                                                                      \
    INLINE void add_##instruction(const int panels, __m512i *a, __m512i *b, __m512i w_a, __m512i w_b,                  \
                                  const float *codes) {                                                                \
        __m512i token;                                                                                                 \
        if (panels == 1)                                                                                               \
            __asm__(#instruction " %[codes]%{1to16%}, %[w_a], %[a]"                                                    \
                    : [a] "+v"(*a)                                                                                     \
                    : [w_a] "v"(w_a), [codes] "m"(*(const code_word *)codes));                                         \
        else                                                                                                           \
            __asm__("vpbroadcastd %[codes], %[token]\n\t" #instruction " %[token], %[w_a], %[a]\n\t" #instruction      \
                    " %[token], %[w_b], %[b]"                                                                          \
                    : [a] "+&v"(*a), [b] "+&v"(*b), [token] "=&v"(token)                                               \
                    : [w_a] "v"(w_a), [w_b] "v"(w_b), [codes] "m"(*(const code_word *)codes));                         \
    }
ADD_PRODUCTS(vpdpwssd)
ADD_PRODUCTS(vpdpbusd)
#undef ADD_PRODUCTS

#define OF_EACH_TOKEN(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
#define ZEROS(t) __m512i a##t = _mm512_setzero_si512(), b##t = a##t;

/* ---- tokens of int16 codes --------------------------------------------------------------------------------------- */

INLINE __m512i load_pairs_of_panel(const int kind, const void *panel, int64_t pair) {
    if (kind == DENSE_I8)
        return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)((const int8_t *)panel + pair * PAIR_CODES)));
    return _mm512_loadu_si512((const int16_t *)panel + pair * PAIR_CODES);
}

INLINE void vnni_word_range(const int kind, const int panels, const int tokens, const int_range *range,
                            fetch_plan fetch) {
#define MULTIPLY(t)                                                                                                    \
    if (tokens > t)                                                                                                    \
        add_vpdpwssd(panels, &a##t, &b##t, w_a, w_b, codes + t);
#define FINISH(t)                                                                                                      \
    if (tokens > t) {                                                                                                  \
        add_all_scaled(first.totals + t * PANEL, a##t, token_scales[t], first.row_scales);                             \
        if (panels == 2)                                                                                               \
            add_all_scaled(second.totals + t * PANEL, b##t, token_scales[t], second.row_scales);                       \
    }
    panel_range first = range->panels[0], second = range->panels[panels - 1];
    const float *codes = range->codes, *token_scales = range->token_scales;
    for (int64_t begin = 0; begin < range->units; begin += range->block, token_scales += tokens) {
        const int64_t end = range->units - begin < range->block ? range->units : begin + range->block;
        OF_EACH_TOKEN(ZEROS)
        for (int64_t pair = begin; pair < end; pair++, codes += tokens) {
            const __m512i w_a = load_pairs_of_panel(kind, first.codes, pair);
            const __m512i w_b = panels == 2 ? load_pairs_of_panel(kind, second.codes, pair) : w_a;
            fetch_some(panels, &fetch);
            OF_EACH_TOKEN(MULTIPLY)
        }
        OF_EACH_TOKEN(FINISH)
        if (kind == DENSE_I16) {
            first.row_scales += PANEL;
            second.row_scales += PANEL;
        }
    }
#undef MULTIPLY
#undef FINISH
}

/* ---- tokens of int8 codes ---------------------------------------------------------------------------------------- */

/* `sum` and a part's sum times its factor. */
INLINE __m512i add_part(__m512i sum, __m512i of_part, const float *word) {
    int16_t factor;
    memcpy(&factor, word, sizeof factor);
    return _mm512_add_epi32(sum, _mm512_mullo_epi32(of_part, _mm512_set1_epi32(factor)));
}

/* The sums of a part are in registers, those of a block in memory. */
INLINE void vnni_byte_range(const int panels, const int tokens, const int_range *range, fetch_plan fetch) {
#define MULTIPLY(t)                                                                                                    \
    if (tokens > t)                                                                                                    \
        add_vpdpbusd(panels, &a##t, &b##t, w_a, w_b, codes + t);
#define END_OF_PART(t)                                                                                                 \
    if (tokens > t) {                                                                                                  \
        sums[0][t] = add_part(sums[0][t], a##t, factors + t);                                                          \
        if (panels == 2)                                                                                               \
            sums[1][t] = add_part(sums[1][t], b##t, factors + t);                                                      \
    }
    const char *first = range->panels[0].codes, *second = range->panels[panels - 1].codes;
    const float *codes = range->codes, *scales = range->token_scales;
    __m512i sums[2][VNNI_TILE];
    for (int64_t begin = 0; begin < range->units; begin += range->block, scales += 2 * tokens) {
        const int64_t end = range->units - begin < range->block ? range->units : begin + range->block;
        for (int t = 0; t < tokens; t++)
            sums[0][t] = sums[1][t] = word_of_token(scales + tokens + t);
        for (int64_t part = begin; part < end; part += PART / 4) {
            const int64_t stop = end - part < PART / 4 ? end : part + PART / 4;
            const float *factors = codes;
            codes += tokens;
            OF_EACH_TOKEN(ZEROS)
            for (int64_t unit = part; unit < stop; unit++, codes += tokens) {
                const __m512i w_a = _mm512_loadu_si512(first + unit * 4 * PANEL);
                const __m512i w_b = panels == 2 ? _mm512_loadu_si512(second + unit * 4 * PANEL) : w_a;
                fetch_some(panels, &fetch);
                OF_EACH_TOKEN(MULTIPLY)
            }
            OF_EACH_TOKEN(END_OF_PART)
        }
        for (int p = 0; p < panels; p++)
            for (int t = 0; t < tokens; t++)
                add_all_scaled(range->panels[p].totals + t * PANEL, sums[p][t], scales[t], 0);
    }
#undef MULTIPLY
#undef END_OF_PART
}
#undef OF_EACH_TOKEN
#undef ZEROS

/* ---- all numbers of panels and tokens ---------------------------------------------------------------------------- */

#define VNNI_OF(panels, tokens)                                                                                        \
    static __attribute__((noinline)) void vnni_I8_##panels##_##tokens(const int_range *range, fetch_plan fetch) {      \
        vnni_word_range(DENSE_I8, panels, tokens, range, fetch);                                                       \
    }                                                                                                                  \
    static __attribute__((noinline)) void vnni_I16_##panels##_##tokens(const int_range *range, fetch_plan fetch) {     \
        vnni_word_range(DENSE_I16, panels, tokens, range, fetch);                                                      \
    }                                                                                                                  \
    static __attribute__((noinline)) void vnni_W8A8_##panels##_##tokens(const int_range *range, fetch_plan fetch) {    \
        vnni_byte_range(panels, tokens, range, fetch);                                                                 \
    }
#define FOR_TOKENS_OF_TILE(DO, panels)                                                                                 \
    DO(panels, 1)                                                                                                      \
    DO(panels, 2)                                                                                                      \
    DO(panels, 3)                                                                                                      \
    DO(panels, 4)                                                                                                      \
    DO(panels, 5)                                                                                                      \
    DO(panels, 6)                                                                                                      \
    DO(panels, 7)                                                                                                      \
    DO(panels, 8)                                                                                                      \
    DO(panels, 9)                                                                                                      \
    DO(panels, 10)                                                                                                     \
    DO(panels, 11)                                                                                                     \
    DO(panels, 12)
#define I8_NAME(panels, tokens) vnni_I8_##panels##_##tokens,
#define I16_NAME(panels, tokens) vnni_I16_##panels##_##tokens,
#define W8A8_NAME(panels, tokens) vnni_W8A8_##panels##_##tokens,

FOR_TOKENS_OF_TILE(VNNI_OF, 1)
FOR_TOKENS_OF_TILE(VNNI_OF, 2)

/* By kind, panels less one, and tokens less one. */
static const range_function vnni_ranges[][2][VNNI_TILE] = {
    {{FOR_TOKENS_OF_TILE(I8_NAME, 1)}, {FOR_TOKENS_OF_TILE(I8_NAME, 2)}},
    {{FOR_TOKENS_OF_TILE(I16_NAME, 1)}, {FOR_TOKENS_OF_TILE(I16_NAME, 2)}},
    {{FOR_TOKENS_OF_TILE(W8A8_NAME, 1)}, {FOR_TOKENS_OF_TILE(W8A8_NAME, 2)}},
};
#undef VNNI_OF
#undef FOR_TOKENS_OF_TILE
#undef I8_NAME
#undef I16_NAME
#undef W8A8_NAME
#endif

#endif
