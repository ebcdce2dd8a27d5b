/* items.c - items with their times as sections, and what every layout of them needs. */
#include <stdlib.h>
#include <string.h>

#include "layout/layout.h"

/* ---- checks ---------------------------------------------------------------------------------- */

static const char *fault_of(const sk_layout_items *items, int32_t item, int64_t left) {
    if (items->ends[item] <= items->starts[item]) {
        return "ends before it starts";
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
    if (items->nitems < 0) {
        return sk__fail(SK_INVALID, "layout: %d items", items->nitems);
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

/* Fill `firsts`, `ends` and `nsections`. */
static bool cut_sections(sk_layout *layout, const sk_layout_items *items) {
    size_t count = 2 * (size_t)layout->nitems;
    sk__moment *moments = malloc((count + 1) * sizeof *moments);
    if (moments == NULL) {
        return false;
    }
    sk__moment *next = moments;
    for (int32_t item = 0; item < layout->nitems; item++) {
        *next++ = (sk__moment){items->starts[item], item, true};
        *next++ = (sk__moment){items->ends[item], item, false};
    }
    qsort(moments, count, sizeof *moments, compare_moments);
    int32_t section = -1;
    bool has_ended = true;
    for (size_t i = 0; i < count; i++) {
        if (moments[i].is_start) {
            section += has_ended;
            layout->firsts[moments[i].item] = section;
        } else {
            layout->ends[moments[i].item] = section + 1;
        }
        has_ended = !moments[i].is_start;
    }
    layout->nsections = section + 1;
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
        layout->section[layout->firsts[item]] += layout->nbytes[item];
        layout->section[layout->ends[item]] -= layout->nbytes[item];
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
    size_t nbytes = count * ((2 + (size_t)has_fixed) * sizeof(int64_t) + 2 * sizeof(int32_t));
    int64_t *memory = calloc(1, nbytes + 1);
    if (memory == NULL) {
        return false;
    }
    layout->memory = memory;
    layout->nitems = items->nitems;
    layout->nbytes = memory;
    layout->lives = memory + count;
    layout->fixed = has_fixed ? memory + 2 * count : NULL;
    layout->firsts = (int32_t *)(memory + (2 + (size_t)has_fixed) * count);
    layout->ends = layout->firsts + count;
    for (size_t item = 0; item < count; item++) {
        layout->nbytes[item] = items->nbytes[item];
        layout->lives[item] =
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
        loads[item] = find_most(tree, (size_t)layout->firsts[item] + width,
                                (size_t)layout->ends[item] + width);
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
