/* test_fault.c - the nth backend call fails, n = 1, 2, ... until a run has no failure.
 *
 * Every scenario is run for each status, once with a single failure and once with every call from
 * the nth on failing; in both kinds of segments. Its own steps may fail: it notes what it holds.
 * Afterwards the fault is disarmed and: no structure is broken, everything held can be given back,
 * nothing is left reserved, the next allocation that fits succeeds, the pool can be destroyed. The
 * same again with the host's memory running out.
 */
#include "fixture.h"
#include "swapkit_entry.h"

enum {
    BUDGET = 24 * MIB,
    NSTREAMS = 3,
    MAX_HELD = 64,
    MAX_CALLS = 4000,
    COPIED = 512,
    MARKED = 4 * KIB,
    DEVICE = 48 * MIB
};

typedef struct scene {
    fixture f;
    sk_stream *streams[NSTREAMS]; /* NULL where creation failed: then the host's own order */
    void *held[MAX_HELD];
    size_t sizes[MAX_HELD]; /* bytes marked, 0: none */
    unsigned seeds[MAX_HELD];
    int nheld;
    int nspare;                           /* blocks at the end of `held` that the rescue may give */
    unsigned char host[NSTREAMS][COPIED]; /* of each stream its own */
} scene;

static void scene_take(scene *s, size_t nbytes, int stream) {
    void *block = NULL;
    if (s->nheld == MAX_HELD ||
        sk_pool_take(s->f.pool, nbytes, s->streams[stream], &block) != SK_OK) {
        CHECK(block == NULL);
        return;
    }
    /* Its bytes may be touched from here only once the stream is done with them. The first ones are
     * enough: this is not the test for overlaps, and there are thousands of runs. */
    nbytes = nbytes < MARKED ? nbytes : MARKED;
    if (sk_stream_sync(s->f.backend, s->streams[stream]) == SK_OK) {
        pattern_write(block, nbytes, (unsigned)s->nheld);
    } else {
        nbytes = 0;
    }
    s->held[s->nheld] = block;
    s->sizes[s->nheld] = nbytes;
    s->seeds[s->nheld] = (unsigned)s->nheld;
    s->nheld++;
}

/* A give that fails leaves the block where it was: it stays in `held`. */
static bool scene_give(scene *s, int index) {
    if (index < 0 || index >= s->nheld) {
        return false;
    }
    CHECK(s->sizes[index] == 0 || pattern_holds(s->held[index], s->sizes[index], s->seeds[index]));
    if (sk_pool_give(s->f.pool, s->held[index]) != SK_OK) {
        return false;
    }
    s->nheld--;
    s->held[index] = s->held[s->nheld];
    s->sizes[index] = s->sizes[s->nheld];
    s->seeds[index] = s->seeds[s->nheld];
    return true;
}

static void scene_use(scene *s, int index, int stream) {
    if (index < 0 || index >= s->nheld || s->streams[stream] == NULL) {
        return;
    }
    if (sk_pool_use(s->f.pool, s->held[index], s->streams[stream]) == SK_OK) {
        sk_status status = sk_copy_async(s->f.backend, s->host[stream], s->held[index], COPIED,
                                         SK_DEVICE_TO_HOST, s->streams[stream]);
        (void)status; /* may fail: then nothing was queued */
    }
}

static size_t scene_rescue(void *context, size_t needed_bytes) {
    scene *s = context;
    (void)needed_bytes;
    if (s->nspare == 0 || s->nheld == 0) {
        return 0;
    }
    s->nspare--;
    size_t nbytes = s->sizes[s->nheld - 1];
    return scene_give(s, s->nheld - 1) ? nbytes + 1 : 0;
}

/* Ignore a status on purpose: this step is one that may fail. */
static void may_fail(sk_status status) { (void)status; }

static void play(scene *s) {
    for (int i = 0; i < NSTREAMS; i++) {
        may_fail(sk_stream_create(s->f.backend, &s->streams[i]));
    }
    for (int i = 0; i < 6; i++) {
        scene_take(s, (size_t)(i + 1) * 300 * KIB, i % NSTREAMS);
    }
    scene_use(s, 0, 1);
    scene_use(s, 0, 2);
    scene_use(s, 3, 2);
    (void)scene_give(s, 0);
    (void)scene_give(s, 2);
    scene_take(s, 12 * MIB, 1);
    (void)scene_give(s, s->nheld - 1);
    scene_take(s, 10 * MIB, 2); /* adopts what stream 1 has free, or trims */
    may_fail(sk_pool_trim(s->f.pool));
    s->nspare = 3;
    scene_take(s, 11 * MIB, 0); /* needs the rescue */
    scene_take(s, 40 * KIB, 1);
    scene_use(s, s->nheld - 1, 0);
    (void)scene_give(s, s->nheld - 1);
    may_fail(sk_pool_set_budget(s->f.pool, BUDGET / 2));
    scene_take(s, 9 * MIB, 2);
    may_fail(sk_pool_set_budget(s->f.pool, BUDGET));
    scene_take(s, BUDGET + 1, 0); /* never fits */
    while (s->nheld > 4 && scene_give(s, s->nheld / 2)) {
    }
    scene_take(s, 2 * MIB, 1);
    may_fail(sk_pool_trim(s->f.pool));
}

static scene scene_open(bool whole) {
    scene made = {0};
    made.f.backend = made.f.fault = make_fault(make_device(DEVICE));
    sk_pool_params params = {.budget_bytes = BUDGET, .whole_segments = whole};
    CHECK_OK(sk_pool_create(made.f.backend, &params, &made.f.pool));
    return made;
}

/* Faults are off: everything must work again, and nothing may be missing. */
static void scene_close(scene *s) {
    sk_pool_set_rescue(s->f.pool, NULL, NULL);
    CHECK_OK(sk_pool_check(s->f.pool));
    CHECK(stats_of(&s->f).reserved_bytes[0].peak <= BUDGET);
    CHECK_EQUAL(device_bytes(s->f.backend), stats_of(&s->f).reserved_bytes[0].current);
    CHECK_EQUAL(s->nheld, stats_of(&s->f).allocation[0].current);
    while (s->nheld > 0) {
        CHECK(scene_give(s, s->nheld - 1));
    }
    CHECK_OK(sk_pool_set_budget(s->f.pool, BUDGET));
    give(&s->f, take(&s->f, BUDGET, NULL)); /* all of it fits again, as one block */
    CHECK_EQUAL(0, stats_of(&s->f).allocated_bytes[0].current);
    CHECK_EQUAL(0, stats_of(&s->f).active_bytes[0].current);
    CHECK_OK(sk_pool_trim(s->f.pool));
    CHECK_EQUAL(0, stats_of(&s->f).reserved_bytes[0].current);
    CHECK_OK(sk_pool_check(s->f.pool));
    for (int i = 0; i < NSTREAMS; i++) {
        if (s->streams[i] != NULL) {
            drop_used_stream(&s->f, s->streams[i]);
        }
    }
    fixture_close(&s->f);
}

static void run_loop(bool whole, bool forever, sk_status status) {
    device_wipe_not();
    uint64_t nth = 1;
    for (;; nth++) {
        CHECK(nth < MAX_CALLS);
        scene s = scene_open(whole);
        sk_pool_set_rescue(s.f.pool, scene_rescue, &s);
        sk_fault_arm(s.f.fault, nth, forever, status);
        play(&s);
        uint64_t ncalls = sk_fault_calls(s.f.fault);
        sk_fault_arm(s.f.fault, 0, false, SK_OK);
        scene_close(&s);
        if (ncalls < nth) {
            break; /* this run had no failure */
        }
    }
    CHECK(nth > 30); /* the scenario does ask the backend for something */
}

static void run_loops(sk_status status) {
    for (int i = 0; i < 4; i++) {
        run_loop(i % 2 == 1, i / 2 == 1, status);
    }
}

SK_TEST(fault, test_pool_when_nth_call_is_out_of_device_memory_then_recovers) {
    run_loops(SK_OUT_OF_DEVICE_MEMORY);
}
SK_TEST(fault, test_pool_when_nth_call_is_out_of_host_memory_then_recovers) {
    run_loops(SK_OUT_OF_HOST_MEMORY);
}
SK_TEST(fault, test_pool_when_nth_call_fails_in_the_backend_then_recovers) {
    run_loops(SK_BACKEND_FAILED);
}
SK_TEST(fault, test_pool_when_nth_call_is_invalid_then_recovers) { run_loops(SK_INVALID); }
SK_TEST(fault, test_pool_when_nth_call_is_unsupported_then_recovers) { run_loops(SK_UNSUPPORTED); }

/* The whole life of a pool, creation included, while every backend call may fail. */
SK_TEST(fault, test_create_when_nth_call_fails_then_nothing_is_left) {
    for (uint64_t nth = 1; nth < MAX_CALLS; nth++) {
        sk_backend *fault = make_fault(make_device(DEVICE));
        sk_fault_arm(fault, nth, true, SK_BACKEND_FAILED);
        sk_pool_params params = {.budget_bytes = BUDGET};
        sk_pool *pool = NULL;
        sk_status status = sk_pool_create(fault, &params, &pool);
        CHECK((status == SK_OK) == (pool != NULL));
        void *block = NULL;
        if (pool != NULL && sk_pool_take(pool, MIB, NULL, &block) == SK_OK) {
            CHECK_OK(sk_pool_give(pool, block));
        }
        bool unharmed = sk_fault_calls(fault) < nth;
        if (sk_pool_destroy(pool) != SK_OK) { /* refused by the device: then it is still there */
            sk_fault_arm(fault, 0, false, SK_OK);
            CHECK_OK(sk_pool_check(pool));
            CHECK_OK(sk_pool_destroy(pool));
        }
        sk_fault_arm(fault, 0, false, SK_OK);
        CHECK_EQUAL(0, device_bytes(fault));
        sk_backend_close(fault);
        if (unharmed) {
            return;
        }
    }
    CHECK(false);
}

static void host_loop(bool whole, bool forever) {
    device_wipe_not();
    uint64_t nth = 1;
    for (;; nth++) {
        CHECK(nth < MAX_CALLS);
        scene s = scene_open(whole);
        sk_pool_set_rescue(s.f.pool, scene_rescue, &s);
        host_memory_fail(nth, forever);
        play(&s);
        uint64_t ncalls = host_memory_calls();
        host_memory_fail(0, false);
        scene_close(&s);
        if (ncalls < nth) {
            break;
        }
    }
    CHECK(nth > 2);
}

SK_TEST(fault, test_pool_when_host_memory_runs_out_then_recovers) {
    for (int i = 0; i < 4; i++) {
        host_loop(i % 2 == 1, i / 2 == 1);
    }
}

/* Creation of backends, wrappers, rings and entries without host memory. */
static bool build_all(void) {
    sk_cpu_params params = {.capacity_bytes = CAPACITY};
    sk_pool_params pool_params = {.budget_bytes = BUDGET};
    sk_backend *backend = NULL;
    sk_backend *wrapper = NULL;
    sk_pool *pool = NULL;
    sk_entry *entry = NULL;
    sk_ring *ring = NULL;
    sk_stream *stream = NULL;
    sk_event *event = NULL;
    bool made = sk_backend_cpu(&params, &backend) == SK_OK;
    sk_status (*const wrap[])(sk_backend *, sk_backend **) = {sk_backend_fault, sk_backend_delay};
    for (size_t i = 0; made && i < sizeof wrap / sizeof wrap[0]; i++) {
        wrapper = NULL;
        made = wrap[i](backend, &wrapper) == SK_OK;
        CHECK(made == (wrapper != NULL));
        backend = made ? wrapper : backend;
    }
    wrapper = NULL;
    made = made && sk_backend_trace(backend, KIB, &wrapper) == SK_OK;
    backend = wrapper != NULL ? wrapper : backend;
    made = made && sk_pool_create(backend, &pool_params, &pool) == SK_OK;
    made = made && sk_entry_create(pool, &entry) == SK_OK;
    made = made && sk_ring_create(KIB, &ring) == SK_OK;
    made = made && sk_stream_create(backend, &stream) == SK_OK;
    made = made && sk_event_create(backend, &event) == SK_OK;
    if (stream != NULL) {
        CHECK_OK(sk_stream_destroy(backend, stream));
    }
    if (event != NULL) {
        CHECK_OK(sk_event_destroy(backend, event));
    }
    sk_ring_destroy(ring);
    sk_entry_destroy(entry);
    CHECK_OK(sk_pool_destroy(pool));
    sk_backend_close(backend);
    return made;
}

SK_TEST(fault, test_create_when_host_memory_runs_out_then_nothing_is_left) {
    uint64_t nth = 1;
    for (; nth < MAX_CALLS; nth++) {
        host_memory_fail(nth, false);
        bool made = build_all();
        uint64_t ncalls = host_memory_calls();
        host_memory_fail(0, false);
        if (ncalls < nth) {
            CHECK(made);
            break;
        }
        CHECK(!made);
    }
    CHECK(nth > 5);
}
