/* Threads: parallel regions, a barrier, and loops whose work is stolen.

   The threads of a region divide each loop into parts of about the same size and wait for each other after it. In
   long loops (`Loop`) a thread that is done takes over from one that is not, because another process has its core.

   Two things to know before changing this. Threads are those of libgomp, which torch has loaded, so that the process
   has one pool of them; GOMP_parallel, which gcc calls for `#pragma omp parallel`, is called directly, because clang
   would call a library of its own. And the barrier is not libgomp's, which hardly spins where a process has more
   OpenMP threads than cores: another engine, or torch in another thread, is enough for that, and a token passes 300
   barriers. */

#pragma once

#include "compiler.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

void GOMP_parallel(void (*body)(void *), void *data, unsigned num_threads, unsigned flags);
int omp_get_thread_num(void);
int omp_get_num_threads(void);

#if defined(__x86_64__)
#define SPINS 4000 /* 0.2 ms: longer, and threads of a busy machine spin while others should run (docs/log/cpu.md) */
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define SPINS 20000
#define RELAX() __asm__ volatile("isb")
#else
#define SPINS 20000
#define RELAX() __asm__ volatile("")
#endif

typedef struct {
    int64_t taken; /* how many indices of this thread's part of the current loop are taken */
} ALIGNED Taken;

typedef struct { /* shared by the threads of a region */
    Taken *parts;  /* by thread */
    int64_t spins; /* before a thread sleeps */
    int32_t arrived, phase, sleeping;
} ALIGNED Barrier;

typedef struct {
    int64_t index, count;
    Barrier *barrier;
} Thread;

typedef struct {
    int64_t first, end;
} Part;

/* How often a thread looks before it sleeps: as often as the threads of libgomp where its environment variables say so,
   which users of a shared machine set. */
int64_t num_spins(void) {
    const char *count = getenv("GOMP_SPINCOUNT"), *policy = getenv("OMP_WAIT_POLICY");
    if (count && *count >= '0' && *count <= '9') {
        char *suffix;
        int64_t spins = strtoll(count, &suffix, 10);
        return *suffix == 'k' ? spins * 1000 : *suffix == 'M' ? spins * 1000000 : spins;
    }
    return policy && (*policy == 'p' || *policy == 'P') ? 0 : SPINS; /* passive */
}

typedef struct {
    void (*body)(const Thread *, const void *);
    const void *data;
    Barrier *barrier;
} Region;

static void enter_region(void *data) {
    const Region *region = data;
    Thread thread = {omp_get_thread_num(), omp_get_num_threads(), region->barrier};
    region->body(&thread, region->data);
}

/* Calls body(thread, data) in each of the threads and waits for all of them. */
static void run_region(int64_t num_threads, void (*body)(const Thread *, const void *), const void *data) {
    Taken parts[num_threads];
    Barrier barrier = {parts, num_spins(), 0, 0, 0};
    Region region = {body, data, &barrier};
    memset(parts, 0, sizeof parts);
    GOMP_parallel(enter_region, &region, num_threads, 0);
}

/* This thread's part of a loop. */
INLINE Part part_of(const Thread *thread, int64_t count) {
    return (Part){count * thread->index / thread->count, count * (thread->index + 1) / thread->count};
}

typedef struct { /* a loop whose parts are not fixed */
    const Thread *thread;
    int64_t count, owner; /* owner: the thread from whose part indices are taken */
    Part part;
} Loop;

INLINE Loop loop_of(const Thread *thread, int64_t count) {
    return (Loop){thread, count, thread->index, part_of(thread, count)};
}

/* The next index of the loop for this thread, from its own part in order, then from those of others. -1: the loop is
   done. */
INLINE int64_t take(Loop *loop) {
    for (;;) {
        int64_t *taken = &loop->thread->barrier->parts[loop->owner].taken;
        int64_t index = loop->part.first + __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED);
        if (index < loop->part.end) return index;
        Thread next = *loop->thread;
        next.index = loop->owner + 1 == next.count ? 0 : loop->owner + 1;
        if (next.index == loop->thread->index) return -1;
        loop->owner = next.index, loop->part = part_of(&next, loop->count);
    }
}

/* Waits until all threads have called it. The next loop begins. */
static void wait_for_all(const Thread *thread) {
    Barrier *b = thread->barrier;
    if (thread->count == 1) {
        b->parts[0].taken = 0;
        return;
    }
    int32_t phase = __atomic_load_n(&b->phase, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&b->arrived, 1, __ATOMIC_ACQ_REL) == thread->count) {
        __atomic_store_n(&b->arrived, 0, __ATOMIC_RELAXED);
        for (int64_t i = 0; i < thread->count; i++) __atomic_store_n(&b->parts[i].taken, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&b->phase, phase + 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&b->sleeping, __ATOMIC_SEQ_CST))
            syscall(SYS_futex, &b->phase, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
        return;
    }
    for (int64_t i = 0; i < b->spins; i++) {
        if (__atomic_load_n(&b->phase, __ATOMIC_ACQUIRE) != phase) return;
        RELAX();
    }
    __atomic_add_fetch(&b->sleeping, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&b->phase, __ATOMIC_SEQ_CST) == phase)
        syscall(SYS_futex, &b->phase, FUTEX_WAIT_PRIVATE, phase, NULL, NULL, 0);
    __atomic_sub_fetch(&b->sleeping, 1, __ATOMIC_SEQ_CST);
}
