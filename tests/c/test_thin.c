/* test_thin.c - mappings that are too many: they go a few at a time, and only when no work is
 * behind them. */
#include <stdlib.h>

#include "fixture.h"
#include "instruments/interpose.h"
#include "swapkit_lives.h"

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
    size_t mapped, most;      /* granules of addresses; most 0: no limit */
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

static sk_status mapping_count(watched *state, size_t nbytes) {
    size_t count = nbytes / state->granule_bytes;
    if (state->most > 0 && state->mapped + count > state->most) {
        return sk__fail(SK_OUT_OF_DEVICE_MEMORY, "the test's device has no mappings left");
    }
    state->mapped += count;
    return SK_OK;
}

static sk_status watched_commit(void *self, void *address, size_t nbytes) {
    watched *state = self;
    const sk_backend *inner = state->base.inner;
    sk_status status = mapping_count(state, nbytes);
    return status != SK_OK ? status : inner->ops.range_commit(inner->self, address, nbytes);
}

static sk_status watched_alias(void *self, void *from, void *to, size_t nbytes) {
    watched *state = self;
    const sk_backend *inner = state->base.inner;
    sk_status status = mapping_count(state, nbytes);
    return status != SK_OK ? status : inner->ops.range_alias(inner->self, from, to, nbytes);
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
        state->mapped--;
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
    (*out)->ops.range_commit = watched_commit;
    (*out)->ops.range_alias = watched_alias;
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

/* Else no memory could move to the addresses of the layout. */
SK_TEST(thin, test_layout_when_there_are_many_aliases_then_all_go_once_no_work_is_behind_them) {
    const sk_place place = {.nbytes = MIB, .room_bytes = MIB};
    churn mine = churn_open();
    for (unsigned i = 0; i < ROUNDS; i++) {
        churn_once(&mine, i);
    }
    sk_pool_set_lives(mine.f.pool, SK_LIVES_NOTED);
    int64_t before = stats_of(&mine.f).unmaps;
    CHECK_OK(sk_pool_set_layout(mine.f.pool, &place, 1, MIB));
    CHECK(stats_of(&mine.f).unmaps > before + BUDGET / GRANULE);
    CHECK_EQUAL(0, mine.device->nearly);
    before = stats_of(&mine.f).unmaps;
    CHECK_OK(sk_pool_set_layout(mine.f.pool, &place, 1, MIB));
    CHECK_EQUAL(before, stats_of(&mine.f).unmaps);
    CHECK_OK(sk_pool_check(mine.f.pool));
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

/* Mappings that a real driver, or the addresses of a process, have no room for: budget and memory
 * are there, but for every granule in use there are aliases. */
SK_TEST(thin, test_take_when_the_device_maps_no_more_then_aliases_make_way_or_the_text_says_so) {
    enum { WANTED = 8 * MIB, MOST_KEPT = BUDGET / GRANULE };
    churn mine = churn_open();
    for (unsigned i = 0; i < ROUNDS / 4; i++) {
        churn_once(&mine, i);
    }
    void *kept[MOST_KEPT];
    size_t count = 0;
    while (count < MOST_KEPT &&
           sk_pool_take(mine.f.pool, GRANULE, mine.stream, &kept[count]) == SK_OK) {
        count++;
    }
    CHECK_OK(sk_pool_set_budget(mine.f.pool, (size_t)2 * BUDGET));
    mine.device->most = mine.device->mapped;
    CHECK(mine.device->most > (BUDGET + WANTED) / mine.device->granule_bytes);
    void *block = NULL;
    mine.device->refuses = true;
    CHECK_STATUS(SK_OUT_OF_DEVICE_MEMORY, sk_pool_take(mine.f.pool, WANTED, mine.stream, &block));
    CHECK_CONTAINS(sk_error_text(), "the budget is 67108864; the device refused: the test's device "
                                    "has no mappings left");
    mine.device->refuses = false;
    give(&mine.f, take(&mine.f, WANTED, mine.stream));
    CHECK_EQUAL(0, mine.device->nearly);
    CHECK_OK(sk_pool_check(mine.f.pool));
    while (count > 0) {
        give(&mine.f, kept[--count]);
    }
    churn_close(&mine);
}
