/* test_making.c - who is told that a take makes memory, and when. */
#include "fixture.h"

enum { BLOCK_BYTES = 2 * MIB, BUDGET = 8 * MIB };

typedef struct witness {
    fixture f;
    void *held;
    void *inside; /* taken by the callback that begins, if it is to */
    int nbegun, nended, nrescues;
    bool is_on; /* between the two */
    bool takes; /* the callbacks take, too */
    bool wrong; /* not in pairs, or a rescue outside of one */
} witness;

static void making(void *context, bool begins) {
    witness *mine = context;
    mine->wrong = mine->wrong || mine->is_on == begins;
    mine->is_on = begins;
    *(begins ? &mine->nbegun : &mine->nended) += 1;
    CHECK_OK(sk_pool_check(mine->f.pool)); /* no lock is held */
    if (mine->takes && begins) {
        mine->inside = take(&mine->f, BLOCK_BYTES, NULL);
    }
}

static size_t rescue(void *context, size_t needed_bytes) {
    witness *mine = context;
    (void)needed_bytes;
    mine->wrong = mine->wrong || !mine->is_on;
    mine->nrescues++;
    if (mine->held == NULL) {
        return 0;
    }
    give(&mine->f, mine->held);
    mine->held = NULL;
    return BLOCK_BYTES;
}

static witness witness_open(bool whole) { return (witness){.f = fixture_open(BUDGET, whole)}; }

static void witness_close(witness *mine) {
    CHECK(!mine->wrong && !mine->is_on);
    sk_pool_set_making(mine->f.pool, NULL, NULL);
    sk_pool_set_rescue(mine->f.pool, NULL, NULL);
    fixture_close(&mine->f);
}

static void tells_of_growth(bool whole) {
    witness mine = witness_open(whole);
    sk_pool_set_making(mine.f.pool, making, &mine);
    give(&mine.f, take(&mine.f, BLOCK_BYTES, NULL));
    CHECK_EQUAL(1, mine.nbegun);
    CHECK_EQUAL(1, mine.nended);
    give(&mine.f, take(&mine.f, BLOCK_BYTES, NULL));
    CHECK_EQUAL(1, mine.nbegun);
    witness_close(&mine);
}

SK_TEST(making, test_making_when_pool_grows_then_told_once_and_not_when_it_fits) {
    tells_of_growth(false);
    tells_of_growth(true);
}

SK_TEST(making, test_making_when_rescued_then_that_is_a_part_of_it) {
    witness mine = witness_open(false);
    mine.held = take(&mine.f, BLOCK_BYTES, NULL);
    sk_pool_set_making(mine.f.pool, making, &mine);
    sk_pool_set_rescue(mine.f.pool, rescue, &mine);
    give(&mine.f, take(&mine.f, BUDGET, NULL));
    CHECK_EQUAL(1, mine.nrescues);
    CHECK_EQUAL(1, mine.nbegun);
    CHECK_EQUAL(1, mine.nended);
    witness_close(&mine);
}

SK_TEST(making, test_making_when_the_take_fails_then_its_end_is_told) {
    witness mine = witness_open(false);
    sk_pool_set_making(mine.f.pool, making, &mine);
    void *block = NULL;
    CHECK_STATUS(SK_OVER_BUDGET, sk_pool_take(mine.f.pool, 2 * BUDGET, NULL, &block));
    CHECK_EQUAL(1, mine.nended);
    witness_close(&mine);
}

SK_TEST(making, test_making_when_its_callback_takes_then_that_is_not_told) {
    witness mine = witness_open(false);
    mine.takes = true;
    sk_pool_set_making(mine.f.pool, making, &mine);
    give(&mine.f, take(&mine.f, BLOCK_BYTES, NULL));
    give(&mine.f, mine.inside);
    CHECK_EQUAL(1, mine.nbegun);
    witness_close(&mine);
}

SK_TEST(making, test_making_when_the_thread_is_tentative_then_not_told) {
    witness mine = witness_open(false);
    sk_pool_set_making(mine.f.pool, making, &mine);
    CHECK(!sk_tentative_set(true));
    give(&mine.f, take(&mine.f, BLOCK_BYTES, NULL));
    CHECK(sk_tentative_set(false));
    CHECK_EQUAL(0, mine.nbegun);
    witness_close(&mine);
}
