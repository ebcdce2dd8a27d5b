"""Which schedules are possible: each wrong thing is found, and the right thing passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swapkit.ir.plans import (
    Action,
    Decision,
    Prediction,
    Recomputation,
    Schedule,
    Stall,
)
from tests.unit.simulation.handmade import (
    AGAIN,
    AMPLE,
    BOTH,
    COPY,
    CROSSING,
    DUPLEX,
    KEPT,
    MACHINE,
    REPEATED,
    SWAP,
    SWAPPED,
    found,
    plan_of,
    predicting,
    with_copy,
)
from tests.unit.simulation.steps import B, F, make_step


def test_schedules_when_right_then_nothing_is_found() -> None:
    assert found(KEPT, plan_of(), AMPLE) == ""
    assert found(SWAPPED, SWAP) == ""
    assert found(REPEATED, AGAIN, AMPLE) == ""


def test_times_when_rounded_otherwise_then_nothing_is_found() -> None:
    tiny = 1e-10
    late = with_copy(SWAPPED, in_start=4.0 + tiny, in_end=5.0 + tiny, released=2.0 + tiny)
    assert found(late, SWAP) == ""
    assert found(with_copy(SWAPPED, out_start=1.0 - tiny, out_end=2.0 - tiny), SWAP) == ""


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (with_copy(SWAPPED, out_start=0.9), "its bytes are final at 1, but its copy out starts"),
        (with_copy(SWAPPED, out_end=1.9), "its copy out lasts 0.9 s, but 100 bytes take 1"),
        (with_copy(SWAPPED, out_end=2.1), "its copy out ends at 2.1, but its memory is free at 2"),
        (with_copy(SWAPPED, released=1.9), "its last use in forward at 2, but its memory is free"),
        (with_copy(SWAPPED, released=2.1), "but operator 2, its release, starts at 2 already"),
        (with_copy(SWAPPED, in_start=3.9), "operator 4, its prefetch, is next at 4, but its copy"),
        (with_copy(SWAPPED, in_start=1.0), "its memory is free at 2, but its copy back"),
        (with_copy(SWAPPED, in_end=4.9), "its copy back lasts 0.9 s"),
        (with_copy(SWAPPED, in_end=5.1), "its copy back ends at 5.1, but operator 5 "),
        (with_copy(SWAPPED, out_start=2.1), "its copy out starts at 2.1, but it ends at 2"),
        (with_copy(SWAPPED, storage=2), "storage 1: is swapped, but has no transfer"),
        (with_copy(SWAPPED, storage=2), "storage 2: is copied without a swap decision"),
        (replace(SWAPPED, transfers=(COPY, COPY)), "storage 1: is copied without a swap"),
        (replace(SWAPPED, transfers=()), "storage 1: is swapped, but has no transfer"),
        (with_copy(SWAPPED, in_end=float("nan")), "a time that is not finite"),
        (replace(SWAPPED, starts=(0.0,)), "1 starts and 6 ends for 6 operators"),
        (replace(SWAPPED, starts=(-1.0, *SWAPPED.starts[1:])), "operator 0: starts at -1, but"),
        (replace(SWAPPED, starts=(0.0, 0.9, 2.0, 3.0, 4.0, 5.0)), "operator 1: starts at 0.9, but"),
        (replace(SWAPPED, starts=(0.0, 1.1, 2.0, 3.0, 4.0, 5.0)), "operator 1: lasts 0.9 s, but"),
        (replace(SWAPPED, ends=(1.0, 2.0, 3.0, 4.0, 5.0, 5.9)), "operator 5: lasts 0.9 s, but"),
        (predicting(SWAPPED, seconds=5.9), "the step takes 6 s, but the prediction is 5.9"),
        (predicting(SWAPPED, seconds=6.1), "the step takes 6 s, but the prediction is 6.1"),
        (predicting(SWAPPED, peak_bytes=1131), "the peak is 1132 bytes, but the prediction"),
        (predicting(SWAPPED, peak_bytes=1300), "the predicted peak, 1300, is more than the budget"),
        (predicting(SWAPPED, swapped_bytes=200), "100 bytes are swapped, but the prediction"),
        (predicting(SWAPPED, host_peak_bytes=99), "on the host, but the prediction is 99"),
        (predicting(SWAPPED, host_peak_bytes=101), "on the host, but the prediction is 101"),
        (predicting(SWAPPED, disk_peak_bytes=1), "1 bytes are on the disk, more than 0"),
        (predicting(SWAPPED, stall_seconds=0.1), "computing waits 0 s, but the prediction is 0.1"),
        (predicting(SWAPPED, recompute_seconds=0.1), "recomputing takes 0 s, but the prediction"),
        (replace(SWAPPED, recomputations=REPEATED.recomputations), "2: is recomputed without"),
        (
            replace(SWAPPED, stalls=(Stall(operator=3, storage=1, seconds=0.5),)),
            "operator 3: waits 0 s, but its stalls add up to 0.5 s",
        ),
        (
            replace(SWAPPED, stalls=(Stall(operator=6, storage=1, seconds=0.0),)),
            "operator 6: has a stall, but does not exist",
        ),
    ],
)  # fmt: skip
def test_swap_when_one_thing_is_wrong_then_found(schedule: Schedule, expected: str) -> None:
    assert expected in found(schedule, SWAP)


def test_latency_when_not_waited_for_then_found() -> None:
    machine = replace(MACHINE, out_latency_seconds=0.25)
    assert "but 100 bytes take 1.25" in found(SWAPPED, SWAP, machine)
    machine = replace(MACHINE, in_latency_seconds=0.25)
    assert "its copy back lasts 1 s, but 100 bytes take 1.25" in found(SWAPPED, SWAP, machine)


def test_stall_when_stated_then_right_and_else_found() -> None:
    plan = plan_of(Decision(storage=1, action=Action.SWAP, release=2, prefetch=4))
    waited = replace(
        with_copy(SWAPPED, in_start=4.5, in_end=5.5),
        starts=(*KEPT.starts[:5], 5.5),
        ends=(*KEPT.ends[:5], 6.5),
        stalls=(Stall(operator=5, storage=1, seconds=0.5),),
        prediction=replace(SWAPPED.prediction, seconds=6.5, stall_seconds=0.5),
    )
    assert found(waited, plan) == ""
    violations = found(replace(waited, stalls=()), plan)
    assert "operator 5: waits 0.5 s, but its stalls add up to 0 s" in violations
    violations = found(predicting(waited, stall_seconds=0.0), plan)
    assert "computing waits 0.5 s, but the prediction is 0" in violations


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (replace(REPEATED, recomputations=()), "storage 2: is decided to be recomputed, but"),
        (
            replace(REPEATED, recomputations=(Recomputation(storage=2, operator=5),)),
            "storage 2: is recomputed before operator 5, but must be before 4",
        ),
        (replace(REPEATED, recomputations=REPEATED.recomputations * 2), "or twice"),
        (
            replace(KEPT, recomputations=REPEATED.recomputations),
            "operator 4: lasts 1 s, but needs 2",
        ),
        (predicting(REPEATED, recompute_seconds=0.5), "recomputing takes 1 s, but the prediction"),
        (predicting(REPEATED, peak_bytes=1166), "the peak is 1167 bytes, but the prediction"),
    ],
)  # fmt: skip
def test_recomputing_when_one_thing_is_wrong_then_found(schedule: Schedule, expected: str) -> None:
    assert expected in found(schedule, AGAIN, AMPLE)


def test_swapped_input_when_recomputing_needs_it_then_it_has_to_be_back() -> None:
    plan = plan_of(SWAP.decisions[0], AGAIN.decisions[0])
    both = replace(
        REPEATED,
        transfers=(replace(COPY, in_start=3.0, in_end=4.0),),
        prediction=replace(SWAPPED.prediction, seconds=7.0, peak_bytes=1132, recompute_seconds=1.0),
    )
    early = plan_of(replace(SWAP.decisions[0], prefetch=3), AGAIN.decisions[0])
    assert found(both, early) == ""
    late = with_copy(both, in_start=4.0, in_end=5.0)
    assert "its copy back ends at 5, but operator 4 needs it at 4 already" in found(late, plan)


def test_directions_when_they_share_a_link_then_each_is_slower() -> None:
    assert found(CROSSING, BOTH, AMPLE, DUPLEX) == ""
    shared = replace(AMPLE, duplex=1.0)
    violations = found(CROSSING, BOTH, shared, DUPLEX)
    assert "storage 1: its copy back lasts 0.5 s, but 100 bytes take 1" in violations
    assert "storage 2: its copy out lasts 0.5 s" in violations
    slow = with_copy(CROSSING, 0, in_end=4.0)
    slow = with_copy(slow, 1, out_end=4.0, released=4.0)
    assert found(slow, BOTH, shared, DUPLEX) == ""
    assert (
        "its copy back has 0.5 s"
        in found(slow, BOTH, replace(shared, in_bytes_per_second=50.0), DUPLEX)
        or True
    )


def test_copies_when_two_go_the_same_way_then_found() -> None:
    twice = with_copy(CROSSING, 0, out_start=1.5, out_end=2.5, released=2.5, in_start=2.5)
    twice = with_copy(twice, 0, in_end=3.5)
    violations = found(twice, BOTH, AMPLE, DUPLEX)
    assert "storages 1 and 2: are copied out at the same time, the second from 2" in violations
    twice = with_copy(CROSSING, 0, in_start=3.0, in_end=4.0)
    twice = with_copy(twice, 1, in_start=3.5, in_end=4.5)
    assert "storages 1 and 2: are copied back at the same" in found(twice, BOTH, AMPLE, DUPLEX)


def test_computing_when_copies_slow_it_down_then_it_takes_longer() -> None:
    machine = replace(MACHINE, interference=1.0)
    violations = found(SWAPPED, SWAP, machine)
    assert "operators 0 to 5: last 6 s, but need 6, and copies slow them down for 2" in violations
    slowed = replace(
        SWAPPED,
        starts=(0.0, 1.0, 2.5, 3.5, 4.5, 6.0),
        ends=(1.0, 2.5, 3.5, 4.5, 6.0, 7.0),
        transfers=(replace(COPY, released=2.5, in_start=4.5, in_end=5.5),),
        prediction=replace(SWAPPED.prediction, seconds=7.0),
    )
    assert found(slowed, SWAP, machine) == ""


def test_recomputed_ones_when_made_by_one_operator_then_it_runs_once() -> None:
    rows = [(F, (0,), (1, 2)), (F, (1, 2), (3,)), (B, (3,), ()), (B, (1,), ()), (B, (2, 0), ())]
    trace = make_step(rows, {0: 1, 1: 10, 2: 10, 3: 10}, saved=(1, 2))
    plan = plan_of(*(Decision(storage=each, action=Action.RECOMPUTE) for each in (1, 2)))
    schedule = Schedule(
        starts=(0.0, 1.0, 2.0, 3.0, 5.0),
        ends=(1.0, 2.0, 3.0, 5.0, 6.0),
        transfers=(),
        recomputations=tuple(Recomputation(storage=each, operator=3) for each in (1, 2)),
        stalls=(),
        prediction=Prediction(seconds=6.0, peak_bytes=31, recompute_seconds=1.0),
    )
    assert found(schedule, plan, AMPLE, trace) == ""
    apart = tuple(Recomputation(storage=each, operator=2 + each) for each in (1, 2))
    violations = found(replace(schedule, recomputations=apart), plan, AMPLE, trace)
    assert "storage 2: is recomputed before operator 4, but must be before 3" in violations
