"""Work of a simulated step: all of its time, once; and why a step follows no plan."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from swapkit.ir.traces import Phase
from swapkit.reporting.steps import (
    COPY_IN,
    COPY_OUT,
    RECOMPUTE,
    WAITING,
    SimulatedStep,
    Work,
    list_works,
    simulate_step,
)
from swapkit.simulation.timeline import simulate
from tests.support.run_records import make_record
from tests.unit.simulation.handmade import AGAIN, AMPLE, MACHINE, STEP, SWAP

PHASES = {phase.value for phase in Phase}


def of_kind(works: list[Work], *kinds: str) -> list[Work]:
    return [each for each in works if each.kind in kinds]


def test_works_when_a_storage_is_recomputed_then_its_time_is_before_the_operators() -> None:
    schedule = simulate(STEP, AGAIN, AMPLE)
    works = list(list_works(SimulatedStep(trace=STEP, plan=AGAIN, schedule=schedule)))
    assert of_kind(works, RECOMPUTE) == [Work(RECOMPUTE, 4.0, 5.0, operator=4, storage=2)]
    assert [each.start for each in of_kind(works, *PHASES)] == [0, 1, 2, 3, 5, 6]


def test_works_when_computing_waits_then_for_the_copy_that_ends_with_it() -> None:
    slow = replace(MACHINE, in_bytes_per_second=50.0)
    step = simulate_step(STEP, SWAP, slow, "")
    works = list(list_works(step))
    assert of_kind(works, WAITING) == [Work(WAITING, 5.0, 6.0, operator=5, storage=1)]
    assert of_kind(works, COPY_OUT) == [Work(COPY_OUT, 1.0, 2.0, storage=1)]
    assert of_kind(works, COPY_IN) == [Work(COPY_IN, 4.0, 6.0, storage=1)]


def test_works_when_all_are_added_then_the_whole_step_without_an_overlap() -> None:
    record = make_record()
    assert record.trace is not None
    step = simulate_step(record.trace, record.plan, record.machine, "")
    computing = [each for each in list_works(step) if each.kind not in {COPY_OUT, COPY_IN}]
    spent = sum(each.end - each.start for each in computing)
    assert spent == pytest.approx(step.schedule.ends[-1])
    assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(computing))
    assert step.reasons


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"plan": None}, "no plan fits"),
        ({"machine": None}, "did not measure the speed of the links"),
        ({"tight": True}, "cannot be simulated on this machine: "),
    ],
)
def test_step_when_it_has_no_plan_to_follow_then_the_plain_one_and_why(
    given: dict[str, None], why: str
) -> None:
    record = make_record()
    assert record.trace is not None
    assert record.plan is not None
    plan = replace(record.plan, budget_bytes=1) if "tight" in given else record.plan
    plan = given.get("plan", plan)  # type: ignore[assignment]
    step = simulate_step(record.trace, plan, given.get("machine", record.machine), "no plan fits")
    assert why in step.why_not_planned
    assert step.reasons == ()
    assert step.schedule.transfers == ()
    assert step.schedule.ends[-1] == pytest.approx(record.trace.seconds)
