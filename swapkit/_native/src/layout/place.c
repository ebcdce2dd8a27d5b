/* place.c - one placement of items in a given order.
 *
 * The placed items are listed by *windows* of sections, in order of their offsets. Level k has
 * windows of 2 x stride sections, one at each multiple of the stride; strides grow by a constant
 * factor, up to one window for everything. An item is listed in every window that it shares a
 * section with. The items that a new one may collide with are thus in one list: that of the window,
 * at the finest level whose stride is as long as the new item's life, that begins at or before it.
 *
 * A life that goes on in the next period is listed as two; its own list is that of everything.
 *
 * Inside a window only the sections of the window matter: see window.h. */
#include <stdlib.h>

#include "layout/layout.h"
#include "layout/window.h"

enum {
    FACTOR = 8,        /* between the strides of two levels */
    MOST_WINDOWS = 64, /* of the finest level */
    LEAST_SHARE = 32,  /* items for each of them */
    MOST_LEVELS = 8,
    ITEM_WORK = 256 /* visits that take as long as adding an item */
};

typedef struct sk__level {
    int32_t stride;
    int32_t count;
    sk__window *windows;
} sk__level;

/* The placed items. */
typedef struct sk__space {
    const sk_layout *layout;
    int32_t nlevels;
    sk__level levels[MOST_LEVELS]; /* from the finest */
    int64_t work;                  /* entries visited */
} sk__space;

/* ---- making and freeing ---------------------------------------------------------------------- */

static bool add_level(sk__space *space, int32_t stride) {
    sk__level *level = &space->levels[space->nlevels++];
    int32_t nsections = space->layout->nsections;
    level->stride = stride;
    level->count = stride >= nsections ? 1 : (nsections + stride - 1) / stride;
    level->windows = calloc((size_t)level->count, sizeof level->windows[0]);
    return level->windows != NULL;
}

static void free_space(sk__space *space) {
    if (space == NULL) {
        return;
    }
    for (int32_t number = 0; number < space->nlevels; number++) {
        sk__level *level = &space->levels[number];
        for (int32_t i = 0; level->windows != NULL && i < level->count; i++) {
            sk__window_free(&level->windows[i]);
        }
        free(level->windows);
    }
    free(space);
}

/* NULL: no host memory. */
static sk__space *make_space(const sk_layout *layout) {
    sk__space *space = calloc(1, sizeof *space);
    if (space == NULL) {
        return NULL;
    }
    space->layout = layout;
    int32_t windows = layout->nitems / LEAST_SHARE;
    windows = windows > MOST_WINDOWS ? MOST_WINDOWS : windows < 1 ? 1 : windows;
    int64_t stride = (layout->nsections + windows - 1) / windows;
    bool is_made = true;
    for (; is_made && stride < layout->nsections; stride *= FACTOR) {
        is_made = add_level(space, (int32_t)stride);
    }
    if (!is_made || !add_level(space, layout->nsections > 0 ? layout->nsections : 1)) {
        free_space(space);
        return NULL;
    }
    return space;
}

/* ---- adding ---------------------------------------------------------------------------------- */

static int32_t most(int32_t a, int32_t b) { return a > b ? a : b; }

/* List an item in the windows of one level. */
static bool add_to_level(sk__level *level, const sk__entry *item) {
    int32_t last = (item->end - 1) / level->stride;
    for (int32_t i = most(item->first / level->stride - 1, 0); i <= last; i++) {
        int64_t begin = (int64_t)i * level->stride;
        int64_t end = begin + 2 * (int64_t)level->stride;
        sk__entry entry = *item;
        entry.first = begin > item->first ? (int32_t)begin : item->first;
        entry.end = end < item->end ? (int32_t)end : item->end;
        /* In range: no section is above the last window.
         * NOLINTNEXTLINE(clang-analyzer-security.ArrayBound) */
        if (!sk__window_insert(&level->windows[i], &entry)) {
            return false;
        }
    }
    return true;
}

static bool add(sk__space *space, int32_t item, int64_t offset) {
    const sk_layout *layout = space->layout;
    const sk__sections *life = &layout->lives[item];
    const sk__entry entry = {offset, offset + layout->nbytes[item], life->first, life->end};
    const sk__entry rest = {entry.low, entry.high, 0, life->wrap};
    space->work += ITEM_WORK;
    for (int32_t number = 0; number < space->nlevels; number++) {
        sk__level *level = &space->levels[number];
        if (!add_to_level(level, &entry) || (life->wrap > 0 && !add_to_level(level, &rest))) {
            return false;
        }
    }
    return true;
}

/* ---- finding --------------------------------------------------------------------------------- */

static const sk__window *window_of(const sk__space *space, const sk__sections *life) {
    const sk__level *level = space->levels;
    const sk__level *last = level + space->nlevels - 1;
    while (level < last && (level->stride < life->end - life->first || life->wrap > 0)) {
        level++;
    }
    return &level->windows[life->first / level->stride];
}

static bool is_beside(const sk__entry *entry, const sk__sections *life) {
    return (entry->first < life->end && entry->end > life->first) || entry->first < life->wrap;
}

/* A search for a gap, one chunk after the other. */
typedef struct sk__gap {
    const sk__sections *life;
    int64_t nbytes;
    int64_t top;   /* of what is below */
    int64_t best;  /* the offset of the smallest gap so far; -1: none */
    int64_t least; /* its size */
} sk__gap;

/* Return whether the gap is below an entry of this chunk. */
static bool find_first(sk__gap *gap, const sk__chunk *chunk) {
    int64_t top = gap->top;
    for (const sk__entry *entry = chunk->entries; entry < chunk->entries + chunk->count; entry++) {
        if (is_beside(entry, gap->life)) {
            if (entry->low - top >= gap->nbytes) {
                gap->top = top;
                return true;
            }
            top = entry->high > top ? entry->high : top;
        }
    }
    gap->top = top;
    return false;
}

static void find_best(sk__gap *gap, const sk__chunk *chunk) {
    for (const sk__entry *entry = chunk->entries; entry < chunk->entries + chunk->count; entry++) {
        if (!is_beside(entry, gap->life)) {
            continue;
        }
        int64_t size = entry->low - gap->top;
        if (size >= gap->nbytes && size < gap->least) {
            gap->least = size;
            gap->best = gap->top;
        }
        gap->top = entry->high > gap->top ? entry->high : gap->top;
    }
}

static int64_t find(sk__space *space, int32_t item, sk_layout_fit fit) {
    const sk_layout *layout = space->layout;
    sk__gap gap = {&layout->lives[item], layout->nbytes[item], 0, -1, INT64_MAX};
    const sk__window *window = window_of(space, gap.life);
    bool is_found = false;
    for (int32_t i = 0; i < window->count && !is_found; i++) {
        space->work += window->chunks[i]->count;
        if (fit == SK_LAYOUT_FIRST_FIT) {
            is_found = find_first(&gap, window->chunks[i]);
        } else {
            find_best(&gap, window->chunks[i]);
        }
    }
    return gap.best >= 0 ? gap.best : gap.top;
}

/* ---- a placement ----------------------------------------------------------------------------- */

static sk_status fail_memory(void) {
    return sk__fail(SK_OUT_OF_HOST_MEMORY, "layout: no host memory for the placed items");
}

/* Whether the bytes from `offset` on are free of placed items. */
static bool is_free(const sk__space *space, int32_t item, int64_t offset) {
    const sk_layout *layout = space->layout;
    int64_t high = offset + layout->nbytes[item];
    const sk__window *window = window_of(space, &layout->lives[item]);
    for (int32_t i = 0; i < window->count; i++) {
        const sk__chunk *chunk = window->chunks[i];
        for (const sk__entry *entry = chunk->entries; entry < chunk->entries + chunk->count;
             entry++) {
            bool is_in_way = entry->low < high && entry->high > offset;
            if (is_in_way && is_beside(entry, &layout->lives[item])) {
                return false;
            }
        }
    }
    return true;
}

static sk_status add_fixed(sk__space *space, int64_t *offsets) {
    const int64_t *fixed = space->layout->fixed;
    for (int32_t item = 0; fixed != NULL && item < space->layout->nitems; item++) {
        if (fixed[item] < 0) {
            continue;
        }
        if (!is_free(space, item, fixed[item])) {
            return sk__fail(SK_INVALID, "layout: item %d overlaps another fixed item", item);
        }
        offsets[item] = fixed[item];
        if (!add(space, item, fixed[item])) {
            return fail_memory();
        }
    }
    return SK_OK;
}

static sk_status fill(sk__space *space, const int32_t *order, sk_layout_fit fit, int64_t *offsets) {
    const sk_layout *layout = space->layout;
    sk_status status = add_fixed(space, offsets);
    for (int32_t place = 0; place < layout->nitems && status == SK_OK; place++) {
        int32_t item = order[place];
        if (layout->fixed != NULL && layout->fixed[item] >= 0) {
            continue;
        }
        offsets[item] = find(space, item, fit);
        if (!add(space, item, offsets[item])) {
            status = fail_memory();
        }
    }
    return status;
}

/* SK_INVALID: not a permutation of the items. */
static sk_status check_order(const sk_layout *layout, const int32_t *order) {
    bool *seen = calloc((size_t)layout->nitems + 1, sizeof *seen);
    if (seen == NULL) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "layout: no host memory for an order");
    }
    sk_status status = SK_OK;
    for (int32_t place = 0; place < layout->nitems && status == SK_OK; place++) {
        int32_t item = order[place];
        if (item < 0 || item >= layout->nitems || seen[item]) {
            status = sk__fail(SK_INVALID, "layout: order has item %d at %d: out of range or twice",
                              item, place);
        } else {
            seen[item] = true;
        }
    }
    free(seen);
    return status;
}

sk_status sk_layout_place(const sk_layout *layout, const int32_t *order, sk_layout_fit fit,
                          int64_t *offsets, int64_t *work) {
    if (fit != SK_LAYOUT_FIRST_FIT && fit != SK_LAYOUT_BEST_FIT) {
        return sk__fail(SK_INVALID, "layout: no fit has the number %d", (int)fit);
    }
    sk_status status = check_order(layout, order);
    if (status != SK_OK) {
        return status;
    }
    sk__space *space = make_space(layout);
    if (space == NULL) {
        return fail_memory();
    }
    status = fill(space, order, fit, offsets);
    *work += space->work;
    free_space(space);
    return status;
}
