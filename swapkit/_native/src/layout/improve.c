/* improve.c - placement again and again, with the items nearest to the top earlier each time. */
#include <stdlib.h>
#include <string.h>

#include "layout/layout.h"

enum {
    DIGIT_BITS = 11, /* of the sort */
    DIGITS = 1 << DIGIT_BITS,
    NDIGITS = 4,
    FRACTION_BITS = 12, /* of a rank, 31 bits: all are NDIGITS x DIGIT_BITS bits and one to spare */
    WORSE_PERCENT = 3,  /* passes that may end higher than the present one */
    OTHERS = 4          /* for each so many items near the top, another one moves */
};

typedef struct sk__keyed {
    uint64_t key;
    int32_t item;
} sk__keyed;

typedef struct sk__lane {
    const sk_layout *layout;
    sk__space *space;
    uint64_t random;
    int64_t height; /* of `order` and `offsets`, where the search stands */
    int32_t *order; /* nitems each */
    int32_t *trial;
    int32_t *ranks; /* of items in `order` */
    int64_t *offsets;
    int64_t *found;   /* by the trial */
    sk__keyed *keyed; /* two of nitems */
} sk__lane;

/* ---- numbers --------------------------------------------------------------------------------- */

/* splitmix64 */
static uint64_t next_random(sk__lane *lane) {
    uint64_t z = lane->random += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static uint32_t below(sk__lane *lane, uint32_t limit) {
    return (uint32_t)(((next_random(lane) >> 32) * limit) >> 32);
}

/* ---- an order -------------------------------------------------------------------------------- */

static uint64_t key_of(int32_t rank) { return (uint64_t)(uint32_t)rank << FRACTION_BITS; }

/* Key every item by its rank, those that end above `top` by 0.2 to 0.9 of it; return how many. */
static int32_t key_items(sk__lane *lane, int64_t top) {
    const sk_layout *layout = lane->layout;
    int32_t moved = 0;
    for (int32_t item = 0; item < layout->nitems; item++) {
        uint64_t key = key_of(lane->ranks[item]);
        if (lane->offsets[item] + layout->nbytes[item] > top) {
            key = key * (205 + below(lane, 717)) / 1024;
            moved++;
        }
        lane->keyed[item] = (sk__keyed){key, item};
    }
    for (int32_t left = moved / OTHERS + 1; left > 0; left--) {
        sk__keyed *other = &lane->keyed[below(lane, (uint32_t)layout->nitems)];
        other->key = other->key * (717 + below(lane, 614)) / 1024;
    }
    return moved;
}

/* Sort the keyed items, and take their order as the trial. */
static void sort_keyed(sk__lane *lane) {
    int32_t count = lane->layout->nitems;
    sk__keyed *from = lane->keyed;
    sk__keyed *to = lane->keyed + count;
    for (int32_t digit = 0; digit < NDIGITS; digit++) {
        int32_t shift = digit * DIGIT_BITS;
        int32_t places[DIGITS + 1] = {0};
        for (int32_t i = 0; i < count; i++) {
            places[((from[i].key >> shift) % DIGITS) + 1]++;
        }
        for (int32_t i = 1; i < DIGITS; i++) {
            places[i] += places[i - 1];
        }
        for (int32_t i = 0; i < count; i++) {
            to[places[(from[i].key >> shift) % DIGITS]++] = from[i];
        }
        sk__keyed *other = from;
        from = to;
        to = other;
    }
    for (int32_t i = 0; i < count; i++) {
        lane->trial[i] = from[i].item;
    }
}

/* ---- the search ------------------------------------------------------------------------------ */

static void rank(sk__lane *lane) {
    for (int32_t place = 0; place < lane->layout->nitems; place++) {
        lane->ranks[lane->order[place]] = place;
    }
}

/* Make one pass; go on from it if it is not worse, or now and then anyway. */
static sk_status step(sk__lane *lane) {
    int64_t excess = lane->height - lane->layout->bound;
    int64_t top = lane->layout->bound + excess / 100 * below(lane, 90);
    bool may_be_worse = below(lane, 100) < WORSE_PERCENT;
    (void)key_items(lane, top);
    sort_keyed(lane);
    sk_status status = sk__space_fill(lane->space, lane->trial, SK_LAYOUT_FIRST_FIT,
                                      may_be_worse ? INT64_MAX : lane->height, lane->found);
    if (status != SK_OK || sk__space_height(lane->space) == INT64_MAX) {
        return status;
    }
    int32_t *order = lane->order;
    lane->order = lane->trial;
    lane->trial = order;
    int64_t *offsets = lane->offsets;
    lane->offsets = lane->found;
    lane->found = offsets;
    lane->height = sk__space_height(lane->space);
    rank(lane);
    return SK_OK;
}

static sk_status search(sk__lane *lane, const sk_layout_effort *effort, int32_t *order,
                        int64_t *offsets) {
    size_t count = (size_t)lane->layout->nitems;
    int64_t best = lane->height;
    sk_status status = SK_OK;
    while (status == SK_OK && best > effort->target && !sk__is_stopped(effort) &&
           sk__space_work(lane->space) < effort->most_work) {
        status = step(lane);
        if (status == SK_OK && lane->height < best) {
            best = lane->height;
            memcpy(order, lane->order, count * sizeof *order);
            memcpy(offsets, lane->offsets, count * sizeof *offsets);
        }
    }
    return status;
}

static bool open_lane(sk__lane *lane) {
    size_t count = (size_t)lane->layout->nitems;
    lane->space = sk__space_make(lane->layout);
    lane->order = calloc(count, sizeof lane->order[0]);
    lane->trial = calloc(count, sizeof lane->trial[0]);
    lane->ranks = calloc(count, sizeof lane->ranks[0]);
    lane->offsets = calloc(count, sizeof lane->offsets[0]);
    lane->found = calloc(count, sizeof lane->found[0]);
    lane->keyed = calloc(2 * count, sizeof lane->keyed[0]);
    return lane->space != NULL && lane->order != NULL && lane->trial != NULL &&
           lane->ranks != NULL && lane->offsets != NULL && lane->found != NULL &&
           lane->keyed != NULL;
}

static void close_lane(sk__lane *lane) {
    sk__space_free(lane->space);
    free(lane->order);
    free(lane->trial);
    free(lane->ranks);
    free(lane->offsets);
    free(lane->found);
    free(lane->keyed);
}

sk_status sk_layout_improve(const sk_layout *layout, const sk_layout_effort *effort, int32_t *order,
                            int64_t *offsets, int64_t *work) {
    *work = 0;
    sk_status status = sk__layout_check_order(layout, order);
    if (status != SK_OK || layout->nitems == 0) {
        return status;
    }
    sk__lane lane = {.layout = layout, .random = effort->seed};
    if (open_lane(&lane)) {
        size_t count = (size_t)layout->nitems;
        memcpy(lane.order, order, count * sizeof *order);
        memcpy(lane.offsets, offsets, count * sizeof *offsets);
        rank(&lane);
        lane.height = sk__layout_height(layout, offsets);
        status = search(&lane, effort, order, offsets);
        *work = sk__space_work(lane.space);
    } else {
        status = sk__fail(SK_OUT_OF_HOST_MEMORY, "layout: no host memory for an improvement");
    }
    close_lane(&lane);
    return status;
}
