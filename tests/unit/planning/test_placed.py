"""Plans that fit in bytes are checked by addresses."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from swapkit.errors import InfeasibleBudget
from swapkit.ir.machines import Machine
from swapkit.ir.traces import Operator, Phase, Storage, Trace
from swapkit.planning import planner
from swapkit.planning.bounds.bound import Program
from swapkit.planning.placed import make_placed_plan, make_placed_plans, predict_reserved
from swapkit.planning.planner import PlanTarget, make_plan
from tests.support.random_traces import random_trace

if TYPE_CHECKING:
    from swapkit.ir.plans import Plan
    from swapkit.ir.traces import HostTime
    from swapkit.simulation.problems import Problem

pytestmark = pytest.mark.promise("F2")

AMPLE = Machine(budget_bytes=1 << 50, out_bytes_per_second=300.0, in_bytes_per_second=300.0)
SEEDS = range(20)


def machine_of(budget_bytes: int) -> Machine:
    return replace(AMPLE, budget_bytes=budget_bytes)


def reserved_bytes(plan: Plan) -> int:
    assert plan.prediction is not None
    return plan.prediction.reserved_bytes


def find_least_bytes(trace: Trace, machine: Machine) -> int:
    """Return the least budget that the error for a machine names; 0: there is a plan."""
    try:
        plan = make_placed_plan(trace, machine)
    except InfeasibleBudget as error:
        return error.least_bytes
    assert reserved_bytes(plan) <= machine.budget_bytes
    return 0


def unmovable_trace(seed: int) -> Trace:
    """Return a step whose memory is always full, with storages that no plan can move.

    At each operator some storages go, and others of any sizes take as many bytes.
    """
    draw = random.Random(seed)
    count, full = 20, 100
    alive: list[Storage] = []
    gone: list[Storage] = []
    for operator in range(count):
        going = [each for each in alive if draw.random() < 0.5]
        alive = [each for each in alive if each not in going]
        gone += [replace(each, death=operator) for each in going]
        while (room := full - sum(each.nbytes for each in alive)) > 0:
            alive.append(Storage(nbytes=draw.randint(1, room), birth=operator, death=count))
    storages = gone + alive
    operators = tuple(Operator(name="work", seconds=1.0, phase=Phase.FORWARD) for _ in range(count))
    return Trace(operators=operators, storages=tuple(storages))


def find_gap() -> tuple[Trace, int]:
    """Return a step that has no addresses within its peak, and the bytes that it takes."""
    for seed in SEEDS:
        trace = unmovable_trace(seed)
        plan = make_plan(trace, machine_of(trace.peak_bytes))
        nbytes = reserved_bytes(predict_reserved(trace, plan, AMPLE))
        if nbytes > trace.peak_bytes:
            return trace, nbytes
    raise AssertionError("all steps have addresses within their peak")


def test_plan_when_it_fits_in_bytes_but_not_in_addresses_then_the_budget_is_refused() -> None:
    trace, needed_bytes = find_gap()
    assert make_plan(trace, machine_of(trace.peak_bytes)).prediction is not None
    with pytest.raises(InfeasibleBudget, match="at addresses") as caught:
        make_placed_plan(trace, machine_of(trace.peak_bytes))
    assert caught.value.least_bytes == needed_bytes
    plan = make_placed_plan(trace, machine_of(needed_bytes))
    assert reserved_bytes(plan) == needed_bytes


def test_session_plan_when_nothing_fits_in_addresses_then_it_keeps_the_plan_in_bytes() -> None:
    trace, needed_bytes = find_gap()
    target = PlanTarget(machine=machine_of(trace.peak_bytes), most_bytes=trace.peak_bytes)
    (plan,) = make_placed_plans(trace, share=1.0, count=1, target=target, policy="auto")
    assert plan.budget_bytes == trace.peak_bytes
    assert reserved_bytes(plan) == needed_bytes


def test_plan_when_its_layout_is_too_high_then_one_for_less_memory_takes_its_place() -> None:
    lowered = refused = 0
    for seed in SEEDS:
        trace = random_trace(seed)
        machine = machine_of(int(trace.peak_bytes * 0.6))
        try:
            plain = predict_reserved(trace, make_plan(trace, machine), machine)
        except InfeasibleBudget:
            continue
        is_too_high = reserved_bytes(plain) > machine.budget_bytes
        least_bytes = find_least_bytes(trace, machine)
        if least_bytes:
            assert is_too_high
            assert least_bytes > machine.budget_bytes
            assert find_least_bytes(trace, machine_of(least_bytes)) == 0
            refused += 1
            continue
        plan = make_placed_plan(trace, machine)
        assert reserved_bytes(plan) <= machine.budget_bytes
        assert (plan.budget_bytes < machine.budget_bytes) == is_too_high
        lowered += is_too_high
    assert lowered + refused


def test_plan_when_made_again_for_less_then_its_linear_program_is_built_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[Problem] = []

    def build(problem: Problem, machine: Machine, **options: HostTime | None) -> Program:
        built.append(problem)
        return Program(problem, machine, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(planner, "Program", build)
    lowered = 0
    for seed in SEEDS:
        trace = random_trace(seed)
        machine = machine_of(int(trace.peak_bytes * 0.6))
        built.clear()
        with contextlib.suppress(InfeasibleBudget):
            lowered += make_placed_plan(trace, machine).budget_bytes < machine.budget_bytes
        assert len(built) <= 1
    assert lowered


def test_candidates_when_several_are_made_then_each_fits_in_addresses() -> None:
    several = 0
    for seed in SEEDS[:6]:
        trace = random_trace(seed)
        machine = machine_of(int(trace.peak_bytes * 0.9))
        target = PlanTarget(machine=machine, most_bytes=machine.budget_bytes)
        try:
            plans = make_placed_plans(trace, share=1.0, count=4, target=target, policy="auto")
        except InfeasibleBudget:
            continue
        assert all(map(reserved_bytes, plans))
        if reserved_bytes(plans[0]) > machine.budget_bytes:
            continue  # none was found that fits
        assert max(map(reserved_bytes, plans)) <= machine.budget_bytes
        several += len(plans) > 1
    assert several
