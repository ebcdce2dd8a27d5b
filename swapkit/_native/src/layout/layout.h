/* layout.h - items with their times as ranks, and the passes over them.
 *
 * items.c makes the ranks; place.c is one placement in a given order; eject.c
 * lowers a layout; search.c is exact; verify.c is a check that uses none of these. */
#ifndef SWAPKIT_LAYOUT_LAYOUT_H
#define SWAPKIT_LAYOUT_LAYOUT_H

#include "base/base.h"
#include "swapkit_layout.h"

/* Times are cut into *sections*: a new one begins where an item starts after another has ended. Two
 * items live at the same time exactly if they share a section. */
struct sk_layout {
    int32_t nitems;
    int32_t nsections;
    int64_t bound;
    int32_t *firsts;  /* nitems: the first section of an item */
    int32_t *ends;    /* nitems: the section after its last */
    int64_t *nbytes;  /* nitems */
    int64_t *fixed;   /* nitems; NULL: all are free */
    int64_t *lives;   /* nitems: the length of an item's life, in the caller's time */
    int64_t *section; /* nsections: the bytes alive in it */
    void *memory;     /* of the arrays of items */
};

/* The highest end of an item. */
int64_t sk__layout_height(const sk_layout *layout, const int64_t *offsets);

static inline bool sk__is_stopped(const sk_layout_effort *effort) {
    return effort->stop != NULL && __atomic_load_n(effort->stop, __ATOMIC_RELAXED) != 0;
}

#endif
