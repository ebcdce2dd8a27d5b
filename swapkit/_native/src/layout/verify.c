/* verify.c - a check of a layout, by a sweep over time.
 *
 * Addresses are cut at the ends of all items. A tree over the cuts counts, for each stretch of
 * address, the items that are alive there: no item may start where the count is not zero. */
#include <stdlib.h>

#include "layout/layout.h"

typedef struct sk__event {
    int64_t time;
    int32_t item;
    int32_t change; /* -1: it ends, which counts first; 1: it starts */
} sk__event;

typedef struct sk__sweep {
    const sk_layout_items *items;
    const int64_t *offsets;
    sk__event *events;
    int64_t *cuts; /* addresses, ascending, each once */
    int32_t
        *most; /* of a node: the most items at one address in it, without those of its parents */
    int32_t *whole; /* items that take all of the node, but not all of its parent */
    size_t ncuts;
    size_t width; /* leaves: a power of two */
    size_t nevents;
} sk__sweep;

static int compare_events(const void *left, const void *right) {
    const sk__event *a = left;
    const sk__event *b = right;
    if (a->time != b->time) {
        return a->time < b->time ? -1 : 1;
    }
    return a->change - b->change;
}

static int compare_addresses(const void *left, const void *right) {
    int64_t a = *(const int64_t *)left;
    int64_t b = *(const int64_t *)right;
    return a < b ? -1 : a > b;
}

static size_t find_cut(const sk__sweep *sweep, int64_t address) {
    size_t from = 0;
    size_t to = sweep->ncuts;
    while (from < to) {
        size_t middle = (from + to) / 2;
        if (sweep->cuts[middle] < address) {
            from = middle + 1;
        } else {
            to = middle;
        }
    }
    return from;
}

static int32_t highest(int32_t a, int32_t b) { return a > b ? a : b; }

static void recount(sk__sweep *sweep, size_t node) {
    for (node /= 2; node > 0; node /= 2) {
        sweep->most[node] =
            highest(sweep->most[2 * node], sweep->most[2 * node + 1]) + sweep->whole[node];
    }
}

static void change(sk__sweep *sweep, size_t low, size_t high, int32_t by) {
    size_t first = low + sweep->width;
    size_t last = high + sweep->width - 1;
    size_t from = first;
    size_t to = last + 1;
    for (; from < to; from /= 2, to /= 2) {
        if (from % 2 == 1) {
            sweep->most[from] += by;
            sweep->whole[from++] += by;
        }
        if (to % 2 == 1) {
            sweep->most[--to] += by;
            sweep->whole[to] += by;
        }
    }
    recount(sweep, first);
    recount(sweep, last);
}

/* Return the most items anywhere in a stretch: of each node that makes it up, with its parents. */
static int32_t count(const sk__sweep *sweep, size_t low, size_t high) {
    size_t from = low + sweep->width;
    size_t to = high + sweep->width - 1;
    int32_t left = sweep->most[from];
    int32_t right = sweep->most[to];
    while (from / 2 != to / 2) {
        if (from % 2 == 0) {
            left = highest(left, sweep->most[from + 1]);
        }
        if (to % 2 == 1) {
            right = highest(right, sweep->most[to - 1]);
        }
        from /= 2;
        to /= 2;
        left += sweep->whole[from];
        right += sweep->whole[to];
    }
    int32_t found = highest(left, right);
    for (from /= 2; from > 0; from /= 2) {
        found += sweep->whole[from];
    }
    return found;
}

static sk_status fail_overlap(const sk__sweep *sweep, int32_t item) {
    const sk_layout_items *items = sweep->items;
    int64_t low = sweep->offsets[item];
    for (int32_t other = 0; other < items->nitems; other++) {
        bool is_alive =
            items->starts[other] < items->ends[item] && items->ends[other] > items->starts[item];
        int64_t end = sweep->offsets[other] + items->nbytes[other];
        if (other != item && is_alive && sweep->offsets[other] < low + items->nbytes[item] &&
            end > low) {
            return sk__fail(SK_CORRUPT, "layout: items %d and %d overlap", item, other);
        }
    }
    return sk__fail(SK_CORRUPT, "layout: item %d overlaps another", item);
}

static sk_status run_sweep(sk__sweep *sweep) {
    for (size_t i = 0; i < sweep->nevents; i++) {
        int32_t item = sweep->events[i].item;
        int64_t low = sweep->offsets[item];
        size_t from = find_cut(sweep, low);
        size_t to = find_cut(sweep, low + sweep->items->nbytes[item]);
        if (sweep->events[i].change > 0 && count(sweep, from, to) > 0) {
            return fail_overlap(sweep, item);
        }
        change(sweep, from, to, sweep->events[i].change);
    }
    return SK_OK;
}

static bool open_sweep(sk__sweep *sweep) {
    size_t nends = 2 * (size_t)sweep->items->nitems;
    for (sweep->width = 1; sweep->width < nends; sweep->width *= 2) {
    }
    sweep->events = malloc(2 * nends * sizeof sweep->events[0]);
    sweep->cuts = malloc(nends * sizeof sweep->cuts[0]);
    sweep->most = calloc(2 * sweep->width, sizeof sweep->most[0]);
    sweep->whole = calloc(2 * sweep->width, sizeof sweep->whole[0]);
    return sweep->events != NULL && sweep->cuts != NULL && sweep->most != NULL &&
           sweep->whole != NULL;
}

static void fill_sweep(sk__sweep *sweep) {
    const sk_layout_items *items = sweep->items;
    size_t nends = 2 * (size_t)items->nitems;
    sk__event *event = sweep->events;
    int64_t *cut = sweep->cuts;
    for (int32_t item = 0; item < items->nitems; item++) {
        bool wraps = items->period != 0 && items->ends[item] > items->period;
        *event++ = (sk__event){items->starts[item], item, 1};
        *event++ = (sk__event){wraps ? items->period : items->ends[item], item, -1};
        if (wraps) {
            *event++ = (sk__event){0, item, 1};
            *event++ = (sk__event){items->ends[item] - items->period, item, -1};
        }
        *cut++ = sweep->offsets[item];
        *cut++ = sweep->offsets[item] + items->nbytes[item];
    }
    sweep->nevents = (size_t)(event - sweep->events);
    qsort(sweep->events, sweep->nevents, sizeof sweep->events[0], compare_events);
    qsort(sweep->cuts, nends, sizeof sweep->cuts[0], compare_addresses);
    sweep->ncuts = 0;
    for (size_t i = 0; i < nends; i++) {
        if (i == 0 || sweep->cuts[i] != sweep->cuts[sweep->ncuts - 1]) {
            sweep->cuts[sweep->ncuts++] = sweep->cuts[i];
        }
    }
}

/* Check every item by itself, and find the height. */
static sk_status check_each(const sk_layout_items *items, const int64_t *offsets, int64_t *height) {
    *height = 0;
    for (int32_t item = 0; item < items->nitems; item++) {
        if (items->nbytes[item] <= 0 || items->nbytes[item] > SK_LAYOUT_MOST_BYTES ||
            items->starts[item] >= items->ends[item]) {
            return sk__fail(SK_INVALID, "layout: item %d has no bytes or no life", item);
        }
        bool is_fixed = items->fixed != NULL && items->fixed[item] >= 0;
        if (offsets[item] < 0 || offsets[item] > 2 * SK_LAYOUT_MOST_BYTES) {
            return sk__fail(SK_CORRUPT, "layout: item %d is out of range", item);
        }
        if (is_fixed && offsets[item] != items->fixed[item]) {
            return sk__fail(SK_CORRUPT, "layout: item %d is not at its fixed offset", item);
        }
        int64_t top = offsets[item] + items->nbytes[item];
        *height = top > *height ? top : *height;
    }
    return SK_OK;
}

sk_status sk_layout_verify(const sk_layout_items *items, const int64_t *offsets, int64_t *height) {
    sk_status status = check_each(items, offsets, height);
    if (status != SK_OK || items->nitems == 0) {
        return status;
    }
    sk__sweep sweep = {.items = items, .offsets = offsets};
    if (open_sweep(&sweep)) {
        fill_sweep(&sweep);
        status = run_sweep(&sweep);
    } else {
        status = sk__fail(SK_OUT_OF_HOST_MEMORY, "layout: no host memory to check %d items",
                          items->nitems);
    }
    free(sweep.events);
    free(sweep.cuts);
    free(sweep.most);
    free(sweep.whole);
    return status;
}
