"""Actions for problems: near the best, within the limits, and nothing moved in vain."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from swapkit.ir.traces import HostTime
from swapkit.planning.bounds.fluid import IDLE
from swapkit.planning.search.local_search import Effort, Search
from swapkit.planning.search.moves import Moves, Rounder, Shares, Trials, list_choices, list_rows
from swapkit.planning.search.solving import PlanFailure, Solution, plan_problem
from swapkit.simulation.timeline import KEEP, RECOMPUTE, SWAP, SWAP_TO_DISK, find_host_seconds
from tests.support.problems import kept_peak, machine_for, random_problem
from tests.unit.planning.drawing import draw_case

if TYPE_CHECKING:
    from swapkit.ir.machines import Machine
    from swapkit.planning.search.moves import Trial
    from swapkit.simulation.problems import Problem

SMALL = Effort(starts=60, changes=1000)


def layered_problem(layers: int, *, seed: int = 0) -> Problem:
    """Return a problem of layers that have four items each, used in reverse order."""
    return random_problem(seed, items=4 * layers, shuffle=0)


def try_all(problem: Problem, machine: Machine, host: HostTime | None = None) -> float:
    """Return the least seconds of all possible actions; math.inf: none runs."""
    trials = Trials(problem, machine, host)
    found = (
        trials.simulate(np.array(actions, np.int8))
        for actions in itertools.product(*list_choices(problem, machine))
    )
    return min((trial.cost for trial in found if trial.is_possible), default=math.inf)


def least_in_use(problem: Problem, trial: Trial) -> int:
    """Recompute the memory of a run from its times, at the start of each slot."""
    run, peak = trial.run, 0
    for slot, start in enumerate(run.slot_starts):
        level = int(problem.slot_bytes[slot])
        for item, action in enumerate(trial.actions):
            alive = problem.births[item] <= slot <= problem.deaths[item]
            if action == RECOMPUTE:
                alive = alive and not problem.releases[item] < slot < run.needs[item]
            elif action != KEEP:
                alive = alive and not run.released[item] <= start < run.in_starts[item]
            level += int(problem.item_bytes[item]) * bool(alive)
        peak = max(peak, level)
    return peak


@pytest.mark.promise("A1")
@pytest.mark.promise("A2")
@pytest.mark.promise("D1")
@pytest.mark.parametrize("seed", range(24))
def test_plan_when_all_actions_can_be_tried_then_within_one_per_cent_of_the_best(
    seed: int,
) -> None:
    problem, machine, _ = draw_case(seed, 6)
    best = try_all(problem, machine)
    solution = plan_problem(problem, machine, effort=SMALL)
    if math.isinf(best):
        assert isinstance(solution, PlanFailure)
        assert solution.least.budget_bytes > machine.budget_bytes
        return
    assert isinstance(solution, Solution)
    assert solution.trial.cost <= best * 1.01
    assert solution.bound_seconds <= solution.trial.cost * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(24))
def test_plan_when_the_host_may_be_the_limit_then_within_one_per_cent_of_the_best(
    seed: int,
) -> None:
    problem, machine, _ = draw_case(seed, 6)
    plain = float(problem.slot_seconds.sum())
    source = random.Random(seed)
    host = HostTime(
        step_seconds=plain * source.uniform(0.7, 1.2),
        swap_seconds=plain * source.uniform(0.0, 0.2),
        recompute_seconds=plain * source.uniform(0.0, 0.2),
    )
    best = try_all(problem, machine, host)
    solution = plan_problem(problem, machine, effort=SMALL, host=host)
    if math.isinf(best):
        assert isinstance(solution, PlanFailure)
        return
    assert isinstance(solution, Solution)
    assert solution.trial.cost <= best * 1.01
    assert solution.bound_seconds <= solution.trial.cost * (1 + 1e-6)
    assert IDLE * find_host_seconds(host, solution.trial.actions) <= solution.trial.cost


@pytest.mark.promise("A1")
@pytest.mark.promise("D1")
@pytest.mark.parametrize("seed", range(8))
def test_plan_when_made_then_its_run_holds_the_budget(seed: int) -> None:
    problem = random_problem(seed, items=24)
    machine = machine_for(problem, 0.5)
    solution = plan_problem(problem, machine, effort=SMALL)
    assert isinstance(solution, Solution)
    assert solution.trial.run.peak_bytes <= machine.budget_bytes
    assert least_in_use(problem, solution.trial) <= machine.budget_bytes


def test_plan_when_everything_fits_then_nothing_moves() -> None:
    problem = layered_problem(4)
    solution = plan_problem(problem, machine_for(problem, 1.0))
    assert isinstance(solution, Solution)
    assert (solution.trial.actions == KEEP).all()
    assert solution.trial.cost == pytest.approx(problem.slot_seconds.sum())


def test_plan_when_little_is_missing_then_little_moves() -> None:
    problem = layered_problem(8)
    machine = machine_for(problem, 1.0)
    machine = replace(machine, budget_bytes=machine.budget_bytes - 1)
    solution = plan_problem(problem, machine)
    assert isinstance(solution, Solution)
    moved = problem.item_bytes[solution.trial.actions != KEEP]
    assert 1 <= len(moved) <= 2


def test_plan_when_made_twice_then_the_same() -> None:
    problem = random_problem(3, items=40)
    machine = machine_for(problem, 0.4)
    first, second = (plan_problem(problem, machine, effort=SMALL) for _ in range(2))
    assert isinstance(first, Solution)
    assert isinstance(second, Solution)
    assert (first.trial.actions == second.trial.actions).all()
    assert first.trial.cost == second.trial.cost


def test_plan_when_actions_are_known_then_no_worse_than_they_are() -> None:
    problem = random_problem(5, items=40)
    machine = machine_for(problem, 0.4)
    good = plan_problem(problem, machine, effort=Effort(starts=100, changes=4000))
    assert isinstance(good, Solution)
    poor = Effort(starts=1, changes=1)
    solution = plan_problem(problem, machine, effort=poor, known=[good.trial.actions])
    assert isinstance(solution, Solution)
    assert solution.trial.cost <= good.trial.cost * (1 + 1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_plan_when_layers_are_alike_then_near_the_bound(seed: int) -> None:
    problem = layered_problem(24, seed=seed)
    solution = plan_problem(problem, machine_for(problem, 0.4))
    assert isinstance(solution, Solution)
    assert solution.trial.cost <= solution.bound_seconds * 1.01


def test_plan_when_no_item_can_move_then_says_what_is_needed() -> None:
    problem = random_problem(0)
    fixed = replace(
        problem,
        can_swap=np.zeros_like(problem.can_swap),
        can_recompute=np.zeros_like(problem.can_recompute),
    )
    solution = plan_problem(fixed, machine_for(problem, 0.9))
    assert isinstance(solution, PlanFailure)
    assert solution.least.budget_bytes == kept_peak(problem)


@pytest.mark.parametrize("seed", range(30))
def test_least_budget_when_planned_for_then_runs_and_less_does_not(seed: int) -> None:
    problem, machine, _ = draw_case(seed, 5)
    failure = plan_problem(problem, replace(machine, budget_bytes=1))
    assert isinstance(failure, PlanFailure)
    least = failure.least
    assert least.trial.is_possible
    assert least.trial.run.peak_bytes <= least.budget_bytes
    there = replace(machine, budget_bytes=least.budget_bytes)
    assert isinstance(plan_problem(problem, there, effort=SMALL), Solution)
    less = replace(machine, budget_bytes=int(least.budget_bytes * 0.98))
    assert math.isinf(try_all(problem, less))


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_plan_when_host_has_little_room_then_disk_takes_the_rest(share: float) -> None:
    problem = layered_problem(8)
    problem = replace(problem, can_recompute=np.zeros_like(problem.can_recompute))
    total = int(problem.item_bytes.sum())
    machine = replace(
        machine_for(problem, 0.4),
        host_bytes=int(share * total),
        disk_bytes=total,
        disk_write_bytes_per_second=1e9,
        disk_read_bytes_per_second=1e9,
    )
    solution = plan_problem(problem, machine, effort=SMALL)
    assert isinstance(solution, Solution)
    run = solution.trial.run
    assert run.host_peak_bytes <= int(share * total)
    assert (solution.trial.actions == SWAP_TO_DISK).any()


def test_shares_when_diffused_then_each_class_has_its_sum_at_any_time() -> None:
    problem = layered_problem(16)
    rounder = Rounder(problem, machine_for(problem, 0.5))
    nitems = len(problem.item_bytes)
    shares = Shares(np.full(nitems, 0.3), np.where(problem.can_recompute, 0.4, 0.0))
    actions = rounder.diffuse(shares, [(0.0, 0.0)] * rounder.nclasses)
    for number in range(rounder.nclasses):
        items = np.flatnonzero(problem.classes == number)
        for count in range(1, len(items) + 1):
            swapped = (actions[items[:count]] == SWAP).sum()
            assert abs(swapped - 0.3 * count) <= 1


def test_shares_when_taken_from_the_first_then_the_last_are_kept() -> None:
    problem = layered_problem(16)
    problem = replace(problem, can_recompute=np.zeros_like(problem.can_recompute))
    rounder = Rounder(problem, machine_for(problem, 0.5))
    nitems = len(problem.item_bytes)
    actions = rounder.take_first(Shares(np.full(nitems, 0.5), np.zeros(nitems)))
    for row in list_rows(problem):
        swapped = (actions[row] == SWAP).tolist()
        assert swapped == sorted(swapped, reverse=True)
        assert sum(swapped) == math.ceil(len(row) / 2)


def test_rows_when_two_passes_alternate_then_each_has_its_own() -> None:
    problem = layered_problem(2)
    uses = problem.uses.copy()
    uses[4:] += uses.max()  # a second microbatch, used after the first
    rows = list_rows(replace(problem, uses=uses))
    assert sorted(map(tuple, rows)) == [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)]


def test_changes_when_proposed_then_only_allowed_actions() -> None:
    problem = random_problem(1, items=20)
    machine = machine_for(problem, 0.5)
    trials = Trials(problem, machine)
    moves = Moves(problem, machine, random.Random(0))
    choices = list_choices(problem, machine)
    trial, changed = trials.simulate(trials.keep_all()), 0
    for _ in range(500):
        actions = moves.propose(trial)
        if actions is None:
            continue
        assert all(int(action) in choices[item] for item, action in enumerate(actions))
        changed += bool((actions != trial.actions).any())
        trial = trials.simulate(actions)
    assert changed > 200


def test_search_when_a_swap_is_needless_then_kept() -> None:
    problem = layered_problem(4)
    machine = machine_for(problem, 1.0, 1e12)
    trials = Trials(problem, machine)
    search = Search(trials, SMALL, bound_seconds=0.0)
    all_swapped = trials.simulate(np.full(len(problem.item_bytes), SWAP, np.int8))
    assert (search.drop_needless(all_swapped).actions == KEEP).all()


def test_swaps_when_the_host_is_full_then_disk_takes_the_rest_of_them() -> None:
    problem = layered_problem(4)
    machine = replace(
        machine_for(problem, 0.5),
        host_bytes=int(problem.item_bytes[:4].sum()),
        disk_bytes=1 << 40,
        disk_write_bytes_per_second=1e9,
        disk_read_bytes_per_second=1e9,
    )
    swapped = np.full(len(problem.item_bytes), SWAP, np.int8)
    actions = Rounder(problem, machine).spill(swapped.copy())
    on_host = problem.item_bytes[actions == SWAP].sum()
    assert 0 < on_host <= machine.host_bytes
    assert (actions == SWAP_TO_DISK).any()
    assert (Rounder(problem, replace(machine, host_bytes=None)).spill(swapped) == SWAP).all()
