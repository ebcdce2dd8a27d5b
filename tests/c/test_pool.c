/* test_pool.c - one pool, one thread, the host's own order: rounding, fit, split, merge, figures.
 */
#include <stdlib.h>
#include <string.h>

#include "fixture.h"

/* Every scenario holds with virtual memory and with whole segments. */
static void both_modes(void (*scenario)(fixture *f)) {
    for (int whole = 0; whole < 2; whole++) {
        fixture f = fixture_open(0, whole == 1);
        scenario(&f);
        fixture_close(&f);
    }
}

static void arguments(fixture *f) {
    void *block = NULL;
    CHECK_STATUS(SK_INVALID, sk_pool_take(f->pool, 0, NULL, &block));
    CHECK_STATUS(SK_INVALID, sk_pool_take(f->pool, SIZE_MAX, NULL, &block));
    CHECK_STATUS(SK_INVALID, sk_pool_take(f->pool, SIZE_MAX / 2, NULL, &block));
    CHECK(block == NULL);
    CHECK_STATUS(SK_INVALID, sk_pool_give(f->pool, NULL));
    CHECK_STATUS(SK_INVALID, sk_pool_use(f->pool, NULL, NULL));
    CHECK_EQUAL(0, stats_of(f).allocation[0].current);
}

SK_TEST(pool, test_pool_when_arguments_wrong_then_error_and_nothing_done) { both_modes(arguments); }

static void unknown_address(fixture *f) {
    char *block = take(f, 4 * KIB, NULL);
    int outside = 0;
    CHECK_STATUS(SK_INVALID, sk_pool_give(f->pool, &outside));
    CHECK_STATUS(SK_INVALID, sk_pool_give(f->pool, block + ROUNDING));
    CHECK_STATUS(SK_INVALID, sk_pool_give(f->pool, block + 1));
    CHECK_STATUS(SK_INVALID, sk_pool_use(f->pool, block + 1, NULL));
    give(f, block);
    CHECK_STATUS(SK_INVALID, sk_pool_give(f->pool, block));
    CHECK_STATUS(SK_INVALID, sk_pool_use(f->pool, block, NULL));
    CHECK_CONTAINS(sk_error_text(), "0x");
}

SK_TEST(pool, test_give_when_no_block_in_use_there_then_invalid) { both_modes(unknown_address); }

static void rounding(fixture *f) {
    static const size_t asked[] = {1, 511, 512, 513, 4097, MIB, MIB + 1, 3 * MIB + 7};
    for (size_t i = 0; i < sizeof asked / sizeof asked[0]; i++) {
        void *block = take(f, asked[i], NULL);
        size_t rounded = (asked[i] + ROUNDING - 1) / ROUNDING * ROUNDING;
        CHECK_EQUAL(0, (uintptr_t)block % ROUNDING);
        CHECK_EQUAL(rounded, stats_of(f).allocated_bytes[0].current);
        CHECK_EQUAL(asked[i], stats_of(f).requested_bytes[0].current);
        sk_block_info info = block_at(f, block);
        CHECK_EQUAL(asked[i], info.requested_bytes);
        CHECK_EQUAL(rounded, info.nbytes);
        CHECK_EQUAL(SK_BLOCK_IN_USE, info.state);
        give(f, block);
        CHECK_EQUAL(0, stats_of(f).allocated_bytes[0].current);
        CHECK_EQUAL(0, stats_of(f).requested_bytes[0].current);
    }
}

SK_TEST(pool, test_take_when_any_size_then_rounded_to_512_and_counted) { both_modes(rounding); }

static void arenas(fixture *f) {
    void *small = take(f, SMALL_LIMIT, NULL);
    void *large = take(f, SMALL_LIMIT + 1, NULL);
    sk_pool_stats stats = stats_of(f);
    CHECK_EQUAL(1, stats.allocation[1].current);
    CHECK_EQUAL(1, stats.allocation[2].current);
    CHECK_EQUAL(2, stats.allocation[0].current);
    CHECK_EQUAL(SMALL_LIMIT, stats.allocated_bytes[1].current);
    CHECK_EQUAL(SMALL_LIMIT + ROUNDING, stats.allocated_bytes[2].current);
    give(f, small);
    give(f, large);
}

SK_TEST(pool, test_take_when_past_1_mib_then_large_arena) { both_modes(arenas); }

static void reuse(fixture *f) {
    void *first = take(f, 8 * KIB, NULL);
    give(f, first);
    int64_t reserved = stats_of(f).reserved_bytes[0].current;
    CHECK(reserved > 0);
    CHECK(take(f, 8 * KIB, NULL) == first);
    CHECK_EQUAL(reserved, stats_of(f).reserved_bytes[0].current);
    give(f, first);
}

SK_TEST(pool, test_take_when_same_size_was_given_then_same_block_and_no_growth) {
    both_modes(reuse);
}

SK_TEST(pool, test_take_when_a_large_block_lacks_a_page_then_64_kib_are_committed_at_once) {
    fixture f = fixture_open(CAPACITY, false);
    give(&f, take(&f, 2 * MIB, NULL));
    CHECK_EQUAL(2 * MIB, stats_of(&f).reserved_bytes[0].current);
    void *larger = take(&f, 2 * MIB + 4 * KIB, NULL);
    CHECK_EQUAL(2 * MIB + 64 * KIB, stats_of(&f).reserved_bytes[0].current);
    give(&f, larger);
    fixture_close(&f);
}

/* Three holes of different size between blocks in use: the smallest that fits is taken. */
static void best_fit(fixture *f) {
    static const size_t sizes[] = {64 * KIB, 16 * KIB, 32 * KIB};
    void *holes[3];
    void *walls[3];
    for (int i = 0; i < 3; i++) {
        holes[i] = take(f, sizes[i], NULL);
        walls[i] = take(f, ROUNDING, NULL);
    }
    for (int i = 0; i < 3; i++) {
        give(f, holes[i]);
    }
    CHECK(take(f, 20 * KIB, NULL) == holes[2]);
    CHECK(take(f, 16 * KIB, NULL) == holes[1]);
    CHECK(take(f, 33 * KIB, NULL) == holes[0]);
    for (int i = 0; i < 3; i++) {
        give(f, holes[i]);
        give(f, walls[i]);
    }
}

SK_TEST(pool, test_take_when_several_holes_fit_then_the_smallest) { both_modes(best_fit); }

static void split_merge(fixture *f) {
    char *whole = take(f, 96 * KIB, NULL);
    char *wall = take(f, ROUNDING, NULL);
    give(f, whole);
    char *parts[3];
    for (int i = 0; i < 3; i++) {
        parts[i] = take(f, 32 * KIB, NULL);
        CHECK(parts[i] == whole + (ptrdiff_t)i * 32 * KIB);
    }
    CHECK_OK(sk_pool_check(f->pool));
    give(f, parts[1]); /* alone, then with its right, then with its left neighbour */
    CHECK_OK(sk_pool_check(f->pool));
    give(f, parts[2]);
    CHECK_OK(sk_pool_check(f->pool));
    give(f, parts[0]);
    CHECK_OK(sk_pool_check(f->pool));
    CHECK(take(f, 96 * KIB, NULL) == whole);
    give(f, whole);
    give(f, wall);
}

SK_TEST(pool, test_give_when_neighbours_are_free_then_merged) { both_modes(split_merge); }

static void peaks(fixture *f) {
    void *first = take(f, 2 * MIB, NULL);
    void *second = take(f, 3 * MIB, NULL);
    give(f, second);
    CHECK_EQUAL(5 * MIB, stats_of(f).allocated_bytes[0].peak);
    CHECK_EQUAL(2 * MIB, stats_of(f).allocated_bytes[0].current);
    CHECK_EQUAL(5 * MIB, stats_of(f).allocated_bytes[0].allocated);
    CHECK_EQUAL(3 * MIB, stats_of(f).allocated_bytes[0].freed);
    sk_pool_stats_reset_peak(f->pool);
    CHECK_EQUAL(2 * MIB, stats_of(f).allocated_bytes[0].peak);
    CHECK_EQUAL(stats_of(f).reserved_bytes[0].current, stats_of(f).reserved_bytes[0].peak);
    give(f, first);
}

SK_TEST(pool, test_stats_when_blocks_come_and_go_then_peaks_and_totals_follow) {
    both_modes(peaks);
}

static void peak_take(fixture *f) {
    (void)sk_pool_peak_take(f->pool);
    void *block = take(f, 24 * MIB, NULL);
    give(f, block);
    CHECK_OK(sk_pool_trim(f->pool));
    CHECK(sk_pool_peak_take(f->pool) >= 24 * MIB);
    CHECK_EQUAL(0, sk_pool_peak_take(f->pool)); /* since the last call: nothing reserved */
    CHECK(stats_of(f).reserved_bytes[0].peak >= 24 * MIB);
}

SK_TEST(pool, test_peak_take_when_called_twice_then_second_starts_anew) { both_modes(peak_take); }

static void trim(fixture *f) {
    void *kept = take(f, 2 * MIB, NULL);
    void *spare = take(f, 24 * MIB, NULL);
    pattern_write(kept, 2 * MIB, 1);
    give(f, spare);
    int64_t before = stats_of(f).reserved_bytes[0].current;
    CHECK_OK(sk_pool_trim(f->pool));
    int64_t after = stats_of(f).reserved_bytes[0].current;
    CHECK(after < before && after >= 2 * MIB);
    CHECK_EQUAL(after, device_bytes(f->backend));
    CHECK(pattern_holds(kept, 2 * MIB, 1));
    CHECK_OK(sk_pool_check(f->pool));
    give(f, kept);
    CHECK_OK(sk_pool_trim(f->pool));
    CHECK_EQUAL(0, stats_of(f).reserved_bytes[0].current);
    CHECK_EQUAL(0, device_bytes(f->backend));
}

SK_TEST(pool, test_trim_when_blocks_in_use_then_only_spare_bytes_go) { both_modes(trim); }

/* Only granules wholly inside the free block may go: its neighbours share the others. */
SK_TEST(pool, test_trim_when_hole_unaligned_then_neighbours_keep_their_bytes) {
    need_small_granules();
    fixture f = fixture_open(0, false);
    enum { NBYTES = 200 * KIB + ROUNDING, NBLOCKS = 5 };
    void *blocks[NBLOCKS];
    for (unsigned i = 0; i < NBLOCKS; i++) {
        blocks[i] = take(&f, NBYTES, NULL);
        pattern_write(blocks[i], NBYTES, i);
    }
    give(&f, blocks[1]);
    give(&f, blocks[3]);
    int64_t before = stats_of(&f).reserved_bytes[0].current;
    CHECK_OK(sk_pool_trim(f.pool));
    CHECK(stats_of(&f).reserved_bytes[0].current < before);
    CHECK_EQUAL(0, stats_of(&f).reserved_bytes[0].current % (int64_t)granule_of());
    for (unsigned i = 0; i < NBLOCKS; i += 2) {
        CHECK(pattern_holds(blocks[i], NBYTES, i));
    }
    blocks[1] = take(&f, NBYTES, NULL); /* commits the middle again */
    pattern_write(blocks[1], NBYTES, 1);
    CHECK_OK(sk_pool_check(f.pool));
    for (unsigned i = 0; i < NBLOCKS; i++) {
        if (i != 3) {
            CHECK(pattern_holds(blocks[i], NBYTES, i));
            give(&f, blocks[i]);
        }
    }
    fixture_close(&f);
}

static void destroy_busy(fixture *f) {
    void *block = take(f, KIB, NULL);
    CHECK_STATUS(SK_INVALID, sk_pool_destroy(f->pool));
    CHECK_OK(sk_pool_check(f->pool));
    pattern_write(block, KIB, 1);
    give(f, block);
}

SK_TEST(pool, test_destroy_when_blocks_in_use_then_invalid_and_still_works) {
    both_modes(destroy_busy);
}

SK_TEST(pool, test_create_when_arguments_wrong_then_invalid) {
    sk_backend *backend = make_device(CAPACITY);
    sk_pool_params params = {0};
    sk_pool *pool = NULL;
    CHECK_STATUS(SK_INVALID, sk_pool_create(NULL, &params, &pool));
    CHECK_STATUS(SK_INVALID, sk_pool_create(backend, &params, NULL));
    CHECK(pool == NULL);
    CHECK_OK(sk_pool_destroy(NULL));
    sk_backend_close(backend);
}

static void owns(fixture *f) {
    char *block = take(f, 4 * KIB, NULL);
    int outside = 0;
    CHECK_EQUAL(1, sk_pool_owns(f->pool, block));
    CHECK_EQUAL(1, sk_pool_owns(f->pool, block + 4 * KIB - 1));
    CHECK_EQUAL(0, sk_pool_owns(f->pool, &outside));
    CHECK_EQUAL(0, sk_pool_owns(f->pool, NULL));
    give(f, block);
}

SK_TEST(pool, test_owns_when_inside_a_segment_then_1) { both_modes(owns); }

static void walk(fixture *f) {
    void *small = take(f, KIB, NULL);
    void *large = take(f, 5 * MIB, NULL);
    sk_segment_info segments[16];
    size_t nsegments = sk_pool_segments(f->pool, segments, 16);
    CHECK(nsegments >= 2 && nsegments <= 16);
    size_t committed = 0;
    for (size_t i = 0; i < nsegments; i++) {
        CHECK(segments[i].committed_bytes <= segments[i].nbytes);
        committed += segments[i].committed_bytes;
    }
    CHECK_EQUAL(stats_of(f).reserved_bytes[0].current, committed);
    sk_block_info one;
    CHECK(sk_pool_blocks(f->pool, &one, 1) > 1); /* says how many there are, writes one */
    CHECK_EQUAL(nsegments, sk_pool_segments(f->pool, segments, 1));
    give(f, small);
    give(f, large);
}

SK_TEST(pool, test_segments_when_walked_then_committed_bytes_are_the_reserved) { both_modes(walk); }

static void tags(fixture *f) {
    enum { TAG = 77 };
    CHECK_EQUAL(0, sk_tag_set(TAG));
    void *tagged = take(f, KIB, NULL);
    CHECK_EQUAL(TAG, sk_tag_set(0));
    void *plain = take(f, KIB, NULL);
    CHECK_EQUAL(TAG, block_at(f, tagged).tag);
    CHECK_EQUAL(0, block_at(f, plain).tag);
    sk_pool_note(f->pool, SK_RING_MARK, 0);
    void *later = take(f, KIB, NULL);
    sk_pool_note(f->pool, SK_RING_MARK, 0);
    CHECK_EQUAL(1, block_at(f, later).age);
    CHECK_EQUAL(2, block_at(f, plain).age);
    give(f, later);
    give(f, tagged);
    give(f, plain);
}

SK_TEST(pool, test_tag_when_set_then_blocks_of_this_thread_carry_it) { both_modes(tags); }

static void many(fixture *f) {
    enum { NBLOCKS = 3000, STEPS = 20000, LARGEST = 40 * KIB };
    void **blocks = calloc(NBLOCKS, sizeof *blocks);
    size_t *sizes = calloc(NBLOCKS, sizeof *sizes);
    CHECK(blocks != NULL && sizes != NULL);
    uint64_t state = 1;
    for (int step = 0; step < STEPS; step++) {
        size_t i = random_below(&state, NBLOCKS);
        if (blocks[i] != NULL) {
            CHECK(pattern_holds(blocks[i], sizes[i], (unsigned)i));
            give(f, blocks[i]);
            blocks[i] = NULL;
            continue;
        }
        sizes[i] = 1 + random_below(&state, LARGEST);
        blocks[i] = take(f, sizes[i], NULL);
        pattern_write(blocks[i], sizes[i], (unsigned)i);
    }
    CHECK_OK(sk_pool_check(f->pool));
    for (size_t i = 0; i < NBLOCKS; i++) {
        if (blocks[i] != NULL) {
            CHECK(pattern_holds(blocks[i], sizes[i], (unsigned)i));
            give(f, blocks[i]);
        }
    }
    free(blocks);
    free(sizes);
}

SK_TEST(pool, test_pool_when_thousands_of_random_blocks_then_none_overlap) { both_modes(many); }

static void mixed_sizes(fixture *f) {
#ifdef SK_TEST_SANITISED
    enum { NBLOCKS = 24, STEPS = 600, LARGEST = 16 * MIB };
    device_wipe_not();
#else
    enum { NBLOCKS = 24, STEPS = 2000, LARGEST = 16 * MIB };
#endif
    void *blocks[NBLOCKS] = {0};
    size_t sizes[NBLOCKS];
    uint64_t state = 2;
    for (int step = 0; step < STEPS; step++) {
        size_t i = random_below(&state, NBLOCKS);
        if (blocks[i] != NULL) {
            CHECK(pattern_holds(blocks[i], sizes[i], (unsigned)i));
            give(f, blocks[i]);
            blocks[i] = NULL;
        } else {
            sizes[i] = 1 + random_below(&state, (size_t)1 << (10 + random_below(&state, 15)));
            CHECK(sizes[i] <= LARGEST);
            blocks[i] = take(f, sizes[i], NULL);
            pattern_write(blocks[i], sizes[i], (unsigned)i);
        }
        if (step % 100 == 0) {
            CHECK_OK(sk_pool_trim(f->pool));
            CHECK_OK(sk_pool_check(f->pool));
        }
    }
    for (size_t i = 0; i < NBLOCKS; i++) {
        if (blocks[i] != NULL) {
            CHECK(pattern_holds(blocks[i], sizes[i], (unsigned)i));
            give(f, blocks[i]);
        }
    }
}

SK_TEST(pool, test_trim_when_between_random_blocks_then_contents_stay) { both_modes(mixed_sizes); }
