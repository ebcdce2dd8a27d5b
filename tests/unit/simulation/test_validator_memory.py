"""What a schedule may hold: every byte too many is found, and nothing is counted twice."""

from __future__ import annotations

from dataclasses import replace

from swapkit.ir.plans import (
    Action,
    Decision,
    Prediction,
    Recomputation,
    Schedule,
    Stall,
    Tier,
)
from tests.unit.simulation.handmade import (
    AGAIN,
    AMPLE,
    BOTH,
    COPY,
    KEPT,
    MACHINE,
    REPEATED,
    STEP,
    SWAP,
    SWAPPED,
    found,
    plan_of,
    predicting,
    with_copy,
)
from tests.unit.simulation.steps import B, F, I, make_step, with_operator


def test_budget_when_a_byte_less_then_found() -> None:
    violations = found(SWAPPED, SWAP, replace(MACHINE, budget_bytes=1131))
    assert "1132 bytes are in use at operator 4, more than the budget, 1131" in violations
    assert "1167 bytes are in use at operator 2" in found(KEPT, plan_of())


def test_memory_when_both_copies_hold_it_longer_then_found() -> None:
    # Still there in operator 2, or back in operator 3 already: as much as if it were kept.
    plan = plan_of(Decision(storage=1, action=Action.SWAP))
    late = with_copy(predicting(SWAPPED, peak_bytes=1167), released=2.5)
    assert found(late, plan, AMPLE) == ""
    assert "1167 bytes are in use at operator 2" in found(late, plan)
    early = with_copy(predicting(SWAPPED, peak_bytes=1142), in_start=3.0, in_end=4.0)
    assert found(early, plan, AMPLE) == ""
    assert "1142 bytes are in use at operator 3" in found(early, plan)


def test_copies_when_within_one_operator_then_memory_is_free_in_between_only() -> None:
    # In operator 3, from 3 to 7, 2 leaves and 1 comes back: there is room for one of them.
    trace = make_step(
        [(F, (0,), (1,)), (I, (), ()), (F, (0,), (2,)), (I, (), ()), (B, (1,), ()), (B, (2,), ())],
        {0: 1, 1: 100, 2: 100},
        saved=(1, 2),
    )
    first, second = COPY, replace(COPY, storage=2, out_start=3.0, out_end=4.0, released=4.0)
    schedule = Schedule(
        starts=(0.0, 1.0, 2.0, 3.0, 7.0, 9.0),
        ends=(1.0, 2.0, 3.0, 7.0, 8.0, 10.0),
        transfers=(first, replace(second, in_start=8.0, in_end=9.0)),
        recomputations=(),
        stalls=(Stall(operator=5, storage=2, seconds=1.0),),
        prediction=Prediction(
            seconds=10.0, peak_bytes=101, host_peak_bytes=200, swapped_bytes=200, stall_seconds=1.0
        ),
    )
    trace = with_operator(trace, 3, seconds=4.0)
    machine = replace(MACHINE, budget_bytes=101)
    assert found(schedule, BOTH, machine, trace) == ""
    early = with_copy(schedule, 0, in_start=3.9, in_end=4.9)
    assert "200 bytes are in use at operator 3" in found(early, BOTH, machine, trace)


def test_host_when_too_small_then_found() -> None:
    assert found(SWAPPED, SWAP, replace(MACHINE, host_bytes=100)) == ""
    violations = found(SWAPPED, SWAP, replace(MACHINE, host_bytes=99))
    assert "100 bytes are on the host, more than 99" in violations


def test_disk_when_slow_or_too_small_then_found() -> None:
    decision = replace(SWAP.decisions[0], tier=Tier.DISK)
    machine = replace(
        MACHINE,
        disk_bytes=100,
        disk_write_bytes_per_second=100.0,
        disk_read_bytes_per_second=100.0,
    )
    schedule = predicting(SWAPPED, host_peak_bytes=0, disk_peak_bytes=100)
    plan = plan_of(decision)
    assert found(schedule, plan, machine) == ""
    slow = replace(machine, disk_write_bytes_per_second=50.0)
    assert "copy out lasts 1 s, but 100 bytes take 2" in found(schedule, plan, slow)
    slow = replace(machine, disk_read_bytes_per_second=50.0)
    assert "copy back lasts 1 s, but 100 bytes take 2" in found(schedule, plan, slow)
    small = replace(machine, disk_bytes=99)
    assert "100 bytes are on the disk, more than 99" in found(schedule, plan, small)


def test_recomputing_when_its_step_needs_more_than_there_is_then_found() -> None:
    # Before operator 4 there are the base, 0, 1, 4 and 2 again: 1132, and what making it takes.
    trace = with_operator(STEP, 1, workspace_bytes=35)
    assert found(REPEATED, AGAIN, AMPLE, trace) == ""
    trace = with_operator(STEP, 1, workspace_bytes=36)
    violations = found(REPEATED, AGAIN, AMPLE, trace)
    assert "1168 bytes are in use at operator 4, more than the budget, 1167" in violations


def test_recomputing_when_what_it_passes_through_is_large_then_found() -> None:
    # 1 is not saved and gone: making 2 again makes 1 again, beside 0, 4 and 2.
    trace = make_step(
        [(F, (0,), (1,)), (F, (1,), (2,)), (F, (2,), (3,)), (B, (3,), (4,)), (B, (2,), ()),
         (B, (4, 0), ())],
        {0: 7, 1: 100, 2: 20, 3: 10, 4: 5},
        saved=(2, 3),
    )  # fmt: skip
    schedule = replace(
        REPEATED,
        starts=(0.0, 1.0, 2.0, 3.0, 4.0, 7.0),
        ends=(1.0, 2.0, 3.0, 4.0, 7.0, 8.0),
        prediction=Prediction(seconds=8.0, peak_bytes=132, recompute_seconds=2.0),
    )
    assert found(schedule, AGAIN, AMPLE, trace) == ""
    violations = found(schedule, AGAIN, replace(AMPLE, budget_bytes=131), trace)
    assert "132 bytes are in use at operator 4, more than the budget, 131" in violations
    fast = predicting(replace(schedule, starts=REPEATED.starts, ends=REPEATED.ends), seconds=7.0)
    assert "operator 4: lasts 2 s, but needs 3" in found(fast, AGAIN, AMPLE, trace)


def test_recomputing_when_earlier_than_needed_then_its_memory_counts_from_there() -> None:
    # Made again before operator 3: the budget then has to hold 3, 4, 2 and 1 at once.
    schedule = replace(
        REPEATED,
        starts=(0.0, 1.0, 2.0, 3.0, 5.0, 6.0),
        ends=(1.0, 2.0, 3.0, 5.0, 6.0, 7.0),
        recomputations=(Recomputation(storage=2, operator=3),),
    )
    assert found(schedule, AGAIN, AMPLE) == ""
    low = with_operator(STEP, 2, workspace_bytes=0)
    calm = predicting(schedule, peak_bytes=1142)
    violations = found(calm, AGAIN, replace(AMPLE, budget_bytes=1141), low)
    assert "1142 bytes are in use at operator 3" in violations


def test_operators_when_they_take_no_time_then_memory_still_counts() -> None:
    trace = STEP
    for number in range(6):
        trace = with_operator(trace, number, seconds=0.0)
    schedule = replace(
        KEPT,
        starts=(0.0,) * 6,
        ends=(0.0,) * 6,
        prediction=Prediction(seconds=0.0, peak_bytes=1167),
    )
    assert found(schedule, plan_of(), AMPLE, trace) == ""
    assert "1167 bytes are in use at operator 2" in found(schedule, plan_of(), MACHINE, trace)


def test_copy_when_back_early_then_it_counts_until_its_need() -> None:
    trace = with_operator(STEP, 4, workspace_bytes=50)
    plan = plan_of(Decision(storage=1, action=Action.SWAP))
    early = with_copy(predicting(SWAPPED, peak_bytes=1182), in_start=3.0, in_end=4.0)
    machine = replace(MACHINE, budget_bytes=1182)
    assert found(early, plan, machine, trace) == ""
    violations = found(early, plan, AMPLE, trace)
    assert "1182 bytes are in use at operator 4" in violations


def test_recomputing_when_its_operator_makes_something_then_not_before_it_begins() -> None:
    # Operator 4 makes 5 (40 bytes); what runs again before it takes 36 and is done by then.
    trace = make_step(
        [(F, (0,), (1,)), (F, (1,), (2,)), (F, (2,), (3,)), (B, (3,), (4,)), (B, (2,), (5,)),
         (B, (1, 4, 5, 0), ())],
        {0: 7, 1: 100, 2: 20, 3: 10, 4: 5, 5: 40},
        saved=(1, 2, 3),
    )  # fmt: skip
    trace = with_operator(trace, 1, workspace_bytes=36)
    peak = 7 + 100 + 20 + 5 + 40
    schedule = predicting(REPEATED, peak_bytes=peak)
    assert found(schedule, AGAIN, replace(MACHINE, budget_bytes=peak), trace) == ""


def test_host_when_one_is_gone_before_the_other_then_they_are_not_added_up() -> None:
    trace = make_step(
        [(F, (0,), (1,)), (I, (), ()), (B, (1,), ()), (F, (0,), (2,)), (I, (), ()), (B, (2,), ())],
        {0: 1, 1: 100, 2: 100},
        saved=(1, 2),
    )
    for pause in (1, 4):
        trace = with_operator(trace, pause, seconds=2.0)
    first = replace(COPY, released=2.0, in_start=2.0, in_end=3.0)
    shifted = {name: getattr(first, name) + 4.0 for name in ("out_start", "out_end", "released")}
    second = replace(first, storage=2, in_start=6.0, in_end=7.0, **shifted)
    schedule = Schedule(
        starts=(0.0, 1.0, 3.0, 4.0, 5.0, 7.0),
        ends=(1.0, 3.0, 4.0, 5.0, 7.0, 8.0),
        transfers=(first, second),
        recomputations=(),
        stalls=(),
        prediction=Prediction(seconds=8.0, peak_bytes=101, host_peak_bytes=100, swapped_bytes=200),
    )
    assert found(schedule, BOTH, MACHINE, trace) == ""
    wrong = predicting(schedule, host_peak_bytes=200)
    assert "100 bytes are on the host, but the prediction is 200" in found(
        wrong, BOTH, MACHINE, trace
    )
