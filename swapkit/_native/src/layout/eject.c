/* eject.c - a layout pressed below a limit, by items that displace others.
 *
 * Items above the limit are taken out. One after the other goes back where those in its way weigh
 * least; these are taken out, and go back in turn. An item that had to displace others becomes
 * heavier, so that the search does not go in circles (guided ejection search: Nagata and Braysy,
 * 2009). When all are back, the limit is lowered.
 *
 * With many more items out, the search seldom recovers. So it restarts from the last layout, with
 * the weights found so far. The limit of additional items out follows the sequence 1, 2, 1, 4, 1,
 * 2, 1, 8, ... of Luby, Sinclair and Zuckerman, 1993, in sixteenths of all items. */
#include <stdlib.h>
#include <string.h>

#include "layout/layout.h"

#define LEAST_WEIGHT 1e-5              /* of any item, in units */
#define MOST_WEIGHT ((int64_t)1 << 40) /* so that no sum of weights overflows */

enum {
    STEP_PERCENT = 97, /* a new limit keeps so much of the excess */
    STOP_EVERY = 64,
    RUN = 16,             /* of a sort: what is sorted by insertion */
    GROWTH = 16,          /* an item that displaces others gains one part in so many */
    PARTS = 16,           /* of the items */
    MOST_PARTS = 8,       /* more of them out before a restart */
    RESTART_WORK = 20,    /* for each item */
    UNIT_WEIGHT = 1 << 24 /* of an item that takes everything */
};

typedef struct sk__top {
    int64_t high;
    int32_t item;
} sk__top;

typedef struct sk__press {
    const sk_layout *layout;
    uint64_t random;
    int64_t limit;
    int64_t work;
    int64_t most_nbytes; /* of an item */
    /* The placed items, by `low`; in arrays of their own, because most are only asked for one. */
    int64_t *lows;
    sk__sections *sections;
    int32_t *items;
    int32_t nplaced;
    int32_t *pool; /* items that are out: a stack */
    int32_t npool;
    int64_t *weights; /* of items */
    int32_t *beside;  /* scratch: the places of items alive with one that goes back */
    sk__top *by_high; /* scratch: the same items by their ends */
    sk__top *merged;  /* scratch */
    int32_t nbeside;
} sk__press;

/* splitmix64 */
static uint64_t next_random(sk__press *press) {
    uint64_t z = press->random += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static bool is_fixed(const sk_layout *layout, int32_t item) {
    return layout->fixed != NULL && layout->fixed[item] >= 0;
}

/* ---- in and out ------------------------------------------------------------------------------ */

/* Return the first place whose item lies at `low` or above. */
static int32_t place_of(const sk__press *press, int64_t low) {
    int32_t from = 0;
    int32_t to = press->nplaced;
    while (from < to) {
        int32_t middle = (from + to) / 2;
        if (press->lows[middle] < low) {
            from = middle + 1;
        } else {
            to = middle;
        }
    }
    return from;
}

static void move_places(sk__press *press, int32_t to, int32_t from, int32_t end) {
    size_t count = (size_t)(end - from);
    memmove(press->lows + to, press->lows + from, count * sizeof press->lows[0]);
    memmove(press->sections + to, press->sections + from, count * sizeof press->sections[0]);
    memmove(press->items + to, press->items + from, count * sizeof press->items[0]);
    press->work += (end - from) / 5;
}

static void set_place(sk__press *press, int32_t place, int32_t item, int64_t offset) {
    press->lows[place] = offset;
    press->sections[place] = press->layout->lives[item];
    press->items[place] = item;
}

/* Take out the items at places below `end` that end above `offset` and live with `item` (-1: all
 * that end above), from place `from` on; return the place after those that stay. */
static int32_t take_out(sk__press *press, int32_t item, int64_t offset, int32_t from, int32_t end) {
    const sk_layout *layout = press->layout;
    int32_t kept = from;
    for (int32_t i = from; i < end; i++) {
        int32_t other = press->items[i];
        bool is_out = press->lows[i] + layout->nbytes[other] > offset;
        if (item >= 0) {
            is_out = is_out && sk__live_together(&press->sections[i], &layout->lives[item]);
        }
        if (is_out) {
            press->pool[press->npool++] = other;
        } else {
            set_place(press, kept++, other, press->lows[i]);
        }
    }
    press->work += end - from;
    return kept;
}

/* Put an item in; those in its way go to the pool. */
static void put_in(sk__press *press, int32_t item, int64_t offset) {
    int64_t high = offset + press->layout->nbytes[item];
    int32_t from = place_of(press, offset - press->most_nbytes + 1);
    int32_t end = place_of(press, high);
    int32_t kept = take_out(press, item, offset, from, end);
    int32_t place = from;
    while (place < kept && press->lows[place] < offset) {
        place++;
    }
    if (kept + 1 != end) {
        move_places(press, kept + 1, end, press->nplaced);
    }
    move_places(press, place + 1, place, kept);
    set_place(press, place, item, offset);
    press->nplaced += kept + 1 - end;
}

/* ---- where an item goes ---------------------------------------------------------------------- */

/* Merge the sorted halves of `from` into `to`. */
static void merge(const sk__top *from, sk__top *to, int32_t middle, int32_t end) {
    int32_t left = 0;
    int32_t right = middle;
    for (int32_t i = 0; i < end; i++) {
        bool is_left = right >= end || (left < middle && from[left].high <= from[right].high);
        to[i] = is_left ? from[left++] : from[right++];
    }
}

static void sort_run(sk__top *tops, int32_t count) {
    for (int32_t i = 1; i < count; i++) {
        sk__top moved = tops[i];
        int32_t place = i;
        for (; place > 0 && tops[place - 1].high > moved.high; place--) {
            tops[place] = tops[place - 1];
        }
        tops[place] = moved;
    }
}

/* Sort `by_high`, which is partly in order. */
static void sort_tops(sk__press *press, int32_t count) {
    for (int32_t i = 0; i < count; i += RUN) {
        sort_run(press->by_high + i, count - i < RUN ? count - i : RUN);
    }
    for (int32_t width = RUN; width < count; width *= 2) {
        for (int32_t i = 0; i < count; i += 2 * width) {
            int32_t end = count - i < 2 * width ? count - i : 2 * width;
            merge(press->by_high + i, press->merged + i, end < width ? end : width, end);
        }
        sk__top *other = press->by_high;
        press->by_high = press->merged;
        press->merged = other;
        press->work += count;
    }
}

static void list_beside(sk__press *press, int32_t item) {
    const sk__sections life = press->layout->lives[item];
    int32_t count = 0;
    for (int32_t i = 0; i < press->nplaced; i++) {
        press->beside[count] = i; /* without a branch: half of them would be predicted wrong */
        count += (int32_t)sk__live_together(&press->sections[i], &life);
    }
    for (int32_t i = 0; i < count; i++) {
        int32_t other = press->items[press->beside[i]];
        int64_t high = press->lows[press->beside[i]] + press->layout->nbytes[other];
        press->by_high[i] = (sk__top){high, other};
    }
    sort_tops(press, count);
    press->nbeside = count;
    press->work += press->nplaced / 3 + 6 * (int64_t)count;
}

/* A window of `nbytes` that moves up over the items beside; what is in its way. */
typedef struct sk__way {
    int64_t offset;
    int64_t nbytes;
    int32_t ended; /* of the items by their ends: those wholly below it */
    int32_t began; /* of the items by their offsets: those that begin below its end */
    int32_t nfixed;
    int64_t weight;
} sk__way;

static void add_to_way(const sk__press *press, sk__way *way, int32_t item, int32_t sign) {
    way->weight += sign * press->weights[item];
    way->nfixed += sign * (int32_t)is_fixed(press->layout, item);
}

/* Move up to `offset`. */
static void move_up(const sk__press *press, sk__way *way, int64_t offset) {
    way->offset = offset;
    for (; way->ended < press->nbeside && press->by_high[way->ended].high <= offset; way->ended++) {
        add_to_way(press, way, press->by_high[way->ended].item, -1);
    }
    for (; way->began < press->nbeside; way->began++) {
        int32_t place = press->beside[way->began];
        if (press->lows[place] >= offset + way->nbytes) {
            return;
        }
        add_to_way(press, way, press->items[place], 1);
    }
}

/* Return the offset at which the items in the way weigh least; `*weight`: so much, 0: none is.
 * It is 0 or the end of an item: from there on up to the next item, nothing more is in the way. */
static int64_t find_lightest(sk__press *press, int32_t item, int64_t *weight) {
    sk__way way = {.nbytes = press->layout->nbytes[item]};
    int64_t best = -1;
    uint64_t ties = 0;
    *weight = INT64_MAX;
    for (int64_t offset = 0; offset + way.nbytes <= press->limit;) {
        move_up(press, &way, offset);
        bool is_better = way.nfixed == 0 && way.weight < *weight;
        bool is_tie = way.nfixed == 0 && way.weight == *weight;
        ties = is_better ? 1 : ties + is_tie;
        if (is_better || (is_tie && next_random(press) % ties == 0)) {
            best = offset;
            *weight = way.weight;
        }
        if (*weight == 0 || way.ended == press->nbeside) {
            break;
        }
        /* In range: `ended` is below `nbeside`.
         * NOLINTNEXTLINE(clang-analyzer-security.ArrayBound) */
        offset = press->by_high[way.ended].high;
    }
    return best;
}

/* Make an item heavier; all become lighter when one is too heavy. */
static void grow(sk__press *press, int32_t item) {
    press->weights[item] += press->weights[item] / GROWTH + 1;
    if (press->weights[item] > MOST_WEIGHT) {
        for (int32_t each = 0; each < press->layout->nitems; each++) {
            /* In range: one weight for each item.
             * NOLINTNEXTLINE(clang-analyzer-security.ArrayBound) */
            press->weights[each] = press->weights[each] / (1 << 20) + 1;
        }
    }
}

/* Put one item of the pool back; false: it cannot be below the limit. */
static bool put_back(sk__press *press) {
    int32_t item = press->pool[--press->npool];
    int64_t weight = 0;
    list_beside(press, item);
    int64_t offset = find_lightest(press, item, &weight);
    if (offset < 0) {
        return false;
    }
    if (weight > 0) {
        grow(press, item);
    }
    put_in(press, item, offset);
    return true;
}

/* ---- the search ------------------------------------------------------------------------------ */

static int compare_tops(const void *left, const void *right) {
    const sk__top *a = left;
    const sk__top *b = right;
    if (a->high != b->high) {
        return a->high < b->high ? -1 : 1;
    }
    return a->item < b->item ? -1 : a->item > b->item;
}

/* Put all items at their offsets. */
static void place_all(sk__press *press, const int64_t *offsets) {
    const sk_layout *layout = press->layout;
    for (int32_t item = 0; item < layout->nitems; item++) {
        press->by_high[item] = (sk__top){offsets[item], item};
        press->most_nbytes =
            layout->nbytes[item] > press->most_nbytes ? layout->nbytes[item] : press->most_nbytes;
    }
    qsort(press->by_high, (size_t)layout->nitems, sizeof press->by_high[0], compare_tops);
    for (int32_t place = 0; place < layout->nitems; place++) {
        set_place(press, place, press->by_high[place].item, press->by_high[place].high);
    }
    press->nplaced = layout->nitems;
}

static void weigh(sk__press *press) {
    const sk_layout *layout = press->layout;
    for (int32_t item = 0; item < layout->nitems; item++) {
        double share = (double)layout->nbytes[item] / (double)layout->bound;
        const sk__sections *sections = &layout->lives[item];
        double life =
            (double)(sections->end - sections->first + sections->wrap) / (double)layout->nsections;
        press->weights[item] = 1 + (int64_t)((LEAST_WEIGHT + share * life) * (double)UNIT_WEIGHT);
    }
}

/* Sort the pool by weight, so that the heaviest goes back first. */
static void sort_pool(sk__press *press) {
    for (int32_t i = 1; i < press->npool; i++) {
        int32_t item = press->pool[i];
        int32_t place = i;
        for (; place > 0 && press->weights[press->pool[place - 1]] > press->weights[item];
             place--) {
            press->pool[place] = press->pool[place - 1];
        }
        press->pool[place] = item;
    }
}

/* Restore a layout, and take the items above the limit out. */
static void restart(sk__press *press, const int64_t *offsets) {
    place_all(press, offsets);
    press->npool = 0;
    press->nplaced = take_out(press, -1, press->limit, 0, press->nplaced);
    press->work += RESTART_WORK * (int64_t)press->layout->nitems;
}

/* Return the limit of additional items out before restart number `count`. */
static int32_t most_out(const sk_layout *layout, uint32_t count) {
    uint32_t parts = count & (~count + 1);         /* its lowest bit */
    int32_t part = layout->nitems / PARTS + PARTS; /* 16 items may always be out */
    return part * (int32_t)(parts < MOST_PARTS ? parts : MOST_PARTS);
}

/* Press a layout below the limit; false: the work is done, or it is impossible. */
static bool press_below(sk__press *press, const sk_layout_effort *effort, const int64_t *offsets) {
    uint32_t count = 1; /* of restarts, with the next one */
    restart(press, offsets);
    int32_t above = press->npool; /* out after each restart */
    for (int64_t step = 0; press->npool > 0; step++) {
        if (press->work >= effort->most_work ||
            (step % STOP_EVERY == 0 && sk__is_stopped(effort))) {
            return false;
        }
        int32_t before = press->npool;
        if (!put_back(press)) {
            return false;
        }
        if (press->npool - above > most_out(press->layout, count)) {
            restart(press, offsets);
            count++;
        } else if (press->npool > before) {
            sort_pool(press);
        }
    }
    return true;
}

static void search(sk__press *press, const sk_layout_effort *effort, int64_t *offsets) {
    int64_t bound = press->layout->bound;
    int64_t height = sk__layout_height(press->layout, offsets);
    weigh(press);
    /* Below the bound, fixed items would be above the limit. */
    while (height > effort->target && height > bound) {
        press->limit = bound + (height - bound) / 100 * STEP_PERCENT;
        press->limit = press->limit < effort->target ? effort->target : press->limit;
        press->limit = press->limit >= height ? height - 1 : press->limit;
        if (!press_below(press, effort, offsets)) {
            return;
        }
        for (int32_t i = 0; i < press->nplaced; i++) {
            offsets[press->items[i]] = press->lows[i];
        }
        height = sk__layout_height(press->layout, offsets);
    }
}

static bool open_press(sk__press *press) {
    size_t count = (size_t)press->layout->nitems;
    press->lows = calloc(count, sizeof press->lows[0]);
    press->sections = calloc(count, sizeof press->sections[0]);
    press->items = calloc(count, sizeof press->items[0]);
    press->pool = calloc(count, sizeof press->pool[0]);
    press->weights = calloc(count, sizeof press->weights[0]);
    press->beside = calloc(count + 1, sizeof press->beside[0]);
    press->by_high = calloc(count, sizeof press->by_high[0]);
    press->merged = calloc(count, sizeof press->merged[0]);
    return press->lows != NULL && press->sections != NULL && press->items != NULL &&
           press->pool != NULL && press->weights != NULL && press->beside != NULL &&
           press->by_high != NULL && press->merged != NULL;
}

sk_status sk_layout_press(const sk_layout *layout, const sk_layout_effort *effort, int64_t *offsets,
                          int64_t *work) {
    *work = 0;
    if (layout->nitems <= 0) {
        return SK_OK;
    }
    sk_status status = SK_OK;
    sk__press press = {.layout = layout, .random = effort->seed};
    if (open_press(&press)) {
        search(&press, effort, offsets);
        *work = press.work;
    } else {
        status = sk__fail(SK_OUT_OF_HOST_MEMORY, "layout: no host memory to press %d items",
                          layout->nitems);
    }
    free(press.lows);
    free(press.sections);
    free(press.items);
    free(press.pool);
    free(press.weights);
    free(press.beside);
    free(press.by_high);
    free(press.merged);
    return status;
}
