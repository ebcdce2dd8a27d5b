/* plan.h - one simulation of a step under given actions, and its passes.
 *
 * prepare.c turns actions into sums for each slot and queues of copies; flow.c runs the three
 * queues through time; prefetch.c chooses when copies in start; release.c finds the slots by which
 * copies out must be done. All arrays are parts of one allocation that lasts for one call. */
#ifndef SWAPKIT_PLAN_PLAN_H
#define SWAPKIT_PLAN_PLAN_H

#include "base/base.h"
#include "swapkit_plan.h"

typedef struct sk__plan {
    const sk_plan_problem *problem;
    const sk_plan_machine *machine;
    const sk_plan_request *request;
    sk_plan_run *run;
    /* For each slot: */
    double *seconds;     /* including the recomputation before it, without the wait of one */
    int64_t *held;       /* bytes beside those of items, while it runs */
    int64_t *taken;      /* of items, when it begins; without those that come back */
    int64_t *back;       /* of items that are needed in it and come back */
    int64_t *given;      /* of items, when it ends */
    int64_t *host_given; /* of copies, when it ends */
    int64_t *disk_given;
    int64_t *released;     /* of items whose copy out was done before the slot ended */
    int64_t *level;        /* in use when it begins, with every copy in at the last moment */
    int32_t *awaited;      /* number of copies in that must be done before it begins */
    int32_t *outs_awaited; /* the same for copies out: for copies in at once, else for releases */
    /* For each item: */
    int32_t *gone;      /* the first slot that begins without it */
    int32_t *prefetch;  /* the slot from which its copy in may start */
    int32_t *by_birth;  /* items, the later born first */
    int32_t *scratch;   /* nitems */
    int32_t *outs;      /* the items to copy out, in that order */
    int32_t *ins;       /* the swapped items, in the order of copies in */
    int32_t *out_place; /* of an item among `outs`; -1: its copy in waits for none of them */
    /* For each step: */
    int32_t *step_slot; /* the latest slot that it was counted for, or the earliest need */
    int64_t *step_bytes;
    int32_t *buckets; /* nslots + 2, for sorting */
    int32_t nouts;
    int32_t nins;
    bool has_recomputing;
} sk__plan;

/* Fill everything but `prefetch`, `gone`, `level`, and the run's needs. */
sk_status sk__plan_prepare(sk__plan *plan);

/* Set `outs_awaited` from the request's releases; without any, to 0. */
void sk__plan_await_releases(const sk__plan *plan);

/* Run the step and leave the times in plan->run. With `at_once` copies in take no time: then
 * `level` and `gone` are filled, too. */
void sk__plan_flow(sk__plan *plan, bool at_once);

/* Choose `prefetch` after a flow with copies in at once. */
void sk__plan_choose_prefetches(sk__plan *plan);

/* Fill the run's release_slots after a flow. */
void sk__plan_find_releases(sk__plan *plan);

static inline bool sk__is_swapped(const sk__plan *plan, int32_t item) {
    return (plan->request->actions[item] & 1) != 0;
}

static inline bool sk__is_on_disk(const sk__plan *plan, int32_t item) {
    return plan->request->actions[item] == SK_PLAN_SWAP_TO_DISK;
}

static inline bool sk__is_recomputed(const sk__plan *plan, int32_t item) {
    return plan->request->actions[item] == SK_PLAN_RECOMPUTE;
}

/* Whether an item has a copy when it becomes idle, its own or that of an earlier part. */
static inline bool sk__is_clean(const sk__plan *plan, int32_t item) {
    const int32_t *formers = plan->problem->formers;
    while (formers[item] >= 0) {
        if (formers[item] == item || sk__is_swapped(plan, formers[item])) {
            return true;
        }
        item = formers[item];
    }
    return false;
}

/* Whether an item is swapped without a copy out. */
static inline bool sk__is_dropped(const sk__plan *plan, int32_t item) {
    return sk__is_swapped(plan, item) && sk__is_clean(plan, item);
}

static inline bool sk__goes_on(const sk__plan *plan, int32_t item) {
    return plan->problem->tails[item] >= 0;
}

/* The slot at whose end the copy out may begin; and its memory be free. */
static inline int32_t sk__slot_of_out(const sk__plan *plan, int32_t item) {
    return sk__goes_on(plan, item) ? plan->problem->tails[item] - 1 : plan->problem->readies[item];
}

static inline int32_t sk__slot_of_end(const sk__plan *plan, int32_t item) {
    return sk__goes_on(plan, item) ? plan->problem->tails[item] - 1 : plan->problem->releases[item];
}

/* Whether an item is in memory when the step begins. */
static inline bool sk__is_there_before(const sk__plan *plan, int32_t item) {
    return plan->problem->readies[item] < 0 &&
           !(sk__goes_on(plan, item) && sk__is_swapped(plan, item));
}

#endif
