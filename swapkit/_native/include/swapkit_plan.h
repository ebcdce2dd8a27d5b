/* swapkit_plan.h - a training step under a plan, simulated.
 *
 * A step is K *slots* of computing in order and N *items* that may be moved off the device;
 * swapkit/simulation/problems.py explains the arrays. Computing, copies out and copies in are three
 * queues; each does one thing at a time, in order:
 *
 *   - A slot with `since` below itself only waits, for a transfer between ranks that goes on beside
 *     the three queues. It ends as long after slot `since` as if nothing were moved, or when the
 *     recomputation before it is done. So what delays computing in between takes no extra time as
 *     long as the wait lasts.
 *   - Slot k begins when slot k - 1 has ended, every swapped item needed by then is back, every one
 *     whose *release* is k or before is gone, and the memory that it takes fits the budget.
 *   - Copies out run in the order in which bytes become final (ties: the lower item first), as far
 *     as the host or the disk has room, which an item takes until slot `deaths` has ended. Memory
 *     is free when the copy is done and slot `releases` has ended.
 *   - Copies in run in the order of `needs` (ties: the later born first), each after its own copy
 *     out, as soon as its memory fits; it takes the memory when it starts. Ahead of its need a copy
 *     starts in its *prefetch* slot or later, and takes no memory that the slot which waits to
 *     begin would need.
 *   - A *clean* item, a weight, has a copy already. It is not copied out, and its memory is free
 *     when slot `releases` has ended. A copy that it has all the time is outside of the room.
 *   - A weight with a tail that is not clean is copied out once the slot before its tail has ended,
 *     into the room of its last copy; the step ends when that is done.
 *
 * Between slots k - 1 and k the lesser of their `slot_bytes` counts as in use.
 *
 * The rules are those of swapkit.h. Everything is borrowed for the call. Threads: any. */
#ifndef SWAPKIT_PLAN_H
#define SWAPKIT_PLAN_H

#include "swapkit.h"

typedef struct sk_plan_problem {
    int32_t nslots;
    int32_t nitems;
    int32_t nsteps;
    const double *slot_seconds; /* nslots */
    const int64_t *slot_bytes;
    const int32_t *since;      /* itself: the slot computes; -1: it waits since the step's start */
    const int64_t *item_bytes; /* nitems, like all arrays below unless marked */
    const int32_t *births;
    const int32_t *readies;
    const int32_t *releases;
    const int32_t *uses;
    const int32_t *deaths;
    /* The slot from which a kept item is there again, until the step's end (nslots: in none), since
     * the next step begins with it; swapped, it is not there when the step begins, either. -1: the
     * item does not go on in the next step. */
    const int32_t *tails;
    /* Parts of weights: the part before, with whose copy the item is clean if that one is swapped,
     * or clean; itself: it is always clean; -1: it never is. */
    const int32_t *formers;
    const bool *is_weight; /* it does not go to disk */
    const bool *can_swap;
    const bool *can_recompute;
    const int64_t *chain_bytes;
    const int32_t *own_steps;
    const double *step_seconds;  /* nsteps */
    const int32_t *chain_starts; /* nitems + 1 */
    const int32_t *chain_steps;
    const int32_t *input_starts; /* nitems + 1 */
    const int32_t *inputs;
} sk_plan_problem;

typedef struct sk_plan_machine {
    int64_t budget_bytes;
    int64_t host_bytes;
    int64_t disk_bytes; /* 0: there is no disk */
    double out_bytes_per_second;
    double in_bytes_per_second;
    double out_latency_seconds;
    double in_latency_seconds;
    double duplex;       /* from 1 to 2: while copies run both ways, each has half of it */
    double interference; /* while a copy runs, computing takes 1 + this times as long */
    double disk_write_bytes_per_second;
    double disk_read_bytes_per_second;
} sk_plan_machine;

typedef enum sk_plan_action {
    SK_PLAN_KEEP,
    SK_PLAN_SWAP,
    SK_PLAN_RECOMPUTE,
    SK_PLAN_SWAP_TO_DISK
} sk_plan_action;

typedef struct sk_plan_request {
    const int8_t *actions; /* nitems, of sk_plan_action */
    /* nitems; -1: not before the need. NULL: the simulation chooses, as early as there is room
     * beside the memory that computing takes until the need. */
    const int32_t *prefetches;
    int32_t window; /* chosen prefetches are at most this many slots before the need */
    /* nitems; the slot that waits until the item's memory is free, at the earliest the first slot
     * in which it can be; -1: no slot waits. NULL: -1 for all. */
    const int32_t *releases;
    /* nitems; the slot before which a recomputed item is made, if forward has released it then and
     * the need is later; -1: at its need. NULL: -1 for all. */
    const int32_t *earlies;
} sk_plan_request;

/* Times are seconds from the start of the step. Events that did not happen: NAN, for slots -1. */
typedef struct sk_plan_run {
    double *slot_starts; /* nslots each, the caller's */
    double *slot_ends;
    double *slot_stalls; /* waited before the slot */
    double *out_starts;  /* nitems each, the caller's */
    double *out_ends;
    double *released; /* the memory is free */
    double *in_starts;
    double *in_ends;
    int32_t *needs;
    /* The first slot that would not fit if the item were still there, although earlier copies out
     * were gone. */
    int32_t *release_slots;
    int32_t *prefetch_slots; /* the slot that ran or waited to begin when the copy in started */
    double seconds;          /* INFINITY: the step cannot run */
    double stall_seconds;
    double recompute_seconds;
    int64_t peak_bytes;
    int64_t host_peak_bytes;
    int64_t disk_peak_bytes;
    int64_t swapped_bytes;
    int32_t stuck_slot; /* the slot that can never begin; -1: none */
} sk_plan_run;

/* Check that every index of a problem is in range and every item's slots are in order; call it
 * once, before any other use of the problem. SK_INVALID names the item at fault. */
SK_API SK_NODISCARD sk_status sk_plan_check(const sk_plan_problem *problem);
/* Simulate one step. SK_INVALID: an action that the item cannot have or the machine cannot do. */
SK_API SK_NODISCARD sk_status sk_plan_simulate(const sk_plan_problem *problem,
                                               const sk_plan_machine *machine,
                                               const sk_plan_request *request, sk_plan_run *run);

#endif
