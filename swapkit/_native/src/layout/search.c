/* search.c - every layout of at most a given height, by depth.
 *
 * After MiniMalloc (Moffitt, ASPLOS 2023). Items are placed from the bottom up: each offset is the
 * lowest that the items placed before allow, and no item is placed below the one before it (or at
 * the same offset, but with a lower rank). Every layout becomes one of these if its items fall as
 * far as they can. A placement is given up if
 *
 *   - an item that is left would end above the capacity,
 *   - in some section, the bytes left do not fit between its floor and the capacity. The floor is
 *     the highest of: the last offset, the top of the items placed there, and the lowest offset of
 *     the items left there,
 *   - another item fits wholly below the offset (the gap would be for nothing).
 *
 * If nothing left can lie above the item just placed, other choices for it do not help. Where the
 * items left fall into groups that share no section, each group is searched by itself. */
#include <stdlib.h>

#include "layout/layout.h"

enum { STOP_EVERY = 1024 };

/* An item that is left: the lowest offset that the placed items allow, and its rank in the group.
 */
typedef struct sk__left {
    int64_t offset;
    int32_t rank;
    int32_t item;
} sk__left;

typedef struct sk__group {
    const sk__left *left; /* by offset, then rank */
    int32_t count;
    int32_t first; /* sections */
    int32_t end;
    int64_t offset; /* of the last placement, and its rank */
    int32_t rank;
} sk__group;

typedef struct sk__depth {
    const sk_layout *layout;
    const sk_layout_effort *effort;
    sk_layout_rule rule;
    int64_t work;
    int64_t *offsets;
    int64_t *tops;  /* of each section: the end of the highest item placed there */
    int64_t *bytes; /* of each section: those left */
    int32_t *cuts;  /* the items left that are alive in a section and in the next */
    int32_t *next;  /* scratch: the section from here on whose floor is not known */
    int64_t *most;  /* scratch, of items: of the bytes left in their sections */
    sk__left *left; /* a stack: the groups of all depths */
    int64_t *saved; /* a stack: tops */
    size_t left_used;
    size_t saved_used;
} sk__depth;

static sk_layout_outcome search_group(sk__depth *depth, const sk__group *group);

/* ---- orders ---------------------------------------------------------------------------------- */

static int compare_falling(int64_t a, int64_t b) { return a > b ? -1 : a < b; }

static int compare_areas(const sk_layout *layout, int32_t a, int32_t b) {
    __int128 left = (__int128)layout->lengths[a] * layout->nbytes[a];
    __int128 right = (__int128)layout->lengths[b] * layout->nbytes[b];
    return left > right ? -1 : left < right;
}

static int compare_items(const sk__depth *depth, int32_t a, int32_t b) {
    static const char rules[SK_LAYOUT_RULES][4] = {"WAT", "TAW", "TWA", "ZWT"};
    const sk_layout *layout = depth->layout;
    int found = 0;
    for (const char *key = rules[depth->rule]; *key != '\0' && found == 0; key++) {
        switch (*key) {
        case 'A':
            found = compare_areas(layout, a, b);
            break;
        case 'T':
            found = compare_falling(depth->most[a], depth->most[b]);
            break;
        case 'W':
            found = compare_falling(layout->lengths[a], layout->lengths[b]);
            break;
        default:
            found = compare_falling(layout->nbytes[a], layout->nbytes[b]);
        }
    }
    return found != 0 ? found : (a < b ? -1 : a > b);
}

static void sift(const sk__depth *depth, sk__left *left, int32_t root, int32_t count) {
    for (int32_t child = 2 * root + 1; child < count; child = 2 * root + 1) {
        if (child + 1 < count && compare_items(depth, left[child].item, left[child + 1].item) < 0) {
            child++;
        }
        if (compare_items(depth, left[root].item, left[child].item) >= 0) {
            return;
        }
        sk__left other = left[root];
        left[root] = left[child];
        left[child] = other;
        root = child;
    }
}

/* Sort items by the rule, and number them. */
static void rank_items(sk__depth *depth, sk__left *left, int32_t count) {
    const sk_layout *layout = depth->layout;
    for (int32_t i = 0; i < count; i++) {
        int64_t most = 0;
        for (int32_t s = layout->lives[left[i].item].first; s < layout->lives[left[i].item].end;
             s++) {
            most = depth->bytes[s] > most ? depth->bytes[s] : most;
        }
        depth->most[left[i].item] = most;
    }
    for (int32_t root = count / 2 - 1; root >= 0; root--) {
        sift(depth, left, root, count);
    }
    for (int32_t last = count - 1; last > 0; last--) {
        sk__left other = left[0];
        left[0] = left[last];
        left[last] = other;
        sift(depth, left, 0, last);
    }
    for (int32_t i = 0; i < count; i++) {
        left[i].rank = i;
    }
}

static bool is_before(const sk__left *a, const sk__left *b) {
    return a->offset != b->offset ? a->offset < b->offset : a->rank < b->rank;
}

/* Sort by offset, then rank; `left` is nearly sorted. */
static void sort_left(sk__left *left, int32_t count) {
    for (int32_t i = 1; i < count; i++) {
        sk__left moved = left[i];
        int32_t place = i;
        for (; place > 0 && is_before(&moved, &left[place - 1]); place--) {
            left[place] = left[place - 1];
        }
        left[place] = moved;
    }
}

/* ---- one placement --------------------------------------------------------------------------- */

/* List what is left after placing `at`, with new offsets; return how many, -1: one does not fit.
 * `*is_covered`: some of them live at the same time. */
static int32_t list_rest(sk__depth *depth, const sk__group *group, int32_t at, bool *is_covered) {
    const sk_layout *layout = depth->layout;
    const sk__left *placed = &group->left[at];
    int64_t top = placed->offset + layout->nbytes[placed->item];
    int32_t first = layout->lives[placed->item].first;
    int32_t end = layout->lives[placed->item].end;
    sk__left *rest = depth->left + depth->left_used;
    int32_t count = 0;
    for (int32_t i = 0; i < group->count; i++) {
        sk__left left = group->left[i];
        if (i == at) {
            continue;
        }
        if (layout->lives[left.item].first < end && layout->lives[left.item].end > first) {
            *is_covered = true;
            left.offset = left.offset > top ? left.offset : top;
            if (left.offset > depth->effort->target - layout->nbytes[left.item]) {
                return -1;
            }
        }
        rest[count++] = left;
    }
    sort_left(rest, count);
    return count;
}

static int32_t find_next(int32_t *next, int32_t section) {
    int32_t found = section;
    while (next[found] != found) {
        found = next[found];
    }
    while (next[section] != found) {
        int32_t step = next[section];
        next[section] = found;
        section = step;
    }
    return found;
}

static bool fits(const sk__depth *depth, int32_t section, int64_t floor) {
    floor = depth->tops[section] > floor ? depth->tops[section] : floor;
    return depth->bytes[section] <= depth->effort->target - floor;
}

/* Whether in every section of the group the bytes left fit above its floor. `rest` is sorted, so
 * the first item that covers a section has the lowest offset there. */
static bool may_fit(sk__depth *depth, const sk__group *group, const sk__left *rest, int32_t count,
                    int64_t offset) {
    const sk_layout *layout = depth->layout;
    for (int32_t section = group->first; section <= group->end; section++) {
        depth->next[section] = section;
    }
    for (int32_t i = 0; i < count; i++) {
        int64_t floor = rest[i].offset > offset ? rest[i].offset : offset;
        int32_t end = layout->lives[rest[i].item].end;
        int32_t section = find_next(depth->next, layout->lives[rest[i].item].first);
        for (; section < end; section = find_next(depth->next, section)) {
            if (!fits(depth, section, floor)) {
                return false;
            }
            depth->next[section] = section + 1;
        }
    }
    return true;
}

/* Whether the bytes left in the sections of an item fit above its offset: the cheapest check. */
static bool may_place(const sk__depth *depth, const sk__left *placed) {
    const sk_layout *layout = depth->layout;
    int64_t room = depth->effort->target - placed->offset;
    for (int32_t s = layout->lives[placed->item].first; s < layout->lives[placed->item].end; s++) {
        if (depth->bytes[s] > room) {
            return false;
        }
    }
    return true;
}

static void put(sk__depth *depth, const sk__left *placed) {
    const sk_layout *layout = depth->layout;
    int64_t nbytes = layout->nbytes[placed->item];
    int32_t end = layout->lives[placed->item].end;
    for (int32_t section = layout->lives[placed->item].first; section < end; section++) {
        depth->saved[depth->saved_used++] = depth->tops[section];
        depth->tops[section] = placed->offset + nbytes;
        depth->bytes[section] -= nbytes;
        depth->cuts[section] -= section + 1 < end;
    }
    depth->offsets[placed->item] = placed->offset;
}

static void take_back(sk__depth *depth, const sk__left *placed) {
    const sk_layout *layout = depth->layout;
    int32_t first = layout->lives[placed->item].first;
    int32_t end = layout->lives[placed->item].end;
    for (int32_t section = end - 1; section >= first; section--) {
        depth->tops[section] = depth->saved[--depth->saved_used];
        depth->bytes[section] += layout->nbytes[placed->item];
        depth->cuts[section] += section + 1 < end;
    }
}

/* The functions below call each other: at most SK_LAYOUT_MOST_EXACT deep, an item at a time.
 * NOLINTBEGIN(misc-no-recursion) */
/* ---- the tree -------------------------------------------------------------------------------- */

/* Search the items of `rest` that live in some sections as a group of their own. */
static sk_layout_outcome search_part(sk__depth *depth, const sk__left *rest, int32_t count,
                                     int32_t first, int32_t end) {
    sk__left *part = depth->left + depth->left_used;
    int32_t found = 0;
    for (int32_t i = 0; i < count; i++) {
        if (depth->layout->lives[rest[i].item].first >= first &&
            depth->layout->lives[rest[i].item].first < end) {
            part[found++] = rest[i];
        }
    }
    if (found == 0) {
        return SK_LAYOUT_FOUND;
    }
    rank_items(depth, part, found);
    sort_left(part, found);
    depth->left_used += (size_t)found;
    const sk__group group = {.left = part, .count = found, .first = first, .end = end};
    sk_layout_outcome outcome = search_group(depth, &group);
    depth->left_used -= (size_t)found;
    return outcome;
}

/* Search what is left after `placed`: as one group, or as several if it falls apart. */
static sk_layout_outcome search_rest(sk__depth *depth, const sk__group *group,
                                     const sk__left *placed, const sk__left *rest, int32_t count) {
    int32_t end = depth->layout->lives[placed->item].end;
    int32_t first = group->first;
    sk_layout_outcome outcome = SK_LAYOUT_FOUND;
    for (int32_t section = depth->layout->lives[placed->item].first;
         section + 1 < end && outcome == SK_LAYOUT_FOUND; section++) {
        if (depth->cuts[section] == 0) {
            outcome = search_part(depth, rest, count, first, section + 1);
            first = section + 1;
        }
    }
    if (first > group->first) {
        return outcome == SK_LAYOUT_FOUND ? search_part(depth, rest, count, first, group->end)
                                          : outcome;
    }
    const sk__group left = {.left = rest,
                            .count = count,
                            .first = group->first,
                            .end = group->end,
                            .offset = placed->offset,
                            .rank = placed->rank};
    return search_group(depth, &left);
}

static bool is_over(const sk__depth *depth) {
    return depth->work >= depth->effort->most_work ||
           (depth->work % STOP_EVERY == 0 && sk__is_stopped(depth->effort));
}

/* Place one item of the group, and search on; `*is_covered`: something left can lie above it. */
static sk_layout_outcome try_item(sk__depth *depth, const sk__group *group, int32_t at,
                                  bool *is_covered) {
    const sk__left *placed = &group->left[at];
    const sk__left *rest = depth->left + depth->left_used;
    if (!may_place(depth, placed)) {
        *is_covered = true;
        return SK_LAYOUT_IMPOSSIBLE;
    }
    int32_t count = list_rest(depth, group, at, is_covered);
    if (count < 0) {
        return SK_LAYOUT_IMPOSSIBLE;
    }
    depth->left_used += (size_t)count;
    put(depth, placed);
    sk_layout_outcome outcome = SK_LAYOUT_IMPOSSIBLE;
    if (may_fit(depth, group, rest, count, placed->offset)) {
        outcome = search_rest(depth, group, placed, rest, count);
    }
    take_back(depth, placed);
    depth->left_used -= (size_t)count;
    return outcome;
}

static sk_layout_outcome search_group(sk__depth *depth, const sk__group *group) {
    const int64_t *nbytes = depth->layout->nbytes;
    int64_t least_top = INT64_MAX;
    for (int32_t i = 0; i < group->count; i++) {
        int64_t top = group->left[i].offset + nbytes[group->left[i].item];
        least_top = top < least_top ? top : least_top;
    }
    const sk__left last = {.offset = group->offset, .rank = group->rank};
    for (int32_t i = 0; i < group->count && group->left[i].offset < least_top; i++) {
        if (is_before(&group->left[i], &last)) {
            continue;
        }
        if (is_over(depth)) {
            return SK_LAYOUT_UNKNOWN;
        }
        depth->work++;
        bool is_covered = false;
        sk_layout_outcome outcome = try_item(depth, group, i, &is_covered);
        if (outcome != SK_LAYOUT_IMPOSSIBLE) {
            return outcome;
        }
        if (!is_covered) {
            break;
        }
    }
    return group->count == 0 ? SK_LAYOUT_FOUND : SK_LAYOUT_IMPOSSIBLE;
}

/* NOLINTEND(misc-no-recursion) */

/* ---- the interface --------------------------------------------------------------------------- */

static bool open_depth(sk__depth *depth) {
    const sk_layout *layout = depth->layout;
    size_t nitems = (size_t)layout->nitems;
    size_t nsections = (size_t)layout->nsections;
    size_t spans = 0;
    for (size_t item = 0; item < nitems; item++) {
        spans += (size_t)(layout->lives[item].end - layout->lives[item].first);
    }
    depth->tops = calloc(nsections, sizeof depth->tops[0]);
    depth->bytes = malloc(nsections * sizeof depth->bytes[0]);
    depth->cuts = calloc(nsections, sizeof depth->cuts[0]);
    depth->next = malloc((nsections + 1) * sizeof depth->next[0]);
    depth->most = malloc(nitems * sizeof depth->most[0]);
    /* At each depth an item is gone, and a group is listed at most twice. */
    depth->left = malloc(nitems * (nitems + 1) * sizeof depth->left[0]);
    depth->saved = malloc((spans + 1) * sizeof depth->saved[0]);
    return depth->tops != NULL && depth->bytes != NULL && depth->cuts != NULL &&
           depth->next != NULL && depth->most != NULL && depth->left != NULL &&
           depth->saved != NULL;
}

static void close_depth(sk__depth *depth) {
    free(depth->tops);
    free(depth->bytes);
    free(depth->cuts);
    free(depth->next);
    free(depth->most);
    free(depth->left);
    free(depth->saved);
}

static sk_layout_outcome search_all(sk__depth *depth) {
    const sk_layout *layout = depth->layout;
    for (int32_t section = 0; section < layout->nsections; section++) {
        depth->bytes[section] = layout->section[section];
    }
    for (int32_t item = 0; item < layout->nitems; item++) {
        depth->left[item] = (sk__left){.item = item};
        for (int32_t s = layout->lives[item].first; s + 1 < layout->lives[item].end; s++) {
            depth->cuts[s]++;
        }
    }
    depth->left_used = (size_t)layout->nitems;
    sk_layout_outcome outcome = SK_LAYOUT_FOUND;
    int32_t first = 0;
    for (int32_t section = 0; section < layout->nsections && outcome == SK_LAYOUT_FOUND;
         section++) {
        if (depth->cuts[section] == 0) {
            outcome = search_part(depth, depth->left, layout->nitems, first, section + 1);
            first = section + 1;
        }
    }
    return outcome;
}

static sk_status check_search(const sk_layout *layout, const sk_layout_effort *effort,
                              sk_layout_rule rule) {
    if (layout->nitems > SK_LAYOUT_MOST_EXACT || layout->fixed != NULL || layout->is_circle) {
        return sk__fail(SK_INVALID,
                        "layout: an exact search takes at most %d items, none fixed, no period",
                        (int)SK_LAYOUT_MOST_EXACT);
    }
    if ((int)rule < 0 || (int)rule >= SK_LAYOUT_RULES || effort->target < 0) {
        return sk__fail(SK_INVALID, "layout: no such rule or capacity");
    }
    return SK_OK;
}

sk_status sk_layout_search(const sk_layout *layout, const sk_layout_effort *effort,
                           sk_layout_rule rule, int64_t *offsets, sk_layout_outcome *outcome) {
    sk_status status = check_search(layout, effort, rule);
    if (status != SK_OK || layout->nitems == 0) {
        *outcome = SK_LAYOUT_FOUND;
        return status;
    }
    *outcome = SK_LAYOUT_IMPOSSIBLE;
    if (layout->bound > effort->target) {
        return SK_OK;
    }
    sk__depth depth = {.layout = layout, .effort = effort, .rule = rule, .offsets = offsets};
    if (open_depth(&depth)) {
        *outcome = search_all(&depth);
    } else {
        status = sk__fail(SK_OUT_OF_HOST_MEMORY, "layout: no host memory to search %d items",
                          layout->nitems);
    }
    close_depth(&depth);
    return status;
}
