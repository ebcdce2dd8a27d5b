"""The simulator and the validator share no code: on steps at random they have to agree."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from swapkit.errors import InfeasibleBudget
from swapkit.ir.machines import Machine
from swapkit.ir.plans import Action, Decision, Plan
from swapkit.simulation.items import Touches, find_items
from swapkit.simulation.lowering import find_chains, lower
from swapkit.simulation.running import KEEP, RECOMPUTE, SWAP, run
from swapkit.simulation.timeline import set_moments, simulate
from swapkit.simulation.validation.computing import Resolver
from swapkit.simulation.validation.gaps import find_gaps, find_touches
from swapkit.simulation.validator import find_violations
from tests.support.random_traces import random_trace

if TYPE_CHECKING:
    from swapkit.simulation.problems import Problem
    from swapkit.simulation.validation.gaps import Gap

DRAWS = 8
AMPLE = Machine(budget_bytes=1 << 40, out_bytes_per_second=300.0, in_bytes_per_second=300.0)
ACTIONS = {SWAP: Action.SWAP, RECOMPUTE: Action.RECOMPUTE}


def draw_actions(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Return an action for each item that it can have; most are recomputed that can be."""
    drawn = rng.choice([KEEP, SWAP, RECOMPUTE], len(problem.item_bytes), p=[0.3, 0.2, 0.5])
    return np.where((drawn == RECOMPUTE) & ~problem.can_recompute, KEEP, drawn).astype(np.int8)


def draw_early(rng: np.random.Generator, gap: Gap) -> int | None:
    """Return an operator before which to recompute, or none."""
    return int(rng.integers(gap.last + 1, gap.need + 1)) if rng.random() < 0.3 else None


def decide(problem: Problem, actions: np.ndarray) -> dict[int, Action]:
    """Return what is decided about storages."""
    return {
        int(problem.item_storages[item]): ACTIONS[int(actions[item])]
        for item in np.flatnonzero(actions != KEEP)
    }


@pytest.mark.parametrize("transfers", [0.0, 0.4])
@pytest.mark.parametrize("seed", range(150))
def test_recomputing_when_simulated_then_the_validator_runs_the_same_operators_again(
    seed: int,
    transfers: float,
) -> None:
    trace = random_trace(seed, transfers=transfers)
    problem = lower(trace, least_bytes=0)
    touches = Touches(trace)
    chains = find_chains(touches, find_items(touches, optimizer_states=False, least_bytes=0))
    judged = find_touches(trace)
    gaps = find_gaps(trace, judged)
    rng = np.random.default_rng(seed)
    for _ in range(DRAWS if chains else 0):
        actions = draw_actions(rng, problem)
        needs = problem.slot_operators[run(problem, AMPLE, actions).needs]
        decided = decide(problem, actions)
        reruns: dict[int, set[int]] = {}
        for item in np.flatnonzero(actions == RECOMPUTE):
            chain = chains[item]
            assert chain is not None
            reruns.setdefault(int(needs[item]), set()).update(chain.steps)
        demand = Resolver(trace, judged, gaps, decided).resolve()
        assert demand.violations == []
        assert {number: demand.needs[number] for number in decided} == {
            int(problem.item_storages[item]): int(needs[item])
            for item in np.flatnonzero(actions != KEEP)
        }
        assert demand.reruns == reruns


@pytest.mark.parametrize("transfers", [0.0, 0.4])
@pytest.mark.parametrize("seed", range(150))
def test_schedule_when_simulated_then_the_validator_finds_nothing(
    seed: int, transfers: float
) -> None:
    trace = random_trace(seed, transfers=transfers)
    rng = np.random.default_rng(seed)
    problem = lower(trace)
    gaps = find_gaps(trace, find_touches(trace))
    for share in rng.uniform(0.7, 1.2, DRAWS if problem.item_bytes.size else 0):
        machine = replace(AMPLE, budget_bytes=int(trace.peak_bytes * share))
        decided = decide(problem, draw_actions(rng, problem))
        plan = Plan(
            decisions=tuple(
                Decision(
                    storage=each,
                    action=decided[each],
                    prefetch=draw_early(rng, gaps[each]) if transfers else None,
                )
                if decided[each] is Action.RECOMPUTE
                else Decision(storage=each, action=decided[each])
                for each in decided
            ),
            budget_bytes=machine.budget_bytes,
        )
        assert find_violations(trace, plan, machine) == []
        try:
            plan = set_moments(trace, plan, machine)
        except InfeasibleBudget:
            continue
        schedule = simulate(trace, plan, machine)
        assert find_violations(trace, plan, machine, schedule) == []
