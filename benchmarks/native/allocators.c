/* allocators.c - nanoseconds per allocate + free, for swapkit's pool, glibc and mimalloc.
 *
 *     allocators ROUNDS MILLISECONDS BYTES...
 *
 * All three are called through the same table of two functions. A measurement is one loop of
 * allocate + free of one size, in 1 or in 4 threads at once; the block is not touched, so what is
 * measured is the allocator and not the kernel's clearing of pages. In every round each allocator
 * has its turn, in rotating order, so that all meet the same noise; every measurement lasts about
 * MILLISECONDS. Output: one line per measurement,
 *
 *     NAME BYTES THREADS NANOSECONDS
 *
 * nanoseconds as one thread sees them: its elapsed time divided by its number of pairs. An
 * allocator that is not installed is left out, and said so on stderr.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "swapkit_devices.h"
#include "swapkit_pool.h"

enum { MAX_THREADS = 4, MAX_ALLOCATORS = 3, GROWTH = 8, CALIBRATION = 16 };

static const uint64_t ns_per_s = 1000000000;
static const uint64_t ns_per_ms = 1000000;

typedef struct allocator {
    const char *name;
    void *(*take)(void *state, size_t nbytes);
    void (*give)(void *state, void *address);
    void *state;
} allocator;

static uint64_t now_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * ns_per_s + (uint64_t)now.tv_nsec;
}

static _Noreturn void stop(const char *why) {
    (void)fprintf(stderr, "allocators: %s\n", why);
    exit(EXIT_FAILURE);
}

/* ---- the contestants ------------------------------------------------------------------------- */

static void *pool_take(void *state, size_t nbytes) {
    void *address = NULL;
    return sk_pool_take(state, nbytes, NULL, &address) == SK_OK ? address : NULL;
}

static void pool_give(void *state, void *address) {
    if (sk_pool_give(state, address) != SK_OK) {
        stop("the pool did not take a block back");
    }
}

static void *glibc_take(void *state, size_t nbytes) {
    (void)state;
    return malloc(nbytes);
}

static void glibc_give(void *state, void *address) {
    (void)state;
    free(address);
}

typedef struct mimalloc {
    void *(*take)(size_t nbytes);
    void (*give)(void *address);
} mimalloc;

static void *mimalloc_take(void *state, size_t nbytes) { return ((mimalloc *)state)->take(nbytes); }
static void mimalloc_give(void *state, void *address) { ((mimalloc *)state)->give(address); }

static allocator open_pool(size_t largest_bytes) {
    sk_cpu_params machine = {0};
    sk_backend *backend = NULL;
    sk_pool_params params = {.budget_bytes = 2 * MAX_THREADS * largest_bytes};
    sk_pool *pool = NULL;
    if (sk_backend_cpu(&machine, &backend) != SK_OK ||
        sk_pool_create(backend, &params, &pool) != SK_OK) {
        stop(sk_error_text());
    }
    return (allocator){.name = "pool", .take = pool_take, .give = pool_give, .state = pool};
}

/* False if the library is not installed. */
static bool open_mimalloc(allocator *out) {
    static mimalloc functions;
    void *library = dlopen("libmimalloc.so.2", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        (void)fprintf(stderr, "allocators: no mimalloc: %s\n", dlerror());
        return false;
    }
    /* POSIX makes this conversion work; ISO C has no word for it. */
    *(void **)&functions.take = dlsym(library, "mi_malloc");
    *(void **)&functions.give = dlsym(library, "mi_free");
    if (functions.take == NULL || functions.give == NULL) {
        stop("libmimalloc.so.2 has no mi_malloc or mi_free");
    }
    *out = (allocator){
        .name = "mimalloc", .take = mimalloc_take, .give = mimalloc_give, .state = &functions};
    return true;
}

/* ---- one measurement ------------------------------------------------------------------------- */

typedef struct measurement {
    const allocator *allocator;
    size_t nbytes;
    uint64_t pairs;
    pthread_barrier_t *start;
    uint64_t elapsed_ns;
} measurement;

static void pairs_run(const measurement *m, uint64_t pairs) {
    for (uint64_t i = 0; i < pairs; i++) {
        void *volatile address = m->allocator->take(m->allocator->state, m->nbytes);
        if (address == NULL) {
            stop("an allocation failed");
        }
        m->allocator->give(m->allocator->state, address);
    }
}

static void *measure_thread(void *argument) {
    measurement *m = argument;
    pairs_run(m, CALIBRATION); /* fill this thread's caches */
    (void)pthread_barrier_wait(m->start);
    uint64_t begin = now_ns();
    pairs_run(m, m->pairs);
    m->elapsed_ns = now_ns() - begin;
    return NULL;
}

/* Nanoseconds per pair as a thread sees them, the mean over the threads. */
static double measure(const allocator *allocator, size_t nbytes, unsigned nthreads,
                      uint64_t pairs) {
    pthread_barrier_t start;
    pthread_t threads[MAX_THREADS];
    measurement each[MAX_THREADS];
    (void)pthread_barrier_init(&start, NULL, nthreads);
    for (unsigned i = 0; i < nthreads; i++) {
        each[i] = (measurement){
            .allocator = allocator, .nbytes = nbytes, .pairs = pairs, .start = &start};
        if (pthread_create(&threads[i], NULL, measure_thread, &each[i]) != 0) {
            stop("a thread could not be started");
        }
    }
    double sum_ns = 0;
    for (unsigned i = 0; i < nthreads; i++) {
        (void)pthread_join(threads[i], NULL);
        sum_ns += (double)each[i].elapsed_ns;
    }
    (void)pthread_barrier_destroy(&start);
    return sum_ns / nthreads / (double)pairs;
}

/* How many pairs take about `wanted_ns`. */
static uint64_t calibrate(const allocator *allocator, size_t nbytes, unsigned nthreads,
                          uint64_t wanted_ns) {
    uint64_t pairs = CALIBRATION;
    for (;;) {
        double ns = measure(allocator, nbytes, nthreads, pairs);
        double scale = (double)wanted_ns / (ns * (double)pairs);
        if (scale <= 2) {
            uint64_t scaled = (uint64_t)((double)pairs * scale);
            return scaled > CALIBRATION ? scaled : CALIBRATION;
        }
        pairs = (uint64_t)((double)pairs * (scale < GROWTH ? scale : GROWTH));
    }
}

static void compare(const allocator *allocators, unsigned count, size_t nbytes, unsigned nthreads,
                    const unsigned long options[2]) {
    uint64_t pairs[MAX_ALLOCATORS];
    for (unsigned i = 0; i < count; i++) {
        pairs[i] = calibrate(&allocators[i], nbytes, nthreads, options[1] * ns_per_ms);
    }
    for (unsigned long round = 0; round < options[0]; round++) {
        for (unsigned turn = 0; turn < count; turn++) {
            unsigned i = (unsigned)((round + turn) % count);
            double ns = measure(&allocators[i], nbytes, nthreads, pairs[i]);
            (void)printf("%s %zu %u %.3f\n", allocators[i].name, nbytes, nthreads, ns);
        }
    }
}

static unsigned long number(const char *text) {
    enum { DECIMAL = 10 };
    char *end = NULL;
    unsigned long value = strtoul(text, &end, DECIMAL);
    if (value == 0 || *end != '\0') {
        stop("usage: allocators ROUNDS MILLISECONDS BYTES...");
    }
    return value;
}

int main(int argc, char **argv) {
    enum { FIRST_SIZE = 3 };
    if (argc <= FIRST_SIZE) {
        stop("usage: allocators ROUNDS MILLISECONDS BYTES...");
    }
    unsigned long options[2] = {number(argv[1]), number(argv[2])};
    size_t largest = 0;
    for (int i = FIRST_SIZE; i < argc; i++) {
        largest = number(argv[i]) > largest ? number(argv[i]) : largest;
    }
    allocator allocators[MAX_ALLOCATORS] = {
        open_pool(largest), {.name = "glibc", .take = glibc_take, .give = glibc_give}};
    unsigned count = 2;
    count += open_mimalloc(&allocators[count]) ? 1 : 0;
    for (unsigned nthreads = 1; nthreads <= MAX_THREADS; nthreads *= MAX_THREADS) {
        for (int i = FIRST_SIZE; i < argc; i++) {
            compare(allocators, count, number(argv[i]), nthreads, options);
        }
    }
    return EXIT_SUCCESS;
}
