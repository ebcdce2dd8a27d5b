/* test_making.c - who is told that a take makes memory, and when. */
#include <pthread.h>

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

/* Told by several threads while it comes and goes. */
typedef struct listener {
    atomic_long nbegun, nended, nwrong;
} listener;

static _Thread_local const listener *listening;

static void listen(void *context, bool begins) {
    listener *mine = context;
    const listener *expected = begins ? NULL : mine;
    atomic_fetch_add(&mine->nwrong, listening != expected);
    atomic_fetch_add(begins ? &mine->nbegun : &mine->nended, 1);
    listening = begins ? mine : NULL;
}

enum { NTAKERS = 3, NTAKEN = 300, NSET = 2000 };

static void *grower_run(void *argument) {
    fixture *f = argument;
    for (int i = 0; i < NTAKEN; i++) {
        void *block = NULL;
        if (sk_pool_take(f->pool, BLOCK_BYTES, NULL, &block) == SK_OK) {
            CHECK_OK(sk_pool_give(f->pool, block));
        }
        CHECK_OK(sk_pool_trim(f->pool)); /* so that the next has to grow */
    }
    return NULL;
}

SK_TEST(making, test_making_when_set_while_others_take_then_each_is_told_in_pairs) {
    fixture f = fixture_open(BUDGET, false);
    listener listeners[2] = {0};
    pthread_t takers[NTAKERS];
    for (int i = 0; i < NTAKERS; i++) {
        CHECK_EQUAL(0, pthread_create(&takers[i], NULL, grower_run, &f));
    }
    for (int i = 0; i < NSET; i++) {
        sk_pool_set_making(f.pool, i % 3 == 2 ? NULL : listen, &listeners[i % 2]);
    }
    sk_pool_set_making(f.pool, listen, &listeners[0]);
    for (int i = 0; i < NTAKERS; i++) {
        CHECK_EQUAL(0, pthread_join(takers[i], NULL));
    }
    give(&f, take(&f, BLOCK_BYTES, NULL));
    CHECK(atomic_load(&listeners[0].nbegun) > 0);
    for (int i = 0; i < 2; i++) {
        CHECK_EQUAL(0, atomic_load(&listeners[i].nwrong));
        CHECK_EQUAL(atomic_load(&listeners[i].nbegun), atomic_load(&listeners[i].nended));
    }
    sk_pool_set_making(f.pool, NULL, NULL);
    fixture_close(&f);
}
