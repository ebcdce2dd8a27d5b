/* test_thin.c - mappings that are too many: they go a few at a time, and only when no work is
 * behind them. */
#include <stdlib.h>

#include "backend/interpose.h"
#include "fixture.h"

enum {
    BUDGET = 32 * MIB,
    BLOCKS = 24,
    RATIO = 2, /* most that go for one that is mapped */
    NMARKS = 1 << 16,
#ifdef SK_TEST_SANITISED
    ROUNDS = 1200, /* sanitisers make everything many times slower */
#else
    ROUNDS = 3000,
#endif
};

/* The linker wraps it; tests make the other fail. */
void *__real_calloc(size_t count, size_t nbytes);

/* A device that knows which work was queued last on each granule of addresses, and up to which work
 * the host has waited. */
typedef struct mark {
    uintptr_t granule;
    uint64_t work;
} mark;

typedef struct watched {
    sk__interposer base;
    size_t granule_bytes;
    mark *marks; /* open addressing; a place comes again and is never removed */
    uint64_t queued, waited;
    size_t nunmapped, nearly; /* unmapped; of these too early */
    bool refuses;             /* to unmap */
} watched;

static mark *mark_of(watched *state, uintptr_t address) {
    uintptr_t granule = address / state->granule_bytes;
    size_t slot = granule * 0x9E3779B97F4A7C15 % NMARKS;
    while (state->marks[slot].granule != 0 && state->marks[slot].granule != granule) {
        slot = (slot + 1) % NMARKS;
    }
    state->marks[slot].granule = granule;
    return &state->marks[slot];
}

static void work_queue(watched *state, const void *address, size_t nbytes) {
    state->queued++;
    uintptr_t end = (uintptr_t)address + nbytes;
    uintptr_t at = sk__round_down((uintptr_t)address, state->granule_bytes);
    for (; at < end; at += state->granule_bytes) {
        mark_of(state, at)->work = state->queued;
    }
}

static sk_status watched_sync(void *self, sk_stream *stream) {
    watched *state = self;
    state->waited = state->queued;
    return sk_stream_sync(state->base.inner, stream);
}

static sk_status watched_decommit(void *self, void *address, size_t nbytes) {
    watched *state = self;
    const sk_backend *inner = state->base.inner;
    if (state->refuses) {
        return sk__fail(SK_BACKEND_FAILED, "the test's device unmaps nothing");
    }
    for (size_t done = 0; done < nbytes; done += state->granule_bytes) {
        state->nearly += mark_of(state, (uintptr_t)address + done)->work > state->waited;
        state->nunmapped++;
    }
    return inner->ops.range_decommit(inner->self, address, nbytes);
}

static void watched_destroy(sk__interposer *self) {
    watched *state = (watched *)self;
    free(state->marks);
    free(state);
}

static watched *watched_make(sk_backend **out) {
    watched *state = __real_calloc(1, sizeof *state);
    CHECK(state != NULL);
    state->base = (sk__interposer){.inner = make_aliasing(CAPACITY), .destroy = watched_destroy};
    state->granule_bytes = state->base.inner->ops.granule_bytes;
    state->marks = __real_calloc(NMARKS, sizeof *state->marks);
    CHECK(state->marks != NULL);
    CHECK_OK(sk__interpose(&state->base, "watched", out));
    (*out)->ops.stream_sync = watched_sync;
    (*out)->ops.range_decommit = watched_decommit;
    return state;
}

/* Blocks of all sizes come and go until mappings have been unmapped in good numbers. */
typedef struct churn {
    fixture f;
    watched *device;
    sk_stream *stream;
    void *live[BLOCKS];
    uint64_t state;
} churn;

static churn churn_open(void) {
    churn made = {.state = 7};
    device_wipe_not();
    made.device = watched_make(&made.f.backend);
    sk_pool_params params = {.budget_bytes = BUDGET};
    CHECK_OK(sk_pool_create(made.f.backend, &params, &made.f.pool));
    made.stream = make_stream(made.f.backend);
    return made;
}

static void churn_drop(churn *mine, size_t which) {
    if (mine->live[which] != NULL) {
        give(&mine->f, mine->live[which]);
        mine->live[which] = NULL;
    }
}

static void churn_once(churn *mine, unsigned round) {
    size_t which = random_below(&mine->state, BLOCKS);
    churn_drop(mine, which);
    size_t nbytes = 1 + random_below(&mine->state, round % 3 == 0 ? 6 * MIB : 2 * MIB);
    void *taken = NULL;
    if (sk_pool_take(mine->f.pool, nbytes, mine->stream, &taken) == SK_OK) {
        work_queue(mine->device, taken, nbytes);
        mine->live[which] = taken;
    } else {
        churn_drop(mine, random_below(&mine->state, BLOCKS));
    }
}

static void churn_close(churn *mine) {
    for (size_t i = 0; i < BLOCKS; i++) {
        churn_drop(mine, i);
    }
    drop_used_stream(&mine->f, mine->stream);
    fixture_close(&mine->f);
}

SK_TEST(thin, test_take_when_there_are_too_many_aliases_then_a_few_go_at_a_time) {
    churn mine = churn_open();
    for (unsigned i = 0; i < ROUNDS; i++) {
        sk_pool_stats before = stats_of(&mine.f);
        churn_once(&mine, i);
        sk_pool_stats after = stats_of(&mine.f);
        CHECK(after.unmaps - before.unmaps <= RATIO * (after.maps - before.maps));
    }
    CHECK(stats_of(&mine.f).unmaps > BUDGET / GRANULE); /* there were too many */
    CHECK_OK(sk_pool_check(mine.f.pool));
    churn_close(&mine);
}

SK_TEST(thin, test_thinning_when_work_is_queued_then_it_waits_before_it_unmaps) {
    churn mine = churn_open();
    for (unsigned i = 0; i < ROUNDS; i++) {
        churn_once(&mine, i);
        CHECK_EQUAL(0, mine.device->nearly);
    }
    CHECK(mine.device->nunmapped > BUDGET / GRANULE);
    int64_t waits = stats_of(&mine.f).num_sync_all_streams;
    CHECK(waits > 0 && waits < (int64_t)mine.device->nunmapped / 100); /* once for many */
    churn_close(&mine);
}

SK_TEST(thin, test_take_when_tentative_and_there_are_too_many_aliases_then_it_does_not_wait) {
    churn mine = churn_open();
    int64_t waits = 0;
    (void)sk_tentative_set(true);
    for (unsigned i = 0; i < ROUNDS; i++) {
        churn_once(&mine, i);
        waits = stats_of(&mine.f).num_sync_all_streams;
    }
    (void)sk_tentative_set(false);
    CHECK_EQUAL(0, waits);
    CHECK_EQUAL(0, mine.device->nunmapped); /* nothing is ever known to be done */
    CHECK_EQUAL(0, stats_of(&mine.f).alias_failures);
    for (unsigned i = 0; i < ROUNDS; i++) {
        churn_once(&mine, i);
    }
    CHECK(mine.device->nunmapped > 0);
    CHECK_EQUAL(0, mine.device->nearly);
    churn_close(&mine);
}

SK_TEST(thin, test_thinning_when_the_device_refuses_then_it_goes_on_later) {
    churn mine = churn_open();
    unsigned round = 0;
    while (mine.device->nunmapped == 0) {
        churn_once(&mine, round++);
    }
    mine.device->refuses = true;
    for (unsigned i = 0; i < ROUNDS / 4; i++) {
        churn_once(&mine, round++);
    }
    CHECK_OK(sk_pool_check(mine.f.pool));
    CHECK(stats_of(&mine.f).alias_failures > 0);
    mine.device->refuses = false;
    size_t before = mine.device->nunmapped;
    for (unsigned i = 0; i < ROUNDS; i++) {
        churn_once(&mine, round++);
    }
    CHECK(mine.device->nunmapped > before);
    churn_close(&mine);
}
