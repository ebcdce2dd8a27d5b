/* test_alias.c - memory that is mapped at several addresses: a step that repeats maps nothing, and
 * nobody sees that two addresses are one memory. */
#include <stdlib.h>
#include <string.h>

#include "fixture.h"

enum {
    BUDGET = 32 * MIB,
    PAIRS = 6,
    LARGE = 12 * MIB,
#ifdef SK_TEST_SANITISED
    MANY = 2000, /* sanitisers make everything many times slower */
#else
    MANY = 4000,
#endif
};

static int64_t moves(fixture *f) {
    sk_pool_stats stats = stats_of(f);
    CHECK_EQUAL(stats.reserved_bytes[0].current, device_bytes(f->backend));
    CHECK(stats.reserved_bytes[0].current <= BUDGET);
    return stats.maps + stats.unmaps;
}

/* A step whose large request needs memory that its small ones have left in pieces: of six pairs of
 * 2 MiB blocks one of each stays, while 24 MiB are wanted twice 12 at once. */
static void step(fixture *f, unsigned seed) {
    void *kept[PAIRS];
    void *gone[PAIRS];
    for (unsigned i = 0; i < PAIRS; i++) {
        gone[i] = take(f, 2 * MIB, NULL);
        kept[i] = take(f, 2 * MIB - ROUNDING, NULL);
        pattern_write(kept[i], 2 * MIB - ROUNDING, seed + i);
        pattern_write(gone[i], 2 * MIB, seed + PAIRS + i);
    }
    for (unsigned i = 0; i < PAIRS; i++) {
        CHECK(pattern_holds(gone[i], 2 * MIB, seed + PAIRS + i));
        give(f, gone[i]);
    }
    void *large = take(f, LARGE + 3 * MIB, NULL);
    void *small = take(f, 100 * KIB, NULL);
    pattern_write(large, LARGE + 3 * MIB, seed);
    for (unsigned i = 0; i < PAIRS; i++) {
        CHECK(pattern_holds(kept[i], 2 * MIB - ROUNDING, seed + i));
        give(f, kept[i]);
    }
    CHECK(pattern_holds(large, LARGE + 3 * MIB, seed));
    void *other = take(f, LARGE, NULL);
    pattern_write(other, LARGE, seed + 1);
    CHECK(pattern_holds(large, LARGE + 3 * MIB, seed));
    give(f, large);
    give(f, small);
    give(f, other);
    sk_pool_note(f->pool, SK_RING_MARK, 0);
}

SK_TEST(alias, test_step_when_it_repeats_then_nothing_is_mapped_any_more) {
    enum { WARM = 3, STEPS = 6 };
    device_wipe_not();
    fixture f = fixture_open_aliasing(BUDGET);
    step(&f, 1);
    CHECK(moves(&f) > 0);
    for (unsigned i = 0; i < WARM; i++) {
        step(&f, i);
    }
    int64_t before = moves(&f);
    for (unsigned i = 0; i < STEPS; i++) {
        step(&f, i);
        CHECK_OK(sk_pool_check(f.pool));
    }
    CHECK_EQUAL(before, moves(&f));
    CHECK_EQUAL(0, stats_of(&f).num_sync_all_streams); /* nor was the device waited for */
    fixture_close(&f);
}

SK_TEST(alias, test_take_when_of_whole_granules_then_all_of_it_can_lie_elsewhere_afterwards) {
    enum { PIECES = 15, FREED = PIECES / 2 };
    fixture f = fixture_open_aliasing(BUDGET);
    void *odd = take(&f, 2 * MIB - 32 * KIB, NULL); /* ends inside a granule */
    void *pieces[PIECES];
    for (int i = 0; i < PIECES; i++) {
        pieces[i] = take(&f, 2 * MIB, NULL);
    }
    for (int i = 1; i < PIECES; i += 2) { /* no two are neighbours */
        give(&f, pieces[i]);
    }
    void *all = take(&f, FREED * 2 * MIB, NULL);
    CHECK_OK(sk_pool_check(f.pool));
    give(&f, all);
    give(&f, odd);
    for (int i = 0; i < PIECES; i += 2) {
        give(&f, pieces[i]);
    }
    fixture_close(&f);
}

/* Whatever comes back at other times, as copies do. */
typedef struct late {
    void *address;
    size_t nbytes;
    unsigned seed;
} late;

static void late_give(fixture *f, late *block) {
    if (block->address != NULL) {
        CHECK(pattern_holds(block->address, block->nbytes, block->seed));
        give(f, block->address);
        block->address = NULL;
    }
}

/* The same requests in every step, given back up to three requests late. */
static void jittery_step(fixture *f, uint64_t *state) {
    enum { REQUESTS = 30, LIVE = 6, LATEST = 3 };
    static const size_t sizes[] = {2 * MIB, 4 * MIB, 3 * MIB + ROUNDING, 6 * MIB, 100 * KIB};
    late live[REQUESTS] = {0};
    size_t first = 0;
    for (size_t i = 0; i < REQUESTS; i++) {
        size_t end = i < LIVE ? 0 : i - LIVE + random_below(state, LATEST);
        for (; first < end; first++) {
            late_give(f, &live[first]);
        }
        size_t nbytes = sizes[i * i % 5];
        live[i] = (late){.address = take(f, nbytes, NULL), .nbytes = nbytes, .seed = (unsigned)i};
        pattern_write(live[i].address, nbytes, (unsigned)i);
    }
    for (; first < REQUESTS; first++) {
        late_give(f, &live[first]);
    }
    sk_pool_note(f->pool, SK_RING_MARK, 0);
}

SK_TEST(alias, test_step_when_memory_comes_back_at_odd_times_then_maps_die_out) {
    enum { WARM = 30, STEPS = 10 };
    device_wipe_not();
    fixture f = fixture_open_aliasing(BUDGET);
    uint64_t state = 1;
    for (unsigned i = 0; i < WARM; i++) {
        jittery_step(&f, &state);
        (void)moves(&f);
    }
    int64_t before = moves(&f);
    for (unsigned i = 0; i < STEPS; i++) {
        jittery_step(&f, &state);
    }
    CHECK_OK(sk_pool_check(f.pool));
    CHECK(moves(&f) - before < before / 50);
    fixture_close(&f);
}

SK_TEST(alias, test_blocks_when_sizes_are_random_then_none_shares_memory_with_another) {
    enum { BLOCKS = 24, ROUNDS = MANY / 2, STEP = 50 };
    fixture f = fixture_open_aliasing(BUDGET);
    late live[BLOCKS] = {0};
    uint64_t state = 7;
    device_wipe_not();
    for (unsigned i = 0; i < ROUNDS; i++) {
        late *block = &live[random_below(&state, BLOCKS)];
        late_give(&f, block);
        size_t nbytes = 1 + random_below(&state, i % 3 == 0 ? 6 * MIB : 2 * MIB);
        if (sk_pool_take(f.pool, nbytes, NULL, &block->address) != SK_OK) {
            block->address = NULL;
            late_give(&f, &live[random_below(&state, BLOCKS)]);
        } else {
            block->nbytes = nbytes;
            block->seed = i;
            pattern_write(block->address, nbytes, i);
        }
        if (i % STEP == 0) {
            sk_pool_note(f.pool, SK_RING_MARK, 0);
            CHECK_OK(sk_pool_check(f.pool));
            (void)moves(&f);
        }
    }
    CHECK(stats_of(&f).unmaps > 0); /* there were too many aliases at some time */
    for (size_t i = 0; i < BLOCKS; i++) {
        late_give(&f, &live[i]);
    }
    fixture_close(&f);
}

SK_TEST(alias, test_trim_when_memory_has_aliases_then_the_device_has_it_back) {
    fixture f = fixture_open_aliasing(BUDGET);
    for (unsigned i = 0; i < 3; i++) {
        step(&f, i);
    }
    CHECK_OK(sk_pool_trim(f.pool));
    CHECK_EQUAL(0, device_bytes(f.backend));
    CHECK_OK(sk_pool_check(f.pool));
    step(&f, 3);
    CHECK_OK(sk_pool_set_budget(f.pool, 2 * MIB));
    CHECK(device_bytes(f.backend) <= 2 * MIB);
    CHECK_EQUAL(stats_of(&f).reserved_bytes[0].current, device_bytes(f.backend));
    fixture_close(&f);
}

/* Two free pieces of a stream, and a request for both. */
static void pieces_free(fixture *f, sk_stream *stream, void *kept[2]) {
    void *gone[2];
    for (int i = 0; i < 2; i++) {
        gone[i] = take(f, 8 * MIB, stream);
        kept[i] = take(f, 8 * MIB, stream);
    }
    give(f, gone[0]);
    give(f, gone[1]);
}

SK_TEST(alias, test_take_when_the_stream_is_busy_then_its_own_memory_is_not_waited_for) {
    fixture f = fixture_open_aliasing(BUDGET);
    sk_stream *stream = make_stream(f.backend);
    void *kept[2];
    unsigned char *host = host_take(MIB);
    pieces_free(&f, stream, kept);
    CHECK_OK(sk_copy_async(f.backend, host, kept[0], MIB, SK_DEVICE_TO_HOST, stream)); /* held */
    void *taken = take(&f, 16 * MIB, stream);
    CHECK_EQUAL(0, stats_of(&f).num_sync_all_streams);
    sk_delay_release(f.gate, UINT64_MAX);
    give(&f, taken);
    give(&f, kept[0]);
    give(&f, kept[1]);
    drop_used_stream(&f, stream);
    fixture_close(&f);
    host_give(host);
}

SK_TEST(alias, test_take_when_another_stream_owns_the_memory_then_its_work_is_waited_for) {
    fixture f = fixture_open_aliasing(BUDGET);
    sk_stream *owner = make_stream(f.backend);
    sk_stream *other = make_stream(f.backend);
    void *kept[2];
    pieces_free(&f, owner, kept);
    void *taken = take(&f, 16 * MIB, other);
    CHECK_EQUAL(1, stats_of(&f).num_sync_all_streams);
    CHECK_EQUAL((uintptr_t)other, block_at(&f, taken).stream);
    give(&f, taken);
    give(&f, kept[0]);
    give(&f, kept[1]);
    drop_used_stream(&f, owner);
    drop_used_stream(&f, other);
    fixture_close(&f);
}

SK_TEST(alias, test_take_when_no_alias_can_be_made_then_memory_is_given_back_and_taken_anew) {
    fixture f = fixture_open_aliasing(BUDGET);
    void *kept[2];
    pieces_free(&f, NULL, kept);
    pattern_write(kept[0], 8 * MIB, 1);
    pattern_write(kept[1], 8 * MIB, 2);
    sk_fault_arm(f.fault, 1, false, SK_BACKEND_FAILED); /* the mapping */
    void *taken = take(&f, 16 * MIB, NULL);
    CHECK_EQUAL(16 * MIB / GRANULE, stats_of(&f).unmaps);
    CHECK_EQUAL(0, stats_of(&f).moved_bytes);
    pattern_write(taken, 16 * MIB, 3);
    CHECK(pattern_holds(kept[0], 8 * MIB, 1) && pattern_holds(kept[1], 8 * MIB, 2));
    give(&f, taken);
    give(&f, kept[0]);
    give(&f, kept[1]);
    fixture_close(&f);
}

/* Requests that need free pieces to lie together, of which the first meets a failing call; returns
 * how many of them were served by mapping. */
static int after_failure(fixture *f, sk_status failure, int requests) {
    int mapped = 0;
    for (int i = 0; i < requests; i++) {
        void *kept[2];
        pieces_free(f, NULL, kept);
        int64_t before = stats_of(f).moved_bytes;
        sk_fault_arm(f->fault, i == 0 ? 1 : 0, false, failure);
        give(f, take(f, 16 * MIB, NULL));
        mapped += stats_of(f).moved_bytes > before ? 1 : 0;
        give(f, kept[0]);
        give(f, kept[1]);
        CHECK_OK(sk_pool_trim(f->pool));
        CHECK_OK(sk_pool_check(f->pool));
    }
    return mapped;
}

SK_TEST(alias, test_take_when_one_alias_has_failed_then_the_next_is_tried_again) {
    static const sk_status failures[] = {SK_OUT_OF_DEVICE_MEMORY, SK_OUT_OF_HOST_MEMORY,
                                         SK_BACKEND_FAILED};
    for (size_t i = 0; i < sizeof failures / sizeof failures[0]; i++) {
        fixture f = fixture_open_aliasing(BUDGET);
        CHECK_EQUAL(2, after_failure(&f, failures[i], 3));
        CHECK_EQUAL(1, stats_of(&f).alias_failures);
        sk_pool_stats_reset_accumulated(f.pool);
        CHECK_EQUAL(0, stats_of(&f).alias_failures);
        fixture_close(&f);
    }
}

SK_TEST(alias, test_take_when_aliases_cannot_be_made_at_all_then_none_is_tried_again) {
    fixture f = fixture_open_aliasing(BUDGET);
    CHECK_EQUAL(0, after_failure(&f, SK_UNSUPPORTED, 3));
    CHECK_EQUAL(1, stats_of(&f).alias_failures);
    fixture_close(&f);
}

SK_TEST(alias, test_take_when_aliases_keep_failing_then_they_are_tried_more_and_more_seldom) {
    enum { REQUESTS = 40, MOST = 6 }; /* 1 + 2 + 4 + 8 + 16 + 32 */
    need_host_order();                /* else the call that fails is a wait */
    fixture f = fixture_open_aliasing(BUDGET);
    for (int i = 0; i < REQUESTS; i++) {
        int64_t before = stats_of(&f).alias_failures;
        CHECK_EQUAL(0, after_failure(&f, SK_BACKEND_FAILED, 1));
        CHECK(stats_of(&f).alias_failures <= before + 1);
    }
    CHECK(stats_of(&f).alias_failures > 2 && stats_of(&f).alias_failures <= MOST);
    fixture_close(&f);
}

SK_TEST(alias, test_step_when_any_call_fails_then_the_pool_is_sound_and_goes_on) {
    enum { CALLS = MANY / 125 };
    for (uint64_t nth = 1; nth <= CALLS; nth++) {
        fixture f = fixture_open_aliasing(BUDGET);
        step(&f, 1);
        sk_fault_arm(f.fault, nth, false, SK_OUT_OF_DEVICE_MEMORY);
        step(&f, 2);
        sk_status trimmed = sk_pool_trim(f.pool);
        CHECK(trimmed == SK_OK || trimmed == SK_OUT_OF_DEVICE_MEMORY);
        CHECK_OK(sk_pool_check(f.pool));
        sk_fault_arm(f.fault, 0, false, SK_OK);
        step(&f, 2);
        fixture_close(&f);
    }
}

SK_TEST(alias, test_step_when_host_memory_runs_out_then_the_pool_is_sound_and_goes_on) {
    enum { CALLS = MANY / 250 };
    for (uint64_t nth = 1; nth <= CALLS; nth++) {
        fixture f = fixture_open_aliasing(BUDGET);
        void *kept[2];
        void *taken = NULL;
        pieces_free(&f, NULL, kept);
        host_memory_fail(nth, false);
        sk_status status = sk_pool_take(f.pool, 16 * MIB, NULL, &taken);
        host_memory_fail(0, false);
        CHECK(status == SK_OK || status == SK_OUT_OF_HOST_MEMORY);
        CHECK_OK(sk_pool_check(f.pool));
        if (status == SK_OK) {
            give(&f, taken);
        }
        give(&f, kept[0]);
        give(&f, kept[1]);
        step(&f, 1);
        fixture_close(&f);
    }
}

/* Of 24 MiB a third each is in use, cached and the device's own, and there is no budget. */
static void take_from_full_device(bool has_stream) {
    fixture f = {.backend = make_aliasing(24 * MIB)};
    sk_pool_params params = {0};
    CHECK_OK(sk_pool_create(f.backend, &params, &f.pool));
    sk_stream *stream = has_stream ? make_stream(f.backend) : NULL;
    void *cached = take(&f, 8 * MIB, stream);
    void *kept = take(&f, 8 * MIB, stream);
    give(&f, cached);
    void *large = take(&f, 16 * MIB, stream);
    give(&f, large);
    give(&f, kept);
    if (has_stream) {
        drop_used_stream(&f, stream);
    }
    fixture_close(&f);
}

SK_TEST(alias, test_take_when_the_device_is_full_then_what_is_free_goes_back_to_it_first) {
    take_from_full_device(false);
}

SK_TEST(alias, test_take_when_the_device_is_full_then_work_on_what_is_free_is_waited_for) {
    take_from_full_device(true);
}
