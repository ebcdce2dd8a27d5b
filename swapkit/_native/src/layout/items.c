/* items.c - items with their times as sections, and what every layout of them needs. */
#include <stdlib.h>
#include <string.h>

#include "layout/layout.h"

/* ---- checks ---------------------------------------------------------------------------------- */

static const char *fault_of(const sk_layout_items *items, int32_t item, int64_t left) {
    if (items->ends[item] <= items->starts[item]) {
        return "ends before it starts";
    }
    bool is_late = items->starts[item] < 0 || items->starts[item] >= items->period;
    if (items->period != 0 &&
        (is_late || items->ends[item] - items->starts[item] > items->period)) {
        return "does not start in the period, or lives for longer";
    }
    if (items->nbytes[item] <= 0 || items->nbytes[item] > left) {
        return "has no bytes, or too many";
    }
    if (items->fixed == NULL) {
        return NULL;
    }
    bool is_low = items->fixed[item] < -1;
    bool is_high = items->fixed[item] > SK_LAYOUT_MOST_BYTES;
    return is_low || is_high ? "has a fixed offset out of range" : NULL;
}

static sk_status check_items(const sk_layout_items *items) {
    if (items->nitems < 0 || items->period < 0) {
        return sk__fail(SK_INVALID, "layout: %d items in a period of %lld", items->nitems,
                        (long long)items->period);
    }
    int64_t left = SK_LAYOUT_MOST_BYTES;
    for (int32_t item = 0; item < items->nitems; item++) {
        const char *fault = fault_of(items, item, left);
        if (fault != NULL) {
            return sk__fail(SK_INVALID, "layout: item %d %s", item, fault);
        }
        left -= items->nbytes[item];
    }
    return SK_OK;
}

/* ---- sections -------------------------------------------------------------------------------- */

typedef struct sk__moment {
    int64_t time;
    int32_t item;
    bool is_start; /* ends come first: an item that ends when another starts shares no section */
} sk__moment;

static int compare_moments(const void *left, const void *right) {
    const sk__moment *a = left;
    const sk__moment *b = right;
    if (a->time != b->time) {
        return a->time < b->time ? -1 : 1;
    }
    if (a->is_start != b->is_start) {
        return a->is_start ? 1 : -1;
    }
    return a->item < b->item ? -1 : a->item > b->item;
}

static bool wraps(const sk_layout_items *items, int32_t item) {
    return items->period != 0 && items->ends[item] > items->period;
}

/* Fill `lives` and `nsections`. */
static bool cut_sections(sk_layout *layout, const sk_layout_items *items) {
    size_t count = 2 * (size_t)layout->nitems;
    sk__moment *moments = malloc((count + 1) * sizeof *moments);
    if (moments == NULL) {
        return false;
    }
    sk__moment *next = moments;
    int32_t section = -1;
    for (int32_t item = 0; item < layout->nitems; item++) {
        int64_t end = items->ends[item];
        *next++ = (sk__moment){items->starts[item], item, true};
        *next++ = (sk__moment){wraps(items, item) ? end - items->period : end, item, false};
        section = wraps(items, item) ? 0 : section; /* some live from the beginning on */
    }
    qsort(moments, count, sizeof *moments, compare_moments);
    bool has_ended = section < 0;
    for (size_t i = 0; i < count; i++) {
        sk__sections *life = &layout->lives[moments[i].item];
        if (moments[i].is_start) {
            section += has_ended;
            life->first = section;
        } else {
            life->end = section + 1;
        }
        has_ended = !moments[i].is_start;
    }
    layout->nsections = section + 1;
    for (int32_t item = 0; item < layout->nitems; item++) {
        if (wraps(items, item)) {
            layout->lives[item].wrap = layout->lives[item].end;
            layout->lives[item].end = layout->nsections;
        }
    }
    free(moments);
    return true;
}

static bool sum_sections(sk_layout *layout) {
    int64_t *section = calloc((size_t)layout->nsections + 1, sizeof *section);
    if (section == NULL) {
        return false;
    }
    layout->section = section;
    for (int32_t item = 0; item < layout->nitems; item++) {
        const sk__sections *life = &layout->lives[item];
        layout->section[life->first] += layout->nbytes[item];
        layout->section[life->end] -= layout->nbytes[item];
        layout->section[0] += life->wrap > 0 ? layout->nbytes[item] : 0;
        layout->section[life->wrap] -= life->wrap > 0 ? layout->nbytes[item] : 0;
    }
    int64_t alive = 0;
    for (int32_t section = 0; section < layout->nsections; section++) {
        alive += layout->section[section];
        layout->section[section] = alive;
        layout->bound = alive > layout->bound ? alive : layout->bound;
    }
    for (int32_t item = 0; layout->fixed != NULL && item < layout->nitems; item++) {
        int64_t top = layout->fixed[item] < 0 ? 0 : layout->fixed[item] + layout->nbytes[item];
        layout->bound = top > layout->bound ? top : layout->bound;
    }
    return true;
}

/* ---- the interface --------------------------------------------------------------------------- */

static bool fill(sk_layout *layout, const sk_layout_items *items) {
    size_t count = (size_t)items->nitems;
    bool has_fixed = items->fixed != NULL;
    size_t nbytes = count * ((2 + (size_t)has_fixed) * sizeof(int64_t) + sizeof(sk__sections));
    int64_t *memory = calloc(1, nbytes + 1);
    if (memory == NULL) {
        return false;
    }
    layout->memory = memory;
    layout->nitems = items->nitems;
    layout->nbytes = memory;
    layout->is_circle = items->period != 0;
    layout->lengths = memory + count;
    layout->fixed = has_fixed ? memory + 2 * count : NULL;
    layout->lives = (sk__sections *)(memory + (2 + (size_t)has_fixed) * count);
    for (size_t item = 0; item < count; item++) {
        layout->nbytes[item] = items->nbytes[item];
        layout->lengths[item] =
            (int64_t)((uint64_t)items->ends[item] - (uint64_t)items->starts[item]);
        if (layout->fixed != NULL) {
            layout->fixed[item] = items->fixed[item];
        }
    }
    return cut_sections(layout, items) && sum_sections(layout);
}

sk_status sk_layout_make(const sk_layout_items *items, sk_layout **out) {
    sk_status status = check_items(items);
    if (status != SK_OK) {
        return status;
    }
    sk_layout *layout = calloc(1, sizeof *layout);
    if (layout == NULL || !fill(layout, items)) {
        sk_layout_free(layout);
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "layout: no host memory for %d items",
                        items->nitems);
    }
    *out = layout;
    return SK_OK;
}

void sk_layout_free(sk_layout *layout) {
    if (layout == NULL) {
        return;
    }
    free(layout->memory);
    free(layout->section);
    free(layout);
}

static int64_t highest(int64_t a, int64_t b) { return a > b ? a : b; }

/* Return the most of the leaves `low` to `high`, exclusive, of a tree of maxima. */
static int64_t find_most(const int64_t *tree, size_t low, size_t high) {
    int64_t most = 0;
    for (; low < high; low /= 2, high /= 2) {
        most = low % 2 == 1 ? highest(most, tree[low]) : most;
        most = high % 2 == 1 ? highest(most, tree[high - 1]) : most;
        low += low % 2;
    }
    return most;
}

sk_status sk_layout_measure(const sk_layout *layout, int64_t *bound, int64_t *loads) {
    *bound = layout->bound;
    if (loads == NULL || layout->nitems == 0) {
        return SK_OK;
    }
    size_t width = (size_t)layout->nsections;
    int64_t *tree = malloc(2 * width * sizeof *tree);
    if (tree == NULL) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "layout: no host memory for %zu sections", width);
    }
    memcpy(tree + width, layout->section, width * sizeof *tree);
    for (size_t node = width - 1; node > 0; node--) {
        tree[node] = highest(tree[2 * node], tree[2 * node + 1]);
    }
    for (int32_t item = 0; item < layout->nitems; item++) {
        const sk__sections *life = &layout->lives[item];
        loads[item] =
            highest(find_most(tree, (size_t)life->first + width, (size_t)life->end + width),
                    find_most(tree, width, (size_t)life->wrap + width));
    }
    free(tree);
    return SK_OK;
}

int64_t sk__layout_height(const sk_layout *layout, const int64_t *offsets) {
    int64_t height = 0;
    for (int32_t item = 0; item < layout->nitems; item++) {
        int64_t top = offsets[item] + layout->nbytes[item];
        height = top > height ? top : height;
    }
    return height;
}
