/* flow.c - the three queues of a step, through time.
 *
 * The work that ends next moves the clock; then each idle queue begins its next work if it can.
 * Computing comes first, so a copy in never takes the memory of a slot that could have begun. */
#include <math.h>
#include <string.h>

#include "plan/plan.h"

typedef struct sk__flow {
    sk__plan *plan;
    bool at_once;
    bool is_computing;
    double now;
    double compute_end; /* INFINITY: idle; the same for the next two */
    double wait_end;    /* computing ends no earlier */
    double out_end;
    double in_end;
    double compute_rate; /* seconds of work done per second at present */
    double copy_rate;
    double last_end; /* of computing */
    int32_t slot;    /* runs, or begins next; equals the number of ended slots */
    int32_t outs_begun;
    int32_t outs_done;
    int32_t ins_begun;
    int32_t ins_done;
    int64_t bytes; /* of items, in memory */
    int64_t host_bytes;
    int64_t disk_bytes;
} sk__flow;

static void note_peak(sk__flow *flow, int64_t bytes) {
    sk_plan_run *run = flow->plan->run;
    if (bytes > run->peak_bytes) {
        run->peak_bytes = bytes;
    }
}

/* Return the bytes beside those of items between the slot that ended last and the next; the step
 * before and the step after surround the step. */
static int64_t held_between(const sk__plan *plan, int32_t slot) {
    const int64_t *bytes = plan->problem->slot_bytes;
    int64_t before = bytes[slot == 0 ? plan->problem->nslots - 1 : slot - 1];
    return before < bytes[slot] ? before : bytes[slot];
}

/* ---- computing ------------------------------------------------------------------------------- */

static bool has_all_moved(const sk__flow *flow) {
    const sk__plan *plan = flow->plan;
    return flow->outs_done >= plan->outs_awaited[flow->slot] &&
           (flow->at_once || flow->ins_done >= plan->awaited[flow->slot]);
}

/* Return when the transfer is done that a slot waits for; 0: the slot computes. */
static double end_of_wait(const sk__plan *plan, int32_t slot) {
    int32_t since = plan->problem->since[slot];
    double end = since >= 0 && since < slot ? plan->run->slot_ends[since] : 0.0;
    for (int32_t each = since + 1; each <= slot; each++) {
        end += plan->problem->slot_seconds[each];
    }
    return end;
}

static void begin_slot(sk__flow *flow) {
    const sk__plan *plan = flow->plan;
    int32_t slot = flow->slot;
    if (flow->is_computing || slot == plan->problem->nslots || !has_all_moved(flow)) {
        return;
    }
    int64_t taken = plan->taken[slot] + (flow->at_once ? plan->back[slot] : 0);
    int64_t bytes = flow->bytes + taken + plan->held[slot];
    if (bytes > plan->machine->budget_bytes) {
        return;
    }
    note_peak(flow, bytes);
    plan->level[slot] = bytes;
    flow->bytes += taken;
    flow->is_computing = true;
    flow->compute_end = flow->now + plan->seconds[slot] / flow->compute_rate;
    flow->wait_end = end_of_wait(plan, slot);
    plan->run->slot_starts[slot] = flow->now;
    plan->run->slot_stalls[slot] = flow->now - flow->last_end;
    plan->run->stall_seconds += flow->now - flow->last_end;
}

static void end_slot(sk__flow *flow) {
    const sk__plan *plan = flow->plan;
    int32_t slot = flow->slot++;
    flow->is_computing = false;
    flow->compute_end = INFINITY;
    flow->last_end = flow->now;
    flow->bytes -= plan->given[slot] + plan->released[slot];
    flow->host_bytes -= plan->host_given[slot];
    flow->disk_bytes -= plan->disk_given[slot];
    plan->run->slot_ends[slot] = flow->now;
}

/* ---- copies out ------------------------------------------------------------------------------ */

static double copy_seconds(double latency, int64_t nbytes, double link, double disk) {
    return latency + (double)nbytes / (disk < link ? disk : link);
}

static bool take_room(int64_t *taken, int64_t nbytes, int64_t limit, int64_t *peak) {
    if (nbytes > limit - *taken) {
        return false;
    }
    *taken += nbytes;
    if (*taken > *peak) {
        *peak = *taken;
    }
    return true;
}

static void begin_out(sk__flow *flow) {
    const sk__plan *plan = flow->plan;
    if (flow->outs_begun > flow->outs_done || flow->outs_begun == plan->nouts) {
        return;
    }
    int32_t item = plan->outs[flow->outs_begun];
    if (sk__slot_of_out(plan, item) >= flow->slot) {
        return;
    }
    const sk_plan_machine *machine = plan->machine;
    int64_t nbytes = plan->problem->item_bytes[item];
    bool on_disk = sk__is_on_disk(plan, item);
    bool has_room = on_disk ? take_room(&flow->disk_bytes, nbytes, machine->disk_bytes,
                                        &plan->run->disk_peak_bytes)
                            : take_room(&flow->host_bytes, nbytes, machine->host_bytes,
                                        &plan->run->host_peak_bytes);
    if (!has_room) {
        return;
    }
    double disk = on_disk ? machine->disk_write_bytes_per_second : INFINITY;
    double seconds =
        copy_seconds(machine->out_latency_seconds, nbytes, machine->out_bytes_per_second, disk);
    flow->outs_begun++;
    flow->out_end = flow->now + seconds / flow->copy_rate;
    plan->run->out_starts[item] = flow->now;
}

static void end_out(sk__flow *flow) {
    sk__plan *plan = flow->plan;
    int32_t item = plan->outs[flow->outs_done++];
    int32_t release = sk__slot_of_end(plan, item);
    int64_t nbytes = plan->problem->item_bytes[item];
    flow->out_end = INFINITY;
    plan->run->out_ends[item] = flow->now;
    if (release < flow->slot) {
        flow->bytes -= nbytes;
    } else {
        plan->released[release] += nbytes;
    }
    int32_t next = flow->slot + (flow->is_computing ? 1 : 0);
    if (!sk__goes_on(plan, item)) { /* otherwise gone when the step begins */
        plan->gone[item] = next > release ? next : release + 1;
    }
}

/* ---- copies in ------------------------------------------------------------------------------- */

static bool fits_now(const sk__flow *flow, int32_t item) {
    const sk__plan *plan = flow->plan;
    int32_t slot = flow->slot;
    int64_t bytes = flow->bytes + plan->problem->item_bytes[item];
    if (flow->is_computing) {
        bytes += plan->held[slot];
    } else if (plan->run->needs[item] <= slot) {
        bytes += held_between(plan, slot);
    } else {
        bytes += plan->taken[slot] + plan->held[slot];
    }
    return bytes <= plan->machine->budget_bytes;
}

static void begin_in(sk__flow *flow) {
    const sk__plan *plan = flow->plan;
    if (flow->at_once || flow->ins_begun > flow->ins_done || flow->ins_begun == plan->nins ||
        flow->slot == plan->problem->nslots) {
        return;
    }
    int32_t item = plan->ins[flow->ins_begun];
    bool is_gone =
        plan->out_place[item] < flow->outs_done && plan->problem->releases[item] < flow->slot;
    if (!is_gone || plan->prefetch[item] > flow->slot || !fits_now(flow, item)) {
        return;
    }
    const sk_plan_machine *machine = plan->machine;
    double disk = sk__is_on_disk(plan, item) ? machine->disk_read_bytes_per_second : INFINITY;
    int64_t nbytes = plan->problem->item_bytes[item];
    double seconds =
        copy_seconds(machine->in_latency_seconds, nbytes, machine->in_bytes_per_second, disk);
    flow->ins_begun++;
    flow->bytes += nbytes;
    flow->in_end = flow->now + seconds / flow->copy_rate;
    plan->run->in_starts[item] = flow->now;
    plan->run->prefetch_slots[item] = flow->slot;
    note_peak(flow, flow->bytes + (flow->is_computing ? plan->held[flow->slot]
                                                      : held_between(plan, flow->slot)));
}

static void end_in(sk__flow *flow) {
    const sk__plan *plan = flow->plan;
    int32_t item = plan->ins[flow->ins_done++];
    flow->in_end = INFINITY;
    plan->run->in_ends[item] = flow->now;
}

/* ---- the clock ------------------------------------------------------------------------------- */

/* Adapt the ends of running work to the slowdown by other work beside it. */
static void adapt_rates(sk__flow *flow) {
    const sk_plan_machine *machine = flow->plan->machine;
    bool goes_out = flow->outs_begun > flow->outs_done;
    bool comes_in = flow->ins_begun > flow->ins_done;
    double compute_rate = goes_out || comes_in ? 1.0 / (1.0 + machine->interference) : 1.0;
    double copy_rate = goes_out && comes_in ? machine->duplex / 2.0 : 1.0;
    if (compute_rate != flow->compute_rate) {
        double left = flow->compute_end > flow->now ? flow->compute_end - flow->now : 0.0;
        flow->compute_end = flow->now + left * (flow->compute_rate / compute_rate);
        flow->compute_rate = compute_rate;
    }
    if (copy_rate != flow->copy_rate) {
        double ratio = flow->copy_rate / copy_rate;
        flow->out_end = flow->now + (flow->out_end - flow->now) * ratio;
        flow->in_end = flow->now + (flow->in_end - flow->now) * ratio;
        flow->copy_rate = copy_rate;
    }
}

/* Move the clock to the next end; return whether anything was under way. */
static bool advance(sk__flow *flow) {
    double computed = flow->compute_end > flow->wait_end ? flow->compute_end : flow->wait_end;
    double next = computed;
    next = flow->out_end < next ? flow->out_end : next;
    next = flow->in_end < next ? flow->in_end : next;
    if (next == INFINITY) {
        return false;
    }
    flow->now = next;
    if (computed <= next) {
        end_slot(flow);
    }
    if (flow->out_end <= next) {
        end_out(flow);
    }
    if (flow->in_end <= next) {
        end_in(flow);
    }
    return true;
}

static void clear_run(const sk__plan *plan) {
    sk_plan_run *run = plan->run;
    for (int32_t slot = 0; slot < plan->problem->nslots; slot++) {
        run->slot_starts[slot] = run->slot_ends[slot] = run->slot_stalls[slot] = NAN;
        plan->released[slot] = 0;
    }
    for (int32_t item = 0; item < plan->problem->nitems; item++) {
        run->out_starts[item] = run->out_ends[item] = run->released[item] = NAN;
        run->in_starts[item] = run->in_ends[item] = NAN;
        run->release_slots[item] = run->prefetch_slots[item] = -1;
        plan->gone[item] = plan->problem->releases[item] + 1; /* of those that are dropped */
    }
    run->stall_seconds = 0.0;
    run->peak_bytes = run->host_peak_bytes = run->disk_peak_bytes = 0;
}

static int64_t bytes_before(const sk__plan *plan) {
    int64_t bytes = 0;
    for (int32_t item = 0; item < plan->problem->nitems; item++) {
        bytes += sk__is_there_before(plan, item) ? plan->problem->item_bytes[item] : 0;
    }
    return bytes;
}

/* Copies of weights that are not there when the step begins. */
static int64_t copies_before(const sk__plan *plan) {
    int64_t bytes = 0;
    for (int32_t place = 0; place < plan->nouts; place++) {
        int32_t item = plan->outs[place];
        bytes += sk__goes_on(plan, item) ? plan->problem->item_bytes[item] : 0;
    }
    return bytes;
}

static double end_of_release(const sk__plan *plan, int32_t item) {
    int32_t release = plan->problem->releases[item];
    return release >= 0 ? plan->run->slot_ends[release] : 0.0;
}

void sk__plan_flow(sk__plan *plan, bool at_once) {
    sk_plan_run *run = plan->run;
    clear_run(plan);
    sk__flow flow = {.plan = plan,
                     .at_once = at_once,
                     .compute_end = INFINITY,
                     .out_end = INFINITY,
                     .in_end = INFINITY,
                     .compute_rate = 1.0,
                     .copy_rate = 1.0,
                     .bytes = bytes_before(plan),
                     .host_bytes = copies_before(plan)};
    int32_t nslots = plan->problem->nslots;
    int64_t first = flow.bytes + held_between(plan, 0);
    note_peak(&flow, first);
    run->host_peak_bytes = flow.host_bytes;
    bool goes_on =
        first <= plan->machine->budget_bytes && flow.host_bytes <= plan->machine->host_bytes;
    while (goes_on) {
        begin_slot(&flow);
        begin_out(&flow);
        begin_in(&flow);
        adapt_rates(&flow);
        goes_on = advance(&flow) && (flow.slot < nslots || flow.outs_done < plan->nouts);
    }
    bool has_ended = flow.slot == nslots && flow.outs_done == plan->nouts;
    run->stuck_slot = has_ended ? -1 : flow.slot < nslots ? flow.slot : nslots - 1;
    run->seconds = has_ended ? flow.now : INFINITY;
    run->stall_seconds += has_ended ? flow.now - flow.last_end : 0.0;
    for (int32_t place = 0; place < flow.outs_done; place++) {
        int32_t item = plan->outs[place];
        double end = end_of_release(plan, item);
        run->released[item] = end > run->out_ends[item] ? end : run->out_ends[item];
    }
    for (int32_t place = 0; place < plan->nins; place++) {
        int32_t item = plan->ins[place];
        if (sk__is_dropped(plan, item)) {
            run->out_starts[item] = run->out_ends[item] = run->released[item] =
                end_of_release(plan, item);
        }
    }
}
