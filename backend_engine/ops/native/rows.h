/* Operations on a token's own numbers: norms, rotary positions, activations, sums. */
#ifndef INFLIGHT_ROWS_H
#define INFLIGHT_ROWS_H

#include "native.h"

/* Vectors of `width` numbers, `per_token` of them in a token, `inner` floats apart. */
typedef struct {
    const float *data;
    int64_t stride, inner;
} input_rows;

typedef struct {
    float *data;
    int64_t stride, inner;
} output_rows;

#define FOR_TOKENS(step, chunk, num_chunks, token)                                                                     \
    for (int64_t token = chunk_start((step)->num_tokens, chunk, num_chunks),                                           \
                 last_##token = chunk_start((step)->num_tokens, (chunk) + 1, num_chunks);                              \
         token < last_##token; token++)

INLINE float sum_of_squares(const float *x, int64_t width) {
    vec sums[2] = {{0}, {0}};
    int64_t i = 0;
    for (; i + 2 * LANES <= width; i += 2 * LANES) {
        const vec a = load(x + i), b = load(x + i + LANES);
        sums[0] = multiply_add(a, a, sums[0]);
        sums[1] = multiply_add(b, b, sums[1]);
    }
    float total = sum_of(sums[0] + sums[1]);
    for (; i < width; i++)
        total += x[i] * x[i];
    return total;
}

INLINE float sum_of_row(const float *x, int64_t width) {
    vec sums = {0};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES)
        sums += load(x + i);
    float total = sum_of(sums);
    for (; i < width; i++)
        total += x[i];
    return total;
}

INLINE void norm_row(const float *x, const float *weight, float eps, int64_t width, float *out) {
    const float factor = 1.0f / sqrtf(sum_of_squares(x, width) / (float)width + eps);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES)
        store(out + i, load(x + i) * factor * load(weight + i));
    for (; i < width; i++)
        out[i] = x[i] * factor * weight[i];
}

/* out = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019) */
typedef struct {
    int64_t kind;
    input_rows x;
    output_rows out;
    const float *weight;
    int64_t per_token, width;
    float eps;
} rms_norm_op;

static int64_t rms_norm_chunks(const rms_norm_op *op, const native_step *step, int num_threads) {
    return row_chunks(step->num_tokens, op->per_token * op->width, num_threads);
}

static void rms_norm_chunk(const rms_norm_op *op, const native_step *step, int64_t chunk, int64_t num_chunks) {
    FOR_TOKENS(step, chunk, num_chunks, token)
        for (int64_t j = 0; j < op->per_token; j++)
            norm_row(op->x.data + token * op->x.stride + j * op->x.inner, op->weight, op->eps, op->width,
                     op->out.data + token * op->out.stride + j * op->out.inner);
}

/* total = residual + x, out = rms_norm(total) */
typedef struct {
    int64_t kind;
    const float *x, *residual, *weight;
    float *total, *out;
    int64_t x_stride, residual_stride, width; /* total and out have no gaps */
    float eps;
} add_rms_norm_op;

static int64_t add_rms_norm_chunks(const add_rms_norm_op *op, const native_step *step, int num_threads) {
    return row_chunks(step->num_tokens, op->width, num_threads);
}

static void add_rms_norm_chunk(const add_rms_norm_op *op, const native_step *step, int64_t chunk, int64_t num_chunks) {
    FOR_TOKENS(step, chunk, num_chunks, token) {
        const float *x = op->x + token * op->x_stride, *residual = op->residual + token * op->residual_stride;
        float *total = op->total + token * op->width;
        int64_t i = 0;
        for (; i + LANES <= op->width; i += LANES)
            store(total + i, load(residual + i) + load(x + i));
        for (; i < op->width; i++)
            total[i] = residual[i] + x[i];
        norm_row(total, op->weight, op->eps, op->width, op->out + token * op->width);
    }
}

/* out = (x - mean) / sqrt(variance + eps) * weight + bias (Ba et al., 2016) */
typedef struct {
    int64_t kind;
    input_rows x;
    output_rows out;
    const float *weight, *bias; /* bias may be null */
    int64_t per_token, width;
    float eps;
} layer_norm_op;

static int64_t layer_norm_chunks(const layer_norm_op *op, const native_step *step, int num_threads) {
    return row_chunks(step->num_tokens, op->per_token * op->width, num_threads);
}

static void layer_norm_chunk(const layer_norm_op *op, const native_step *step, int64_t chunk, int64_t num_chunks) {
    FOR_TOKENS(step, chunk, num_chunks, token)
        for (int64_t j = 0; j < op->per_token; j++) {
            const float *x = op->x.data + token * op->x.stride + j * op->x.inner;
            float *out = op->out.data + token * op->out.stride + j * op->out.inner;
            const float mean = sum_of_row(x, op->width) / (float)op->width;
            for (int64_t i = 0; i < op->width; i++)
                out[i] = x[i] - mean;
            const float factor = 1.0f / sqrtf(sum_of_squares(out, op->width) / (float)op->width + op->eps);
            for (int64_t i = 0; i < op->width; i++)
                out[i] = out[i] * factor * op->weight[i] + (op->bias ? op->bias[i] : 0.0f);
        }
}

/* Rotates the first `dim` of the `width` numbers of a head, halves paired, by cosines and signed sines [tokens, dim]:
 * x * cos + (x with its halves swapped) * sin (RoFormer, Su et al., 2021).
 */
typedef struct {
    int64_t kind;
    input_rows x;
    output_rows out;
    const float *cos, *sin;
    int64_t num_heads, width, dim, table_stride;
} rope_op;

static int64_t rope_chunks(const rope_op *op, const native_step *step, int num_threads) {
    return row_chunks(step->num_tokens, op->num_heads * op->width, num_threads);
}

static void rope_chunk(const rope_op *op, const native_step *step, int64_t chunk, int64_t num_chunks) {
    const int64_t half = op->dim / 2;
    FOR_TOKENS(step, chunk, num_chunks, token) {
        const float *cos = op->cos + token * op->table_stride, *sin = op->sin + token * op->table_stride;
        for (int64_t head = 0; head < op->num_heads; head++) {
            const float *x = op->x.data + token * op->x.stride + head * op->x.inner;
            float *out = op->out.data + token * op->out.stride + head * op->out.inner;
            int64_t i = 0;
            for (; i + LANES <= half; i += LANES) {
                const vec low = load(x + i), high = load(x + half + i);
                store(out + i, multiply_add(high, load(sin + i), low * load(cos + i)));
                store(out + half + i, multiply_add(low, load(sin + half + i), high * load(cos + half + i)));
            }
            for (; i < half; i++) {
                const float low = x[i], high = x[half + i];
                out[i] = fmaf(high, sin[i], low * cos[i]);
                out[half + i] = fmaf(low, sin[half + i], high * cos[half + i]);
            }
            for (i = op->dim; i < op->width; i++)
                out[i] = x[i];
        }
    }
}

enum { ACT_SILU = 0, ACT_GELU_TANH = 1, ACT_GELU = 2, ACT_RELU = 3, ACT_CLAMPED_SWIGLU = 4 };

/* gated: x [tokens, 2 * width] holds gate and up side by side, out = act(gate) * up; else x [tokens, width]. alpha and
 * limit are those of the clamped swiglu alone, which is (up + 1) * gate * sigmoid(alpha * gate).
 */
typedef struct {
    int64_t kind;
    const float *x;
    float *out;
    int64_t x_stride, width, act, gated;
    float alpha, limit;
} activation_op;

static int64_t activation_chunks(const activation_op *op, const native_step *step, int num_threads) {
    return row_chunks(step->num_tokens, 4 * op->width, num_threads);
}

INLINE vec sigmoid_of(vec x) { return 1.0f / (1.0f + exp_of(-x)); }

INLINE vec act_of(const int64_t act, vec x, vec up, const activation_op *op) {
    if (act == ACT_SILU)
        return x / (1.0f + exp_of(-x)) * up;
    if (act == ACT_RELU)
        return choose(x > 0.0f, x, choose(x != x, x, (vec){0})) * up;
    if (act == ACT_GELU_TANH) {
        /* 0.5 (1 + tanh(u)) = 1 - 1 / (exp(2 u) + 1) (Hendrycks and Gimpel, 2016) */
        const vec u = 0.7978845608028654f * multiply_add(0.044715f * x * x, x, x);
        return x * (1.0f - 1.0f / (exp_of(2.0f * u) + 1.0f)) * up;
    }
    if (act == ACT_CLAMPED_SWIGLU) {
        const vec limit = broadcast(op->limit);
        const vec gate = choose(x > limit, limit, x);
        const vec bounded = choose(up > limit, limit, choose(up < -limit, -limit, up));
        return (bounded + 1.0f) * (gate * sigmoid_of(op->alpha * gate));
    }
    vec result;
    for (int i = 0; i < LANES; i++)
        result[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678118654752f));
    return result * up;
}

INLINE void activate_as(const int64_t act, const activation_op *op, const float *x, const float *up, int64_t width,
                        float *out) {
    const vec one = broadcast(1.0f);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES)
        store(out + i, act_of(act, load(x + i), op->gated ? load(up + i) : one, op));
    if (i < width) {
        /* The rest as a vector of its own, so that a number's place changes nothing. */
        const size_t rest = (size_t)(width - i) * sizeof(float);
        vec last = {0}, last_up = one;
        memcpy(&last, x + i, rest);
        if (op->gated)
            memcpy(&last_up, up + i, rest);
        const vec result = act_of(act, last, last_up, op);
        memcpy(out + i, &result, rest);
    }
}

/* `width` numbers; up: those of the gated ones that they gate. */
static void activate(const activation_op *op, const float *x, const float *up, int64_t width, float *out) {
    switch (op->act) {
    case ACT_SILU: activate_as(ACT_SILU, op, x, up, width, out); break;
    case ACT_GELU_TANH: activate_as(ACT_GELU_TANH, op, x, up, width, out); break;
    case ACT_GELU: activate_as(ACT_GELU, op, x, up, width, out); break;
    case ACT_RELU: activate_as(ACT_RELU, op, x, up, width, out); break;
    default: activate_as(ACT_CLAMPED_SWIGLU, op, x, up, width, out);
    }
}

static void activation_chunk(const activation_op *op, const native_step *step, int64_t chunk, int64_t num_chunks) {
    FOR_TOKENS(step, chunk, num_chunks, token) {
        const float *x = op->x + token * op->x_stride;
        activate(op, x, x + op->width, op->width, op->out + token * op->width);
    }
}

/* out = x * factor */
typedef struct {
    int64_t kind;
    const float *x;
    float *out;
    int64_t x_stride, width;
    float factor;
} scale_op;

static int64_t scale_chunks(const scale_op *op, const native_step *step, int num_threads) {
    return row_chunks(step->num_tokens, op->width, num_threads);
}

static void scale_chunk(const scale_op *op, const native_step *step, int64_t chunk, int64_t num_chunks) {
    FOR_TOKENS(step, chunk, num_chunks, token)
        for (int64_t i = 0; i < op->width; i++)
            op->out[token * op->width + i] = op->x[token * op->x_stride + i] * op->factor;
}

/* out = x + y */
typedef struct {
    int64_t kind;
    const float *x, *y;
    float *out;
    int64_t x_stride, y_stride, width;
} add_op;

static int64_t add_chunks(const add_op *op, const native_step *step, int num_threads) {
    return row_chunks(step->num_tokens, op->width, num_threads);
}

static void add_chunk(const add_op *op, const native_step *step, int64_t chunk, int64_t num_chunks) {
    FOR_TOKENS(step, chunk, num_chunks, token)
        for (int64_t i = 0; i < op->width; i++)
            op->out[token * op->width + i] = op->x[token * op->x_stride + i] + op->y[token * op->y_stride + i];
}

#endif
