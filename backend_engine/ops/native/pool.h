/* The threads of the native library. A run is a list of operations, one after another; the chunks of an operation are
 * handed out one by one to whoever asks, and the next operation begins when all of them are done.
 *
 * An operation waits for chunks, not for threads: a thread that the system has put aside between two chunks holds up
 * nobody, and the caller's own thread can do all of a run by itself. So the server's processes may take a core away at
 * any time. Threads without a run look for one for a moment, then sleep. A second caller at the same time, which the
 * engine never is, runs alone.
 */
#ifndef INFLIGHT_POOL_H
#define INFLIGHT_POOL_H

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

#include "native.h"

#define MAX_THREADS 256
#define LOOKS_BEFORE_SLEEP 3000 /* some 50 microseconds */
#define LOOKS_BEFORE_YIELD 2000
#define GATE_OPEN 1
#define GATE_INSIDE 2 /* for each thread inside */

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

static int64_t op_chunks(const void *op, const native_step *step, int num_threads);
static void op_chunk(const void *op, const native_step *step, int64_t chunk, int64_t num_chunks, float *scratch);

typedef struct {
    int64_t next, done;
    char padding[112]; /* two counters of one operation share a cache line with no other's */
} op_progress;

typedef struct {
    const void *const *ops;
    int64_t num_ops;
    const native_step *step;
    int num_threads;
    op_progress *progress;
} native_run_state;

static struct {
    pthread_mutex_t busy, lock;
    pthread_cond_t wake;
    int num_workers;
    int64_t epoch, gate, num_asleep;
    native_run_state now;
    int64_t capacity;
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static __thread float *own_scratch;

static float *thread_scratch(void) {
    void *memory = 0;
    if (!own_scratch && posix_memalign(&memory, 64, SCRATCH_FLOATS * sizeof(float)) == 0)
        own_scratch = memory;
    return own_scratch;
}

static void run_alone(const void *const *ops, int64_t num_ops, const native_step *step, float *scratch) {
    for (int64_t i = 0; i < num_ops; i++) {
        const int64_t chunks = op_chunks(ops[i], step, 1);
        for (int64_t chunk = 0; chunk < chunks; chunk++)
            op_chunk(ops[i], step, chunk, chunks, scratch);
    }
}

static void work(const native_run_state *run, float *scratch) {
    for (int64_t i = 0; i < run->num_ops; i++) {
        op_progress *at = &run->progress[i];
        const int64_t chunks = op_chunks(run->ops[i], run->step, run->num_threads);
        int64_t chunk;
        while ((chunk = __atomic_fetch_add(&at->next, 1, __ATOMIC_RELAXED)) < chunks) {
            op_chunk(run->ops[i], run->step, chunk, chunks, scratch);
            __atomic_fetch_add(&at->done, 1, __ATOMIC_RELEASE);
        }
        for (int looks = 0; __atomic_load_n(&at->done, __ATOMIC_ACQUIRE) < chunks; looks++)
            if (looks < LOOKS_BEFORE_YIELD)
                PAUSE();
            else
                sched_yield();
    }
}

static int enter(void) {
    int64_t gate = __atomic_load_n(&pool.gate, __ATOMIC_ACQUIRE);
    while (gate & GATE_OPEN)
        if (__atomic_compare_exchange_n(&pool.gate, &gate, gate + GATE_INSIDE, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            return 1;
    return 0;
}

static void *worker(void *data) {
    const int index = (int)(intptr_t)data;
    float *scratch = thread_scratch();
    int64_t seen = 0;
    for (;;) {
        int looks = 0;
        while (__atomic_load_n(&pool.epoch, __ATOMIC_ACQUIRE) == seen && looks++ < LOOKS_BEFORE_SLEEP)
            PAUSE();
        if (__atomic_load_n(&pool.epoch, __ATOMIC_ACQUIRE) == seen) {
            pthread_mutex_lock(&pool.lock);
            __atomic_fetch_add(&pool.num_asleep, 1, __ATOMIC_SEQ_CST);
            while (__atomic_load_n(&pool.epoch, __ATOMIC_SEQ_CST) == seen)
                pthread_cond_wait(&pool.wake, &pool.lock);
            __atomic_fetch_add(&pool.num_asleep, -1, __ATOMIC_SEQ_CST);
            pthread_mutex_unlock(&pool.lock);
        }
        seen = __atomic_load_n(&pool.epoch, __ATOMIC_ACQUIRE);
        if (scratch && enter()) {
            if (index < pool.now.num_threads)
                work(&pool.now, scratch);
            __atomic_fetch_add(&pool.gate, -GATE_INSIDE, __ATOMIC_RELEASE);
        }
    }
    return 0;
}

/* Starts workers until there are so many; as many as can be had. */
static void start_workers(int wanted) {
    for (; pool.num_workers < wanted; pool.num_workers++) {
        pthread_t thread;
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        const int failed = pthread_create(&thread, &attributes, worker, (void *)(intptr_t)(pool.num_workers + 1));
        pthread_attr_destroy(&attributes);
        if (failed)
            return;
    }
}

static int has_room_for(int64_t num_ops) {
    if (num_ops > pool.capacity) {
        void *memory = 0;
        if (posix_memalign(&memory, 64, (size_t)num_ops * sizeof(op_progress)))
            return 0;
        free(pool.now.progress);
        pool.now.progress = memory;
        pool.capacity = num_ops;
    }
    return 1;
}

/* After a fork the workers are the parent's. */
static void forget_workers(void) {
    memset(&pool, 0, sizeof pool);
    pthread_mutex_init(&pool.busy, 0);
    pthread_mutex_init(&pool.lock, 0);
    pthread_cond_init(&pool.wake, 0);
}

/* Runs the operations with up to num_threads threads. Returns 0, or 1 without memory. */
static int run_ops(const void *const *ops, int64_t num_ops, const native_step *step, int num_threads) {
    float *scratch = thread_scratch();
    if (!scratch)
        return 1;
    num_threads = num_threads < MAX_THREADS ? num_threads : MAX_THREADS;
    const int is_small = num_ops == 1 && op_chunks(ops[0], step, num_threads) < 2;
    if (num_threads < 2 || is_small || pthread_mutex_trylock(&pool.busy)) {
        run_alone(ops, num_ops, step, scratch);
        return 0;
    }
    if (!has_room_for(num_ops)) {
        pthread_mutex_unlock(&pool.busy);
        return 1;
    }
    start_workers(num_threads - 1);
    pool.now.ops = ops;
    pool.now.num_ops = num_ops;
    pool.now.step = step;
    pool.now.num_threads = num_threads;
    for (int64_t i = 0; i < num_ops; i++)
        pool.now.progress[i].next = pool.now.progress[i].done = 0;
    __atomic_store_n(&pool.gate, GATE_OPEN, __ATOMIC_RELEASE);
    __atomic_fetch_add(&pool.epoch, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&pool.num_asleep, __ATOMIC_SEQ_CST)) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    work(&pool.now, scratch);
    __atomic_fetch_and(&pool.gate, ~(int64_t)GATE_OPEN, __ATOMIC_ACQ_REL);
    for (int looks = 0; __atomic_load_n(&pool.gate, __ATOMIC_ACQUIRE); looks++)
        if (looks < LOOKS_BEFORE_YIELD)
            PAUSE();
        else
            sched_yield();
    pthread_mutex_unlock(&pool.busy);
    return 0;
}

#endif
