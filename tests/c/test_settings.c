/* test_settings.c - what a pool is told when it is made: blocks that stay whole, and a share of the
 * budget above which it gives cached memory back before it grows. */
#include <math.h>

#include "fixture.h"

enum { SPLIT = 32 * MIB, ROOM = 20 * MIB };

static fixture open_with(const sk_pool_params *params) {
    fixture made = {.backend = make_device(CAPACITY)};
    CHECK_OK(sk_pool_create(made.backend, params, &made.pool));
    return made;
}

static fixture open_split(void) {
    return open_with(&(sk_pool_params){.whole_segments = true, .max_split_bytes = SPLIT});
}

static int64_t segments_of(fixture *f) { return stats_of(f).segment[0].current; }

SK_TEST(settings, test_pool_when_a_setting_is_out_of_range_then_invalid_with_the_range) {
    sk_backend *backend = make_device(CAPACITY);
    static const double shares[] = {-0.1, 1.0, 2.0, NAN};
    sk_pool *pool = NULL;
    for (size_t i = 0; i < sizeof shares / sizeof shares[0]; i++) {
        sk_pool_params params = {.garbage_collection_threshold = shares[i]};
        CHECK_STATUS(SK_INVALID, sk_pool_create(backend, &params, &pool));
        CHECK_CONTAINS(sk_error_text(), "0 to below 1");
    }
    static const size_t splits[] = {1, MIB, ROOM};
    for (size_t i = 0; i < sizeof splits / sizeof splits[0]; i++) {
        sk_pool_params params = {.max_split_bytes = splits[i]};
        CHECK_STATUS(SK_INVALID, sk_pool_create(backend, &params, &pool));
        CHECK_CONTAINS(sk_error_text(), "more than 20971520");
    }
    CHECK(pool == NULL);
    sk_backend_close(backend);
}

SK_TEST(settings, test_stats_when_settings_are_made_then_shown) {
    fixture plain = fixture_open(0, true);
    CHECK_EQUAL(-1, stats_of(&plain).max_split_size);
    CHECK_EQUAL(0, stats_of(&plain).expandable_segments);
    fixture_close(&plain);
    fixture split = open_split();
    CHECK_EQUAL(SPLIT, stats_of(&split).max_split_size);
    fixture_close(&split);
    fixture ranges = open_with(&(sk_pool_params){.max_split_bytes = SPLIT});
    CHECK_EQUAL(-1, stats_of(&ranges).max_split_size); /* there it has no effect */
    CHECK_EQUAL(1, stats_of(&ranges).expandable_segments);
    fixture_close(&ranges);
}

/* ---- blocks that stay whole ------------------------------------------------------------------ */

SK_TEST(settings, test_take_when_only_a_larger_block_than_may_be_split_is_free_then_a_new_segment) {
    fixture f = open_split();
    void *large = take(&f, 40 * MIB, NULL);
    give(&f, large);
    void *small = take(&f, 4 * MIB, NULL);
    CHECK_EQUAL(2, segments_of(&f));
    CHECK_EQUAL(40 * MIB, block_at(&f, large).nbytes);
    give(&f, small);
    fixture_close(&f);
}

SK_TEST(settings, test_take_when_the_free_block_may_be_split_then_a_part_of_it) {
    fixture f = open_split();
    void *large = take(&f, SPLIT, NULL); /* not larger than the limit */
    give(&f, large);
    void *small = take(&f, 4 * MIB, NULL);
    CHECK(small == large);
    CHECK_EQUAL(1, segments_of(&f));
    give(&f, small);
    fixture_close(&f);
}

SK_TEST(settings, test_take_when_a_block_stays_whole_then_it_serves_what_is_nearly_as_large) {
    fixture f = open_split();
    void *large = take(&f, 60 * MIB, NULL);
    give(&f, large);
    void *near = take(&f, 41 * MIB, NULL);
    CHECK(near == large);
    CHECK_EQUAL(60 * MIB, block_at(&f, near).nbytes); /* whole */
    give(&f, near);
    void *far = take(&f, 40 * MIB, NULL); /* 20 MiB would be lost in it */
    CHECK(far != large);
    CHECK_EQUAL(2, segments_of(&f));
    give(&f, far);
    fixture_close(&f);
}

SK_TEST(settings, test_take_when_rounding_would_pass_the_limit_then_the_segment_ends_there) {
    fixture f =
        open_with(&(sk_pool_params){.whole_segments = true, .max_split_bytes = SPLIT + MIB + 100});
    void *block = take(&f, SPLIT + MIB - KIB, NULL); /* 34 MiB, were it rounded up */
    CHECK_EQUAL(SPLIT + MIB, stats_of(&f).reserved_bytes[0].current);
    give(&f, block);
    fixture_close(&f);
}

SK_TEST(settings, test_take_when_whole_blocks_fill_the_budget_then_they_are_given_back) {
    fixture f = open_with(&(sk_pool_params){
        .budget_bytes = 48 * MIB, .whole_segments = true, .max_split_bytes = SPLIT});
    give(&f, take(&f, 40 * MIB, NULL));
    void *small = take(&f, 12 * MIB, NULL);
    CHECK_EQUAL(12 * MIB, stats_of(&f).reserved_bytes[0].current);
    give(&f, small);
    fixture_close(&f);
}

SK_TEST(settings, test_take_when_another_stream_has_only_whole_blocks_then_none_is_adopted) {
    fixture f = open_with(&(sk_pool_params){
        .budget_bytes = 48 * MIB, .whole_segments = true, .max_split_bytes = SPLIT});
    sk_stream *other = make_stream(f.backend);
    void *large = take(&f, 40 * MIB, other);
    give(&f, large);
    void *small = take(&f, 12 * MIB, NULL);
    CHECK(small != large);
    CHECK_EQUAL(1, stats_of(&f).num_sync_all_streams); /* given back by its own stream */
    CHECK_EQUAL(12 * MIB, block_at(&f, small).nbytes);
    CHECK_EQUAL(12 * MIB, stats_of(&f).reserved_bytes[0].current);
    give(&f, small);
    drop_used_stream(&f, other);
    fixture_close(&f);
}

/* ---- giving back before growing -------------------------------------------------------------- */

static fixture open_collecting(size_t budget_bytes, bool whole) {
    return open_with(&(sk_pool_params){.budget_bytes = budget_bytes,
                                       .whole_segments = whole,
                                       .garbage_collection_threshold = 0.5});
}

static void collects(bool whole) {
    fixture f = open_collecting(100 * MIB, whole);
    void *first = take(&f, 40 * MIB, NULL);
    void *second = take(&f, 20 * MIB, NULL);
    give(&f, first);
    void *third = take(&f, 42 * MIB, NULL); /* would fit the budget: 102 MiB are never reserved */
    sk_pool_stats stats = stats_of(&f);
    CHECK_EQUAL(1, stats.num_garbage_collections);
    CHECK(stats.garbage_collected_bytes >= 10 * MIB);
    CHECK(stats.reserved_bytes[0].peak <= 100 * MIB);
    CHECK_EQUAL(0, stats.num_alloc_retries); /* it was not the budget that made it */
    give(&f, second);
    give(&f, third);
    sk_pool_stats_reset_accumulated(f.pool);
    CHECK_EQUAL(0, stats_of(&f).num_garbage_collections);
    CHECK_EQUAL(0, stats_of(&f).garbage_collected_bytes);
    fixture_close(&f);
}

SK_TEST(settings, test_take_when_the_share_is_passed_then_cached_memory_goes_back_before_growth) {
    collects(false);
    collects(true);
}

SK_TEST(settings, test_take_when_the_share_is_not_passed_then_all_stays_cached) {
    fixture f = open_collecting(200 * MIB, true);
    void *first = take(&f, 40 * MIB, NULL);
    give(&f, first);
    void *second = take(&f, 44 * MIB, NULL);
    CHECK_EQUAL(0, stats_of(&f).num_garbage_collections);
    CHECK_EQUAL(84 * MIB, stats_of(&f).reserved_bytes[0].current);
    give(&f, second);
    fixture_close(&f);
}

SK_TEST(settings, test_take_when_a_cached_block_serves_then_nothing_is_collected) {
    fixture f = open_collecting(100 * MIB, true);
    give(&f, take(&f, 60 * MIB, NULL));
    void *again = take(&f, 60 * MIB, NULL);
    CHECK_EQUAL(0, stats_of(&f).num_garbage_collections);
    give(&f, again);
    fixture_close(&f);
}

SK_TEST(settings, test_take_when_there_is_no_budget_then_nothing_is_collected) {
    fixture f = open_collecting(0, true);
    give(&f, take(&f, 40 * MIB, NULL));
    void *block = take(&f, 44 * MIB, NULL);
    CHECK_EQUAL(0, stats_of(&f).num_garbage_collections);
    give(&f, block);
    fixture_close(&f);
}

/* Memory that a stream may still work on goes back only when that stream was waited for. */
static void busy_stream(bool tentative) {
    fixture f = open_collecting(100 * MIB, true);
    sk_stream *busy = make_stream(f.backend);
    give(&f, take(&f, 60 * MIB, busy));
    bool before = sk_tentative_set(tentative);
    void *block = take(&f, 20 * MIB, NULL);
    (void)sk_tentative_set(before);
    CHECK_EQUAL(tentative ? 0 : 1, stats_of(&f).num_sync_all_streams);
    CHECK_EQUAL(tentative ? 0 : 60 * MIB, stats_of(&f).garbage_collected_bytes);
    give(&f, block);
    drop_used_stream(&f, busy);
    fixture_close(&f);
}

SK_TEST(settings, test_collect_when_a_stream_owns_the_memory_then_waited_for_unless_tentative) {
    busy_stream(false);
    busy_stream(true);
}

/* ---- rounding by divisions of powers of two ---------------------------------------------------
 */

/* Take and give a block; return its size. */
static int64_t block_size(fixture *f, size_t nbytes) {
    int64_t before = stats_of(f).allocated_bytes[0].current;
    void *block = take(f, nbytes, NULL);
    int64_t size = stats_of(f).allocated_bytes[0].current - before;
    give(f, block);
    CHECK_OK(sk_pool_check(f->pool));
    return size;
}

SK_TEST(settings, test_take_when_divisions_are_given_then_the_next_part_of_the_power_of_two) {
    sk_pool_params params = {.whole_segments = false};
    for (size_t i = 0; i < 16; i++) {
        params.roundup_divisions[i] = 4;
    }
    fixture f = open_with(&params);
    CHECK_EQUAL(512, block_size(&f, 1));
    CHECK_EQUAL(1536, block_size(&f, 1200)); /* at most 512 * 4: as usual */
    CHECK_EQUAL(2048, block_size(&f, 2048));
    CHECK_EQUAL(2560, block_size(&f, 2049));
    CHECK_EQUAL(4 * KIB, block_size(&f, 4 * KIB)); /* a power of two stays */
    CHECK_EQUAL(5 * KIB, block_size(&f, 4 * KIB + 1));
    CHECK_EQUAL(8 * KIB, block_size(&f, 7 * KIB + 1));
    CHECK_EQUAL(MIB, block_size(&f, 900 * KIB)); /* still a small one */
    CHECK_EQUAL(MIB + 256 * KIB, block_size(&f, MIB + 1));
    CHECK_EQUAL(3 * MIB, block_size(&f, 3 * MIB));
    CHECK_EQUAL(3 * MIB + 512 * KIB, block_size(&f, 3 * MIB + 1));
    fixture_close(&f);
}

SK_TEST(settings, test_take_when_divisions_differ_by_interval_then_each_by_its_own) {
    /* [2:1,4:2,>:8]: 1 up to below 4 MiB, 2 from 4 MiB, 8 from 8 MiB. */
    sk_pool_params params = {.roundup_divisions = {1, 1, 2, 8, 8}};
    fixture f = open_with(&params);
    CHECK_EQUAL(3 * MIB + 512, block_size(&f, 3 * MIB + 1));
    CHECK_EQUAL(6 * MIB, block_size(&f, 4 * MIB + 1));
    CHECK_EQUAL(9 * MIB, block_size(&f, 8 * MIB + 1));
    CHECK_EQUAL(18 * MIB, block_size(&f, 16 * MIB + 1));
    CHECK_EQUAL(32 * MIB + 512, block_size(&f, 32 * MIB + 1)); /* none there */
    fixture_close(&f);
}

SK_TEST(settings, test_take_when_the_rounded_size_is_over_the_budget_then_refused) {
    sk_pool_params params = {.budget_bytes = 5 * MIB, .roundup_divisions = {1, 1, 2}};
    fixture f = open_with(&params);
    void *block = NULL;
    CHECK_STATUS(SK_OVER_BUDGET, sk_pool_take(f.pool, 4 * MIB + 1, NULL, &block));
    CHECK_EQUAL(4 * MIB, block_size(&f, 4 * MIB));
    fixture_close(&f);
}

SK_TEST(settings, test_pool_when_divisions_are_no_power_of_two_then_invalid) {
    sk_backend *backend = make_device(CAPACITY);
    sk_pool *pool = NULL;
    sk_pool_params params = {.roundup_divisions = {0, 3}};
    CHECK_STATUS(SK_INVALID, sk_pool_create(backend, &params, &pool));
    CHECK_CONTAINS(sk_error_text(), "roundup_divisions[1]=3: expected a power of 2");
    sk_backend_close(backend);
}
