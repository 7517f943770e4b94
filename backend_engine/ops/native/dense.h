/* Products with plain weights: out[token, row] = sum over columns of w[row, column] * x[token, column] (+ bias).
 *
 * A weight lies in panels of 16 rows, column after column. A few tokens are multiplied with a weight while it is read,
 * many with TILE_COLUMNS of a panel, which stay in the first level of the cache. A result is summed in an order that
 * depends on the number of columns alone: floats one column after another (dense_float.h), integers in blocks
 * (dense_int.h).
 */
#ifndef INFLIGHT_DENSE_H
#define INFLIGHT_DENSE_H

#include "rows.h"

#define PANEL 16 /* rows */
#define PANEL_VECS (PANEL / LANES)
#if LANES == 16
#define TILE_TOKENS 12   /* that are multiplied with TILE_PANELS at once, all results in registers */
#define TILE_COLUMNS 192 /* most columns of these panels that stay in the first level of the cache */
#define TILE_PANELS 2
#else
#define TILE_TOKENS 6
#define TILE_COLUMNS 288
#define TILE_PANELS 1
#endif
#define FEW_TOKENS 6            /* up to so many, a weight is read once and not kept */
#define TOKEN_BLOCK 240         /* most tokens of which TILE_COLUMNS stay in the second level */
#define AHEAD 2048              /* bytes of each panel that are fetched before they are used */
#define DENSE_SMALL 65536       /* bytes, or work that takes as long, of one thread */
#define DENSE_CHUNK_BYTES 32768 /* the same, at least, of a chunk */
#define FLOPS_PER_BYTE 6        /* that a thread computes while it reads a byte */

enum { DENSE_F32, DENSE_F16, DENSE_BF16, DENSE_I8, DENSE_I16, DENSE_W8A8 };

/* data: [rows / 16][columns][16] of float32, float16 or bfloat16, [rows / 16][columns / 2][16][2] of int8 or int16, or
 * [rows / 16][columns / 4][16][4] of W8A8, 128 higher; rows and columns rounded up, with zeros. scales: of int8 and W8A8
 * [rows rounded up], of int16 [rows / 16][blocks][16]; bias (or NULL): [rows rounded up].
 */
typedef struct {
    int64_t rows, columns, kind;
    const void *data;
    const float *scales, *bias;
} dense_weight;

/* rounded: of integers, what round_op made of x, for more than one token; of others NULL. gated (of integers, or NULL):
 * what is made of the results before they are written; the first half of the rows gates the second, both are whole
 * panels, and out has half as many numbers.
 */
typedef struct {
    int64_t kind;
    const dense_weight *w;
    const float *x;
    int64_t x_stride;
    float *out;
    int64_t out_stride;
    const float *rounded;
    int64_t rounded_stride;
    const activation_op *gated;
} dense_op;

INLINE int64_t num_panels(const dense_weight *w) { return (w->rows + PANEL - 1) / PANEL; }

/* Panels of results, each made of one of the weight's or of two. */
INLINE int64_t out_panels(const dense_op *op) { return op->gated ? num_panels(op->w) / 2 : num_panels(op->w); }

/* Rows of a panel that exist. */
INLINE int rows_of_panel(const dense_weight *w, int64_t panel) {
    return w->rows - panel * PANEL < PANEL ? (int)(w->rows - panel * PANEL) : PANEL;
}

/* Parts of equal length, none longer than `most`. */
INLINE int64_t equal_parts(int64_t length, int64_t most) {
    const int64_t parts = (length + most - 1) / most;
    return (length + parts - 1) / parts;
}

INLINE void copy_row(float *to, const float *from, int count) {
    if (count == PANEL)
        memcpy(to, from, PANEL * sizeof(float));
    else
        memcpy(to, from, (size_t)count * sizeof(float));
}

/* What is fetched meanwhile: `step` bytes a column, with two panels also so many that are `apart`. */
typedef struct {
    const char *from;
    int64_t step, apart;
} fetch_plan;

INLINE void fetch_some(const int panels, fetch_plan *plan) {
    __builtin_prefetch(plan->from, 0, 2);
    if (panels == 2)
        __builtin_prefetch(plan->from + plan->apart, 0, 2);
    plan->from += plan->step;
}

typedef struct {
    float *to;
    int64_t stride;
    int is_first; /* no sum of earlier columns to continue */
    const float *bias;
} tile_results;

#include "dense_float.h"
#include "dense_int.h"
#include "dense_pack.h"

/* ---- chunks ------------------------------------------------------------------------------------------------------ */

/* Panels that a chunk is made of: as many as are read side by side; of many tokens equal parts of a thread's share, of
 * floats so many that it pays to copy x.
 */
INLINE int64_t chunk_unit(const dense_op *op, int64_t num_tokens, int num_threads) {
    if (num_tokens <= FEW_TOKENS)
        return num_tokens == 1 ? MAX_SIDE_BY_SIDE : 2;
    return equal_parts((out_panels(op) + num_threads - 1) / num_threads, op->w->kind >= DENSE_I8 && !HAS_VNNI ? 5 : 8);
}

static int64_t dense_chunks(const dense_op *op, const native_step *step, int num_threads) {
    const dense_weight *w = op->w;
    const int64_t panels = out_panels(op), tokens = step->num_tokens, numbers = num_panels(w) * PANEL * w->columns;
    if (tokens == 0 || num_threads == 1)
        return tokens > 0;
    const int64_t flops_per_byte = w->kind >= DENSE_I8 ? 2 * FLOPS_PER_BYTE : FLOPS_PER_BYTE;
    const int64_t cost = numbers * number_bytes(w->kind) + numbers * 2 * tokens / flops_per_byte;
    if (cost < DENSE_SMALL)
        return 1;
    int64_t chunks = (tokens <= FEW_TOKENS ? 8 : 6) * (int64_t)num_threads;
    const int64_t unit = chunk_unit(op, tokens, num_threads), units = (panels + unit - 1) / unit;
    chunks = chunks < units ? chunks : units;
    return chunks < cost / DENSE_CHUNK_BYTES ? chunks : cost / DENSE_CHUNK_BYTES;
}

static void dense_chunk(const dense_op *op, const native_step *step, int64_t chunk, int64_t num_chunks,
                        float *scratch) {
    const int64_t panels = out_panels(op), unit = step->num_tokens == 1 ? MAX_SIDE_BY_SIDE : 1;
    const int64_t units = (panels + unit - 1) / unit, first = chunk_start(units, chunk, num_chunks) * unit;
    int64_t end = chunk_start(units, chunk + 1, num_chunks) * unit;
    end = end < panels ? end : panels;
    if (op->w->kind >= DENSE_I8)
        dense_int_chunk(op, step->num_tokens, first, end, scratch);
    else
        dense_float_chunk(op, step->num_tokens, first, end, scratch);
}

#endif
