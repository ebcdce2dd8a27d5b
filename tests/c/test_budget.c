/* test_budget.c - reserved bytes never pass the budget, and all of it can be used. */
#include <stdlib.h>
#include <string.h>

#include "fixture.h"

static void both_modes(size_t budget_bytes, void (*scenario)(fixture *f)) {
    for (int whole = 0; whole < 2; whole++) {
        fixture f = fixture_open(budget_bytes, whole == 1);
        scenario(&f);
        fixture_close(&f);
    }
}

static void exact(fixture *f) {
    void *block = take(f, 8 * MIB, NULL);
    CHECK_EQUAL(8 * MIB, stats_of(f).reserved_bytes[0].current);
    void *more = NULL;
    CHECK_STATUS(SK_OVER_BUDGET, sk_pool_take(f->pool, 1, NULL, &more));
    CHECK(more == NULL);
    CHECK_EQUAL(1, stats_of(f).num_ooms);
    give(f, block);
}

SK_TEST(budget, test_take_when_exactly_the_budget_then_fits_and_one_byte_more_does_not) {
    both_modes(8 * MIB, exact);
}

static void never_fits(fixture *f) {
    void *block = NULL;
    CHECK_STATUS(SK_OVER_BUDGET, sk_pool_take(f->pool, 8 * MIB + 1, NULL, &block));
    CHECK_STATUS(SK_OVER_BUDGET, sk_pool_take(f->pool, (size_t)CAPACITY * 2, NULL, &block));
    CHECK_EQUAL(0, device_bytes(f->backend)); /* the device was not asked */
    give(f, take(f, 8 * MIB, NULL));
}

SK_TEST(budget, test_take_when_larger_than_the_budget_then_over_budget_and_device_not_asked) {
    both_modes(8 * MIB, never_fits);
}

/* Fill the small arena with cached bytes: a large request must get them back. */
static void arenas_share(fixture *f) {
    enum { NBLOCKS = 16, NBYTES = 256 * KIB };
    void *blocks[NBLOCKS];
    for (int i = 0; i < NBLOCKS; i++) {
        blocks[i] = take(f, NBYTES, NULL);
    }
    for (int i = 0; i < NBLOCKS; i++) {
        give(f, blocks[i]);
    }
    void *large = take(f, 8 * MIB, NULL);
    CHECK(stats_of(f).num_alloc_retries >= 0);
    CHECK_EQUAL(8 * MIB, stats_of(f).reserved_bytes[0].current);
    give(f, large);
    for (int i = 0; i < NBLOCKS; i++) {
        blocks[i] = take(f, NBYTES, NULL);
    }
    for (int i = 0; i < NBLOCKS; i++) {
        give(f, blocks[i]);
    }
}

SK_TEST(budget, test_take_when_other_arena_caches_it_all_then_trimmed_and_served) {
    both_modes(8 * MIB, arenas_share);
}

/* Virtual memory only: holes of another arena are given back although their segment is in use. */
SK_TEST(budget, test_take_when_free_bytes_are_scattered_then_granules_are_moved) {
    need_small_granules();
    fixture f = fixture_open(8 * MIB, false);
    enum { NBLOCKS = 16, NBYTES = 512 * KIB };
    void *blocks[NBLOCKS];
    for (unsigned i = 0; i < NBLOCKS; i++) {
        blocks[i] = take(&f, NBYTES, NULL);
        pattern_write(blocks[i], NBYTES, i);
    }
    for (int i = 0; i < NBLOCKS; i += 2) {
        give(&f, blocks[i]);
    }
    void *large = take(&f, 4 * MIB, NULL); /* 4 MiB are free, in eight holes */
    pattern_write(large, 4 * MIB, NBLOCKS);
    CHECK_EQUAL(8 * MIB, stats_of(&f).reserved_bytes[0].current);
    CHECK_OK(sk_pool_check(f.pool));
    for (unsigned i = 1; i < NBLOCKS; i += 2) {
        CHECK(pattern_holds(blocks[i], NBYTES, i));
        give(&f, blocks[i]);
    }
    CHECK(pattern_holds(large, 4 * MIB, NBLOCKS));
    give(&f, large);
    fixture_close(&f);
}

static void random_under_budget(fixture *f) {
#ifdef SK_TEST_SANITISED
    enum { NBLOCKS = 60, STEPS = 1500, BUDGET = 24 * MIB };
    device_wipe_not();
#else
    enum { NBLOCKS = 60, STEPS = 6000, BUDGET = 24 * MIB };
#endif
    void *blocks[NBLOCKS] = {0};
    size_t sizes[NBLOCKS];
    uint64_t state = 3;
    int nrefused = 0;
    for (int step = 0; step < STEPS; step++) {
        size_t i = random_below(&state, NBLOCKS);
        if (blocks[i] != NULL) {
            CHECK(pattern_holds(blocks[i], sizes[i], (unsigned)i));
            give(f, blocks[i]);
            blocks[i] = NULL;
        } else {
            sizes[i] = 1 + random_below(&state, (size_t)1 << (9 + random_below(&state, 15)));
            sk_status status = sk_pool_take(f->pool, sizes[i], NULL, &blocks[i]);
            CHECK(status == SK_OK || status == SK_OVER_BUDGET);
            nrefused += status != SK_OK;
            if (status == SK_OK) {
                pattern_write(blocks[i], sizes[i], (unsigned)i);
            }
        }
        CHECK(stats_of(f).reserved_bytes[0].current <= BUDGET);
        CHECK(stats_of(f).reserved_bytes[0].peak <= BUDGET);
    }
    CHECK(nrefused > 0);
    CHECK_EQUAL(nrefused, stats_of(f).num_ooms);
    CHECK(sk_pool_peak_take(f->pool) <= BUDGET);
    for (size_t i = 0; i < NBLOCKS; i++) {
        if (blocks[i] != NULL) {
            CHECK(pattern_holds(blocks[i], sizes[i], (unsigned)i));
            give(f, blocks[i]);
        }
    }
    void *all = take(f, BUDGET, NULL); /* after all that, the whole budget is one block again */
    give(f, all);
}

SK_TEST(budget, test_pool_when_random_blocks_at_the_limit_then_budget_holds_and_all_comes_back) {
    both_modes(24 * MIB, random_under_budget);
}

static void set_budget(fixture *f) {
    void *block = take(f, 4 * MIB, NULL);
    give(f, take(f, 12 * MIB, NULL)); /* cached: lowering the budget must trim it */
    CHECK_STATUS(SK_OVER_BUDGET, sk_pool_set_budget(f->pool, 2 * MIB));
    CHECK_EQUAL(64 * MIB, stats_of(f).budget_bytes);
    pattern_write(block, 4 * MIB, 1);
    give(f, block);
    CHECK_OK(sk_pool_set_budget(f->pool, 2 * MIB));
    CHECK_EQUAL(2 * MIB, stats_of(f).budget_bytes);
    CHECK(stats_of(f).reserved_bytes[0].current <= 2 * MIB);
    CHECK_STATUS(SK_OVER_BUDGET, sk_pool_take(f->pool, 3 * MIB, NULL, &block));
    CHECK_OK(sk_pool_set_budget(f->pool, 0));
    CHECK_EQUAL(0, stats_of(f).budget_bytes);
    give(f, take(f, 100 * MIB, NULL));
}

SK_TEST(budget, test_set_budget_when_lowered_then_trims_or_refuses) {
    both_modes(64 * MIB, set_budget);
}

static void ask_for_room(fixture *f) {
    void *taken = take(f, 16 * MIB, NULL);
    CHECK(sk_pool_has_room(f->pool, 48 * MIB, false));
    CHECK(!sk_pool_has_room(f->pool, 48 * MIB + 1, false));
    CHECK(sk_pool_has_room(f->pool, 47 * MIB, true));
    CHECK(!sk_pool_has_room(f->pool, 47 * MIB + 1, true));
    CHECK_OK(sk_pool_set_budget(f->pool, 0));
    CHECK(sk_pool_has_room(f->pool, SIZE_MAX, true));
    CHECK_OK(sk_pool_set_budget(f->pool, 16 * MIB));
    CHECK(sk_pool_has_room(f->pool, 0, false));
    CHECK(!sk_pool_has_room(f->pool, 0, true));
    give(f, taken);
}

SK_TEST(budget, test_has_room_when_asked_then_within_the_budget_and_some_is_spared) {
    both_modes(64 * MIB, ask_for_room);
}

/* A budget that is no multiple of a granule or of a segment. */
static void odd_budget(fixture *f) {
    enum { BUDGET = 3 * MIB + 12345 };
    enum { NBYTES = 64 * KIB };
    void *blocks[64];
    int nblocks = 0;
    while (nblocks < 64 && sk_pool_take(f->pool, NBYTES, NULL, &blocks[nblocks]) == SK_OK) {
        nblocks++;
        CHECK(stats_of(f).reserved_bytes[0].current <= BUDGET);
    }
    CHECK(nblocks * NBYTES <= BUDGET);
    CHECK(nblocks * NBYTES >= 2 * MIB);
    while (nblocks > 0) {
        give(f, blocks[--nblocks]);
    }
}

SK_TEST(budget, test_take_when_budget_is_odd_then_never_passed) {
    both_modes(3 * MIB + 12345, odd_budget);
}

static void tiny_budget(fixture *f) {
    void *block = NULL;
    CHECK_STATUS(SK_OVER_BUDGET, sk_pool_take(f->pool, 4 * KIB, NULL, &block));
    CHECK_EQUAL(0, stats_of(f).reserved_bytes[0].current);
}

SK_TEST(budget, test_take_when_budget_is_one_byte_then_over_budget) { both_modes(1, tiny_budget); }

/* The device itself is smaller than the budget. */
SK_TEST(budget, test_take_when_device_smaller_than_budget_then_out_of_device_memory) {
    for (int whole = 0; whole < 2; whole++) {
        fixture f = {.backend = make_device(16 * MIB)};
        sk_pool_params params = {.budget_bytes = 64 * MIB, .whole_segments = whole == 1};
        CHECK_OK(sk_pool_create(f.backend, &params, &f.pool));
        void *block = NULL;
        CHECK_STATUS(SK_OUT_OF_DEVICE_MEMORY, sk_pool_take(f.pool, 17 * MIB, NULL, &block));
        give(&f, take(&f, 12 * MIB, NULL));
        fixture_close(&f);
    }
}

/* The pool likes to get a megabyte for small blocks at once; less must do where less is left. */
SK_TEST(budget, test_take_when_device_has_little_left_then_small_blocks_still_fit) {
    need_small_granules();
    fixture f = {.backend = make_device(8 * MIB)};
    sk_pool_params params = {0};
    CHECK_OK(sk_pool_create(f.backend, &params, &f.pool));
    void *large = take(&f, 7 * MIB + (size_t)512 * KIB, NULL);
    void *small = take(&f, KIB, NULL);
    give(&f, small);
    give(&f, large);
    fixture_close(&f);
}

SK_TEST(budget, test_take_when_absurdly_large_then_over_budget_and_no_range_reserved) {
    sk_backend *trace = make_trace(make_device(CAPACITY), KIB);
    fixture f = {.backend = trace};
    sk_pool_params params = {.budget_bytes = 8 * MIB};
    CHECK_OK(sk_pool_create(trace, &params, &f.pool));
    void *block = NULL;
    CHECK_STATUS(SK_OVER_BUDGET, sk_pool_take(f.pool, (size_t)1 << 45, NULL, &block));
    sk_trace_call calls[KIB];
    size_t ncalls = sk_trace_read(trace, calls, KIB);
    for (size_t i = 0; i < ncalls; i++) {
        CHECK(strncmp(calls[i].name, "range_", 6) != 0);
    }
    fixture_close(&f);
}
