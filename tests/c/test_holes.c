/* test_holes.c - requests that do not go as planned, in the memory of a layout: in holes, and in
 * places that several sizes share. */
#include "layouts.h"

enum { TAG = 7 };

/* ---- holes ----------------------------------------------------------------------------------- */

/* Three blocks one after another in one place, beside one that another block needs at first only.
 */
enum { NHOT = 3, HOT = 2 * MIB, HOT_TAG = 11 };

/* Take the hot blocks; a squatter is there from the first one on if `squats`. */
static void hot_run(fixture *f, bool squats) {
    void *aside = take_at(f, HOT_TAG + 1, HOT, NULL);
    give(f, aside);
    char *squatter = NULL;
    if (squats) { /* takes the first turn, and lives longer than planned */
        squatter = take_at(f, HOT_TAG, HOT, NULL);
        pattern_write(squatter, HOT, 1);
    }
    for (unsigned i = 0; i < NHOT; i++) {
        char *block = take_at(f, HOT_TAG, HOT, NULL);
        pattern_write(block, HOT, 2 + i);
        CHECK(pattern_holds(block, HOT, 2 + i));
        give(f, block);
    }
    if (squats) {
        CHECK(pattern_holds(squatter, HOT, 1));
        give(f, squatter);
    }
    step_end(f);
    CHECK_OK(sk_pool_check(f->pool));
}

static fixture hot_open(uint64_t aside_end) {
    fixture f = fixture_open(0, false);
    sk_pool_set_lives(f.pool, SK_LIVES_NOTED);
    hot_run(&f, false);
    sk_place layout[NHOT + 1];
    for (uint32_t i = 0; i < NHOT; i++) {
        layout[i] = (sk_place){.nbytes = HOT, .room_bytes = HOT, .tag = HOT_TAG, .turn = i};
        layout[i].begin = 2 + 2 * (uint64_t)i;
        layout[i].end = layout[i].begin + 1;
    }
    layout[NHOT] = (sk_place){.nbytes = HOT,
                              .room_bytes = HOT,
                              .offset = HOT,
                              .begin = 0,
                              .end = aside_end,
                              .tag = HOT_TAG + 1};
    CHECK_OK(sk_pool_trim(f.pool));
    CHECK_OK(sk_pool_set_layout(f.pool, layout, NHOT + 1, 2 * (size_t)HOT));
    CHECK_EQUAL(NHOT + 1, layout_of(&f).places);
    return f;
}

SK_TEST(holes, test_take_when_its_place_is_busy_then_it_lies_where_no_other_is_planned) {
    fixture f = hot_open(1);
    hot_run(&f, false);
    CHECK_EQUAL(NHOT + 1, layout_of(&f).hits);
    hot_run(&f, true); /* the others go beside the squatter; the last one has no plan */
    sk_layout_stats stats = layout_of(&f);
    CHECK_EQUAL(NHOT + 3, stats.hits);
    CHECK_EQUAL(NHOT - 1, stats.holes);
    CHECK_EQUAL(1, stats.unplanned);
    CHECK_EQUAL(0, stats.misses);
    hot_run(&f, true); /* known now to live shortly */
    CHECK_EQUAL(2 * NHOT - 1, layout_of(&f).holes);
    CHECK_EQUAL(1, layout_of(&f).unplanned);
    fixture_close(&f);
}

SK_TEST(holes, test_take_when_others_are_planned_everywhere_then_served_outside) {
    fixture f = hot_open(0); /* needed at any time */
    hot_run(&f, true);
    sk_layout_stats stats = layout_of(&f);
    CHECK_EQUAL(2, stats.hits);
    CHECK_EQUAL(0, stats.holes);
    CHECK_EQUAL(NHOT - 1, stats.misses);
    CHECK_EQUAL(1, stats.unplanned);
    fixture_close(&f);
}

SK_TEST(holes, test_take_when_memory_may_last_then_never_in_a_hole) {
    fixture f = hot_open(1);
    void *state = take_at(&f, SK_TAG_OPTIMIZER, HOT, NULL);
    CHECK_EQUAL(0, layout_of(&f).holes);
    CHECK_EQUAL(1, layout_of(&f).unplanned);
    give(&f, state);
    fixture_close(&f);
}

SK_TEST(holes, test_take_when_much_memory_lasts_then_others_still_find_holes) {
    enum { NSTATES = 100 };
    fixture f = hot_open(1);
    void *states[NSTATES];
    for (int i = 0; i < NSTATES; i++) {
        states[i] = take_at(&f, SK_TAG_OPTIMIZER, HOT / NSTATES, NULL);
    }
    hot_run(&f, true);
    CHECK_EQUAL(NSTATES + 1, layout_of(&f).unplanned);
    CHECK_EQUAL(NHOT - 1, layout_of(&f).holes);
    for (int i = 0; i < NSTATES; i++) {
        give(&f, states[i]);
    }
    fixture_close(&f);
}

/* ---- sizes that vary ------------------------------------------------------------------------- */

enum { NSHARED = 3, ROOM = 6 * MIB };

/* A step whose blocks have other sizes each time, and are in use at the same time. */
static void varying_run(fixture *f, const size_t sizes[NSHARED]) {
    char *blocks[NSHARED];
    for (int i = 0; i < NSHARED; i++) {
        blocks[i] = take_at(f, TAG, sizes[i], NULL);
        pattern_write(blocks[i], sizes[i], (unsigned)i);
    }
    for (int i = 0; i < NSHARED; i++) {
        CHECK(pattern_holds(blocks[i], sizes[i], (unsigned)i));
        give(f, blocks[i]);
    }
    step_end(f);
    CHECK_OK(sk_pool_check(f->pool));
}

/* Two steps teach that no size repeats; the blocks of the next ones share one place. */
static fixture varying_open(void) {
    fixture f = fixture_open(0, false);
    sk_pool_set_lives(f.pool, SK_LIVES_NOTED);
    const size_t steps[][NSHARED] = {{4 * MIB, 1 * MIB, 1 * MIB},
                                     {2 * MIB, 3 * MIB, 1 * MIB + ROUNDING},
                                     {1 * MIB, 2 * MIB + ROUNDING, 3 * MIB + ROUNDING}};
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        varying_run(&f, steps[i]);
    }
    sk_place shared[NSHARED];
    for (uint32_t i = 0; i < NSHARED; i++) {
        shared[i] = (sk_place){.room_bytes = ROOM, .tag = TAG, .turn = i};
    }
    CHECK_OK(sk_pool_set_layout(f.pool, shared, NSHARED, ROOM));
    CHECK_EQUAL(NSHARED, layout_of(&f).places);
    return f;
}

SK_TEST(holes, test_take_when_sizes_vary_then_blocks_share_the_room) {
    fixture f = varying_open();
    const size_t steps[][NSHARED] = {{1 * MIB, 4 * MIB + ROUNDING, 1 * MIB - ROUNDING},
                                     {5 * MIB, ROUNDING, 1 * MIB - ROUNDING},
                                     {2 * MIB, 2 * MIB, 2 * MIB}};
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        varying_run(&f, steps[i]);
        CHECK_EQUAL((i + 1) * NSHARED, layout_of(&f).hits);
    }
    CHECK_EQUAL(0, layout_of(&f).misses + layout_of(&f).unplanned);
    fixture_close(&f);
}

SK_TEST(holes, test_take_when_the_room_is_too_small_then_served_elsewhere) {
    fixture f = varying_open();
    const size_t too_much[NSHARED] = {4 * MIB, 2 * MIB + 2 * ROUNDING, 1 * MIB};
    varying_run(&f, too_much);
    CHECK_EQUAL(2, layout_of(&f).hits);
    CHECK_EQUAL(1, layout_of(&f).misses);
    const size_t too_large[NSHARED] = {ROOM + ROUNDING, 1 * MIB, 1 * MIB};
    varying_run(&f, too_large);
    CHECK_EQUAL(4, layout_of(&f).hits);
    CHECK_EQUAL(2, layout_of(&f).misses);
    fixture_close(&f);
}
