/* Packed weights to float32, bit for bit as the reference in Python (compile with -ffp-contract=off). Plain C, and for
 * AVX2 in vectors of eight; packed.h says how a weight is multiplied.
 */

#ifndef INFLIGHT_PACKED_WEIGHTS_H
#define INFLIGHT_PACKED_WEIGHTS_H

#include "native.h"

#define MAX_COLUMNS 640 /* of a row that are decoded at once; a multiple of 32 */

/* Kinds of codes, kinds of scales, and what is done with a last term or factor. */
enum { INT4, INT8, CODEBOOK4, E4M3, E5M2 };
enum { SCALE_FLOAT32, SCALE_FLOAT16, SCALE_BFLOAT16, SCALE_E4M3, SCALE_E8M0 };
enum { NOTHING, ADD, MULTIPLY };

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
    const int is_int = kind == INT4 || kind == INT8;
#if HAS_AVX2
    const int has_halves = kind == INT4 || kind == CODEBOOK4;
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

/* Columns begin to end of one row: at most MAX_COLUMNS, begin is even. */
INLINE void decode_kind(const int kind, const int tail, const packed_weight *w, int64_t row, int64_t begin, int64_t end,
                        float *restrict out) {
    const int64_t size = w->group_size, first = begin / size, num_groups = (end - 1) / size - first + 1;
    const int64_t group = row * w->num_groups + first;
    const uint8_t *codes = w->codes + row * (kind == INT4 || kind == CODEBOOK4 ? w->columns / 2 : w->columns);
    const uint8_t *zeros = w->zeros ? w->zeros + group : NULL;
    const float *offsets = tail == ADD ? w->offsets + group : NULL, *values = w->values;
    const float midpoint = w->midpoint, row_scale = tail == MULTIPLY ? w->row_scale[row] : 1.0f;
    float scales[MAX_COLUMNS];
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

#endif
