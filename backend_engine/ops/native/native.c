/* The native library: one source, compiled by native_library.py on the machine it runs on, called by native_runtime.py.
 */

#define _GNU_SOURCE
#include <time.h>

#include "packed.h"
#include "pool.h"
#include "rows.h"
#include "dense.h"
#include "attention.h"

static int64_t op_chunks(const void *op, const native_step *step, int num_threads) {
    switch (*(const int64_t *)op) {
    case OP_DENSE: return dense_chunks(op, step, num_threads);
    case OP_ROUND: return round_chunks(op, step, num_threads);
    case OP_PACK: return pack_chunks(op, num_threads);
    case OP_APPEND_KV: return append_kv_chunks(op, step, num_threads);
    case OP_ATTEND: return attend_chunks(op, step, num_threads);
    case OP_PACKED: return packed_chunks(op, step, num_threads);
    case OP_PACKED_DECODE: return packed_decode_chunks(op, num_threads);
    case OP_RMS_NORM: return rms_norm_chunks(op, step, num_threads);
    case OP_ADD_RMS_NORM: return add_rms_norm_chunks(op, step, num_threads);
    case OP_LAYER_NORM: return layer_norm_chunks(op, step, num_threads);
    case OP_ROPE: return rope_chunks(op, step, num_threads);
    case OP_ACTIVATION: return activation_chunks(op, step, num_threads);
    case OP_SCALE: return scale_chunks(op, step, num_threads);
    case OP_ADD: return add_chunks(op, step, num_threads);
    default: return 0;
    }
}

static void op_chunk(const void *op, const native_step *step, int64_t chunk, int64_t num_chunks, float *scratch) {
    (void)scratch;
    switch (*(const int64_t *)op) {
    case OP_DENSE: dense_chunk(op, step, chunk, num_chunks, scratch); break;
    case OP_ROUND: round_chunk(op, step, chunk, num_chunks); break;
    case OP_PACK: pack_chunk(op, chunk, num_chunks); break;
    case OP_APPEND_KV: append_kv_chunk(op, step, chunk, num_chunks, scratch); break;
    case OP_ATTEND: attend_chunk(op, step, chunk, num_chunks, scratch); break;
    case OP_PACKED: packed_chunk(op, step, chunk, num_chunks, scratch); break;
    case OP_PACKED_DECODE: packed_decode_chunk(op, chunk, num_chunks); break;
    case OP_RMS_NORM: rms_norm_chunk(op, step, chunk, num_chunks); break;
    case OP_ADD_RMS_NORM: add_rms_norm_chunk(op, step, chunk, num_chunks); break;
    case OP_LAYER_NORM: layer_norm_chunk(op, step, chunk, num_chunks); break;
    case OP_ROPE: rope_chunk(op, step, chunk, num_chunks); break;
    case OP_ACTIVATION: activation_chunk(op, step, chunk, num_chunks); break;
    case OP_SCALE: scale_chunk(op, step, chunk, num_chunks); break;
    case OP_ADD: add_chunk(op, step, chunk, num_chunks); break;
    }
}

__attribute__((constructor)) static void prepare_for_forks(void) { pthread_atfork(0, 0, forget_workers); }

/* Numbers of a vector, and whether products use AVX2 and, of integers, VNNI. */
int native_lanes(void) { return LANES; }
int native_has_avx2(void) { return HAS_AVX2; }
int native_has_vnni(void) { return HAS_VNNI; }

/* Runs operations one after another. Returns 0, or 1 without memory. */
int native_run(const void *const *ops, int64_t num_ops, const native_step *step, int num_threads) {
    return run_ops(ops, num_ops, step, num_threads);
}

/* The same, and adds the seconds that each takes to `seconds` [num_ops]. */
int native_profile(const void *const *ops, int64_t num_ops, const native_step *step, int num_threads, double *seconds) {
    for (int64_t i = 0; i < num_ops; i++) {
        struct timespec before, after;
        clock_gettime(CLOCK_MONOTONIC, &before);
        if (run_ops(ops + i, 1, step, num_threads))
            return 1;
        clock_gettime(CLOCK_MONOTONIC, &after);
        seconds[i] += (double)(after.tv_sec - before.tv_sec) + (double)(after.tv_nsec - before.tv_nsec) * 1e-9;
    }
    return 0;
}

/* One operation for num_tokens tokens that needs nothing else of a step. */
int native_run_one(const void *op, int64_t num_tokens, int num_threads) {
    const native_step step = {.num_tokens = num_tokens};
    return run_ops(&op, 1, &step, num_threads);
}
