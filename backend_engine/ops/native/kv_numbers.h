/* The numbers of a KV cache: float32, or fewer bits beside a factor; what attention/paged_kv.py says of each form. Read
 * eight at a time.
 */
#ifndef INFLIGHT_KV_NUMBERS_H
#define INFLIGHT_KV_NUMBERS_H

#include <float.h>

#include "native.h"

enum { KV_FLOAT32, KV_BFLOAT16, KV_FLOAT16, KV_E4M3, KV_E5M2, KV_INT8 };

#define FOR_KV_KIND(kind, DO)                                                                                          \
    switch (kind) {                                                                                                    \
    case KV_FLOAT32: DO(KV_FLOAT32); break;                                                                            \
    case KV_BFLOAT16: DO(KV_BFLOAT16); break;                                                                          \
    case KV_FLOAT16: DO(KV_FLOAT16); break;                                                                            \
    case KV_E4M3: DO(KV_E4M3); break;                                                                                  \
    case KV_E5M2: DO(KV_E5M2); break;                                                                                  \
    default: DO(KV_INT8);                                                                                              \
    }

INLINE int64_t kv_number_bytes(int64_t kind) { return kind == KV_FLOAT32 ? 4 : kind <= KV_FLOAT16 ? 2 : 1; }

INLINE uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of_half(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = (half >> 10) & 31, mantissa = half & 0x3ff;
    if (exponent == 0)
        return float_of_bits(sign | bits_of_float((float)mantissa * 0x1p-24f));
    return float_of_bits(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13);
}

/* E4M3 at its place in a float16 is 1/256 of what it stands for, but for its NaN. */
INLINE uint16_t half_of_e4m3(uint8_t code) {
    return (uint16_t)((code & 0x80) << 8 | ((code & 0x7f) == 0x7f ? 0x7e00 : (code & 0x7f) << 7));
}

/* `factor`: 1 for what has none; for E4M3 256 times as much. */
INLINE float kv_number(const int kind, const void *numbers, int64_t i, float factor) {
    switch (kind) {
    case KV_FLOAT32: return ((const float *)numbers)[i];
    case KV_BFLOAT16: return float_of_bits((uint32_t)((const uint16_t *)numbers)[i] << 16);
    case KV_FLOAT16: return float_of_half(((const uint16_t *)numbers)[i]);
    case KV_E4M3: return float_of_half(half_of_e4m3(((const uint8_t *)numbers)[i])) * factor;
    case KV_E5M2: return float_of_half((uint16_t)(((const uint8_t *)numbers)[i] << 8)) * factor;
    default: return (float)((const int8_t *)numbers)[i] * factor;
    }
}

#if HAS_AVX2
INLINE __m256 eight_kv_numbers(const int kind, const void *numbers, int64_t i, float factor) {
    if (kind == KV_FLOAT32)
        return _mm256_loadu_ps((const float *)numbers + i);
    if (kind == KV_BFLOAT16 || kind == KV_FLOAT16) {
        const __m128i halves = _mm_loadu_si128((const __m128i *)((const uint16_t *)numbers + i));
        return kind == KV_FLOAT16 ? _mm256_cvtph_ps(halves)
                                  : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
    }
    const __m128i codes = _mm_loadl_epi64((const __m128i *)((const uint8_t *)numbers + i));
    __m256 values;
    if (kind == KV_INT8) {
        values = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
    } else if (kind == KV_E5M2) {
        values = _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(codes), 8));
    } else {
        const __m128i wide = _mm_cvtepi8_epi16(codes), magnitude = _mm_and_si128(wide, _mm_set1_epi16(0x7f));
        const __m128i is_nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f));
        const __m128i bits = _mm_andnot_si128(_mm_set1_epi16(0x4000), _mm_slli_epi16(wide, 7));
        values = _mm256_cvtph_ps(_mm_blendv_epi8(bits, _mm_set1_epi16(0x7e00), is_nan));
    }
    return _mm256_mul_ps(values, _mm256_set1_ps(factor));
}
#endif

/* ---- writing ------------------------------------------------------------------------------------------------- */

/* The nearest number (of two the even one) of `mantissa` bits, `bias` of the exponent and `largest` number. */
INLINE uint32_t to_small_float(float value, const int mantissa, const int bias, const float largest, const uint32_t nan) {
    const uint32_t bits = bits_of_float(value), sign = bits >> 31;
    const int exponent_bits = mantissa == 10 ? 5 : 7 - mantissa, shift = 23 - mantissa;
    float magnitude = float_of_bits(bits & 0x7fffffff);
    uint32_t code;
    if (magnitude != magnitude) {
        code = nan;
    } else {
        magnitude = magnitude < largest ? magnitude : largest;
        if (magnitude < float_of_bits((uint32_t)(128 - bias) << 23)) { /* added and taken away, 2^23 rounds to integers */
            const float units = magnitude * float_of_bits((uint32_t)(126 + bias + mantissa) << 23);
            code = (uint32_t)(units + 0x1p23f - 0x1p23f);
        } else {
            const uint32_t exact = bits_of_float(magnitude);
            code = ((exact + (1u << (shift - 1)) - 1 + (exact >> shift & 1)) >> shift) - ((uint32_t)(127 - bias) << mantissa);
        }
    }
    return sign << (exponent_bits + mantissa) | code;
}

INLINE uint16_t to_bfloat16(float value) {
    const uint32_t bits = bits_of_float(value);
    return value != value ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* int8: the nearest of 255 numbers, the largest magnitude / 127 apart; returns that, or NaN if there is one. */
INLINE float write_int8_numbers(int8_t *to, const float *from, int64_t length) {
    const float highest = (float)((double)FLT_MAX / 127 * (1 - 0x1p-20));
    float largest = 0;
    int has_nan = 0;
    int64_t i = 0;
#if HAS_AVX2
    __m256 peaks = _mm256_setzero_ps(), is_nan = _mm256_setzero_ps();
    for (; i + 8 <= length; i += 8) {
        const __m256 some = _mm256_loadu_ps(from + i);
        peaks = _mm256_max_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), some), peaks); /* of NaN and a peak the peak */
        is_nan = _mm256_or_ps(is_nan, _mm256_cmp_ps(some, some, _CMP_UNORD_Q));
    }
    for (int lane = 0; lane < 8; lane++)
        largest = peaks[lane] > largest ? peaks[lane] : largest;
    has_nan = _mm256_movemask_ps(is_nan) != 0;
#endif
    for (; i < length; i++) {
        const float magnitude = float_of_bits(bits_of_float(from[i]) & 0x7fffffff);
        largest = magnitude > largest ? magnitude : largest;
        has_nan |= from[i] != from[i];
    }
    const float exact = largest / 127.0f, factor = exact < FLT_MIN ? FLT_MIN : exact > highest ? highest : exact;
    i = 0;
#if HAS_AVX2
    const __m256 most = _mm256_set1_ps(127.0f), least = _mm256_set1_ps(-127.0f);
    for (; i + 8 <= length; i += 8) {
        const __m256 units = _mm256_div_ps(_mm256_loadu_ps(from + i), _mm256_set1_ps(factor));
        const __m256 numbers = _mm256_and_ps(units, _mm256_cmp_ps(units, units, _CMP_ORD_Q));
        const __m256i codes = _mm256_cvtps_epi32(_mm256_max_ps(_mm256_min_ps(numbers, most), least)); /* ties to even */
        const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
        _mm_storel_epi64((__m128i *)(to + i), _mm_packs_epi16(halves, halves));
    }
#endif
    for (; i < length; i++) {
        const float units = from[i] / factor, bounded = units > 127 ? 127 : units >= -127 ? units : units < 0 ? -127 : 0;
        to[i] = (int8_t)(int32_t)(bounded + 0x1.8p23f - 0x1.8p23f);
    }
    return has_nan ? NAN : factor;
}

/* `length` numbers, their codes and the factor that the codes are read with; `scale` is that of an fp8 cache. */
INLINE float write_kv_numbers(const int kind, void *to, const float *from, int64_t length, float scale) {
    if (kind == KV_FLOAT32)
        memcpy(to, from, (size_t)length * sizeof(float));
    if (kind == KV_BFLOAT16)
        for (int64_t i = 0; i < length; i++)
            ((uint16_t *)to)[i] = to_bfloat16(from[i]);
    int64_t done = 0;
#if HAS_AVX2
    const __m256 most = _mm256_set1_ps(65504.0f), least = _mm256_set1_ps(-65504.0f);
    for (; kind == KV_FLOAT16 && done + 8 <= length; done += 8) {
        const __m256 bounded = _mm256_max_ps(least, _mm256_min_ps(most, _mm256_loadu_ps(from + done))); /* NaN stays */
        _mm_storeu_si128((__m128i *)((uint16_t *)to + done), _mm256_cvtps_ph(bounded, _MM_FROUND_TO_NEAREST_INT));
    }
#endif
    if (kind == KV_FLOAT16)
        for (int64_t i = done; i < length; i++)
            ((uint16_t *)to)[i] = (uint16_t)to_small_float(from[i], 10, 15, 65504.0f, 0x7e00);
    if (kind == KV_E4M3)
        for (int64_t i = 0; i < length; i++)
            ((uint8_t *)to)[i] = (uint8_t)to_small_float(from[i] / scale, 3, 7, 448.0f, 0x7f);
    if (kind == KV_E5M2)
        for (int64_t i = 0; i < length; i++)
            ((uint8_t *)to)[i] = (uint8_t)to_small_float(from[i] / scale, 2, 15, 57344.0f, 0x7f);
    return kind == KV_INT8 ? write_int8_numbers(to, from, length) : scale;
}

#endif
