/* test_plan.c - a step under a plan: checks of what comes in, memory, and small cases by hand. */
#include <math.h>
#include <string.h>

#include "fixture.h"
#include "swapkit_plan.h"

enum { NSLOTS = 4, NITEMS = 2 };

/* Two items born in slots 0 and 1, used in reverse in slots 2 and 3; a second a slot, a byte a
 * second on the links. */
typedef struct step {
    double seconds[NSLOTS];
    int64_t held[NSLOTS];
    int64_t nbytes[NITEMS];
    int32_t births[NITEMS], readies[NITEMS], releases[NITEMS], uses[NITEMS], deaths[NITEMS];
    int32_t tails[NITEMS];
    int32_t formers[NITEMS];
    bool can[NITEMS], is_weight[NITEMS];
    int64_t chain_bytes[NITEMS];
    int32_t own_steps[NITEMS];
    int32_t since[NSLOTS];
    double step_seconds[NITEMS];
    int32_t chain_starts[NITEMS + 1], chain_steps[NITEMS];
    int32_t input_starts[NITEMS + 1], inputs[1];
    sk_plan_problem problem;
    sk_plan_machine machine;
} step;

typedef struct result {
    double slots[3][NSLOTS];
    double items[5][NITEMS];
    int32_t places[3][NITEMS];
    sk_plan_run run;
} result;

static void step_init(step *s) {
    *s = (step){.seconds = {1, 1, 1, 1},
                .since = {0, 1, 2, 3},
                .nbytes = {1, 1},
                .births = {0, 1},
                .readies = {0, 1},
                .releases = {0, 1},
                .uses = {3, 2},
                .deaths = {3, 2},
                .tails = {-1, -1},
                .formers = {-1, -1},
                .can = {true, true},
                .own_steps = {0, 1},
                .step_seconds = {1, 1},
                .chain_starts = {0, 1, 2},
                .chain_steps = {0, 1},
                .machine = {.budget_bytes = 100,
                            .host_bytes = INT64_MAX,
                            .out_bytes_per_second = 1,
                            .in_bytes_per_second = 1,
                            .duplex = 2}};
    s->problem = (sk_plan_problem){.nslots = NSLOTS,
                                   .nitems = NITEMS,
                                   .nsteps = NITEMS,
                                   .slot_seconds = s->seconds,
                                   .slot_bytes = s->held,
                                   .since = s->since,
                                   .item_bytes = s->nbytes,
                                   .births = s->births,
                                   .readies = s->readies,
                                   .releases = s->releases,
                                   .uses = s->uses,
                                   .deaths = s->deaths,
                                   .tails = s->tails,
                                   .formers = s->formers,
                                   .is_weight = s->is_weight,
                                   .can_swap = s->can,
                                   .can_recompute = s->can,
                                   .chain_bytes = s->chain_bytes,
                                   .own_steps = s->own_steps,
                                   .step_seconds = s->step_seconds,
                                   .chain_starts = s->chain_starts,
                                   .chain_steps = s->chain_steps,
                                   .input_starts = s->input_starts,
                                   .inputs = s->inputs};
}

static sk_status step_run(const step *s, int8_t first, int8_t second, result *r) {
    const int8_t actions[NITEMS] = {first, second};
    const sk_plan_request request = {.actions = actions, .window = NSLOTS};
    r->run = (sk_plan_run){.slot_starts = r->slots[0],
                           .slot_ends = r->slots[1],
                           .slot_stalls = r->slots[2],
                           .out_starts = r->items[0],
                           .out_ends = r->items[1],
                           .released = r->items[2],
                           .in_starts = r->items[3],
                           .in_ends = r->items[4],
                           .needs = r->places[0],
                           .release_slots = r->places[1],
                           .prefetch_slots = r->places[2]};
    return sk_plan_simulate(&s->problem, &s->machine, &request, &r->run);
}

SK_TEST(plan, test_simulate_when_all_is_kept_then_sums) {
    step s;
    result r;
    step_init(&s);
    CHECK_OK(sk_plan_check(&s.problem));
    CHECK_OK(step_run(&s, SK_PLAN_KEEP, SK_PLAN_KEEP, &r));
    CHECK(r.run.seconds == 4);
    CHECK_EQUAL(2, r.run.peak_bytes);
    CHECK_EQUAL(-1, r.run.stuck_slot);
    CHECK(isnan(r.items[0][0]));
}

/* Item 0 is used in slot 1 of each step, and goes on from slot 2 to the next step's slot 0. */
static void let_go_on(step *s) {
    static const bool can_swap[NITEMS] = {true, true};
    s->births[0] = 0;
    s->readies[0] = s->releases[0] = -1;
    s->uses[0] = s->deaths[0] = 1;
    s->tails[0] = 2;
    s->is_weight[0] = true;
    s->can[0] = false; /* recomputed */
    s->own_steps[0] = -1;
    s->problem.can_swap = can_swap;
    s->nbytes[0] = 10;
}

/* Item 0 is used in slot 1 of each step, and not there from slot 2 to the next step's slot 0. */
SK_TEST(plan, test_simulate_when_clean_item_goes_on_then_it_is_away_at_both_ends) {
    step s;
    result r;
    step_init(&s);
    let_go_on(&s);
    s.formers[0] = 0; /* always clean */
    CHECK_OK(sk_plan_check(&s.problem));
    CHECK_OK(step_run(&s, SK_PLAN_KEEP, SK_PLAN_KEEP, &r));
    CHECK_EQUAL(11, r.run.peak_bytes);
    s.machine.budget_bytes = 10;
    s.machine.in_bytes_per_second = 10;
    s.held[0] = s.held[3] = 10;
    CHECK_OK(step_run(&s, SK_PLAN_KEEP, SK_PLAN_KEEP, &r));
    CHECK_EQUAL(0, r.run.stuck_slot); /* it would be there at the start */
    s.nbytes[1] = 0;
    CHECK_OK(step_run(&s, SK_PLAN_SWAP, SK_PLAN_KEEP, &r));
    CHECK_EQUAL(-1, r.run.stuck_slot);
    CHECK(r.run.seconds == 5 && r.items[0][0] == 0 && r.items[3][0] == 1);
    CHECK_EQUAL(10, r.run.peak_bytes);
    CHECK_EQUAL(0, r.run.host_peak_bytes);
    s.tails[0] = 1;
    CHECK_STATUS(SK_INVALID, sk_plan_check(&s.problem));
}

/* The same, but the step writes item 0 in slot 1: its copy out from 2 to 3 frees its memory. */
SK_TEST(plan, test_simulate_when_written_item_goes_on_then_it_is_copied_out_behind_its_last_use) {
    step s;
    result r;
    step_init(&s);
    let_go_on(&s);
    s.machine.in_bytes_per_second = s.machine.out_bytes_per_second = 10;
    CHECK_OK(sk_plan_check(&s.problem));
    CHECK_OK(step_run(&s, SK_PLAN_SWAP, SK_PLAN_KEEP, &r));
    CHECK(r.items[3][0] == 0 && r.items[0][0] == 2 && r.items[1][0] == 3 && r.items[2][0] == 3);
    CHECK_EQUAL(10, r.run.host_peak_bytes);
    s.tails[0] = 4; /* its last use is in the last slot: the step ends with the copy */
    CHECK_OK(step_run(&s, SK_PLAN_SWAP, SK_PLAN_KEEP, &r));
    CHECK(r.items[0][0] == 4 && r.run.seconds == 5 && r.run.stall_seconds == 1);
    s.machine.host_bytes = 9; /* there is no room for the copy of the step before */
    CHECK_OK(step_run(&s, SK_PLAN_SWAP, SK_PLAN_KEEP, &r));
    CHECK(r.run.seconds == INFINITY && r.run.stuck_slot == 0);
}

/* Item 1 is the stretch after item 0 of the same weight: it has the copy of item 0, if that left.
 */
SK_TEST(plan, test_simulate_when_a_former_part_has_left_then_the_next_one_needs_no_copy_out) {
    step s;
    result r;
    step_init(&s);
    s.is_weight[0] = s.is_weight[1] = true;
    s.formers[1] = 0;
    CHECK_OK(sk_plan_check(&s.problem));
    CHECK_OK(step_run(&s, SK_PLAN_SWAP, SK_PLAN_SWAP, &r));
    CHECK(r.items[1][0] > r.items[0][0] && r.items[1][1] == r.items[0][1]);
    CHECK_OK(step_run(&s, SK_PLAN_KEEP, SK_PLAN_SWAP, &r));
    CHECK(r.items[1][1] > r.items[0][1]);
    s.formers[0] = 1;
    CHECK_STATUS(SK_INVALID, sk_plan_check(&s.problem));
    s.formers[0] = 2;
    CHECK_STATUS(SK_INVALID, sk_plan_check(&s.problem));
}

SK_TEST(plan, test_simulate_when_slot_waits_then_it_ends_with_the_transfer) {
    step s;
    result r;
    step_init(&s);
    s.since[2] = 0; /* since the end of slot 0, at 1, for the 2 s of the slots 1 and 2 */
    s.seconds[1] = 0.5;
    s.seconds[2] = 1.5;
    CHECK_OK(sk_plan_check(&s.problem));
    CHECK_OK(step_run(&s, SK_PLAN_KEEP, SK_PLAN_KEEP, &r));
    CHECK(r.slots[0][2] == 1.5 && r.slots[1][2] == 3);
    /* Recomputing item 1 before slot 2 takes 1 s of its wait. */
    CHECK_OK(step_run(&s, SK_PLAN_KEEP, SK_PLAN_RECOMPUTE, &r));
    CHECK(r.run.recompute_seconds == 1);
    CHECK(r.slots[1][2] == 3 && r.run.seconds == 4);
    s.since[2] = 3;
    CHECK_STATUS(SK_INVALID, sk_plan_check(&s.problem));
}

SK_TEST(plan, test_simulate_when_one_fits_then_other_goes_and_comes_back) {
    step s;
    result r;
    step_init(&s);
    s.machine.budget_bytes = 1;
    CHECK_OK(step_run(&s, SK_PLAN_SWAP, SK_PLAN_KEEP, &r));
    /* Slot 1 waits from 1 to 2 for the copy out; the copy in from 4, when slot 2 gave its byte. */
    CHECK(r.items[1][0] == 2 && r.slots[0][1] == 2);
    CHECK(r.items[3][0] == 4 && r.slots[0][3] == 5);
    CHECK(r.run.seconds == 6 && r.run.stall_seconds == 2);
    CHECK_EQUAL(1, r.run.peak_bytes);
    CHECK_EQUAL(1, r.places[1][0]);
    CHECK_EQUAL(3, r.places[2][0]);
}

SK_TEST(plan, test_simulate_when_nothing_can_go_then_stuck) {
    step s;
    result r;
    step_init(&s);
    s.machine.budget_bytes = 1;
    CHECK_OK(step_run(&s, SK_PLAN_KEEP, SK_PLAN_SWAP, &r));
    CHECK_EQUAL(1, r.run.stuck_slot);
    CHECK(isinf(r.run.seconds));
    s.machine.host_bytes = 0;
    CHECK_OK(step_run(&s, SK_PLAN_SWAP, SK_PLAN_SWAP, &r));
    CHECK_EQUAL(1, r.run.stuck_slot);
}

SK_TEST(plan, test_simulate_when_action_or_machine_is_impossible_then_invalid) {
    step s;
    result r;
    step_init(&s);
    CHECK_STATUS(SK_INVALID, step_run(&s, 4, SK_PLAN_KEEP, &r));
    CHECK_STATUS(SK_INVALID, step_run(&s, -1, SK_PLAN_KEEP, &r));
    CHECK_STATUS(SK_INVALID, step_run(&s, SK_PLAN_SWAP_TO_DISK, SK_PLAN_KEEP, &r));
    CHECK_CONTAINS(sk_error_text(), "item 0");
    s.machine.disk_bytes = 1;
    CHECK_STATUS(SK_INVALID, step_run(&s, SK_PLAN_KEEP, SK_PLAN_KEEP, &r)); /* it has no speed */
    s.machine.disk_bytes = 0;
    s.can[1] = false;
    CHECK_STATUS(SK_INVALID, step_run(&s, SK_PLAN_KEEP, SK_PLAN_SWAP, &r));
    CHECK_STATUS(SK_INVALID, step_run(&s, SK_PLAN_KEEP, SK_PLAN_RECOMPUTE, &r));
    s.machine.duplex = 0.5;
    CHECK_STATUS(SK_INVALID, step_run(&s, SK_PLAN_KEEP, SK_PLAN_KEEP, &r));
    s.machine.duplex = 2;
    s.machine.in_bytes_per_second = 0;
    CHECK_STATUS(SK_INVALID, step_run(&s, SK_PLAN_KEEP, SK_PLAN_KEEP, &r));
}

SK_TEST(plan, test_simulate_when_host_memory_fails_then_status) {
    step s;
    result r;
    step_init(&s);
    host_memory_fail(1, false);
    CHECK_STATUS(SK_OUT_OF_HOST_MEMORY, step_run(&s, SK_PLAN_KEEP, SK_PLAN_KEEP, &r));
    host_memory_fail(0, false);
    CHECK_OK(step_run(&s, SK_PLAN_KEEP, SK_PLAN_KEEP, &r));
}

/* Each fault by itself in an otherwise sound step. */
static void check_fault(void (*break_it)(step *), const char *part) {
    step s;
    step_init(&s);
    CHECK_OK(sk_plan_check(&s.problem));
    break_it(&s);
    CHECK_STATUS(SK_INVALID, sk_plan_check(&s.problem));
    CHECK_CONTAINS(sk_error_text(), part);
}

static void no_slots(step *s) { s->problem.nslots = 0; }
static void negative_seconds(step *s) { s->seconds[2] = -1; }
static void negative_held(step *s) { s->held[2] = -1; }
static void late_death(step *s) { s->deaths[0] = NSLOTS; }
static void early_birth(step *s) { s->births[0] = -1; }
static void ready_unborn(step *s) { s->readies[1] = 0; }
static void before_but_later(step *s) { s->readies[1] = -1; }
static void released_unready(step *s) { s->releases[1] = 0; }
static void used_unreleased(step *s) { s->uses[1] = 1; }
static void dead_unused(step *s) { s->deaths[0] = 2; }
static void negative_item(step *s) { s->nbytes[1] = -1; }
static void negative_chain(step *s) { s->chain_bytes[1] = -1; }
static void no_own_step(step *s) { s->own_steps[1] = -1; }
static void wrong_own_step(step *s) { s->own_steps[1] = NITEMS; }
static void wrong_chain_step(step *s) { s->chain_steps[1] = NITEMS; }
static void wrong_row(step *s) { s->chain_starts[1] = -1; }
static void wrong_input(step *s) {
    s->input_starts[2] = 1;
    s->inputs[0] = NITEMS;
}
static void own_input(step *s) {
    s->input_starts[2] = 1;
    s->inputs[0] = 1;
}

SK_TEST(plan, test_check_when_one_thing_is_wrong_then_said) {
    check_fault(no_slots, "no slots");
    check_fault(negative_seconds, "slot 2");
    check_fault(negative_held, "slot 2");
    check_fault(late_death, "item 0 has a slot out of range");
    check_fault(early_birth, "item 0 has a slot out of range");
    check_fault(ready_unborn, "item 1 has slots out of order");
    check_fault(before_but_later, "item 1 has slots out of order");
    check_fault(released_unready, "item 1 has slots out of order");
    check_fault(used_unreleased, "item 1 has slots out of order");
    check_fault(dead_unused, "item 0 has slots out of order");
    check_fault(negative_item, "item 1 has negative bytes");
    check_fault(negative_chain, "item 1 has negative bytes");
    check_fault(no_own_step, "no step of its own");
    check_fault(wrong_own_step, "no step of its own");
    check_fault(wrong_chain_step, "a step out of range");
    check_fault(wrong_row, "a step out of range");
    check_fault(wrong_input, "an input out of range");
    check_fault(own_input, "not older");
}
