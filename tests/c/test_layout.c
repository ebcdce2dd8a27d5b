/* test_layout.c - addresses for known lifetimes: checks of what comes in, small cases by hand,
 * every failed allocation, and searches on several threads. */
#include <pthread.h>
#include <string.h>

#include "fixture.h"
#include "swapkit_layout.h"

enum { MANY = 600, FEW = 4, NTHREADS = 3, WORK = 300000 };

typedef struct items {
    int64_t starts[MANY], ends[MANY], nbytes[MANY], fixed[MANY];
    sk_layout_items all;
} items;

/* Items of a row each: three that form a staircase, and a wide one. */
static const int64_t ROWS[FEW][3] = {{0, 2, 4}, {1, 3, 2}, {2, 4, 4}, {0, 4, 1}};

static void items_few(items *i) {
    for (int32_t item = 0; item < FEW; item++) {
        i->starts[item] = ROWS[item][0];
        i->ends[item] = ROWS[item][1];
        i->nbytes[item] = ROWS[item][2];
        i->fixed[item] = -1;
    }
    i->all = (sk_layout_items){FEW, i->starts, i->ends, i->nbytes, NULL, 0};
}

static void items_many(items *i, uint64_t seed, int32_t count) {
    for (int32_t item = 0; item < count; item++) {
        i->starts[item] = (int64_t)random_below(&seed, 300);
        i->ends[item] = i->starts[item] + 1 + (int64_t)random_below(&seed, 100);
        i->nbytes[item] = 1 + (int64_t)random_below(&seed, 1000);
        i->fixed[item] = -1;
    }
    i->all = (sk_layout_items){count, i->starts, i->ends, i->nbytes, NULL, 0};
}

static sk_layout *make(const items *i) {
    sk_layout *layout = NULL;
    CHECK_OK(sk_layout_make(&i->all, &layout));
    return layout;
}

static void place(const sk_layout *layout, int32_t count, int32_t *order, int64_t *offsets) {
    int64_t work = 0;
    for (int32_t item = 0; item < count; item++) {
        order[item] = item;
    }
    CHECK_OK(sk_layout_place(layout, order, SK_LAYOUT_FIRST_FIT, offsets, &work));
    CHECK(work > 0);
}

static int64_t height_of(const items *i, const int64_t *offsets) {
    int64_t height = 0;
    CHECK_OK(sk_layout_verify(&i->all, offsets, &height));
    return height;
}

SK_TEST(layout, test_place_when_in_order_then_lowest_gaps) {
    items i;
    items_few(&i);
    sk_layout *layout = make(&i);
    int32_t order[FEW];
    int64_t offsets[FEW];
    place(layout, FEW, order, offsets);
    CHECK_EQUAL(0, offsets[0]);
    CHECK_EQUAL(4, offsets[1]);
    CHECK_EQUAL(0, offsets[2]);
    CHECK_EQUAL(6, offsets[3]);
    CHECK_EQUAL(7, height_of(&i, offsets));
    sk_layout_free(layout);
}

SK_TEST(layout, test_best_fit_when_a_later_gap_is_smaller_then_there) {
    items i;
    const int64_t nbytes[FEW] = {4, 2, 1, 1};
    items_few(&i);
    for (int32_t item = 0; item < FEW; item++) {
        i.starts[item] = 0;
        i.ends[item] = 1;
        i.nbytes[item] = nbytes[item];
        i.fixed[item] = -1;
    }
    i.fixed[0] = 3; /* gaps of 3 below and 1 above, then the other fixed one */
    i.fixed[1] = 8;
    i.all.fixed = i.fixed;
    sk_layout *layout = make(&i);
    const int32_t order[FEW] = {0, 1, 2, 3};
    int64_t offsets[FEW];
    int64_t work = 0;
    CHECK_OK(sk_layout_place(layout, order, SK_LAYOUT_BEST_FIT, offsets, &work));
    CHECK_EQUAL(7, offsets[2]);
    CHECK_EQUAL(0, offsets[3]);
    CHECK_EQUAL(10, height_of(&i, offsets));
    sk_layout_free(layout);
}

SK_TEST(layout, test_measure_when_items_overlap_then_most_alive) {
    items i;
    items_few(&i);
    sk_layout *layout = make(&i);
    int64_t bound = 0;
    int64_t loads[FEW];
    CHECK_OK(sk_layout_measure(layout, &bound, loads));
    CHECK_EQUAL(7, bound);
    CHECK_EQUAL(7, loads[0]);
    CHECK_EQUAL(7, loads[1]);
    sk_layout_free(layout);
}

SK_TEST(layout, test_make_when_an_item_is_wrong_then_named) {
    items i;
    sk_layout *layout = NULL;
    items_few(&i);
    i.ends[2] = i.starts[2];
    CHECK_STATUS(SK_INVALID, sk_layout_make(&i.all, &layout));
    CHECK_CONTAINS(sk_error_text(), "item 2 ends before");
    items_few(&i);
    i.nbytes[1] = 0;
    CHECK_STATUS(SK_INVALID, sk_layout_make(&i.all, &layout));
    i.nbytes[1] = SK_LAYOUT_MOST_BYTES;
    CHECK_STATUS(SK_INVALID, sk_layout_make(&i.all, &layout));
    CHECK_CONTAINS(sk_error_text(), "item 1 has no bytes, or too many");
    items_few(&i);
    i.fixed[3] = -2;
    i.all.fixed = i.fixed;
    CHECK_STATUS(SK_INVALID, sk_layout_make(&i.all, &layout));
    i.all.nitems = -1;
    CHECK_STATUS(SK_INVALID, sk_layout_make(&i.all, &layout));
    items_few(&i);
    i.all.period = 2;
    CHECK_STATUS(SK_INVALID, sk_layout_make(&i.all, &layout));
    CHECK_CONTAINS(sk_error_text(), "item 2 does not start in the period");
    i.all.period = -1;
    CHECK_STATUS(SK_INVALID, sk_layout_make(&i.all, &layout));
}

/* The first item goes on to where the second ends, the third lies where neither lives. */
SK_TEST(layout, test_place_when_an_item_goes_on_in_the_next_period_then_at_its_address) {
    items i;
    const int64_t rows[FEW][3] = {{6, 11, 4}, {0, 1, 2}, {1, 6, 4}, {3, 13, 1}};
    items_few(&i);
    for (int32_t item = 0; item < FEW; item++) {
        i.starts[item] = rows[item][0];
        i.ends[item] = rows[item][1];
        i.nbytes[item] = rows[item][2];
    }
    i.all.period = 10;
    sk_layout *layout = make(&i);
    int32_t order[FEW];
    int64_t offsets[FEW];
    int64_t loads[FEW];
    int64_t bound = 0;
    place(layout, FEW, order, offsets);
    CHECK_EQUAL(0, offsets[0]);
    CHECK_EQUAL(4, offsets[1]);
    CHECK_EQUAL(0, offsets[2]);
    CHECK_EQUAL(6, offsets[3]); /* it always lives */
    CHECK_EQUAL(7, height_of(&i, offsets));
    CHECK_OK(sk_layout_measure(layout, &bound, loads));
    CHECK_EQUAL(7, bound);
    CHECK_EQUAL(7, loads[0]);
    CHECK_EQUAL(5, loads[2]);
    offsets[1] = 3;
    CHECK_STATUS(SK_CORRUPT, sk_layout_verify(&i.all, offsets, &bound));
    sk_layout_free(layout);
}

SK_TEST(layout, test_place_when_the_order_is_wrong_then_invalid) {
    items i;
    items_few(&i);
    sk_layout *layout = make(&i);
    int64_t offsets[FEW];
    int64_t work = 0;
    const int32_t twice[FEW] = {0, 1, 1, 3};
    const int32_t outside[FEW] = {0, 1, 2, FEW};
    const int32_t right[FEW] = {0, 1, 2, 3};
    CHECK_STATUS(SK_INVALID, sk_layout_place(layout, twice, 0, offsets, &work));
    CHECK_STATUS(SK_INVALID, sk_layout_place(layout, outside, 0, offsets, &work));
    CHECK_STATUS(SK_INVALID, sk_layout_place(layout, right, (sk_layout_fit)2, offsets, &work));
    sk_layout_free(layout);
}

SK_TEST(layout, test_verify_when_items_overlap_then_both_named) {
    items i;
    items_few(&i);
    int64_t height = 0;
    const int64_t overlapping[FEW] = {0, 3, 0, 6};
    const int64_t below[FEW] = {0, 4, -1, 6};
    CHECK_STATUS(SK_CORRUPT, sk_layout_verify(&i.all, overlapping, &height));
    CHECK_CONTAINS(sk_error_text(), "items 1 and 0 overlap");
    CHECK_STATUS(SK_CORRUPT, sk_layout_verify(&i.all, below, &height));
    const int64_t right[FEW] = {0, 4, 0, 6};
    CHECK_OK(sk_layout_verify(&i.all, right, &height));
    i.fixed[1] = 5;
    i.all.fixed = i.fixed;
    CHECK_STATUS(SK_CORRUPT, sk_layout_verify(&i.all, right, &height));
    CHECK_CONTAINS(sk_error_text(), "item 1 is not at its fixed offset");
}

SK_TEST(layout, test_search_when_there_is_a_layout_then_found_and_else_proven) {
    items i;
    items_few(&i);
    sk_layout *layout = make(&i);
    int64_t offsets[FEW];
    for (int rule = 0; rule < SK_LAYOUT_RULES; rule++) {
        sk_layout_outcome outcome = SK_LAYOUT_UNKNOWN;
        sk_layout_effort effort = {.most_work = WORK, .target = 7};
        CHECK_OK(sk_layout_search(layout, &effort, (sk_layout_rule)rule, offsets, &outcome));
        CHECK_EQUAL(SK_LAYOUT_FOUND, outcome);
        CHECK_EQUAL(7, height_of(&i, offsets));
        effort.target = 6;
        CHECK_OK(sk_layout_search(layout, &effort, (sk_layout_rule)rule, offsets, &outcome));
        CHECK_EQUAL(SK_LAYOUT_IMPOSSIBLE, outcome);
    }
    sk_layout_effort effort = {.most_work = WORK, .target = 7};
    sk_layout_outcome outcome;
    CHECK_STATUS(SK_INVALID, sk_layout_search(layout, &effort, SK_LAYOUT_RULES, offsets, &outcome));
    sk_layout_free(layout);
}

/* At most 6 bytes are alive at any time, but no layout has that height: found by trying all. */
SK_TEST(layout, test_search_when_the_bound_cannot_be_reached_then_impossible) {
    static const int64_t rows[][3] = {{2, 6, 1}, {1, 4, 2}, {1, 2, 4}, {2, 6, 2},
                                      {5, 7, 2}, {4, 6, 1}, {6, 7, 4}, {3, 5, 1}};
    enum { COUNT = sizeof rows / sizeof rows[0] };
    items i;
    for (int32_t item = 0; item < COUNT; item++) {
        i.starts[item] = rows[item][0];
        i.ends[item] = rows[item][1];
        i.nbytes[item] = rows[item][2];
    }
    i.all = (sk_layout_items){COUNT, i.starts, i.ends, i.nbytes, NULL, 0};
    sk_layout *layout = make(&i);
    int64_t bound = 0;
    int64_t offsets[COUNT];
    CHECK_OK(sk_layout_measure(layout, &bound, NULL));
    CHECK_EQUAL(6, bound);
    for (int rule = 0; rule < SK_LAYOUT_RULES; rule++) {
        sk_layout_outcome outcome = SK_LAYOUT_UNKNOWN;
        sk_layout_effort effort = {.most_work = WORK, .target = bound};
        CHECK_OK(sk_layout_search(layout, &effort, (sk_layout_rule)rule, offsets, &outcome));
        CHECK_EQUAL(SK_LAYOUT_IMPOSSIBLE, outcome);
        effort.target = bound + 1;
        CHECK_OK(sk_layout_search(layout, &effort, (sk_layout_rule)rule, offsets, &outcome));
        CHECK_EQUAL(SK_LAYOUT_FOUND, outcome);
        CHECK_EQUAL(bound + 1, height_of(&i, offsets));
    }
    sk_layout_free(layout);
}

SK_TEST(layout, test_press_when_stopped_then_at_once) {
    items i;
    items_many(&i, 1, MANY);
    sk_layout *layout = make(&i);
    int32_t order[MANY];
    int64_t offsets[MANY];
    place(layout, MANY, order, offsets);
    int64_t before = height_of(&i, offsets);
    int64_t work = 1;
    const int32_t stop = 1;
    sk_layout_effort effort = {.most_work = INT64_MAX, .stop = &stop};
    sk_layout_outcome outcome = SK_LAYOUT_FOUND;
    CHECK_OK(sk_layout_press(layout, &effort, offsets, &work));
    CHECK(work < WORK);
    CHECK_EQUAL(before, height_of(&i, offsets));
    effort.target = before;
    CHECK_OK(sk_layout_search(layout, &effort, SK_LAYOUT_WIDTH_AREA, offsets, &outcome));
    CHECK_EQUAL(SK_LAYOUT_UNKNOWN, outcome);
    sk_layout_free(layout);
}

static void lower(const sk_layout *layout, int32_t count, int64_t *offsets) {
    int32_t order[MANY];
    int64_t work = 0;
    const sk_layout_effort effort = {.most_work = 10 * WORK, .seed = 3};
    place(layout, count, order, offsets);
    CHECK_OK(sk_layout_press(layout, &effort, offsets, &work));
    CHECK(work >= effort.most_work);
}

SK_TEST(layout, test_press_then_lower_and_valid) {
    items i;
    items_many(&i, 2, MANY);
    sk_layout *layout = make(&i);
    int32_t order[MANY];
    int64_t offsets[MANY];
    int64_t work = 0;
    place(layout, MANY, order, offsets);
    int64_t placed = height_of(&i, offsets);
    const sk_layout_effort effort = {.most_work = 10 * WORK, .seed = 3};
    CHECK_OK(sk_layout_press(layout, &effort, offsets, &work));
    CHECK(height_of(&i, offsets) < placed);
    sk_layout_free(layout);
}

typedef struct lane {
    const sk_layout *layout;
    int64_t offsets[MANY];
} lane;

static void *run_lane(void *context) {
    lane *l = context;
    lower(l->layout, MANY, l->offsets);
    return NULL;
}

SK_TEST(layout, test_searches_when_on_several_threads_then_the_same_layout) {
    static items i;
    static lane lanes[NTHREADS];
    pthread_t threads[NTHREADS];
    items_many(&i, 4, MANY);
    sk_layout *layout = make(&i);
    for (int t = 0; t < NTHREADS; t++) {
        lanes[t].layout = layout;
        CHECK(pthread_create(&threads[t], NULL, run_lane, &lanes[t]) == 0);
    }
    for (int t = 0; t < NTHREADS; t++) {
        CHECK(pthread_join(threads[t], NULL) == 0);
        CHECK(memcmp(lanes[t].offsets, lanes[0].offsets, sizeof lanes[t].offsets) == 0);
    }
    (void)height_of(&i, lanes[0].offsets);
    sk_layout_free(layout);
}

/* Run everything once; return the first status that is not SK_OK. */
static sk_status run_all(const items *i, int64_t *offsets) {
    sk_layout *layout = NULL;
    int32_t order[MANY];
    int64_t bound = 0;
    int64_t work = 0;
    sk_layout_outcome outcome;
    const sk_layout_effort effort = {.most_work = WORK, .target = 1 << 20};
    for (int32_t item = 0; item < i->all.nitems; item++) {
        order[item] = item;
    }
    sk_status status = sk_layout_make(&i->all, &layout);
    status = status != SK_OK ? status : sk_layout_measure(layout, &bound, offsets);
    status = status != SK_OK ? status : sk_layout_place(layout, order, 0, offsets, &work);
    status = status != SK_OK ? status : sk_layout_press(layout, &effort, offsets, &work);
    status = status != SK_OK ? status : sk_layout_search(layout, &effort, 0, offsets, &outcome);
    status = status != SK_OK ? status : sk_layout_verify(&i->all, offsets, &bound);
    sk_layout_free(layout);
    return status;
}

SK_TEST(layout, test_all_when_host_memory_fails_then_reported_and_nothing_leaks) {
    items i;
    int64_t offsets[MANY];
    items_many(&i, 5, 100);
    for (int32_t item = 0; item < 100; item++) {
        i.fixed[item] = -1;
    }
    CHECK_OK(run_all(&i, offsets));
    int failures = 0;
    for (uint64_t nth = 1;; nth++) {
        host_memory_fail(nth, false);
        sk_status status = run_all(&i, offsets);
        host_memory_fail(0, false);
        if (status == SK_OK) {
            break;
        }
        CHECK_EQUAL(SK_OUT_OF_HOST_MEMORY, status);
        failures++;
    }
    CHECK(failures > 30);
}

SK_TEST(layout, test_no_items_then_no_work) {
    const sk_layout_items none = {0};
    sk_layout *layout = NULL;
    int64_t bound = 1;
    int64_t work = 0;
    int64_t offset = 0;
    int32_t order = 0;
    sk_layout_outcome outcome = SK_LAYOUT_UNKNOWN;
    const sk_layout_effort effort = {.most_work = WORK};
    CHECK_OK(sk_layout_make(&none, &layout));
    CHECK_OK(sk_layout_measure(layout, &bound, NULL));
    CHECK_EQUAL(0, bound);
    CHECK_OK(sk_layout_place(layout, &order, SK_LAYOUT_FIRST_FIT, &offset, &work));
    CHECK_OK(sk_layout_press(layout, &effort, &offset, &work));
    CHECK_OK(sk_layout_search(layout, &effort, SK_LAYOUT_WIDTH_AREA, &offset, &outcome));
    CHECK_EQUAL(SK_LAYOUT_FOUND, outcome);
    CHECK_OK(sk_layout_verify(&none, &offset, &bound));
    sk_layout_free(layout);
}
