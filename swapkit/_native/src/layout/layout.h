/* layout.h - items with their times as ranks, and the passes over them.
 *
 * items.c makes the ranks; place.c is one placement in a given order; eject.c
 * lowers a layout; search.c is exact; verify.c is a check that uses none of these. */
#ifndef SWAPKIT_LAYOUT_LAYOUT_H
#define SWAPKIT_LAYOUT_LAYOUT_H

#include "base/base.h"
#include "swapkit_layout.h"

/* The sections in which an item lives. */
typedef struct sk__sections {
    int32_t first;
    int32_t end;  /* exclusive */
    int32_t wrap; /* of a life that goes on in the next period: those from 0 to below it; or 0 */
} sk__sections;

/* Times are cut into *sections*: a new one begins where an item starts after another has ended. Two
 * items live at the same time exactly if they share a section. */
struct sk_layout {
    int32_t nitems;
    int32_t nsections;
    bool is_circle;
    int64_t bound;
    sk__sections *lives; /* nitems */
    int64_t *nbytes;     /* nitems */
    int64_t *fixed;      /* nitems; NULL: all are free */
    int64_t *lengths;    /* nitems: of an item's life, in the caller's time */
    int64_t *section;    /* nsections: the bytes alive in it */
    void *memory;        /* of the arrays of items */
};

/* Whether items share a section; both live in the last one if both lives go on. */
static inline bool sk__live_together(const sk__sections *a, const sk__sections *b) {
    int32_t both = (int32_t)(a->first < b->end) & (int32_t)(b->first < a->end);
    return (both | (int32_t)(a->first < b->wrap) | (int32_t)(b->first < a->wrap)) != 0;
}

/* The highest end of an item. */
int64_t sk__layout_height(const sk_layout *layout, const int64_t *offsets);

static inline bool sk__is_stopped(const sk_layout_effort *effort) {
    return effort->stop != NULL && __atomic_load_n(effort->stop, __ATOMIC_RELAXED) != 0;
}

#endif
