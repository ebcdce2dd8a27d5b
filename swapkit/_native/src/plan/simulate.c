/* simulate.c - one step under a plan: checks, memory, and the passes in order. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "plan/plan.h"

/* ---- checks ---------------------------------------------------------------------------------- */

static bool are_in_range(const int32_t *starts, const int32_t *values, int32_t item, int32_t end) {
    if (starts[item] < 0 || starts[item + 1] < starts[item]) {
        return false;
    }
    for (int32_t i = starts[item]; i < starts[item + 1]; i++) {
        if (values[i] < 0 || values[i] >= end) {
            return false;
        }
    }
    return true;
}

static const char *fault_of_slots(const sk_plan_problem *problem, int32_t item) {
    int32_t birth = problem->births[item];
    int32_t ready = problem->readies[item];
    int32_t release = problem->releases[item];
    bool is_there_before = ready == -1 && birth == 0;
    if (birth < 0 || problem->deaths[item] >= problem->nslots) {
        return "a slot out of range";
    }
    if (problem->tails[item] >= 0 &&
        !(is_there_before && release == -1 && problem->is_weight[item] &&
          problem->tails[item] > problem->deaths[item] &&
          problem->tails[item] <= problem->nslots)) {
        return "a tail out of order";
    }
    if (!(is_there_before || ready >= birth) || release < ready || problem->uses[item] <= release ||
        problem->deaths[item] < problem->uses[item]) {
        return "slots out of order";
    }
    return NULL;
}

/* A part of a weight follows others, down to one that is always clean, or never. */
static const char *fault_of_formers(const sk_plan_problem *problem, int32_t item) {
    for (int32_t steps = 0; steps <= problem->nitems; steps++) {
        int32_t former = problem->formers[item];
        if (former < -1 || former >= problem->nitems) {
            return "a former part out of range";
        }
        if (former == -1 || former == item) {
            return NULL;
        }
        item = former;
    }
    return "former parts in a circle";
}

static const char *fault_of_item(const sk_plan_problem *problem, int32_t item) {
    const char *fault = fault_of_slots(problem, item);
    if (fault == NULL) {
        fault = fault_of_formers(problem, item);
    }
    if (fault != NULL) {
        return fault;
    }
    if (problem->item_bytes[item] < 0 || problem->chain_bytes[item] < 0) {
        return "negative bytes";
    }
    if (problem->can_recompute[item] &&
        (problem->own_steps[item] < 0 || problem->own_steps[item] >= problem->nsteps ||
         problem->releases[item] < 0)) {
        return "no step of its own";
    }
    if (!are_in_range(problem->chain_starts, problem->chain_steps, item, problem->nsteps)) {
        return "a step out of range";
    }
    if (!are_in_range(problem->input_starts, problem->inputs, item, problem->nitems)) {
        return "an input out of range";
    }
    return NULL;
}

static sk_status check_inputs(const sk_plan_problem *problem, int32_t item) {
    for (int32_t i = problem->input_starts[item]; i < problem->input_starts[item + 1]; i++) {
        int32_t input = problem->inputs[i];
        if (problem->can_recompute[input] && problem->births[input] >= problem->births[item]) {
            return sk__fail(SK_INVALID, "plan: item %d is made from item %d, which is not older",
                            item, input);
        }
    }
    return SK_OK;
}

sk_status sk_plan_check(const sk_plan_problem *problem) {
    if (problem->nslots <= 0 || problem->nitems < 0 || problem->nsteps < 0) {
        return sk__fail(SK_INVALID, "plan: the problem has no slots");
    }
    for (int32_t slot = 0; slot < problem->nslots; slot++) {
        if (!(problem->slot_seconds[slot] >= 0) || problem->slot_bytes[slot] < 0) {
            return sk__fail(SK_INVALID, "plan: slot %d has negative time or memory", slot);
        }
        if (problem->since[slot] < -1 || problem->since[slot] > slot) {
            return sk__fail(SK_INVALID, "plan: slot %d waits since slot %d", slot,
                            problem->since[slot]);
        }
    }
    for (int32_t item = 0; item < problem->nitems; item++) {
        const char *fault = fault_of_item(problem, item);
        if (fault != NULL) {
            return sk__fail(SK_INVALID, "plan: item %d has %s", item, fault);
        }
        sk_status status = check_inputs(problem, item);
        if (status != SK_OK) {
            return status;
        }
    }
    return SK_OK;
}

/* ---- memory ---------------------------------------------------------------------------------- */

typedef struct sk__cutter {
    char *memory; /* NULL: only count */
    size_t used;
} sk__cutter;

static void *cut(sk__cutter *cutter, size_t count, size_t size) {
    size_t place = cutter->used;
    cutter->used += sk__round_up(count * size, sizeof(double));
    return cutter->memory == NULL ? NULL : cutter->memory + place;
}

/* Give every array its part of `memory` (NULL: only count); return the total size. Arrays that must
 * begin with zeros come first, in `*zeros` bytes. */
static size_t lay_out(sk__plan *plan, char *memory, size_t *zeros) {
    size_t nslots = (size_t)plan->problem->nslots;
    size_t nitems = (size_t)plan->problem->nitems;
    size_t nsteps = (size_t)plan->problem->nsteps;
    sk__cutter at = {.memory = memory};
    plan->taken = cut(&at, nslots, sizeof plan->taken[0]);
    plan->back = cut(&at, nslots, sizeof plan->back[0]);
    plan->given = cut(&at, nslots, sizeof plan->given[0]);
    plan->host_given = cut(&at, nslots, sizeof plan->host_given[0]);
    plan->disk_given = cut(&at, nslots, sizeof plan->disk_given[0]);
    *zeros = at.used;
    plan->seconds = cut(&at, nslots, sizeof plan->seconds[0]);
    plan->held = cut(&at, nslots, sizeof plan->held[0]);
    plan->released = cut(&at, nslots, sizeof plan->released[0]);
    plan->level = cut(&at, nslots, sizeof plan->level[0]);
    plan->awaited = cut(&at, nslots, sizeof plan->awaited[0]);
    plan->outs_awaited = cut(&at, nslots, sizeof plan->outs_awaited[0]);
    plan->gone = cut(&at, nitems, sizeof plan->gone[0]);
    plan->prefetch = cut(&at, nitems, sizeof plan->prefetch[0]);
    plan->by_birth = cut(&at, nitems, sizeof plan->by_birth[0]);
    plan->scratch = cut(&at, nitems, sizeof plan->scratch[0]);
    plan->outs = cut(&at, nitems, sizeof plan->outs[0]);
    plan->ins = cut(&at, nitems, sizeof plan->ins[0]);
    plan->out_place = cut(&at, nitems, sizeof plan->out_place[0]);
    plan->step_slot = cut(&at, 2 * nsteps, sizeof plan->step_slot[0]);
    plan->step_bytes = cut(&at, nsteps, sizeof plan->step_bytes[0]);
    plan->buckets = cut(&at, nslots + 2, sizeof plan->buckets[0]);
    return at.used;
}

/* ---- the passes ------------------------------------------------------------------------------ */

static void prefetch_on_demand(const sk__plan *plan) {
    for (int32_t item = 0; item < plan->problem->nitems; item++) {
        plan->prefetch[item] = plan->run->needs[item];
    }
}

static void run_free(sk__plan *plan) {
    sk__plan_flow(plan, true);
    if (plan->run->stuck_slot >= 0 || plan->nins == 0) {
        return;
    }
    sk__plan_choose_prefetches(plan);
    sk__plan_await_releases(plan);
    sk__plan_flow(plan, false);
    if (plan->run->stuck_slot >= 0) {
        /* Links share their speed and the host is full: no copy in ahead of its need. */
        prefetch_on_demand(plan);
        sk__plan_flow(plan, false);
    }
}

static void run_following(sk__plan *plan) {
    const int32_t *prefetches = plan->request->prefetches;
    prefetch_on_demand(plan);
    for (int32_t item = 0; item < plan->problem->nitems; item++) {
        if (prefetches[item] >= 0 && prefetches[item] < plan->prefetch[item]) {
            plan->prefetch[item] = prefetches[item];
        }
    }
    sk__plan_await_releases(plan);
    sk__plan_flow(plan, false);
}

sk_status sk_plan_simulate(const sk_plan_problem *problem, const sk_plan_machine *machine,
                           const sk_plan_request *request, sk_plan_run *run) {
    sk__plan plan = {.problem = problem, .machine = machine, .request = request, .run = run};
    size_t zeros = 0;
    size_t nbytes = lay_out(&plan, NULL, &zeros);
    char *memory = malloc(nbytes);
    if (memory == NULL) {
        return sk__fail(SK_OUT_OF_HOST_MEMORY, "plan: no host memory for %zu bytes", nbytes);
    }
    (void)lay_out(&plan, memory, &zeros);
    memset(memory, 0, zeros);
    run->recompute_seconds = 0.0;
    run->swapped_bytes = 0;
    sk_status status = sk__plan_prepare(&plan);
    if (status == SK_OK && request->prefetches == NULL) {
        run_free(&plan);
    } else if (status == SK_OK) {
        run_following(&plan);
    }
    if (status == SK_OK && run->stuck_slot < 0) {
        sk__plan_find_releases(&plan);
    }
    free(memory);
    return status;
}
