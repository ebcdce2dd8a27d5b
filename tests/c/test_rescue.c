/* test_rescue.c - the last resort of a failing take: ask the owner, again and again, lock-free. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "fixture.h"

enum { BLOCK_BYTES = 2 * MIB, BUDGET = 8 * MIB, MAX_HELD = 8 };

/* An owner that keeps blocks it can do without, and frees some when asked. */
typedef struct owner {
    fixture f;
    void *held[MAX_HELD];
    int nheld;
    int ncalls;
    int free_per_call;
    size_t needed;    /* what the last call asked for */
    sk_status nested; /* what a take inside the callback returned */
    bool nest;        /* try one */
    bool use_pool;    /* call other functions of the pool inside */
    bool lie;         /* say that something was freed when nothing was */
} owner;

static size_t rescue(void *context, size_t needed_bytes) {
    owner *mine = context;
    mine->ncalls++;
    mine->needed = needed_bytes;
    if (mine->nest) {
        void *block = NULL;
        mine->nested = sk_pool_take(mine->f.pool, BUDGET, NULL, &block);
    }
    if (mine->use_pool) {
        sk_pool_stats stats;
        sk_pool_stats_get(mine->f.pool, &stats);
        (void)sk_pool_owns(mine->f.pool, mine);
        CHECK_OK(sk_pool_check(mine->f.pool));
        CHECK_OK(sk_pool_trim(mine->f.pool));
    }
    enum { LIES = 3 };
    if (mine->lie) {
        return mine->ncalls <= LIES ? BLOCK_BYTES : 0;
    }
    size_t freed = 0;
    for (int i = 0; i < mine->free_per_call && mine->nheld > 0; i++) {
        if (sk_pool_give(mine->f.pool, mine->held[--mine->nheld]) == SK_OK) {
            freed += BLOCK_BYTES;
        }
    }
    return freed;
}

static owner owner_open(bool whole, int nheld, int free_per_call) {
    owner made = {.f = fixture_open(BUDGET, whole), .free_per_call = free_per_call};
    for (int i = 0; i < nheld; i++) {
        made.held[made.nheld++] = take(&made.f, BLOCK_BYTES, NULL);
    }
    return made;
}

static void owner_close(owner *mine) {
    sk_pool_set_rescue(mine->f.pool, NULL, NULL);
    while (mine->nheld > 0) {
        give(&mine->f, mine->held[--mine->nheld]);
    }
    fixture_close(&mine->f);
}

SK_TEST(rescue, test_rescue_when_take_fits_then_not_called) {
    owner mine = owner_open(false, 2, 1);
    sk_pool_set_rescue(mine.f.pool, rescue, &mine);
    give(&mine.f, take(&mine.f, 2 * BLOCK_BYTES, NULL));
    CHECK_EQUAL(0, mine.ncalls);
    owner_close(&mine);
}

static void frees_enough(bool whole) {
    owner mine = owner_open(whole, 4, 1);
    sk_pool_set_rescue(mine.f.pool, rescue, &mine);
    void *block = take(&mine.f, BLOCK_BYTES, NULL);
    CHECK_EQUAL(1, mine.ncalls);
    CHECK(mine.needed >= 1 && mine.needed <= 2 * BLOCK_BYTES);
    CHECK_EQUAL(1, stats_of(&mine.f).num_rescues);
    CHECK_EQUAL(BLOCK_BYTES, stats_of(&mine.f).rescued_bytes);
    CHECK_EQUAL(0, stats_of(&mine.f).num_ooms);
    CHECK(stats_of(&mine.f).reserved_bytes[0].peak <= BUDGET);
    give(&mine.f, block);
    owner_close(&mine);
}

SK_TEST(rescue, test_rescue_when_it_frees_enough_then_called_once_and_take_succeeds) {
    frees_enough(false);
    frees_enough(true);
}

/* Four blocks of 2 MiB fill the budget; 6 MiB need three of them, one per call. */
SK_TEST(rescue, test_rescue_when_it_frees_little_then_called_until_enough) {
    owner mine = owner_open(false, 4, 1);
    sk_pool_set_rescue(mine.f.pool, rescue, &mine);
    void *block = take(&mine.f, 3 * BLOCK_BYTES, NULL);
    CHECK_EQUAL(3, mine.ncalls);
    CHECK_EQUAL(1, mine.nheld);
    CHECK_EQUAL(3, stats_of(&mine.f).num_rescues);
    give(&mine.f, block);
    owner_close(&mine);
}

SK_TEST(rescue, test_rescue_when_whole_segments_then_enough_are_freed_for_a_larger_one) {
    owner mine = owner_open(true, 4, 1);
    sk_pool_set_rescue(mine.f.pool, rescue, &mine);
    void *block = take(&mine.f, 3 * BLOCK_BYTES, NULL);
    CHECK(mine.ncalls >= 3);
    CHECK(stats_of(&mine.f).reserved_bytes[0].peak <= BUDGET);
    give(&mine.f, block);
    owner_close(&mine);
}

SK_TEST(rescue, test_rescue_when_it_frees_nothing_then_called_once_and_take_fails) {
    owner mine = owner_open(false, 4, 0);
    sk_pool_set_rescue(mine.f.pool, rescue, &mine);
    void *block = NULL;
    CHECK_STATUS(SK_OVER_BUDGET, sk_pool_take(mine.f.pool, BLOCK_BYTES, NULL, &block));
    CHECK_EQUAL(1, mine.ncalls);
    CHECK_EQUAL(0, stats_of(&mine.f).num_rescues);
    CHECK_EQUAL(1, stats_of(&mine.f).num_ooms);
    CHECK_CONTAINS(sk_error_text(), "budget");
    owner_close(&mine);
}

SK_TEST(rescue, test_rescue_when_all_is_freed_and_still_too_little_then_fails_and_pool_works) {
    owner mine = owner_open(false, 4, 2);
    sk_pool_set_rescue(mine.f.pool, rescue, &mine);
    void *block = NULL;
    void *kept = mine.held[--mine.nheld]; /* not the rescue's to give */
    CHECK_STATUS(SK_OVER_BUDGET, sk_pool_take(mine.f.pool, BUDGET, NULL, &block));
    CHECK_EQUAL(0, mine.nheld);
    give(&mine.f, kept);
    give(&mine.f, take(&mine.f, BUDGET, NULL));
    owner_close(&mine);
}

SK_TEST(rescue, test_rescue_when_request_is_above_the_budget_then_not_called) {
    owner mine = owner_open(false, 2, 2);
    sk_pool_set_rescue(mine.f.pool, rescue, &mine);
    void *block = NULL;
    CHECK_STATUS(SK_OVER_BUDGET, sk_pool_take(mine.f.pool, BUDGET + 1, NULL, &block));
    CHECK_EQUAL(0, mine.ncalls);
    CHECK_EQUAL(2, mine.nheld);
    owner_close(&mine);
}

SK_TEST(rescue, test_rescue_when_it_lies_then_take_ends_with_over_budget) {
    owner mine = owner_open(false, 4, 1);
    mine.lie = true;
    sk_pool_set_rescue(mine.f.pool, rescue, &mine);
    void *block = NULL;
    CHECK_STATUS(SK_OVER_BUDGET, sk_pool_take(mine.f.pool, BLOCK_BYTES, NULL, &block));
    mine.lie = false;
    owner_close(&mine);
}

SK_TEST(rescue, test_rescue_when_it_takes_itself_then_that_take_fails_without_recursion) {
    owner mine = owner_open(false, 4, 1);
    mine.nest = true;
    sk_pool_set_rescue(mine.f.pool, rescue, &mine);
    void *block = take(&mine.f, BLOCK_BYTES, NULL);
    CHECK_STATUS(SK_OVER_BUDGET, mine.nested);
    CHECK_EQUAL(1, mine.ncalls);
    give(&mine.f, block);
    owner_close(&mine);
}

static size_t rescue_that_takes(void *context, size_t needed_bytes) {
    owner *mine = context;
    (void)needed_bytes;
    if (mine->nheld == 0) {
        return 0;
    }
    CHECK_OK(sk_pool_give(mine->f.pool, mine->held[--mine->nheld]));
    void *block = NULL; /* staging from the bytes just freed, for instance */
    mine->nested = sk_pool_take(mine->f.pool, BLOCK_BYTES / 2, NULL, &block);
    CHECK_OK(sk_pool_give(mine->f.pool, block));
    return BLOCK_BYTES;
}

SK_TEST(rescue, test_rescue_when_it_takes_what_fits_then_that_works) {
    owner mine = owner_open(false, 4, 1);
    sk_pool_set_rescue(mine.f.pool, rescue_that_takes, &mine);
    void *block = take(&mine.f, BLOCK_BYTES, NULL);
    CHECK_STATUS(SK_OK, mine.nested);
    give(&mine.f, block);
    owner_close(&mine);
}

SK_TEST(rescue, test_rescue_when_it_calls_the_pool_then_no_deadlock) {
    owner mine = owner_open(false, 4, 1);
    mine.use_pool = true;
    sk_pool_set_rescue(mine.f.pool, rescue, &mine);
    give(&mine.f, take(&mine.f, BLOCK_BYTES, NULL));
    CHECK_EQUAL(1, mine.ncalls);
    owner_close(&mine);
}

SK_TEST(rescue, test_rescue_when_removed_then_not_called_any_more) {
    owner mine = owner_open(false, 4, 1);
    sk_pool_set_rescue(mine.f.pool, rescue, &mine);
    sk_pool_set_rescue(mine.f.pool, NULL, NULL);
    void *block = NULL;
    CHECK_STATUS(SK_OVER_BUDGET, sk_pool_take(mine.f.pool, BLOCK_BYTES, NULL, &block));
    CHECK_EQUAL(0, mine.ncalls);
    owner_close(&mine);
}

/* Another thread works on the pool while the callback runs: it can, for no lock is held. */
static void *take_and_give(void *argument) {
    owner *mine = argument;
    void *block = NULL;
    CHECK_OK(sk_pool_take(mine->f.pool, ROUNDING, NULL, &block));
    CHECK_OK(sk_pool_give(mine->f.pool, block));
    return NULL;
}

static size_t rescue_with_thread(void *context, size_t needed_bytes) {
    owner *mine = context;
    size_t freed = rescue(mine, needed_bytes);
    pthread_t thread;
    if (pthread_create(&thread, NULL, take_and_give, mine) == 0) {
        (void)pthread_join(thread, NULL);
    }
    return freed;
}

SK_TEST(rescue, test_rescue_when_another_thread_uses_the_pool_meanwhile_then_no_deadlock) {
    owner mine = owner_open(false, 4, 1);
    sk_pool_set_rescue(mine.f.pool, rescue_with_thread, &mine);
    void *block = take(&mine.f, BLOCK_BYTES - (size_t)64 * KIB, NULL);
    CHECK_EQUAL(1, mine.ncalls);
    give(&mine.f, block);
    owner_close(&mine);
}

SK_TEST(rescue, test_rescue_when_device_refuses_then_called_too) {
    for (int whole = 0; whole < 2; whole++) {
        owner mine = {.free_per_call = 1, .f = {.backend = make_device(BUDGET)}};
        sk_pool_params params = {.whole_segments = whole == 1};
        CHECK_OK(sk_pool_create(mine.f.backend, &params, &mine.f.pool));
        for (int i = 0; i < MAX_HELD; i++) {
            void *block = NULL;
            if (sk_pool_take(mine.f.pool, BLOCK_BYTES, NULL, &block) != SK_OK) {
                break;
            }
            mine.held[mine.nheld++] = block;
        }
        CHECK(mine.nheld > 0 && mine.nheld <= 4);
        sk_pool_set_rescue(mine.f.pool, rescue, &mine);
        give(&mine.f, take(&mine.f, BLOCK_BYTES, NULL));
        CHECK_EQUAL(1, mine.ncalls);
        owner_close(&mine);
    }
}
