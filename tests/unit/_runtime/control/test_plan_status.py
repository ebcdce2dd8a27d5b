"""The lines that a session logs as its search for a plan goes on."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from swapkit._runtime.control.plan_status import PlanStatus, describe_progress, log_progress
from swapkit.ir.plans import Action, Decision, Plan, Prediction
from swapkit.ir.traces import Kind, Operator, Phase, Storage, Trace
from swapkit.planning.selection.cases import Asked, Case, Request, Stage, Tried

TRACE = Trace(
    operators=(Operator(name="mul", seconds=2.0, phase=Phase.FORWARD),),
    storages=(
        Storage(nbytes=100, kind=Kind.STATE, death=1),
        *[Storage(nbytes=50, birth=0, death=1, is_saved=True)] * 3,
    ),
)
PLAN = Plan(
    decisions=tuple(
        Decision(storage=number, action=action)
        for number, action in ((1, Action.SWAP), (3, Action.RECOMPUTE))
    ),
    budget_bytes=14 << 20,
    prediction=Prediction(seconds=2.5, peak_bytes=13 << 20),
)
STATUS = PlanStatus(
    stage=Stage.STABLE, plan=PLAN, trace=TRACE, progress="plan settled", since_step=7
)

ASKED = Asked(Case(), Request(trace=TRACE, count=1, shares=(1.0,)))


def told(caplog: pytest.LogCaptureFixture, status: PlanStatus) -> str:
    with caplog.at_level(logging.INFO, logger="swapkit"):
        log_progress(status, 16 << 20)
    return caplog.messages[-1]


def test_line_when_a_plan_settles_then_it_says_what_moves_and_what_it_costs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert told(caplog, STATUS) == (
        "plan settled at step 7: 1 of 3 storages swapped, 1 of 3 storages recomputed, "
        "+25.0% step time predicted, 13.00 MiB of 16.00 MiB"
    )


def test_line_when_the_machine_is_slower_than_the_record_then_the_cost_is_relative_to_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert "+0.0% step time" in told(caplog, replace(STATUS, pace=1.25))


def test_line_when_the_clock_saw_no_time_then_it_names_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert told(caplog, replace(STATUS, pace=0.0)).endswith("recomputed, 13.00 MiB of 16.00 MiB")


def test_line_when_nothing_moves_then_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    kept = replace(PLAN, decisions=())
    assert "all 3 storages stay on the device" in told(caplog, replace(STATUS, plan=kept))


def test_line_when_there_is_no_plan_then_it_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    text = told(
        caplog,
        PlanStatus(why_none="the step has no saved tensors", progress="no plan, rescue only"),
    )
    assert text == "no plan, rescue only: the step has no saved tensors"
    assert caplog.records[-1].levelno == logging.WARNING


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (Case(), "recording"),
        (Case(trace=TRACE, asked=ASKED), "planning since step 7 (1.500 s)"),
        (
            Case(trace=TRACE, asked=replace(ASKED, early=PLAN)),
            "following a first plan since step 7, searching for better ones (1.500 s)",
        ),
        (
            Case(trace=TRACE, candidates=[PLAN] * 2, trials=[Tried(PLAN, 1.0, 0)]),
            "trying plan 2 of 3",
        ),
        (Case(trace=TRACE, chosen=PLAN), "plan settled at step 7"),
    ],
)
def test_line_as_a_search_goes_on_then_how_far_it_is(
    caplog: pytest.LogCaptureFixture, case: Case, text: str
) -> None:
    assert case.note_progress(7)
    assert not case.note_progress(8)
    status = PlanStatus(
        trace=TRACE,
        plan=case.chosen,
        progress=case.progress,
        since_step=case.since_step,
        planning_seconds=1.5,
    )
    assert told(caplog, status).startswith(text)
    assert describe_progress(status) == text


def test_progress_when_the_plan_was_given_or_none_is_wanted_then_it_says_so() -> None:
    assert describe_progress(replace(STATUS, since_step=0)) == "following the given plan"
    assert describe_progress(PlanStatus()) == ""
