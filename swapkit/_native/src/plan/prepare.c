/* prepare.c - from actions to the needs of items, sums for each slot, and queues of copies. */
#include <limits.h>
#include <string.h>

#include "plan/plan.h"

/* ---- checks of a request --------------------------------------------------------------------- */

static sk_status check_action(const sk__plan *plan, int32_t item) {
    const sk_plan_problem *problem = plan->problem;
    int8_t action = plan->request->actions[item];
    bool is_possible =
        action == SK_PLAN_KEEP || (action == SK_PLAN_RECOMPUTE && problem->can_recompute[item]) ||
        (action == SK_PLAN_SWAP && problem->can_swap[item]) ||
        (action == SK_PLAN_SWAP_TO_DISK && problem->can_swap[item] && !problem->is_weight[item]);
    if (!is_possible) {
        return sk__fail(SK_INVALID, "plan: item %d cannot have action %d", item, action);
    }
    if (action == SK_PLAN_SWAP_TO_DISK && plan->machine->disk_bytes <= 0) {
        return sk__fail(SK_INVALID, "plan: item %d goes to disk, but the machine has none", item);
    }
    return SK_OK;
}

static sk_status check_machine(const sk_plan_machine *machine) {
    if (!(machine->out_bytes_per_second > 0) || !(machine->in_bytes_per_second > 0)) {
        return sk__fail(SK_INVALID, "plan: the link has no speed");
    }
    if (machine->disk_bytes > 0 &&
        !(machine->disk_write_bytes_per_second > 0 && machine->disk_read_bytes_per_second > 0)) {
        return sk__fail(SK_INVALID, "plan: the disk has no speed");
    }
    if (!(machine->duplex >= 1 && machine->duplex <= 2) || !(machine->interference >= 0) ||
        !(machine->out_latency_seconds >= 0) || !(machine->in_latency_seconds >= 0)) {
        return sk__fail(SK_INVALID, "plan: duplex, interference or latency out of range");
    }
    return SK_OK;
}

/* ---- sorting --------------------------------------------------------------------------------- */

/* Sort `from` by `keys`, which are from -1 to nslots - 1; stable. */
static void sort_by_slot(const sk__plan *plan, const int32_t *keys, const int32_t *from,
                         int32_t count, int32_t *to) {
    int32_t *buckets = plan->buckets;
    memset(buckets, 0, ((size_t)plan->problem->nslots + 2) * sizeof buckets[0]);
    for (int32_t i = 0; i < count; i++) {
        buckets[keys[from[i]] + 2]++; /* the count of the last one is not used */
    }
    for (int32_t slot = 1; slot <= plan->problem->nslots; slot++) {
        buckets[slot] += buckets[slot - 1];
    }
    for (int32_t i = 0; i < count; i++) {
        to[buckets[keys[from[i]] + 1]++] = from[i];
    }
}

static void sort_by_birth(const sk__plan *plan) {
    int32_t nitems = plan->problem->nitems;
    for (int32_t item = 0; item < nitems; item++) {
        plan->outs[item] = item; /* unused until the queues are made */
    }
    sort_by_slot(plan, plan->problem->births, plan->outs, nitems, plan->scratch);
    for (int32_t i = 0; i < nitems; i++) {
        plan->by_birth[i] = plan->scratch[nitems - 1 - i];
    }
}

/* ---- needs ----------------------------------------------------------------------------------- */

/* Lower the need of an item to that of its siblings, which are made together with it, and the needs
 * of its inputs to its own. Inputs that forward still needs at that time are there anyway. */
static void find_need_of(const sk__plan *plan, int32_t item) {
    const sk_plan_problem *problem = plan->problem;
    int32_t *needs = plan->run->needs;
    int32_t together = plan->step_slot[problem->own_steps[item]];
    if (together > problem->releases[item]) {
        needs[item] = together;
    }
    for (int32_t i = problem->input_starts[item]; i < problem->input_starts[item + 1]; i++) {
        int32_t input = problem->inputs[i];
        if (needs[item] < needs[input] && needs[item] > problem->releases[input]) {
            needs[input] = needs[item];
        }
    }
}

/* Return the end of the items, from `begin` on, that are born in the same slot; set `step_slot` to
 * the first need of items that are made together. Siblings have the same birth. */
static int32_t find_siblings(const sk__plan *plan, int32_t begin) {
    const sk_plan_problem *problem = plan->problem;
    int32_t birth = problem->births[plan->by_birth[begin]];
    int32_t end = begin;
    for (; end < problem->nitems && problem->births[plan->by_birth[end]] == birth; end++) {
        int32_t item = plan->by_birth[end];
        int32_t own = problem->own_steps[item];
        if (sk__is_recomputed(plan, item) && plan->run->needs[item] < plan->step_slot[own]) {
            plan->step_slot[own] = plan->run->needs[item];
        }
    }
    return end;
}

static void find_needs(const sk__plan *plan) {
    const sk_plan_problem *problem = plan->problem;
    int32_t *needs = plan->run->needs;
    memcpy(needs, problem->uses, (size_t)problem->nitems * sizeof needs[0]);
    const int32_t *earlies = plan->request->earlies;
    for (int32_t item = 0; earlies != NULL && item < problem->nitems; item++) {
        if (sk__is_recomputed(plan, item) && earlies[item] > problem->releases[item] &&
            earlies[item] < needs[item]) {
            needs[item] = earlies[item];
        }
    }
    for (int32_t step = 0; step < problem->nsteps; step++) {
        plan->step_slot[step] = INT32_MAX;
    }
    int32_t end = plan->has_recomputing ? 0 : problem->nitems;
    while (end < problem->nitems) {
        int32_t begin = end;
        end = find_siblings(plan, begin);
        for (int32_t i = begin; i < end; i++) {
            if (sk__is_recomputed(plan, plan->by_birth[i])) {
                find_need_of(plan, plan->by_birth[i]);
            }
        }
    }
}

/* ---- sums ------------------------------------------------------------------------------------ */

/* Add what a swapped item gives besides: its memory if it is dropped, or else its copy's. */
static void add_copy(const sk__plan *plan, int32_t item) {
    const sk_plan_problem *problem = plan->problem;
    int64_t nbytes = problem->item_bytes[item];
    if (sk__is_dropped(plan, item)) {
        if (problem->releases[item] >= 0) {
            plan->given[problem->releases[item]] += nbytes;
        }
    } else if (sk__goes_on(plan, item)) { /* it is there until it is copied out again */
        plan->given[problem->tails[item] - 1] -= nbytes;
        plan->host_given[problem->tails[item] - 1] += nbytes;
    } else {
        int64_t *tier = sk__is_on_disk(plan, item) ? plan->disk_given : plan->host_given;
        tier[problem->deaths[item]] += nbytes;
    }
}

static void add_lives(const sk__plan *plan) {
    const sk_plan_problem *problem = plan->problem;
    for (int32_t item = 0; item < problem->nitems; item++) {
        int64_t nbytes = problem->item_bytes[item];
        if (problem->readies[item] >= 0) {
            plan->taken[problem->births[item]] += nbytes;
        }
        plan->given[problem->deaths[item]] += nbytes;
        if (sk__is_recomputed(plan, item)) {
            plan->given[problem->releases[item]] += nbytes;
            plan->taken[plan->run->needs[item]] += nbytes;
        } else if (sk__is_swapped(plan, item)) {
            plan->back[plan->run->needs[item]] += nbytes;
            add_copy(plan, item);
        } else if (sk__goes_on(plan, item)) { /* the part that was used last goes on as this one */
            plan->given[problem->tails[item] - 1] -= nbytes;
        }
    }
}

/* Add a recomputation. Siblings share their chain's memory, and items of one slot common steps. */
static void add_chain(const sk__plan *plan, int32_t item, int32_t *counted) {
    const sk_plan_problem *problem = plan->problem;
    int32_t slot = plan->run->needs[item];
    int32_t own = problem->own_steps[item];
    int64_t before = counted[own] == slot ? plan->step_bytes[own] : 0;
    if (problem->chain_bytes[item] > before) {
        plan->held[slot] += problem->chain_bytes[item] - before;
        plan->step_bytes[own] = problem->chain_bytes[item];
    } else {
        plan->step_bytes[own] = before;
    }
    for (int32_t i = problem->chain_starts[item]; i < problem->chain_starts[item + 1]; i++) {
        int32_t step = problem->chain_steps[i];
        if (plan->step_slot[step] != slot) {
            plan->step_slot[step] = slot;
            plan->seconds[slot] += problem->step_seconds[step];
            plan->run->recompute_seconds += problem->step_seconds[step];
        }
    }
    counted[own] = slot;
}

static void add_chains(const sk__plan *plan, const int32_t *by_need, int32_t count) {
    const sk_plan_problem *problem = plan->problem;
    int32_t *counted = plan->step_slot + problem->nsteps;
    for (int32_t step = 0; step < 2 * problem->nsteps; step++) {
        plan->step_slot[step] = -1;
    }
    for (int32_t i = 0; i < count; i++) {
        if (sk__is_recomputed(plan, by_need[i])) {
            add_chain(plan, by_need[i], counted);
        }
    }
}

/* ---- queues ---------------------------------------------------------------------------------- */

static void queue_outs(sk__plan *plan) {
    const sk_plan_problem *problem = plan->problem;
    int32_t count = 0;
    for (int32_t item = 0; item < problem->nitems; item++) {
        plan->out_place[item] = -1;
        if (sk__is_swapped(plan, item)) {
            plan->run->swapped_bytes += problem->item_bytes[item];
        }
        if (sk__is_swapped(plan, item) && !sk__is_clean(plan, item)) {
            plan->prefetch[item] = sk__slot_of_out(plan, item); /* unused until they are chosen */
            plan->scratch[count++] = item;
        }
    }
    plan->nouts = count;
    sort_by_slot(plan, plan->prefetch, plan->scratch, count, plan->outs);
    for (int32_t place = 0; place < count; place++) {
        if (!sk__goes_on(plan, plan->outs[place])) {
            plan->out_place[plan->outs[place]] = place;
        }
    }
}

/* Count for each slot which copies must be done before it begins. */
static void count_awaited(const sk__plan *plan) {
    const sk_plan_problem *problem = plan->problem;
    int32_t place = 0;
    int32_t out = 0; /* copies out that must be done once the copies of `ins` so far are back */
    for (int32_t slot = 0; slot < problem->nslots; slot++) {
        for (; place < plan->nins && plan->run->needs[plan->ins[place]] <= slot; place++) {
            int32_t own = plan->out_place[plan->ins[place]] + 1;
            out = own > out ? own : out;
        }
        plan->awaited[slot] = place;
        plan->outs_awaited[slot] = out;
    }
}

/* Sort items that come back or are recomputed by their needs, the later born first, and leave the
 * swapped ones in `ins`. */
static void sort_by_need(sk__plan *plan) {
    int32_t count = 0;
    for (int32_t i = 0; i < plan->problem->nitems; i++) {
        if (plan->request->actions[plan->by_birth[i]] != SK_PLAN_KEEP) {
            plan->scratch[count++] = plan->by_birth[i];
        }
    }
    sort_by_slot(plan, plan->run->needs, plan->scratch, count, plan->ins);
    if (plan->has_recomputing) {
        add_chains(plan, plan->ins, count);
    }
    plan->nins = 0;
    for (int32_t i = 0; i < count; i++) {
        if (sk__is_swapped(plan, plan->ins[i])) {
            plan->ins[plan->nins++] = plan->ins[i];
        }
    }
}

/* Return the slot that waits for an item's release. The item is free at the end of the last slot of
 * forward that uses it, when its copy out is done: an earlier release can't be kept. */
static int32_t slot_of_release(const sk__plan *plan, int32_t item) {
    const int32_t *asked = plan->request->releases;
    int32_t first = sk__slot_of_end(plan, item) + 1;
    return asked == NULL || asked[item] < 0 ? plan->problem->nslots
           : asked[item] < first            ? first
                                            : asked[item];
}

void sk__plan_await_releases(const sk__plan *plan) {
    int32_t nslots = plan->problem->nslots;
    memset(plan->outs_awaited, 0, (size_t)nslots * sizeof plan->outs_awaited[0]);
    for (int32_t place = 0; place < plan->nouts; place++) {
        int32_t slot = slot_of_release(plan, plan->outs[place]);
        if (slot < nslots) {
            plan->outs_awaited[slot] = place + 1; /* copies out are done in order */
        }
    }
    for (int32_t slot = 1; slot < nslots; slot++) {
        if (plan->outs_awaited[slot] < plan->outs_awaited[slot - 1]) {
            plan->outs_awaited[slot] = plan->outs_awaited[slot - 1];
        }
    }
}

sk_status sk__plan_prepare(sk__plan *plan) {
    const sk_plan_problem *problem = plan->problem;
    sk_status status = check_machine(plan->machine);
    for (int32_t item = 0; status == SK_OK && item < problem->nitems; item++) {
        status = check_action(plan, item);
        plan->has_recomputing = plan->has_recomputing || sk__is_recomputed(plan, item);
    }
    if (status != SK_OK) {
        return status;
    }
    for (int32_t slot = 0; slot < problem->nslots; slot++) {
        plan->seconds[slot] = problem->since[slot] == slot ? problem->slot_seconds[slot] : 0.0;
        plan->held[slot] = problem->slot_bytes[slot];
    }
    sort_by_birth(plan);
    find_needs(plan);
    add_lives(plan);
    sort_by_need(plan);
    queue_outs(plan);
    count_awaited(plan);
    return SK_OK;
}
