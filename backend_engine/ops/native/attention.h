/* Attention over the paged KV cache, which is read where it lies.
 *
 * A piece of work is some tokens of one row with the query heads that share one head of the cache: keys are read once for
 * all of them. They are walked in tiles of KEY_TILE positions, counted from the beginning of the text, with a softmax
 * that goes along (Milakov and Gimelshein, 2018; FlashAttention, 2022). A score is a sum over the head's numbers in
 * order, a result a sum over the keys in order: neither depends on which queries are taken together, so that a token has
 * the same bits alone, in a batch, in whatever chunk and with reused blocks. What a query does not see has weight zero,
 * and never meets it where it is no finite number.
 */
#ifndef INFLIGHT_ATTENTION_H
#define INFLIGHT_ATTENTION_H

#include "attention_tiles.h"

#define SMALL_ATTENTION 32768 /* numbers of the cache, times queries / 4, that one thread attends sooner than two */
#define PIECES_PER_THREAD 3
#define ITEMS_IN_A_ROW 4 /* single tokens of a piece of work, at least, unless threads would go without */

/* pool: [num_blocks, 2, tokens_per_block, num_kv_heads, head_dim] of kind pool_dtype (kv_numbers.h), K first.
 * pool_scales: of int8, the same without the last axis. k_scale, v_scale: of fp8, otherwise 1. k, v: [num_kv_heads,
 * head_dim] for each token, k_stride and v_stride floats apart.
 */
typedef struct {
    int64_t kind;
    void *pool;
    float *pool_scales;
    const float *k, *v;
    int64_t pool_dtype, num_kv_heads, head_dim, k_stride, v_stride;
    float k_scale, v_scale;
} append_kv_op;

static int64_t append_kv_chunks(const append_kv_op *op, const native_step *step, int num_threads) {
    return row_chunks(step->num_tokens, 2 * op->num_kv_heads * op->head_dim, num_threads);
}

INLINE void append_kv_token(const int kind, const append_kv_op *op, const native_step *step, int64_t token) {
    const int64_t slot = step->slot_mapping[token], size = step->tokens_per_block, block = slot / size;
    for (int plane = 0; plane < 2; plane++) {
        const float *from = plane ? op->v + token * op->v_stride : op->k + token * op->k_stride;
        const int64_t first = ((block * 2 + plane) * size + slot % size) * op->num_kv_heads;
        const float scale = plane ? op->v_scale : op->k_scale;
        for (int64_t head = 0; head < op->num_kv_heads; head++) {
            char *to = (char *)op->pool + (first + head) * op->head_dim * kv_number_bytes(kind);
            const float factor = write_kv_numbers(kind, to, from + head * op->head_dim, op->head_dim, scale);
            if (kind == KV_INT8)
                op->pool_scales[first + head] = factor;
        }
    }
}

static void append_kv_chunk(const append_kv_op *op, const native_step *step, int64_t chunk, int64_t num_chunks,
                            float *scratch) {
    (void)scratch;
    const int64_t end = chunk_start(step->num_tokens, chunk + 1, num_chunks);
#define APPEND(kind)                                                                                                   \
    for (int64_t token = chunk_start(step->num_tokens, chunk, num_chunks); token < end; token++)                       \
        append_kv_token(kind, op, step, token)
    FOR_KV_KIND(op->pool_dtype, APPEND)
#undef APPEND
}

/* ---- one piece of work --------------------------------------------------------------------------------------- */

/* Queries `row` to `stop` and their weights times the values of a tile. */
static void add_values(attended *s, int row, int stop, int64_t tile, int64_t column, int vecs) {
    int64_t first = KEY_TILE, end = 0;
    for (int r = row; r < stop; r++) {
        first = smaller(first, larger(s->first[r] - tile, 0));
        end = larger(end, smaller(s->end[r] - tile, KEY_TILE));
    }
    if (first < end)
        product_of(stop - row, vecs)(s->weights + row * KEY_TILE + first, KEY_TILE,
                                     s->values + first * s->values_stride + column, s->values_stride, end - first,
                                     s->out + row * s->out_stride + column, s->out_stride, 1);
}

/* The scores of all queries with a tile. */
static void score_tile(const attend_op *op, attended *s, int64_t first, int64_t end, const tile_places *now,
                       const tile_ahead *next) {
    const int num_blocks = (s->num_rows + BLOCK_ROWS_ATTENDED - 1) / BLOCK_ROWS_ATTENDED;
    const int widest = (s->num_rows + num_blocks - 1) / num_blocks;
    const int64_t num_vecs = (end + LANES - 1) / LANES;
#define READ_KEYS(kind) read_keys(kind, op, now, next, first, end, s->keys)
    FOR_KV_KIND(op->pool_dtype, READ_KEYS)
#undef READ_KEYS
    for (int64_t v = 0; v < num_vecs;) {
        const int vecs = next_vecs(widest, num_vecs - v);
        for (int block = 0; block < num_blocks; block++) {
            const int row = s->num_rows * block / num_blocks, stop = s->num_rows * (block + 1) / num_blocks;
            product_of(stop - row, vecs)(s->q + row * op->head_dim, op->head_dim, s->keys + v * LANES, KEYS_STRIDE,
                                         op->head_dim, s->weights + row * KEY_TILE + v * LANES, KEY_TILE, 0);
        }
        v += vecs;
    }
}

/* One tile: its positions first to end are seen by some query. */
static void attend_tile(const attend_op *op, attended *s, int64_t tile, int64_t first, int64_t end,
                        const tile_places *now, const tile_ahead *next) {
    const int64_t num_vecs = (end + LANES - 1) / LANES;
    int num_blocks = (s->num_rows + BLOCK_ROWS_ATTENDED - 1) / BLOCK_ROWS_ATTENDED, all_seen = 1, finite = 1;
    for (int row = 0; row < s->num_rows; row++)
        all_seen &= s->first[row] <= tile + first && s->end[row] >= tile + end;
    const int is_few = HAS_AVX2 && all_seen && s->num_rows <= FEW_ROWS;
    const int widest = (s->num_rows + num_blocks - 1) / num_blocks;
    if (!is_few || op->pool_dtype != KV_FLOAT32)
        score_tile(op, s, first, end, now, next);
#if HAS_AVX2
    else
        score_few_floats(op, s, now, next, end);
#endif
    for (int row = 0; row < s->num_rows; row++)
        weigh(op, s, row, tile, num_vecs);
#if HAS_AVX2
    if (is_few && add_few_values(op, s, first, end, now, next))
        return;
#endif
#define READ_VALUES(kind) finite = read_values(kind, op, now, next, first, end, s->values, s->values_stride)
    FOR_KV_KIND(op->pool_dtype, READ_VALUES)
#undef READ_VALUES
    /* Where a value that some do not see is infinite or no number, each query has its own keys alone. */
    if (!all_seen && !finite)
        num_blocks = s->num_rows;
    for (int64_t d = 0; d < s->out_stride;) {
        const int vecs = next_vecs(num_blocks == s->num_rows ? 1 : widest, (s->out_stride - d) / LANES);
        for (int block = 0; block < num_blocks; block++)
            add_values(s, s->num_rows * block / num_blocks, s->num_rows * (block + 1) / num_blocks, tile, d, vecs);
        d += vecs * LANES;
    }
}

/* The queries of one head of the cache: `row` of the item's [tokens, group], and as many as s has. */
static void begin_rows(const attend_op *op, const int32_t *item, int64_t head, int64_t row, attended *s) {
    const int64_t group = op->num_heads / op->num_kv_heads, dim = op->head_dim;
    for (int r = 0; r < s->num_rows; r++) {
        const int64_t token = (row + r) / group, query = head * group + (row + r) % group;
        const float *from = op->q + (item[1] + token) * op->q_stride + query * dim;
        for (int64_t d = 0; d < dim; d++)
            s->q[r * dim + d] = from[d] * op->scale;
        s->end[r] = item[3] + token + 1;
        s->first[r] = op->window > 0 ? larger(0, s->end[r] - op->window) : 0;
        s->highest[r] = op->sinks ? op->sinks[query] : -INFINITY;
        s->sum[r] = s->highest[r] == -INFINITY ? 0 : 1;
    }
    memset(s->out, 0, (size_t)(s->num_rows * s->out_stride) * sizeof(float));
}

static void finish_rows(const attend_op *op, const int32_t *item, int64_t head, int64_t row, const attended *s) {
    const int64_t group = op->num_heads / op->num_kv_heads, dim = op->head_dim;
    for (int r = 0; r < s->num_rows; r++) {
        const int64_t token = (row + r) / group, query = head * group + (row + r) % group;
        float *to = op->out + (item[1] + token) * op->out_stride + query * dim;
        for (int64_t d = 0; d < dim; d++)
            to[d] = s->out[r * s->out_stride + d] / s->sum[r] + 0.0f; /* whether keys were left out may turn -0 to 0 */
    }
}

/* The queries of the i-th of the heads that go along the text together. */
INLINE attended of_head(const attended *s, int64_t i, int64_t dim) {
    const int64_t row = i * s->num_rows;
    attended one = *s;
    one.q += row * dim;
    one.out += row * s->out_stride;
    one.first += row;
    one.end += row;
    one.highest += row;
    one.sum += row;
    return one;
}

/* Where the first tile of a query lies; returns how many positions of it. */
static int64_t find_first_places(const attend_op *op, const native_step *step, const int32_t *item, int64_t head,
                                 tile_places *places) {
    const int64_t end = item[3] + 1, first = op->window > 0 ? larger(0, end - op->window) : 0;
    const int64_t tile = first / KEY_TILE * KEY_TILE, seen = smaller(end - tile, KEY_TILE);
    find_places(op, step, step->block_tables + item[0] * step->table_stride, head, tile, first - tile, seen, places);
    return seen;
}

/* Some rows of num_heads heads from `head` on: all of them in one tile after the other. after: the item whose first
 * tile begins to be read meanwhile, or NULL.
 */
static void attend_rows(const attend_op *op, const native_step *step, const int32_t *item, int64_t head,
                        int64_t num_heads, int64_t row, const int32_t *after, const attended *s) {
    const int32_t *table = step->block_tables + item[0] * step->table_stride;
    const int64_t vector_bytes = op->head_dim * kv_number_bytes(op->pool_dtype);
    for (int64_t i = 0; i < num_heads; i++) {
        attended one = of_head(s, i, op->head_dim);
        begin_rows(op, item, head + i, row, &one);
    }
    const int64_t first = s->first[0], end = s->end[s->num_rows - 1];
    tile_places places[2];
    int64_t tile = first / KEY_TILE * KEY_TILE;
    find_places(op, step, table, head, tile, first - tile, smaller(end - tile, KEY_TILE), &places[0]);
    for (int turn = 0; tile < end; tile += KEY_TILE, turn ^= 1) {
        const int64_t next = tile + KEY_TILE;
        int64_t ahead = 0;
        if (next < end) {
            ahead = smaller(end - next, KEY_TILE);
            find_places(op, step, table, head, next, 0, ahead, &places[turn ^ 1]);
        } else if (after) {
            ahead = find_first_places(op, step, after, head, &places[turn ^ 1]);
        }
        for (int64_t i = 0; i < num_heads; i++) {
            attended one = of_head(s, i, op->head_dim);
            attend_op beside = *op;
            beside.pool = (const char *)op->pool + i * vector_bytes;
            beside.pool_scales = op->pool_scales ? op->pool_scales + i : 0;
            const tile_ahead to_fetch = {op->pool,
                                         &places[turn ^ 1],
                                         chunk_start(ahead, i, num_heads),
                                         chunk_start(ahead, i + 1, num_heads),
                                         vector_bytes,
                                         vector_bytes * num_heads};
            attend_tile(&beside, &one, tile, larger(first - tile, 0), smaller(end - tile, KEY_TILE), &places[turn],
                        &to_fetch);
        }
    }
    for (int64_t i = 0; i < num_heads; i++) {
        const attended one = of_head(s, i, op->head_dim);
        finish_rows(op, item, head + i, row, &one);
    }
}

/* Heads `head` to `end` of an item. The heads of a single token go along the text together, so that the cache is read
 * from its beginning to its end; those of many tokens one by one, so that what they read stays near.
 */
static void attend_item(const attend_op *op, const native_step *step, const int32_t *item, int64_t head, int64_t end,
                        int64_t max_rows, const int32_t *after, attended *s) {
    const int64_t rows = item[2] * (op->num_heads / op->num_kv_heads), passes = (rows + max_rows - 1) / max_rows;
    const int64_t together = item[2] == 1 && passes == 1 ? max_rows / rows : 1;
    for (int64_t heads; head < end; head += heads) {
        heads = smaller(together, end - head);
        for (int64_t pass = 0; pass < passes; pass++) {
            const int64_t row = rows * pass / passes;
            s->num_rows = (int)(rows * (pass + 1) / passes - row);
            attend_rows(op, step, item, head, heads, row, head + heads < end ? 0 : after, s);
        }
    }
}

/* Groups that the heads of the cache are cut into, for enough pieces of work. */
INLINE int64_t head_groups(const attend_op *op, const native_step *step, int num_threads) {
    const int64_t wanted = (int64_t)num_threads * PIECES_PER_THREAD, items = larger(step->num_items, 1);
    return num_threads == 1 ? 1 : smaller(op->num_kv_heads, (wanted + items - 1) / items);
}

/* Items that are single tokens are taken several in a row, each while the next one begins to be read. */
static int64_t attend_chunks(const attend_op *op, const native_step *step, int num_threads) {
    const int64_t group = op->num_heads / op->num_kv_heads, items = step->num_items;
    int64_t work = 0;
    for (int64_t i = 0; i < items && work < SMALL_ATTENTION; i++) {
        const int32_t *item = step->items + 4 * i;
        const int64_t seen = item[3] + item[2], keys = op->window > 0 ? smaller(seen, op->window + item[2]) : seen;
        work += keys * op->num_kv_heads * op->head_dim * 2 * (1 + item[2] * group / 4);
    }
    const int64_t groups = work < SMALL_ATTENTION ? 1 : head_groups(op, step, num_threads);
    if (groups > 1 || step->num_tokens != items)
        return items * groups;
    const int64_t runs = smaller(items / ITEMS_IN_A_ROW, (int64_t)num_threads * CHUNKS_PER_THREAD);
    return smaller(items, num_threads == 1 ? 1 : larger(runs, num_threads));
}

/* Either some items, or some heads of one. */
static void attend_chunk(const attend_op *op, const native_step *step, int64_t chunk, int64_t num_chunks,
                         float *scratch) {
    const int64_t items = step->num_items, groups = num_chunks > items ? num_chunks / items : 1;
    const int64_t group = chunk % groups, dim = op->head_dim, num_parts = num_chunks / groups;
    int64_t seen[2][MAX_ROWS_ATTENDED];
    float state[2][MAX_ROWS_ATTENDED];
    attended s = {.first = seen[0], .end = seen[1], .highest = state[0], .sum = state[1]};
    s.out_stride = (dim + LANES - 1) / LANES * LANES;
    s.values_stride = s.out_stride + PAD;
    const int64_t max_rows = smaller(MAX_ROWS_ATTENDED, MAX_QUERY_FLOATS / s.out_stride);
    s.q = scratch;
    s.out = s.q + max_rows * s.out_stride;
    s.weights = s.out + max_rows * s.out_stride;
    s.keys = s.weights + max_rows * KEY_TILE;
    s.values = s.keys + dim * KEYS_STRIDE;
    const int64_t end = chunk_start(items, chunk / groups + 1, num_parts);
    for (int64_t i = chunk_start(items, chunk / groups, num_parts); i < end; i++)
        attend_item(op, step, step->items + 4 * i, chunk_start(op->num_kv_heads, group, groups),
                    chunk_start(op->num_kv_heads, group + 1, groups), max_rows,
                    i + 1 < end ? step->items + 4 * (i + 1) : 0, &s);
}

#endif
