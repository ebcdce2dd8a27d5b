/* test_threads.c - eight threads on one pool at its budget, each block checked for overlap.
 *
 * Each thread takes and gives blocks of random size, some on its own stream with copies on the way.
 * Blocks it has finished with it parks on a shared shelf; the rescue callback gives those back when
 * the budget is full. Runs for SK_TEST_SECONDS (default 2) each.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fixture.h"

enum { NTHREADS = 8, NOWN = 12, SHELF = 64, BUDGET = 12 * MIB, COPY_BYTES = 4 * KIB };

typedef struct parcel {
    void *address;
    size_t nbytes;
    unsigned seed;
} parcel;

typedef struct arena {
    fixture f;
    pthread_mutex_t lock; /* of the shelf */
    parcel shelf[SHELF];
    int nshelf;
    atomic_bool stop;
    atomic_long nrescues;
    atomic_long nrefused;
    atomic_long ntaken;
} arena;

typedef struct worker {
    arena *arena;
    sk_stream *stream; /* NULL for every other thread */
    unsigned number;
    parcel own[NOWN];
    unsigned char *host;
    uint64_t state;
} worker;

static void parcel_give(arena *a, parcel *p) {
    CHECK(pattern_holds(p->address, p->nbytes, p->seed));
    device_fill(p->address, 0xff, p->nbytes < COPY_BYTES ? p->nbytes : COPY_BYTES);
    CHECK_OK(sk_pool_give(a->f.pool, p->address));
    p->address = NULL;
}

static bool shelf_pop(arena *a, parcel *out) {
    bool found = false;
    (void)pthread_mutex_lock(&a->lock);
    if (a->nshelf > 0) {
        *out = a->shelf[--a->nshelf];
        found = true;
    }
    (void)pthread_mutex_unlock(&a->lock);
    return found;
}

static bool shelf_push(arena *a, const parcel *p) {
    bool pushed = false;
    (void)pthread_mutex_lock(&a->lock);
    if (a->nshelf < SHELF) {
        a->shelf[a->nshelf++] = *p;
        pushed = true;
    }
    (void)pthread_mutex_unlock(&a->lock);
    return pushed;
}

static size_t rescue(void *context, size_t needed_bytes) {
    arena *a = context;
    size_t freed = 0;
    parcel p;
    while (freed < needed_bytes && shelf_pop(a, &p)) {
        freed += p.nbytes;
        parcel_give(a, &p);
    }
    atomic_fetch_add(&a->nrescues, freed > 0);
    return freed;
}

static size_t random_size(uint64_t *state) {
    enum { SMALLEST_BITS = 5, BITS = 17 };
    return 1 + random_below(state, (size_t)1 << (SMALLEST_BITS + random_below(state, BITS)));
}

static void worker_take(worker *w, parcel *p) {
    p->nbytes = random_size(&w->state);
    p->seed = (unsigned)random_next(&w->state);
    sk_status status = sk_pool_take(w->arena->f.pool, p->nbytes, w->stream, &p->address);
    if (status != SK_OK) {
        CHECK_EQUAL(SK_OVER_BUDGET, status);
        p->address = NULL;
        atomic_fetch_add(&w->arena->nrefused, 1);
        return;
    }
    atomic_fetch_add(&w->arena->ntaken, 1);
    CHECK_OK(sk_stream_sync(w->arena->f.backend, w->stream)); /* the host may touch it now */
    pattern_write(p->address, p->nbytes, p->seed);
}

/* Give with a copy still on the way, now and then: reuse must wait for it. */
static void worker_give(worker *w, parcel *p) {
    enum { ONE_IN = 4 };
    size_t nbytes = p->nbytes < COPY_BYTES ? p->nbytes : COPY_BYTES;
    if (w->stream == NULL || random_below(&w->state, ONE_IN) != 0) {
        parcel_give(w->arena, p);
        return;
    }
    CHECK(pattern_holds(p->address, p->nbytes, p->seed));
    CHECK_OK(sk_pool_use(w->arena->f.pool, p->address, w->stream));
    CHECK_OK(sk_copy_async(w->arena->f.backend, w->host, p->address, nbytes, SK_DEVICE_TO_HOST,
                           w->stream));
    CHECK_OK(sk_pool_give(w->arena->f.pool, p->address));
    CHECK_OK(sk_stream_sync(w->arena->f.backend, w->stream));
    if (p->nbytes <= COPY_BYTES) {
        CHECK(pattern_holds(w->host, p->nbytes, p->seed));
    }
    p->address = NULL;
}

static void worker_step(worker *w) {
    enum { PARK_ONE_IN = 2, CHECK_ONE_IN = 500, TRIM_ONE_IN = 300, BUDGET_ONE_IN = 400 };
    arena *a = w->arena;
    parcel *p = &w->own[random_below(&w->state, NOWN)];
    if (p->address == NULL) {
        worker_take(w, p);
    } else if (random_below(&w->state, PARK_ONE_IN) == 0 && shelf_push(a, p)) {
        p->address = NULL;
    } else {
        worker_give(w, p);
    }
    if (random_below(&w->state, CHECK_ONE_IN) == 0) {
        CHECK_OK(sk_pool_check(a->f.pool));
        CHECK(stats_of(&a->f).reserved_bytes[0].current <= BUDGET);
    }
    if (random_below(&w->state, TRIM_ONE_IN) == 0) {
        CHECK_OK(sk_pool_trim(a->f.pool));
    }
    if (random_below(&w->state, BUDGET_ONE_IN) == 0) {
        size_t budget = random_below(&w->state, 2) == 0 ? BUDGET : BUDGET - 2 * MIB;
        sk_status status = sk_pool_set_budget(a->f.pool, budget);
        CHECK(status == SK_OK || status == SK_OVER_BUDGET);
    }
}

static void *work(void *argument) {
    worker *w = argument;
    while (!atomic_load(&w->arena->stop)) {
        worker_step(w);
    }
    for (int i = 0; i < NOWN; i++) {
        if (w->own[i].address != NULL) {
            worker_give(w, &w->own[i]);
        }
    }
    return NULL;
}

static unsigned seconds_to_run(void) {
    enum { DEFAULT_SECONDS = 2, DECIMAL = 10 };
    const char *text = getenv("SK_TEST_SECONDS");
    return text == NULL ? DEFAULT_SECONDS : (unsigned)strtoul(text, NULL, DECIMAL);
}

/* Not a wait for something to have happened: the length of the run itself. */
static void let_run(arena *a) {
    struct timespec length = {.tv_sec = seconds_to_run()};
    while (nanosleep(&length, &length) != 0) {
    }
    atomic_store(&a->stop, true);
}

static void run_threads(bool whole) {
    enum { SPARE_SECONDS = 60 };
    test_time_limit(seconds_to_run() + SPARE_SECONDS);
    arena *a = calloc(1, sizeof *a);
    worker *workers = calloc(NTHREADS, sizeof *workers);
    CHECK(a != NULL && workers != NULL);
    a->f = fixture_open(BUDGET, whole);
    (void)pthread_mutex_init(&a->lock, NULL);
    sk_pool_set_rescue(a->f.pool, rescue, a);
    pthread_t threads[NTHREADS];
    for (unsigned i = 0; i < NTHREADS; i++) {
        workers[i] =
            (worker){.arena = a, .number = i, .state = i + 1, .host = host_take(COPY_BYTES)};
        workers[i].stream = i % 2 == 0 ? make_stream(a->f.backend) : NULL;
        CHECK(pthread_create(&threads[i], NULL, work, &workers[i]) == 0);
    }
    let_run(a);
    for (int i = 0; i < NTHREADS; i++) {
        (void)pthread_join(threads[i], NULL);
    }
    sk_pool_set_rescue(a->f.pool, NULL, NULL);
    parcel p;
    while (shelf_pop(a, &p)) {
        parcel_give(a, &p);
    }
    sk_pool_stats stats = stats_of(&a->f);
    CHECK_EQUAL(0, stats.allocated_bytes[0].current);
    CHECK(stats.reserved_bytes[0].peak <= BUDGET);
    CHECK_EQUAL(atomic_load(&a->ntaken), stats.allocation[0].allocated);
    CHECK(atomic_load(&a->nrescues) > 0); /* else the budget was not tight */
    CHECK_OK(sk_pool_trim(a->f.pool));
    for (int i = 0; i < NTHREADS; i++) {
        host_give(workers[i].host);
        if (workers[i].stream != NULL) {
            drop_used_stream(&a->f, workers[i].stream);
        }
    }
    (void)fprintf(stderr, "    %ld taken, %ld rescues, %ld refused\n", atomic_load(&a->ntaken),
                  atomic_load(&a->nrescues), atomic_load(&a->nrefused));
    fixture_close(&a->f);
    (void)pthread_mutex_destroy(&a->lock);
    free(workers);
    free(a);
}

SK_TEST(threads, test_threads_when_budget_is_tight_then_blocks_never_overlap) {
    run_threads(false);
}

SK_TEST(threads, test_threads_when_whole_segments_then_blocks_never_overlap) { run_threads(true); }
