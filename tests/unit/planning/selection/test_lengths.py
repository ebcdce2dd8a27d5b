"""What a plan for inputs of any length is made for."""

from __future__ import annotations

import pytest

from swapkit.errors import InfeasibleBudget
from swapkit.ir.plans import Plan
from swapkit.ir.traces import Kind, Operator, Phase, Storage, Trace
from swapkit.planning.selection.cases import AHEAD, Lengths, Outcome, StepMode, scale
from swapkit.planning.selection.learner import STRANGERS, Learner

TRACE = Trace(
    operators=(Operator(name="mm", seconds=2.0, phase=Phase.FORWARD, workspace_bytes=10),),
    storages=(
        Storage(nbytes=100, kind=Kind.ACTIVATION, birth=0, death=1),
        Storage(nbytes=100, kind=Kind.STATE),
        Storage(nbytes=100, kind=Kind.INPUT),
    ),
    step_seconds=4.0,
)


def sizes(trace: Trace) -> list[int]:
    return [each.nbytes for each in trace.storages]


def test_trace_when_inputs_are_longer_then_what_is_made_of_them_is_and_takes_longer() -> None:
    longer = scale(TRACE, 1.5)
    assert sizes(longer) == [150, 100, 150]
    assert longer.operators[0].seconds == 3.0
    assert longer.operators[0].workspace_bytes == 15
    assert longer.step_seconds == 6.0
    assert scale(TRACE, 1.0) is TRACE


def test_lengths_when_longer_ones_come_then_planned_for_more_than_these_once() -> None:
    lengths = Lengths()
    for length in (20, 60, 40):
        lengths.see(length)
    assert sizes(lengths.record(TRACE, 40)) == [150, 100, 150]
    lengths.see(50)
    assert lengths.grow() is None
    lengths.see(80)
    grown = lengths.grow()
    assert grown is not None
    assert lengths.planned == int(80 * AHEAD)
    assert lengths.grow() is None


class Plans:
    """There are plans for traces up to so many bytes."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.asked: list[int] = []

    def __call__(self, trace: Trace, *, share: float, count: int) -> tuple[Plan, ...]:
        self.asked.append(trace.storages[0].nbytes)
        assert share > 0
        assert count == 1
        if self.asked[-1] > self.most_bytes:
            raise InfeasibleBudget("too little")
        return (Plan(decisions=(), budget_bytes=1, policy=str(self.asked[-1])),)


def run(made: Learner, length: int, *, form: str = "form", rescues: int = 0) -> str:
    instruction = made.begin(f"{form} of {length}", form, length)
    is_recorded = instruction.mode is StepMode.RECORD
    trace = TRACE if is_recorded else None
    made.end(Outcome(seconds=1.0, trace=trace, rescues=rescues))
    assert instruction.plan is None or instruction.for_any_length
    return instruction.plan.policy if instruction.plan else instruction.mode.value


def learn(plans: Plans) -> Learner:
    made = Learner(plans, profile_steps=2, search_steps=4)
    assert [run(made, 40 + each) for each in range(STRANGERS)] == ["rescue"] * STRANGERS
    assert run(made, 20) == "record"
    return made


def test_plan_for_any_length_when_made_then_for_the_longest_seen() -> None:
    assert run(learn(Plans(1000)), 30) == "215"


def test_plan_for_any_length_when_none_is_for_the_longest_then_for_the_recorded_one() -> None:
    plans = Plans(150)
    made = learn(plans)
    assert run(made, 30) == "100"
    assert run(made, 90) == "100"
    assert run(made, 91) == "100"
    assert set(plans.asked) == {215, 100}


@pytest.mark.parametrize(("most_bytes", "then"), [(1000, "510"), (300, "215")])
def test_plan_for_any_length_when_longer_inputs_come_then_another_if_there_is_one(
    most_bytes: int, then: str
) -> None:
    plans = Plans(most_bytes)
    made = learn(plans)
    assert run(made, 90) == "215"
    assert run(made, 31) == then
    assert run(made, 91) == then
    assert plans.asked == [215, 510]


def test_plan_for_any_length_when_another_form_comes_then_not_for_that() -> None:
    made = learn(Plans(1000))
    assert run(made, 30, form="other") == "record"
    assert run(made, 31, form="other") == "100"
    assert run(made, 32) == "215"
