/* Packing: a plain weight, row after row, becomes panels, in integers rounded. Part of dense.h. */
#ifndef INFLIGHT_DENSE_PACK_H
#define INFLIGHT_DENSE_PACK_H

#include "kv_numbers.h"

#define PIECE 64 /* columns that are brought into another order at once; whole units of all kinds, a block of int16 */
#define HIGHEST_BYTE_CODE 127
#define HIGHEST_WORD_CODE 4095
#define ZERO_CODE 128 /* of W8A8, whose codes have no sign */

/* from: [rows] of [columns] numbers of `form` (DENSE_F32, DENSE_F16, DENSE_BF16), `stride` of them between two rows. The
 * numbers of w, and the scales of integers, are written; zeros behind the last row and column.
 */
typedef struct {
    int64_t kind;
    const dense_weight *w;
    const void *from;
    int64_t stride, form;
} pack_op;

typedef float piece_rows[PANEL][PIECE];

/* The nearest float16, of two the even one; beyond the largest infinite. */
INLINE uint16_t to_float16(float value) {
#if HAS_AVX2
    return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
#else
    const uint16_t bounded = (uint16_t)to_small_float(value, 10, 15, 65504.0f, 0x7e00);
    return float_of_bits(bits_of_float(value) & 0x7fffffff) >= 65520.0f ? (bounded & 0x8000) | 0x7c00 : bounded;
#endif
}

static int64_t pack_chunks(const pack_op *op, int num_threads) {
    return row_chunks(num_panels(op->w), PANEL * op->w->columns, num_threads);
}

/* Of a row, `count` columns from `column` on, and zeros. */
INLINE void read_plain(const pack_op *op, int64_t row, int64_t column, int64_t count, float *to) {
    const int64_t first = row * op->stride + column;
    const float *floats = (const float *)op->from + first;
    const uint16_t *halves = (const uint16_t *)op->from + first;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        store(to + i, op->form == DENSE_F32 ? load(floats + i)
                      : op->form == DENSE_F16 ? from_halves(halves + i) : from_bfloats(halves + i));
    for (; i < count; i++)
        to[i] = op->form == DENSE_F32 ? floats[i]
                : op->form == DENSE_F16 ? float_of_half(halves[i]) : float_of_bits((uint32_t)halves[i] << 16);
    memset(to + count, 0, (size_t)(PIECE - count) * sizeof *to);
}

INLINE void read_piece(const pack_op *op, int64_t panel, int64_t column, piece_rows piece) {
    const int64_t rest = op->w->columns - column, count = rest < PIECE ? rest : PIECE;
    const int rows = rows_of_panel(op->w, panel);
    for (int r = 0; r < rows; r++)
        read_plain(op, panel * PANEL + r, column, count, piece[r]);
    memset(piece[rows], 0, (size_t)(PANEL - rows) * sizeof piece[0]);
}

/* The larger of `peaks` and of the magnitudes of each row, as bits. */
INLINE void add_peaks(piece_rows piece, int32_t *peaks) {
    for (int r = 0; r < PANEL; r++) {
        const int32_t bits = peak_bits(piece[r], PIECE);
        peaks[r] = bits > peaks[r] ? bits : peaks[r];
    }
}

INLINE void peaks_to_scales(const int32_t *peaks, float highest_code, float *scales) {
    for (int r = 0; r < PANEL; r++)
        scales[r] = float_of_bits((uint32_t)peaks[r]) / highest_code;
}

/* The nearest codes, of two the even one; of what is no number zero. */
INLINE void round_piece(piece_rows piece, const float *scales, float highest_code) {
    const vec high = broadcast(highest_code), low = broadcast(-highest_code), magic = broadcast(0x1.8p23f);
    for (int r = 0; r < PANEL; r++) {
        const vec divisor = broadcast(scales[r] > 0 ? scales[r] : 1.0f);
        for (int i = 0; i < PIECE; i += LANES) {
            const vec units = load(piece[r] + i) / divisor;
            const vec numbers = choose(units == units, units, broadcast(0));
            store(piece[r] + i, vec_min(vec_max(numbers, low), high) + magic - magic);
        }
    }
}

/* Into the order of a panel. */
INLINE void write_piece(const int kind, const dense_weight *w, int64_t panel, int64_t column, piece_rows piece) {
    const int unit = kind == DENSE_W8A8 ? 4 : kind >= DENSE_I8 ? 2 : 1;
    const int64_t columns = (w->columns + unit - 1) / unit * unit, rest = columns - column;
    const int64_t count = rest < PIECE ? rest : PIECE, first = (panel * columns + column) * PANEL;
    uint8_t *bytes = (uint8_t *)w->data + first;
    uint16_t *words = (uint16_t *)w->data + first;
    float *floats = (float *)w->data + first;
    for (int64_t c = 0; c < count; c += unit)
        for (int r = 0; r < PANEL; r++)
            for (int i = 0; i < unit; i++) {
                const float number = piece[r][c + i];
                const int64_t at = (c * PANEL) + r * unit + i;
                switch (kind) {
                case DENSE_F32: floats[at] = number; break;
                case DENSE_F16: words[at] = to_float16(number); break;
                case DENSE_BF16: words[at] = to_bfloat16(number); break;
                case DENSE_I8: bytes[at] = (uint8_t)(int8_t)number; break;
                case DENSE_I16: words[at] = (uint16_t)(int16_t)number; break;
                default: bytes[at] = (uint8_t)((int)number + ZERO_CODE);
                }
            }
}

INLINE void pack_panel(const int kind, const pack_op *op, int64_t panel) {
    const dense_weight *w = op->w;
    const int64_t num_pieces = (w->columns + PIECE - 1) / PIECE;
    const float highest_code = kind == DENSE_I16 ? HIGHEST_WORD_CODE : HIGHEST_BYTE_CODE;
    float *scales = (float *)w->scales + panel * PANEL * (kind == DENSE_I16 ? num_pieces : 1);
    piece_rows piece;
    if (kind == DENSE_I8 || kind == DENSE_W8A8) {
        int32_t peaks[PANEL] = {0};
        for (int64_t p = 0; p < num_pieces; p++) {
            read_piece(op, panel, p * PIECE, piece);
            add_peaks(piece, peaks);
        }
        peaks_to_scales(peaks, highest_code, scales);
    }
    for (int64_t p = 0; p < num_pieces; p++) {
        read_piece(op, panel, p * PIECE, piece);
        if (kind == DENSE_I16) {
            int32_t peaks[PANEL] = {0};
            add_peaks(piece, peaks);
            peaks_to_scales(peaks, highest_code, scales + p * PANEL);
        }
        if (kind >= DENSE_I8)
            round_piece(piece, kind == DENSE_I16 ? scales + p * PANEL : scales, highest_code);
        write_piece(kind, w, panel, p * PIECE, piece);
    }
}

static void pack_chunk(const pack_op *op, int64_t chunk, int64_t num_chunks) {
    const int64_t panels = num_panels(op->w), end = chunk_start(panels, chunk + 1, num_chunks);
    for (int64_t panel = chunk_start(panels, chunk, num_chunks); panel < end; panel++)
        switch (op->w->kind) {
        case DENSE_F32: pack_panel(DENSE_F32, op, panel); break;
        case DENSE_F16: pack_panel(DENSE_F16, op, panel); break;
        case DENSE_BF16: pack_panel(DENSE_BF16, op, panel); break;
        case DENSE_I8: pack_panel(DENSE_I8, op, panel); break;
        case DENSE_I16: pack_panel(DENSE_I16, op, panel); break;
        default: pack_panel(DENSE_W8A8, op, panel);
        }
}

#endif
