/* test_place.c - what is remembered of where requests were served: bounded, and at a bounded price.
 */
#include "fixture.h"

enum { BUDGET = 32 * MIB, SIZES = 700, NEW_SIZES = 9000, CALLS_PER_SIZE = 4 };

/* Memory that has several addresses: only then are places remembered. */
static fixture aliased_open(void) {
    fixture f = fixture_open_aliasing(BUDGET);
    void *pieces[4];
    for (int i = 0; i < 4; i++) {
        pieces[i] = take(&f, 8 * MIB, NULL);
    }
    give(&f, pieces[0]);
    give(&f, pieces[2]);
    void *both = take(&f, 16 * MIB, NULL);
    CHECK(stats_of(&f).moved_bytes > 0);
    give(&f, both);
    give(&f, pieces[1]);
    give(&f, pieces[3]);
    return f;
}

/* How often the pool asked for host memory while it served requests of so many sizes. */
static uint64_t sizes_take(fixture *f, unsigned first, unsigned count) {
    host_memory_fail(UINT64_MAX, false); /* counts, and fails none */
    for (unsigned i = first; i < first + count; i++) {
        give(f, take(f, SMALL_LIMIT + (size_t)(i + 1) * ROUNDING, NULL));
    }
    uint64_t calls = host_memory_calls();
    host_memory_fail(0, false);
    sk_pool_note(f->pool, SK_RING_MARK, 0);
    return calls;
}

SK_TEST(place, test_step_when_it_has_many_sizes_then_none_is_forgotten) {
    enum { STEPS = 3 };
    fixture f = aliased_open();
    (void)sizes_take(&f, 0, SIZES);
    (void)sizes_take(&f, 0, SIZES);
    for (int i = 0; i < STEPS; i++) {
        CHECK_EQUAL(0, sizes_take(&f, 0, SIZES));
    }
    CHECK_OK(sk_pool_check(f.pool));
    fixture_close(&f);
}

SK_TEST(place, test_take_when_every_size_is_new_then_it_costs_a_record) {
    fixture f = aliased_open();
    CHECK(sizes_take(&f, 0, NEW_SIZES) <= (uint64_t)CALLS_PER_SIZE * NEW_SIZES);
    CHECK(sizes_take(&f, NEW_SIZES, NEW_SIZES) <= (uint64_t)CALLS_PER_SIZE * NEW_SIZES);
    CHECK_OK(sk_pool_check(f.pool));
    fixture_close(&f);
}

SK_TEST(place, test_take_when_host_memory_runs_out_then_only_the_place_is_not_remembered) {
    enum { CALLS = 24 };
    for (uint64_t nth = 1; nth <= CALLS; nth++) {
        fixture f = aliased_open();
        host_memory_fail(nth, true);
        for (unsigned i = 0; i < CALLS; i++) {
            void *taken = NULL;
            sk_status status =
                sk_pool_take(f.pool, SMALL_LIMIT + (size_t)(1 + i % 5) * ROUNDING, NULL, &taken);
            CHECK(status == SK_OK || status == SK_OUT_OF_HOST_MEMORY);
            if (status == SK_OK) {
                give(&f, taken);
            }
        }
        host_memory_fail(0, false);
        CHECK_OK(sk_pool_check(f.pool));
        fixture_close(&f);
    }
}
