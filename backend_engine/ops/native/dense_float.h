/* Products of float32, float16 and bfloat16 weights: one chain in float32 for each result. Part of dense.h. */
#ifndef INFLIGHT_DENSE_FLOAT_H
#define INFLIGHT_DENSE_FLOAT_H

typedef uint16_t half_vec __attribute__((vector_size(2 * LANES)));
typedef uint32_t bits_vec __attribute__((vector_size(4 * LANES)));

INLINE half_vec load_halves(const uint16_t *from) {
    half_vec value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE vec from_halves(const uint16_t *from) {
#if LANES == 16 && defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif LANES == 8 && HAS_AVX2 && defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    const bits_vec half = __builtin_convertvector(load_halves(from), bits_vec);
    const bits_vec is_special = (bits_vec)((half & 0x7c00) == 0x7c00) & 0x7f800000;
    const vec magnitude = (vec)((half & 0x7fff) << 13) * broadcast(0x1p112f);
    return (vec)((bits_vec)magnitude | is_special | (half & 0x8000) << 16);
#endif
}

INLINE vec from_bfloats(const uint16_t *from) {
#if LANES == 8 && HAS_AVX2
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
#else
    return (vec)(__builtin_convertvector(load_halves(from), bits_vec) << 16);
#endif
}

INLINE int64_t number_bytes(const int64_t kind) {
    return kind == DENSE_F32 ? 4 : kind == DENSE_I8 || kind == DENSE_W8A8 ? 1 : 2;
}

/* LANES weights, of which `index` is the first. */
INLINE vec load_weights(const int kind, const void *data, int64_t index) {
    if (kind == DENSE_F32)
        return load((const float *)data + index);
    const uint16_t *halves = (const uint16_t *)data + index;
    return kind == DENSE_F16 ? from_halves(halves) : from_bfloats(halves);
}

INLINE void fetch_lines(const char *from, const int num_bytes) {
    for (int i = 0; i < num_bytes; i += 64)
        __builtin_prefetch(from + i);
}

/* ---- few tokens: read a weight once --------------------------------------------------------------------------- */

enum { MAX_SIDE_BY_SIDE = 4, MOST_SIDE_BY_SIDE_TOKENS = 3 }; /* panels, and tokens of more than one panel */

typedef struct {
    vec of[FEW_TOKENS][MAX_SIDE_BY_SIDE][PANEL_VECS];
} direct_sums;

/* One column of some panels. Either the weights or the tokens are held, as many registers as there are. */
INLINE void direct_column(const int kind, const int tokens, const int panels, const dense_op *op, const char *data,
                          int64_t column, direct_sums *sums) {
    const float *x = op->x + column;
    if (panels == 1) {
        vec w[PANEL_VECS];
        for (int v = 0; v < PANEL_VECS; v++) {
            w[v] = load_weights(kind, data, column * PANEL + v * LANES);
            KEEP(w[v]);
        }
        for (int t = 0; t < tokens; t++) {
            const vec token = broadcast(x[t * op->x_stride]);
            for (int v = 0; v < PANEL_VECS; v++)
                sums->of[t][0][v] = multiply_add(w[v], token, sums->of[t][0][v]);
        }
        return;
    }
    vec token[MOST_SIDE_BY_SIDE_TOKENS];
    for (int t = 0; t < tokens; t++)
        token[t] = broadcast(x[t * op->x_stride]);
    for (int p = 0; p < panels; p++)
        for (int v = 0; v < PANEL_VECS; v++) {
            vec w = load_weights(kind, data, (p * op->w->columns + column) * PANEL + v * LANES);
            if (tokens > 1)
                KEEP(w);
            for (int t = 0; t < tokens; t++)
                sums->of[t][p][v] = multiply_add(w, token[t], sums->of[t][p][v]);
        }
}

/* Columns begin to end of some panels; meanwhile, what lies at `ahead` is fetched. */
INLINE void direct_columns(const int kind, const int tokens, const int panels, const dense_op *op, const char *data,
                           int64_t begin, int64_t end, const char *ahead, direct_sums *sums) {
    const int64_t panel_numbers = op->w->columns * PANEL, size = number_bytes(kind);
    int64_t column = begin;
    for (; column + 2 <= end; column += 2) {
        for (int p = 0; p < panels; p++)
            fetch_lines(ahead + (p * panel_numbers + column * PANEL) * size, 2 * PANEL * (int)size);
        direct_column(kind, tokens, panels, op, data, column, sums);
        direct_column(kind, tokens, panels, op, data, column + 1, sums);
    }
    if (column < end)
        direct_column(kind, tokens, panels, op, data, column, sums);
}

/* Some panels, side by side, with all tokens. */
INLINE void direct_panels(const int kind, const int tokens, const int panels, const dense_op *op, int64_t panel) {
    const dense_weight *w = op->w;
    const int64_t size = number_bytes(kind), column_bytes = PANEL * size, panel_bytes = w->columns * column_bytes;
    const char *data = (const char *)w->data + panel * panel_bytes;
    const int64_t ahead = AHEAD / column_bytes, turn = w->columns > ahead ? (w->columns - ahead) / 2 * 2 : 0;
    direct_sums sums;
    for (int t = 0; t < tokens; t++)
        for (int p = 0; p < panels; p++)
            for (int v = 0; v < PANEL_VECS; v++)
                sums.of[t][p][v] = (vec){0};
    direct_columns(kind, tokens, panels, op, data, 0, turn, data + AHEAD, &sums);
    direct_columns(kind, tokens, panels, op, data, turn, w->columns, data + panels * panel_bytes - turn * column_bytes,
                   &sums);
    for (int p = 0; p < panels; p++)
        for (int t = 0; t < tokens; t++) {
            float results[PANEL];
            for (int v = 0; v < PANEL_VECS; v++) {
                vec sum = sums.of[t][p][v];
                if (w->bias)
                    sum += load(w->bias + (panel + p) * PANEL + v * LANES);
                store(results + v * LANES, sum);
            }
            copy_row(op->out + t * op->out_stride + (panel + p) * PANEL, results, rows_of_panel(w, panel + p));
        }
}

/* As functions of their own, since a compiler shares its registers badly among many loops. */
#define DIRECT_OF(kind, tokens, panels)                                                                                \
    static __attribute__((noinline)) void direct_##kind##_##tokens##_##panels(const dense_op *op, int64_t panel) {     \
        direct_panels(DENSE_##kind, tokens, panels, op, panel);                                                        \
    }
#define DIRECT_SIDE_BY_SIDE(kind, tokens, panels)                                                                      \
    for (; panel + (panels) <= end; panel += (panels))                                                                 \
        direct_##kind##_##tokens##_##panels(op, panel);
#define DIRECT_KIND(kind)                                                                                              \
    DIRECT_OF(kind, 1, 4)                                                                                              \
    DIRECT_OF(kind, 1, 1)                                                                                              \
    DIRECT_OF(kind, 2, 2)                                                                                              \
    DIRECT_OF(kind, 2, 1)                                                                                              \
    DIRECT_OF(kind, 3, 2)                                                                                              \
    DIRECT_OF(kind, 3, 1)                                                                                              \
    DIRECT_OF(kind, 4, 1)                                                                                              \
    DIRECT_OF(kind, 5, 1)                                                                                              \
    DIRECT_OF(kind, 6, 1)                                                                                              \
    static void few_tokens_##kind(const dense_op *op, int64_t tokens, int64_t panel, int64_t end) {                    \
        switch (tokens) {                                                                                              \
        case 1: DIRECT_SIDE_BY_SIDE(kind, 1, 4) DIRECT_SIDE_BY_SIDE(kind, 1, 1) break;                                 \
        case 2: DIRECT_SIDE_BY_SIDE(kind, 2, 2) DIRECT_SIDE_BY_SIDE(kind, 2, 1) break;                                 \
        case 3: DIRECT_SIDE_BY_SIDE(kind, 3, 2) DIRECT_SIDE_BY_SIDE(kind, 3, 1) break;                                 \
        case 4: DIRECT_SIDE_BY_SIDE(kind, 4, 1) break;                                                                 \
        case 5: DIRECT_SIDE_BY_SIDE(kind, 5, 1) break;                                                                 \
        default: DIRECT_SIDE_BY_SIDE(kind, 6, 1)                                                                       \
        }                                                                                                              \
    }

DIRECT_KIND(F32)
DIRECT_KIND(F16)
DIRECT_KIND(BF16)
#undef DIRECT_OF
#undef DIRECT_SIDE_BY_SIDE
#undef DIRECT_KIND

/* ---- many tokens: TILE_COLUMNS of a panel stay in the cache ------------------------------------------------------ */

/* Columns of one panel, or of two that are `apart`, with some tokens, TILE_COLUMNS apart. */
INLINE void dense_tile(const int tokens, const int panels, const float *panel, int64_t apart, const float *x,
                       int64_t length, tile_results results, fetch_plan fetch) {
    const int num_vecs = panels * PANEL_VECS;
    vec sums[TILE_TOKENS][TILE_PANELS * PANEL_VECS];
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < num_vecs; v++)
            sums[t][v] = results.is_first ? (vec){0} : load(results.to + t * results.stride + v * LANES);
    for (int64_t column = 0; column < length; column++) {
        vec w[TILE_PANELS * PANEL_VECS];
        for (int v = 0; v < num_vecs; v++) {
            w[v] = load(panel + v / PANEL_VECS * apart + column * PANEL + v % PANEL_VECS * LANES);
            KEEP(w[v]);
        }
        fetch_some(panels, &fetch);
        for (int t = 0; t < tokens; t++) {
            const vec token = broadcast(x[t * TILE_COLUMNS + column]);
            for (int v = 0; v < num_vecs; v++)
                sums[t][v] = multiply_add(w[v], token, sums[t][v]);
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < num_vecs; v++) {
            const vec sum = results.bias ? sums[t][v] + load(results.bias + v * LANES) : sums[t][v];
            store(results.to + t * results.stride + v * LANES, sum);
        }
}

#define TILE_OF(tokens, panels)                                                                                        \
    static __attribute__((noinline)) void tile_##tokens##_##panels(                                                    \
        const float *panel, int64_t apart, const float *x, int64_t length, tile_results results, fetch_plan fetch) {   \
        dense_tile(tokens, panels, panel, apart, x, length, results, fetch);                                           \
    }
#define TILES_OF(panels)                                                                                               \
    TILE_OF(1, panels)                                                                                                 \
    TILE_OF(2, panels)                                                                                                 \
    TILE_OF(3, panels)                                                                                                 \
    TILE_OF(4, panels)                                                                                                 \
    TILE_OF(5, panels)                                                                                                 \
    TILE_OF(6, panels)

typedef void (*tile_function)(const float *, int64_t, const float *, int64_t, tile_results, fetch_plan);

TILES_OF(1)
#if TILE_PANELS == 2
#define LARGE_TILES_OF(panels)                                                                                         \
    TILE_OF(7, panels)                                                                                                 \
    TILE_OF(8, panels)                                                                                                 \
    TILE_OF(9, panels)                                                                                                 \
    TILE_OF(10, panels)                                                                                                \
    TILE_OF(11, panels)                                                                                                \
    TILE_OF(12, panels)
#define TILES(panels)                                                                                                  \
    {tile_1_##panels, tile_2_##panels, tile_3_##panels, tile_4_##panels,  tile_5_##panels,  tile_6_##panels,           \
     tile_7_##panels, tile_8_##panels, tile_9_##panels, tile_10_##panels, tile_11_##panels, tile_12_##panels}
TILES_OF(2)
LARGE_TILES_OF(1)
LARGE_TILES_OF(2)
static const tile_function tiles[][TILE_TOKENS] = {TILES(1), TILES(2)};
#undef LARGE_TILES_OF
#undef TILES
#else
static const tile_function tiles[][TILE_TOKENS] = {{tile_1_1, tile_2_1, tile_3_1, tile_4_1, tile_5_1, tile_6_1}};
#endif
#undef TILE_OF
#undef TILES_OF

/* Memory of a chunk. panels: columns of some as float32; last_panel: results of one some of whose rows are not there. */
typedef struct {
    float panels[TILE_PANELS * TILE_COLUMNS * PANEL];
    float x[TOKEN_BLOCK * TILE_COLUMNS];
    float last_panel[TOKEN_BLOCK * PANEL];
} dense_memory;

_Static_assert(sizeof(dense_memory) <= SCRATCH_FLOATS * sizeof(float), "what a chunk needs");

/* Short weights are widened once for all tokens. count: a multiple of LANES. */
INLINE void widen(int64_t kind, const char *data, int64_t count, float *memory) {
    for (int64_t i = 0; i < count; i += LANES)
        store(memory + i, kind == DENSE_F16 ? load_weights(DENSE_F16, data, i) : load_weights(DENSE_BF16, data, i));
}

/* Panels first to end, columns begin to begin + length, with the tokens that lie in memory->x. */
static void tile_panels(const dense_op *op, int64_t first, int64_t end, int64_t begin, int64_t length,
                        int64_t token, int64_t num_tokens, dense_memory *memory) {
    const dense_weight *w = op->w;
    const int64_t column_bytes = PANEL * number_bytes(w->kind), groups = (num_tokens + TILE_TOKENS - 1) / TILE_TOKENS;
    const int is_last = begin + length == w->columns;
    int panels;
    for (int64_t panel = first; panel < end; panel += panels) {
        panels = panel + TILE_PANELS <= end && rows_of_panel(w, panel + TILE_PANELS - 1) >= PANEL ? TILE_PANELS : 1;
        const char *data = (const char *)w->data + (panel * w->columns + begin) * column_bytes;
        const char *next = data + panels * w->columns * column_bytes;
        if (panel + panels >= end && !is_last)
            next = (const char *)w->data + (first * w->columns + begin + length) * column_bytes;
        const float *numbers = w->kind == DENSE_F32 ? (const float *)data : memory->panels;
        const int64_t apart = w->kind == DENSE_F32 ? w->columns * PANEL : length * PANEL;
        for (int p = 0; p < panels && w->kind != DENSE_F32; p++)
            widen(w->kind, data + p * w->columns * column_bytes, length * PANEL, memory->panels + p * apart);
        const int rows = rows_of_panel(w, panel);
        tile_results results = {op->out + token * op->out_stride + panel * PANEL, op->out_stride, begin == 0,
                                is_last && w->bias ? w->bias + panel * PANEL : 0};
        if (rows < PANEL) {
            results.to = memory->last_panel;
            results.stride = PANEL;
        }
        for (int64_t group = 0; group < groups; group++) {
            const int64_t start = num_tokens * group / groups, stop = num_tokens * (group + 1) / groups;
            const fetch_plan fetch = {next + length * group / groups * column_bytes, column_bytes / groups,
                                      w->columns * column_bytes};
            tile_results part = results;
            part.to += start * results.stride;
            tiles[panels - 1][stop - start - 1](numbers, apart, memory->x + start * TILE_COLUMNS, length, part, fetch);
        }
        if (rows < PANEL && is_last)
            for (int64_t t = 0; t < num_tokens; t++)
                copy_row(op->out + (token + t) * op->out_stride + panel * PANEL, memory->last_panel + t * PANEL, rows);
    }
}

static void many_tokens_float(const dense_op *op, int64_t num_tokens, int64_t first, int64_t end,
                      dense_memory *memory) {
    const int64_t columns = op->w->columns, most = equal_parts(columns, TILE_COLUMNS);
    const int64_t most_tokens = equal_parts(num_tokens, TOKEN_BLOCK);
    for (int64_t token = 0; token < num_tokens; token += most_tokens) {
        const int64_t tokens = num_tokens - token < most_tokens ? num_tokens - token : most_tokens;
        for (int64_t begin = 0; begin < columns; begin += most) {
            const int64_t length = columns - begin < most ? columns - begin : most;
            for (int64_t t = 0; t < tokens; t++)
                memcpy(memory->x + t * TILE_COLUMNS, op->x + (token + t) * op->x_stride + begin,
                       (size_t)length * sizeof(float));
            tile_panels(op, first, end, begin, length, token, tokens, memory);
        }
    }
}

static void dense_float_chunk(const dense_op *op, int64_t num_tokens, int64_t first, int64_t end, float *scratch) {
    if (num_tokens > FEW_TOKENS)
        many_tokens_float(op, num_tokens, first, end, (dense_memory *)scratch);
    else if (op->w->kind == DENSE_F32)
        few_tokens_F32(op, num_tokens, first, end);
    else if (op->w->kind == DENSE_F16)
        few_tokens_F16(op, num_tokens, first, end);
    else
        few_tokens_BF16(op, num_tokens, first, end);
}

#endif
