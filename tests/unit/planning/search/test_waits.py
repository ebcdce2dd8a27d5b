"""Recomputing in waits for other ranks: only where it fits, and only if the step gets shorter."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace

import pytest

from swapkit.errors import InfeasibleBudget
from swapkit.planning.planner import make_plan
from swapkit.planning.reasons import Why, explain_decisions
from swapkit.planning.search.moves import Trials
from swapkit.planning.search.solving import fill_waits
from swapkit.simulation.running import KEEP, RECOMPUTE, SWAP
from swapkit.simulation.timeline import simulate
from swapkit.simulation.validator import find_violations
from tests.support.random_traces import random_trace
from tests.unit.simulation.tiny import LINK, Item, actions, make_problem

MACHINE = replace(LINK, out_bytes_per_second=300.0, in_bytes_per_second=300.0)


def two_layers(*, wait: int = 3, held: tuple[int, ...] = ()) -> Trials:
    """Two items, made in slots 0 and 1, which are needed in slots 4 and 5; one slot waits."""
    problem = make_problem(
        7,
        Item(birth=0, use=5, nbytes=3, step=0),
        Item(birth=1, use=4, nbytes=2, step=1),
        held=held,
        steps=(0.5, 0.25),
        waits={wait: wait - 1},
    )
    return Trials(problem, replace(LINK, budget_bytes=10))


def test_recomputing_when_there_is_room_then_all_of_it_runs_in_the_wait() -> None:
    trials = two_layers()
    late = trials.simulate(actions(RECOMPUTE, RECOMPUTE))
    filled = fill_waits(trials, late)
    assert (late.cost, filled.cost) == (7.75, 7.0)
    assert filled.run.needs.tolist() == [3, 3]


def test_recomputing_when_memory_is_short_then_the_first_needed_runs_in_the_wait() -> None:
    trials = two_layers(held=(0, 0, 0, 0, 6, 0, 0))
    filled = fill_waits(trials, trials.simulate(actions(RECOMPUTE, RECOMPUTE)))
    assert filled.run.needs.tolist() == [5, 3]
    assert filled.cost == 7.5
    assert filled.run.peak_bytes == 8


def test_recomputing_when_the_wait_is_short_then_the_first_needed_runs_in_it() -> None:
    trials = two_layers()
    trials.problem.slot_seconds[3] = 0.3
    filled = fill_waits(trials, trials.simulate(actions(RECOMPUTE, RECOMPUTE)))
    assert filled.run.needs.tolist() == [5, 3]


@pytest.mark.parametrize("wait", [1, 6])
def test_recomputing_when_the_wait_is_before_forward_ended_or_after_the_need_then_not_in_it(
    wait: int,
) -> None:
    trials = two_layers(wait=wait)
    late = trials.simulate(actions(KEEP, RECOMPUTE))
    assert fill_waits(trials, late) is late


def test_step_when_nothing_is_recomputed_then_its_waits_stay() -> None:
    trials = two_layers()
    swapped = trials.simulate(actions(SWAP, KEEP))
    assert fill_waits(trials, swapped) is swapped


def test_plans_when_steps_wait_then_they_are_legal_and_some_recompute_in_waits() -> None:
    count = 0
    for seed, share in itertools.product(range(20), (0.9, 0.97)):
        trace = random_trace(seed, transfers=0.6)
        machine = replace(MACHINE, budget_bytes=int(trace.peak_bytes * share))
        with contextlib.suppress(InfeasibleBudget):
            plan = make_plan(trace, machine, "recompute")
            schedule = simulate(trace, plan, machine)
            assert find_violations(trace, plan, machine, schedule) == []
            assert plan.prediction is not None
            assert schedule.prediction.seconds == pytest.approx(plan.prediction.seconds)
            early = {each.storage for each in plan.decisions if each.prefetch is not None}
            reasons = explain_decisions(trace, plan, machine, schedule)
            assert {each.storage for each in reasons if each.why is Why.IN_WAIT} == early
            count += bool(early)
    assert count > 0
