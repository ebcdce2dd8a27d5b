/* test_planned.c - blocks at the addresses of a layout, and whatever does not go as planned. */
#include <stdlib.h>

#include "layouts.h"
#include "pool/pool.h"

enum { TAG = 7, BACKWARD_TAG = 9 };

/* Three blocks of which the first gives its place to the third. */
enum { NBLOCKS = 3, FIRST = 3 * MIB, SECOND = 5 * MIB, THIRD = 2 * MIB + ROUNDING };
#define HEIGHT (FIRST + SECOND)

static const sk_place places[NBLOCKS] = {
    {.nbytes = FIRST, .room_bytes = FIRST, .offset = SECOND, .phase = 0, .tag = TAG, .turn = 0},
    {.nbytes = SECOND, .room_bytes = SECOND, .offset = 0, .phase = 0, .tag = TAG, .turn = 0},
    {.nbytes = THIRD,
     .room_bytes = THIRD,
     .offset = SECOND,
     .phase = 1,
     .tag = SK_TAG_BACKWARD | TAG,
     .turn = 0},
};

typedef struct step {
    char *blocks[NBLOCKS];
} step;

static step step_run(fixture *f, sk_stream *stream) {
    step now;
    now.blocks[0] = take_at(f, TAG, FIRST, stream);
    now.blocks[1] = take_at(f, TAG, SECOND, stream);
    pattern_write(now.blocks[0], FIRST, 1);
    pattern_write(now.blocks[1], SECOND, 2);
    CHECK(pattern_holds(now.blocks[0], FIRST, 1));
    give(f, now.blocks[0]);
    now.blocks[2] = take_at(f, SK_TAG_BACKWARD | TAG, THIRD, stream);
    pattern_write(now.blocks[2], THIRD, 3);
    CHECK(pattern_holds(now.blocks[1], SECOND, 2));
    CHECK(pattern_holds(now.blocks[2], THIRD, 3));
    give(f, now.blocks[1]);
    give(f, now.blocks[2]);
    step_end(f);
    CHECK_OK(sk_pool_check(f->pool));
    return now;
}

static fixture planned_open(size_t budget_bytes) {
    fixture f = fixture_open(budget_bytes, false);
    sk_pool_set_lives(f.pool, SK_LIVES_NOTED);
    (void)step_run(&f, NULL);
    CHECK_OK(sk_pool_trim(f.pool));
    CHECK_OK(sk_pool_set_layout(f.pool, places, NBLOCKS, HEIGHT));
    return f;
}

SK_TEST(planned, test_step_when_it_repeats_then_blocks_lie_as_planned_and_nothing_is_mapped) {
    fixture f = planned_open(HEIGHT);
    CHECK_EQUAL(NBLOCKS, layout_of(&f).places);
    step first = step_run(&f, NULL);
    int64_t maps = stats_of(&f).maps;
    for (int i = 0; i < 3; i++) {
        step next = step_run(&f, NULL);
        CHECK(next.blocks[1] + SECOND == next.blocks[0]);
        CHECK(next.blocks[2] == next.blocks[0]);
        CHECK(next.blocks[1] == first.blocks[1]);
    }
    CHECK_EQUAL(maps, stats_of(&f).maps);
    CHECK_EQUAL(4 * NBLOCKS, layout_of(&f).hits);
    CHECK_EQUAL(4 * (FIRST + SECOND + THIRD), layout_of(&f).hit_bytes);
    CHECK_EQUAL(0, layout_of(&f).misses + layout_of(&f).unplanned);
    CHECK_EQUAL(HEIGHT, stats_of(&f).reserved_bytes[0].peak);
    fixture_close(&f);
}

SK_TEST(planned, test_take_when_the_place_is_in_use_then_served_elsewhere) {
    fixture f = planned_open(0);
    void *kept = take_at(&f, TAG, FIRST, NULL); /* and not freed for a step */
    step_end(&f);
    step now = step_run(&f, NULL);
    CHECK(now.blocks[0] != kept);
    CHECK_EQUAL(2, layout_of(&f).misses); /* and the third, in the same place */
    CHECK_EQUAL(FIRST + THIRD, layout_of(&f).missed_bytes);
    CHECK_EQUAL(2, layout_of(&f).hits);
    give(&f, kept);
    (void)step_run(&f, NULL);
    CHECK_EQUAL(2, layout_of(&f).misses);
    fixture_close(&f);
}

SK_TEST(planned, test_take_when_requests_are_added_or_missing_then_the_others_lie_as_planned) {
    fixture f = planned_open(0);
    void *added = take_at(&f, TAG, SECOND + ROUNDING, NULL);
    void *second = take_at(&f, TAG, SECOND, NULL); /* the first is missing */
    void *third = take_at(&f, SK_TAG_BACKWARD | TAG, THIRD, NULL);
    CHECK((char *)second + SECOND == (char *)third);
    CHECK_EQUAL(2, layout_of(&f).hits);
    CHECK_EQUAL(1, layout_of(&f).unplanned);
    CHECK_EQUAL(SECOND + ROUNDING, layout_of(&f).unplanned_bytes);
    give(&f, added);
    give(&f, second);
    give(&f, third);
    fixture_close(&f);
}

/* Cached memory goes to the layout, unless work of a stream may be behind it. */
SK_TEST(planned, test_step_when_cached_memory_fills_the_budget_then_it_moves_to_the_layout) {
    if (device_is_remote()) {
        test_skip("memory behind work of a stream stays until the host has waited");
    }
    fixture f = fixture_open(HEIGHT, false);
    sk_pool_set_lives(f.pool, SK_LIVES_NOTED);
    (void)step_run(&f, NULL);
    CHECK_EQUAL(HEIGHT, stats_of(&f).reserved_bytes[0].current);
    CHECK_OK(sk_pool_set_layout(f.pool, places, NBLOCKS, HEIGHT));
    (void)step_run(&f, NULL);
    (void)step_run(&f, NULL);
    CHECK_EQUAL(2 * NBLOCKS, layout_of(&f).hits);
    fixture_close(&f);
}

/* The work of a stream may be behind it: what cannot be given back without a wait can be mapped at
 * other addresses. */
SK_TEST(planned,
        test_step_when_the_full_budget_is_behind_a_stream_then_it_is_mapped_in_the_layout) {
    device_wipe_not();
    fixture f = fixture_open_aliasing(HEIGHT);
    sk_stream *stream = make_stream(f.backend);
    sk_pool_set_lives(f.pool, SK_LIVES_NOTED);
    (void)step_run(&f, stream);
    CHECK_EQUAL(HEIGHT, stats_of(&f).reserved_bytes[0].current);
    CHECK_OK(sk_pool_set_layout(f.pool, places, NBLOCKS, HEIGHT));
    (void)step_run(&f, stream);
    int64_t maps = stats_of(&f).maps;
    (void)step_run(&f, stream);
    CHECK_EQUAL(maps, stats_of(&f).maps);
    CHECK_EQUAL(2 * NBLOCKS, layout_of(&f).hits);
    CHECK_EQUAL(0, stats_of(&f).num_sync_all_streams);
    CHECK_EQUAL(HEIGHT, stats_of(&f).reserved_bytes[0].peak);
    drop_used_stream(&f, stream);
    fixture_close(&f);
}

/* A place that begins inside a granule needs one more than its block does elsewhere. */
SK_TEST(planned, test_step_when_a_place_needs_more_than_is_free_then_nothing_moves_for_it) {
    enum { NBYTES = 32 * GRANULE };
    device_wipe_not();
    for (int has_stream = 0; has_stream < 2; has_stream++) {
        fixture f = fixture_open_aliasing((size_t)2 * NBYTES);
        sk_stream *stream = has_stream ? make_stream(f.backend) : NULL;
        sk_pool_set_lives(f.pool, SK_LIVES_NOTED);
        void *kept = take_at(&f, 0, NBYTES, stream);
        give(&f, take_at(&f, TAG, NBYTES, stream));
        step_end(&f);
        const sk_place place = {
            .nbytes = NBYTES, .room_bytes = NBYTES, .offset = ROUNDING, .tag = TAG};
        CHECK_OK(sk_pool_set_layout(f.pool, &place, 1, NBYTES + ROUNDING));
        int64_t maps = stats_of(&f).maps;
        give(&f, take_at(&f, TAG, NBYTES, stream));
        CHECK_EQUAL(maps, stats_of(&f).maps);
        CHECK_EQUAL(0, stats_of(&f).num_sync_all_streams);
        CHECK_EQUAL(1, layout_of(&f).misses);
        give(&f, kept);
        if (has_stream) {
            drop_used_stream(&f, stream);
        }
        fixture_close(&f);
    }
}

SK_TEST(planned, test_layout_when_memory_of_the_one_before_is_in_use_elsewhere_then_all_is_served) {
    device_wipe_not();
    fixture f = fixture_open_aliasing(2 * HEIGHT);
    sk_stream *stream = make_stream(f.backend);
    sk_pool_set_lives(f.pool, SK_LIVES_NOTED);
    (void)step_run(&f, stream);
    CHECK_OK(sk_pool_set_layout(f.pool, places, NBLOCKS, HEIGHT));
    (void)step_run(&f, stream);
    void *free_soon = take_at(&f, 0, HEIGHT, stream);
    void *kept = take_at(&f, 0, HEIGHT, stream); /* in memory of the layout, at other addresses */
    CHECK_OK(sk_pool_set_layout(f.pool, places, NBLOCKS, HEIGHT));
    give(&f, free_soon);
    (void)step_run(&f, stream);
    CHECK_EQUAL(NBLOCKS, layout_of(&f).hits);
    give(&f, kept);
    drop_used_stream(&f, stream);
    fixture_close(&f);
}

/* Such as an update without accumulation, or a step of one of two models. */
SK_TEST(planned, test_step_when_shorter_ones_come_between_then_it_keeps_its_places) {
    enum { NREQUESTS = 3000, SHORT_REQUESTS = 100, SHORT_STEPS = 12, NBYTES = 4 * KIB };
    static sk_place layout[NREQUESTS];
    fixture f = fixture_open(0, false);
    sk_pool_set_lives(f.pool, SK_LIVES_NOTED);
    for (uint32_t i = 0; i < NREQUESTS; i++) {
        give(&f, take_at(&f, TAG + i % 2, NBYTES, NULL));
        layout[i] = (sk_place){.nbytes = NBYTES, .room_bytes = NBYTES};
        layout[i].tag = TAG + i % 2;
        layout[i].turn = i / 2;
    }
    step_end(&f);
    CHECK_OK(sk_pool_set_layout(f.pool, layout, NREQUESTS, NBYTES));
    for (size_t step = 0; step < SHORT_STEPS; step++) {
        for (size_t i = 0; i < SHORT_REQUESTS; i++) { /* of one of the two call sites, and others */
            give(&f, take_at(&f, TAG, NBYTES, NULL));
            give(&f, take_at(&f, TAG, (2 + step * SHORT_REQUESTS + i) * NBYTES, NULL));
        }
        step_end(&f);
    }
    sk_layout_stats before = layout_of(&f);
    for (uint32_t i = 0; i < NREQUESTS; i++) {
        give(&f, take_at(&f, TAG + i % 2, NBYTES, NULL));
    }
    CHECK_EQUAL(NREQUESTS, layout_of(&f).hits - before.hits);
    fixture_close(&f);
}

/* Of each granule of the layout the halves are planned for two streams: none is free for one. */
SK_TEST(planned, test_take_when_streams_share_granules_of_the_layout_then_both_are_served) {
    enum { NHALVES = 4 };
    size_t half = granule_of() / 2;
    fixture f = fixture_open(NHALVES * half, false);
    sk_stream *streams[2] = {make_stream(f.backend), make_stream(f.backend)};
    sk_pool_set_lives(f.pool, SK_LIVES_NOTED);
    sk_place halves[NHALVES];
    for (uint32_t i = 0; i < NHALVES; i++) {
        give(&f, take_at(&f, TAG, half, streams[0]));
        halves[i] = (sk_place){.nbytes = half, .room_bytes = half, .tag = TAG};
        halves[i].turn = i;
        halves[i].offset = i * half;
    }
    step_end(&f);
    CHECK_OK(sk_pool_trim(f.pool));
    CHECK_OK(sk_pool_set_layout(f.pool, halves, NHALVES, NHALVES * half));
    void *blocks[NHALVES];
    for (int i = 0; i < NHALVES; i++) {
        blocks[i] = take_at(&f, TAG, half, streams[i % 2]);
    }
    for (int i = 0; i < NHALVES; i++) {
        give(&f, blocks[i]);
    }
    give(&f, take_at(&f, 0, NHALVES * half, streams[1]));
    drop_used_stream(&f, streams[0]);
    drop_used_stream(&f, streams[1]);
    fixture_close(&f);
}

/* Between steps, other work has the layout's memory; it comes back for the next step. */
SK_TEST(planned, test_step_when_other_work_had_the_memory_then_it_comes_back) {
    fixture f = planned_open(HEIGHT);
    (void)step_run(&f, NULL);
    void *other = take_at(&f, 0, HEIGHT - MIB, NULL);
    pattern_write(other, HEIGHT - MIB, 4);
    CHECK(pattern_holds(other, HEIGHT - MIB, 4));
    give(&f, other);
    CHECK_OK(sk_pool_trim(f.pool));
    (void)step_run(&f, NULL);
    CHECK_EQUAL(2 * NBLOCKS, layout_of(&f).hits);
    fixture_close(&f);
}

SK_TEST(planned, test_take_when_on_another_stream_then_blocks_are_safe_there) {
    fixture f = planned_open(0);
    sk_stream *stream = make_stream(f.backend);
    (void)step_run(&f, NULL);
    (void)step_run(&f, stream);
    (void)step_run(&f, NULL);
    CHECK_EQUAL(3 * NBLOCKS, layout_of(&f).hits + layout_of(&f).misses);
    drop_used_stream(&f, stream);
    fixture_close(&f);
}

/* Such as the weights of a model that was made while there was a layout. */
SK_TEST(planned, test_layout_when_replaced_or_removed_then_blocks_in_use_stay_out_of_the_way) {
    fixture f = planned_open(0);
    char *before = take_at(&f, TAG, FIRST, NULL);
    pattern_write(before, FIRST, 1);
    sk_place moved[NBLOCKS] = {places[0], places[1], places[2]};
    moved[0].offset = 0;
    moved[1].offset = FIRST;
    moved[2].offset = 0;
    CHECK_OK(sk_pool_set_layout(f.pool, moved, NBLOCKS, HEIGHT));
    char *second = take_at(&f, TAG, SECOND, NULL);
    pattern_write(second, SECOND, 2);
    CHECK(pattern_holds(before, FIRST, 1));
    CHECK_EQUAL(1, layout_of(&f).hits);
    CHECK_EQUAL(0, layout_of(&f).misses);
    give(&f, second);
    step_end(&f);
    CHECK_OK(sk_pool_set_layout(f.pool, places, NBLOCKS, HEIGHT)); /* in the second range again */
    CHECK(take_at(&f, TAG, SECOND, NULL) == second - FIRST);
    give(&f, second - FIRST);
    give(&f, before);
    CHECK_OK(sk_pool_set_layout(f.pool, NULL, 0, 0));
    CHECK_EQUAL(0, layout_of(&f).height_bytes);
    step_end(&f);
    (void)step_run(&f, NULL);
    CHECK_EQUAL(0, layout_of(&f).hits + layout_of(&f).misses + layout_of(&f).unplanned);
    fixture_close(&f);
}

/* Each layout leaves a block that stays, such as a tensor that the user keeps. */
SK_TEST(planned, test_layout_when_replaced_often_then_its_ranges_are_few) {
    enum { LAYOUTS = 100, MOST = 10, NBYTES = 4 * KIB };
    fixture f = fixture_open(0, false);
    sk_pool_set_lives(f.pool, SK_LIVES_NOTED);
    give(&f, take_at(&f, TAG, NBYTES, NULL));
    step_end(&f);
    const sk_place place = {.nbytes = NBYTES, .room_bytes = NBYTES, .tag = TAG};
    void *kept[LAYOUTS];
    for (unsigned i = 0; i < LAYOUTS; i++) {
        CHECK_OK(sk_pool_set_layout(f.pool, &place, 1, NBYTES));
        kept[i] = take_at(&f, TAG, NBYTES, NULL);
        pattern_write(kept[i], NBYTES, i);
        step_end(&f);
    }
    size_t count = 0;
    for (const sk__segment *each = f.pool->segments; each != NULL; each = each->next) {
        count++;
    }
    CHECK(count <= MOST);
    CHECK_OK(sk_pool_check(f.pool));
    for (unsigned i = 0; i < LAYOUTS; i++) {
        CHECK(pattern_holds(kept[i], NBYTES, i));
        give(&f, kept[i]);
    }
    CHECK_OK(sk_pool_set_layout(f.pool, &place, 1, NBYTES));
    give(&f, take_at(&f, TAG, NBYTES, NULL));
    CHECK_EQUAL(1, layout_of(&f).hits);
    fixture_close(&f);
}

SK_TEST(planned, test_layout_when_it_has_no_places_then_there_is_none) {
    fixture f = fixture_open(0, false);
    sk_pool_set_lives(f.pool, SK_LIVES_NOTED);
    CHECK_OK(sk_pool_set_layout(f.pool, NULL, 0, HEIGHT));
    CHECK_EQUAL(0, layout_of(&f).height_bytes);
    give(&f, take_at(&f, TAG, FIRST, NULL));
    fixture_close(&f);
}

SK_TEST(planned, test_layout_when_wrong_then_refused_and_the_old_one_holds) {
    fixture f = planned_open(0);
    sk_place wrong = places[0];
    wrong.offset = HEIGHT;
    CHECK_STATUS(SK_INVALID, sk_pool_set_layout(f.pool, &wrong, 1, HEIGHT));
    CHECK_CONTAINS(sk_error_text(), "inside the height");
    wrong.offset = 1;
    CHECK_STATUS(SK_INVALID, sk_pool_set_layout(f.pool, &wrong, 1, HEIGHT));
    wrong = places[0];
    wrong.begin = wrong.end = 3;
    CHECK_STATUS(SK_INVALID, sk_pool_set_layout(f.pool, &wrong, 1, HEIGHT));
    CHECK_CONTAINS(sk_error_text(), "needed from 3 to 3");
    wrong = places[0];
    wrong.room_bytes = FIRST - ROUNDING;
    CHECK_STATUS(SK_INVALID, sk_pool_set_layout(f.pool, &wrong, 1, HEIGHT));
    CHECK_CONTAINS(sk_error_text(), "expected all of them");
    wrong = places[1];
    wrong.room_bytes++; /* a hole behind it would be at an odd address */
    CHECK_STATUS(SK_INVALID, sk_pool_set_layout(f.pool, &wrong, 1, HEIGHT));
    CHECK_CONTAINS(sk_error_text(), "in multiples of 512");
    CHECK_EQUAL(NBLOCKS, layout_of(&f).places);
    (void)step_run(&f, NULL);
    CHECK_EQUAL(NBLOCKS, layout_of(&f).hits);
    sk_pool_set_lives(f.pool, SK_LIVES_OFF);
    CHECK_STATUS(SK_INVALID, sk_pool_set_layout(f.pool, places, NBLOCKS, HEIGHT));
    CHECK_CONTAINS(sk_error_text(), "lives are off");
    fixture_close(&f);
}

SK_TEST(planned, test_layout_when_segments_are_whole_then_unsupported) {
    fixture f = fixture_open(0, true);
    sk_pool_set_lives(f.pool, SK_LIVES_NOTED);
    (void)step_run(&f, NULL);
    CHECK_STATUS(SK_UNSUPPORTED, sk_pool_set_layout(f.pool, places, NBLOCKS, HEIGHT));
    (void)step_run(&f, NULL);
    fixture_close(&f);
}

SK_TEST(planned, test_layout_when_it_names_requests_that_are_not_made_then_they_are_left_out) {
    fixture f = planned_open(0);
    sk_place unknown = places[0];
    unknown.turn = 5;
    CHECK_OK(sk_pool_set_layout(f.pool, &unknown, 1, HEIGHT));
    CHECK_EQUAL(0, layout_of(&f).places);
    fixture_close(&f);
}

/* Memory of other streams is given back meanwhile, and theirs is more than the layout's. */
SK_TEST(planned, test_trim_unplanned_when_another_stream_has_more_then_the_layout_keeps_its_own) {
    fixture f = planned_open(0);
    sk_stream *other = make_stream(f.backend);
    (void)step_run(&f, NULL);
    give(&f, take_at(&f, 0, 4 * HEIGHT, other));
    CHECK_OK(sk_pool_trim_unplanned(f.pool));
    CHECK_EQUAL(HEIGHT, stats_of(&f).reserved_bytes[0].current);
    (void)step_run(&f, NULL);
    CHECK_EQUAL(2 * NBLOCKS, layout_of(&f).hits);
    drop_used_stream(&f, other);
    fixture_close(&f);
}

SK_TEST(planned, test_trim_unplanned_when_a_former_layout_held_a_block_then_its_memory_goes_back) {
    fixture f = planned_open(0);
    void *kept = take_at(&f, TAG, FIRST, NULL); /* in the way of the next layout */
    step_end(&f);
    CHECK_OK(sk_pool_set_layout(f.pool, places, NBLOCKS, HEIGHT));
    give(&f, kept);
    (void)step_run(&f, NULL);
    CHECK(stats_of(&f).reserved_bytes[0].current > HEIGHT);
    CHECK_OK(sk_pool_trim_unplanned(f.pool));
    CHECK_EQUAL(HEIGHT, stats_of(&f).reserved_bytes[0].current);
    CHECK_EQUAL(NBLOCKS, layout_of(&f).hits);
    fixture_close(&f);
}

SK_TEST(planned,
        test_take_when_a_collection_threshold_is_passed_then_ready_places_collect_nothing) {
    sk_backend *backend = make_cpu(CAPACITY);
    sk_pool_params params = {.budget_bytes = 2 * HEIGHT, .garbage_collection_threshold = 0.3};
    fixture f = {.backend = backend};
    CHECK_OK(sk_pool_create(backend, &params, &f.pool));
    sk_pool_set_lives(f.pool, SK_LIVES_NOTED);
    (void)step_run(&f, NULL);
    CHECK_OK(sk_pool_trim(f.pool));
    CHECK_OK(sk_pool_set_layout(f.pool, places, NBLOCKS, HEIGHT));
    (void)step_run(&f, NULL);
    int64_t collected = stats_of(&f).num_garbage_collections;
    (void)step_run(&f, NULL);
    CHECK_EQUAL(collected, stats_of(&f).num_garbage_collections);
    CHECK_EQUAL(2 * NBLOCKS, layout_of(&f).hits);
    fixture_close(&f);
}

SK_TEST(planned, test_layout_when_it_is_higher_than_any_memory_then_refused) {
    fixture f = planned_open(0);
    CHECK_STATUS(SK_INVALID, sk_pool_set_layout(f.pool, places, NBLOCKS, SIZE_MAX));
    CHECK_CONTAINS(sk_error_text(), "expected up to");
    fixture_close(&f);
}

SK_TEST(planned, test_layout_when_no_host_memory_then_refused_and_the_old_one_holds) {
    fixture f = planned_open(0);
    host_memory_fail(1, true);
    sk_status status = sk_pool_set_layout(f.pool, places, NBLOCKS, HEIGHT);
    host_memory_fail(0, false);
    CHECK_STATUS(SK_OUT_OF_HOST_MEMORY, status);
    CHECK_EQUAL(NBLOCKS, layout_of(&f).places);
    fixture_close(&f);
}

/* ---- storms ---------------------------------------------------------------------------------- */

enum { TIGHT = 24 * MIB }; /* more than is in use, less than all classes need */
enum {
    STORM_SITES = 40,
    STORM_STEPS = 60,
    STORM_TURNS = 3,
    STORM_HEIGHT = 8 * MIB,
    STORM_SEEDS = 8
};

typedef struct held {
    char *address;
    size_t nbytes;
    unsigned seed;
} held;

static size_t storm_bytes(unsigned site) { return (1 + site * site * 37 % 600) * ROUNDING; }

/* A layout whose places overlap at random: nothing may depend on it being right. */
static void storm_layout(fixture *f, uint64_t *random) {
    sk_place layout[STORM_SITES * STORM_TURNS];
    for (unsigned i = 0; i < STORM_SITES * STORM_TURNS; i++) {
        unsigned site = i / STORM_TURNS;
        size_t nbytes = storm_bytes(site);
        layout[i] = (sk_place){
            .nbytes = nbytes,
            .room_bytes = nbytes,
            .offset = random_below(random, (STORM_HEIGHT - nbytes) / ROUNDING) * ROUNDING,
            .phase = site % 2,
            .tag = site % 2 == 0 ? TAG : SK_TAG_BACKWARD | TAG,
            .turn = i % STORM_TURNS,
        };
    }
    CHECK_OK(sk_pool_trim(f->pool));
    CHECK_OK(sk_pool_set_layout(f->pool, layout, STORM_SITES * STORM_TURNS, STORM_HEIGHT));
}

static void held_give(fixture *f, held *each) {
    if (each->address != NULL) {
        CHECK(pattern_holds(each->address, each->nbytes, each->seed));
        give(f, each->address);
    }
    each->address = NULL;
}

static void storm_step(fixture *f, uint64_t *random, held *blocks) {
    for (unsigned i = 0; i < STORM_SITES * STORM_TURNS; i++) {
        unsigned phase = i < STORM_SITES * STORM_TURNS / 2 ? 0 : 1;
        unsigned site = 2 * (unsigned)random_below(random, STORM_SITES / 2) + phase;
        held *each = &blocks[i];
        held_give(f, each);
        *each = (held){NULL, storm_bytes(site), (unsigned)random_next(random)};
        each->address = take_at(f, phase == 0 ? TAG : SK_TAG_BACKWARD | TAG, each->nbytes, NULL);
        pattern_write(each->address, each->nbytes, each->seed);
        held_give(f, &blocks[random_below(random, i + 1)]);
    }
    step_end(f);
    CHECK_OK(sk_pool_check(f->pool));
}

static void storm_run(fixture *f, uint64_t seed) {
    uint64_t random = seed;
    held blocks[STORM_SITES * STORM_TURNS] = {0};
    sk_pool_set_lives(f->pool, SK_LIVES_SEPARATE);
    for (int i = 0; i < STORM_STEPS; i++) {
        storm_step(f, &random, blocks);
        if (i % 8 == 2) {
            storm_layout(f, &random);
        }
    }
    CHECK(layout_of(f).hits > 0 && layout_of(f).misses > 0);
    for (unsigned i = 0; i < STORM_SITES * STORM_TURNS; i++) {
        held_give(f, &blocks[i]);
    }
}

SK_TEST(planned, test_storm_when_the_layout_is_wrong_then_every_block_keeps_its_bytes) {
    for (uint64_t seed = 1; seed <= STORM_SEEDS; seed++) {
        fixture f = fixture_open(0, false);
        storm_run(&f, seed);
        fixture_close(&f);
    }
}

SK_TEST(planned, test_storm_when_the_budget_is_tight_then_every_block_keeps_its_bytes) {
    for (uint64_t seed = 1; seed <= STORM_SEEDS; seed++) {
        fixture f = fixture_open(TIGHT, false);
        storm_run(&f, seed);
        CHECK(stats_of(&f).reserved_bytes[0].peak <= TIGHT);
        fixture_close(&f);
    }
}

SK_TEST(planned, test_storm_when_memory_has_aliases_then_every_block_keeps_its_bytes) {
    for (uint64_t seed = 1; seed <= STORM_SEEDS; seed++) {
        fixture f = fixture_open_aliasing(TIGHT);
        storm_run(&f, seed);
        fixture_close(&f);
    }
}

/* ---- small holes ----------------------------------------------------------------------------- */

/* Holes of 4 to 32 KiB, every other block: their pages serve a request of many holes' bytes. */
SK_TEST(planned, test_take_when_free_memory_is_a_checkerboard_then_its_pages_serve) {
    if (device_is_remote()) {
        test_skip("a device's pages are larger");
    }
    enum { BOARD = 64 * MIB, WANTED = 24 * MIB, MOST = BOARD / (4 * KIB) };
    static void *blocks[MOST];
    fixture f = fixture_open(BOARD, false);
    size_t count = 0;
    size_t free_bytes = 0;
    for (size_t used = 0; used < BOARD; count++) {
        size_t nbytes = (size_t)(4 * KIB) << count / 2 % 4;
        nbytes = used + nbytes > BOARD ? BOARD - used : nbytes;
        blocks[count] = take(&f, nbytes, NULL);
        pattern_write(blocks[count], nbytes, (unsigned)count);
        used += nbytes;
        free_bytes += count % 2 == 0 ? nbytes : 0;
    }
    for (size_t i = 0; i < count; i += 2) {
        give(&f, blocks[i]);
    }
    CHECK(free_bytes > WANTED);
    void *wanted = take(&f, WANTED, NULL);
    CHECK(stats_of(&f).reserved_bytes[0].peak <= BOARD);
    give(&f, wanted);
    for (size_t i = 1; i < count; i += 2) {
        give(&f, blocks[i]);
    }
    fixture_close(&f);
}
