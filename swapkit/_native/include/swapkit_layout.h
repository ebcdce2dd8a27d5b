/* swapkit_layout.h - addresses for lifetimes that are known in advance.
 *
 * An item lives from `starts` until just before `ends` and takes `nbytes`. A *layout* gives each an
 * offset, so that no two that live at the same time overlap. Its *height* is the end of the highest
 * item. No layout is lower than the *bound*: the most bytes alive at any time.
 *
 * Time may be a circle, as where steps repeat: an item that ends behind the *period* lives from its
 * start to the end of the period, and from 0 to where it ends in the next one.
 *
 * A layout of items never changes after it is made: every function but sk_layout_free() may run on
 * several threads at once. No function takes a lock or calls back. Results depend on the arguments
 * alone, never on time, except that a set stop flag ends a search early.
 *
 * The rules are those of swapkit.h. */
#ifndef SWAPKIT_LAYOUT_H
#define SWAPKIT_LAYOUT_H

#include "swapkit.h"

typedef struct sk_layout sk_layout;

typedef struct sk_layout_items {
    int32_t nitems;
    const int64_t *starts; /* nitems, like all arrays below */
    const int64_t *ends;   /* exclusive, above the start; at most a period above it */
    const int64_t *nbytes; /* above 0; their sum is at most SK_LAYOUT_MOST_BYTES */
    const int64_t *fixed;  /* the offset of an item that must not move; -1: free. NULL: all free */
    int64_t period;        /* starts are from 0 to below it; 0: time is no circle */
} sk_layout_items;

#define SK_LAYOUT_MOST_BYTES ((int64_t)1 << 60)

typedef enum sk_layout_limit {
    SK_LAYOUT_MOST_EXACT = 2048 /* items of an exact search */
} sk_layout_limit;

typedef enum sk_layout_fit {
    SK_LAYOUT_FIRST_FIT, /* the lowest gap that is large enough */
    SK_LAYOUT_BEST_FIT   /* the smallest gap that is large enough; the lowest of these */
} sk_layout_fit;

/* The limits of a search. */
typedef struct sk_layout_effort {
    int64_t most_work; /* of an improvement: list entries visited; of an exact search: placements */
    int64_t target;    /* an improvement ends at this height; the capacity of an exact search */
    uint64_t seed;     /* of an improvement */
    /* Set to another value than 0 by any thread: the search ends soon. NULL: none. */
    const int32_t *stop;
} sk_layout_effort;

typedef enum sk_layout_outcome {
    SK_LAYOUT_FOUND,
    SK_LAYOUT_IMPOSSIBLE, /* proven: no layout fits the capacity */
    SK_LAYOUT_UNKNOWN     /* the limits of the search were reached */
} sk_layout_outcome;

/* An order in which an exact search tries items that can start at the same offset. */
typedef enum sk_layout_rule {
    SK_LAYOUT_WIDTH_AREA, /* longest life first, then largest bytes x time, then fullest section */
    SK_LAYOUT_TOTAL_AREA, /* fullest section first, then area, then width */
    SK_LAYOUT_TOTAL_WIDTH,
    SK_LAYOUT_SIZE_WIDTH, /* most bytes first, then width, then fullest section */
    SK_LAYOUT_RULES
} sk_layout_rule;

/* Items are copied. SK_INVALID names the item at fault. */
SK_API SK_NODISCARD sk_status sk_layout_make(const sk_layout_items *items, sk_layout **out);
SK_API void sk_layout_free(sk_layout *layout);
/* Set `*bound`, and for each item the most bytes alive at any time of its life (NULL: not). */
SK_API SK_NODISCARD sk_status sk_layout_measure(const sk_layout *layout, int64_t *bound,
                                                int64_t *loads);
/* Place fixed items, then the others in the given order, each at the gap that `fit` says among the
 * items placed before that live at the same time; without a gap, above them. Adds the work to
 * `*work`, in entries visited. SK_INVALID: `order` is not a permutation, or fixed items overlap. */
SK_API SK_NODISCARD sk_status sk_layout_place(const sk_layout *layout, const int32_t *order,
                                              sk_layout_fit fit, int64_t *offsets, int64_t *work);
/* Lower a layout without overlaps: items above a limit go back where those in their way weigh
 * least, and these in turn. `offsets` become the lowest found; sets `*work`. */
SK_API SK_NODISCARD sk_status sk_layout_press(const sk_layout *layout,
                                              const sk_layout_effort *effort, int64_t *offsets,
                                              int64_t *work);
/* Search every layout of at most the target's height, by depth; needs memory for nitems squared.
 * `offsets` is set if one is found. SK_INVALID: more than SK_LAYOUT_MOST_EXACT items, fixed ones,
 * or a period. */
SK_API SK_NODISCARD sk_status sk_layout_search(const sk_layout *layout,
                                               const sk_layout_effort *effort, sk_layout_rule rule,
                                               int64_t *offsets, sk_layout_outcome *outcome);
/* Check a layout by a sweep over time that shares nothing with the searches; set its height.
 * SK_CORRUPT names two items that overlap, or one that is not at its fixed offset. */
SK_API SK_NODISCARD sk_status sk_layout_verify(const sk_layout_items *items, const int64_t *offsets,
                                               int64_t *height);

#endif
