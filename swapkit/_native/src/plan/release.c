/* release.c - the slots by which copies out must be done.
 *
 * With nothing gone, slots would not fit; in the order of copies out, items then have to be gone
 * until the slots fit. */
#include <string.h>

#include "plan/plan.h"

typedef struct sk__walk {
    sk__plan *plan;
    int32_t *waiting; /* swapped items that no slot has required to be gone yet */
    int32_t begin;
    int32_t end;
    int64_t gone; /* bytes that earlier slots required to be gone, and that are not back */
} sk__walk;

/* Return the first slot that begins with the item back. */
static int32_t slot_of_return(const sk__plan *plan, int32_t item) {
    const sk_plan_run *run = plan->run;
    int32_t slot = run->prefetch_slots[item];
    return run->in_starts[item] <= run->slot_starts[slot] ? slot : slot + 1;
}

/* Set `level` to the bytes in use in each slot if nothing had been copied out, and clear `back`:
 * the required bytes that are back when a slot begins. */
static void find_levels(const sk__plan *plan) {
    int64_t bytes = 0;
    const sk_plan_problem *problem = plan->problem;
    for (int32_t item = 0; item < problem->nitems; item++) {
        bytes += sk__is_there_before(plan, item) ? problem->item_bytes[item] : 0;
    }
    for (int32_t place = 0; place < plan->nins; place++) {
        int32_t item = plan->ins[place];
        if (sk__is_dropped(plan, item) || sk__goes_on(plan, item)) {
            plan->taken[slot_of_return(plan, item)] += problem->item_bytes[item];
        }
    }
    for (int32_t slot = 0; slot < problem->nslots; slot++) {
        bytes += plan->taken[slot];
        plan->level[slot] = bytes + plan->held[slot];
        bytes -= plan->given[slot];
        plan->back[slot] = 0;
    }
}

static bool fits(const sk__walk *walk, int32_t slot) {
    return walk->plan->level[slot] - walk->gone <= walk->plan->machine->budget_bytes;
}

static void ask(sk__walk *walk, int32_t slot) {
    sk__plan *plan = walk->plan;
    int32_t at = walk->begin;
    int32_t kept = walk->begin; /* the items that forward still needs go here */
    for (; at < walk->end && !fits(walk, slot); at++) {
        int32_t item = walk->waiting[at];
        bool goes_on = sk__goes_on(plan, item);
        int32_t back = goes_on ? plan->problem->nslots : slot_of_return(plan, item);
        if (sk__slot_of_end(plan, item) >= slot) {
            walk->waiting[kept++] = item;
        } else if (back > slot) { /* otherwise no slot ever requires it to be gone */
            plan->run->release_slots[item] = slot;
            walk->gone += plan->problem->item_bytes[item];
            if (!goes_on) {
                plan->back[back] += plan->problem->item_bytes[item];
            }
        }
    }
    while (kept > walk->begin) {
        walk->waiting[--at] = walk->waiting[--kept];
    }
    walk->begin = at;
}

void sk__plan_find_releases(sk__plan *plan) {
    sk__walk walk = {.plan = plan, .waiting = plan->scratch, .end = plan->nouts};
    if (plan->nouts == 0) {
        return;
    }
    memcpy(walk.waiting, plan->outs, (size_t)plan->nouts * sizeof walk.waiting[0]);
    find_levels(plan);
    for (int32_t slot = 0; slot < plan->problem->nslots; slot++) {
        walk.gone -= plan->back[slot];
        ask(&walk, slot);
    }
}
