"""The linear program bounds every run, and is tight where that can be worked out by hand."""

from __future__ import annotations

import math
import sys
from typing import Any

import highspy
import numpy as np
import pytest

from swapkit.ir.machines import Machine
from swapkit.planning.bounds.bound import Program, closed_form_bound, lower_bound
from swapkit.planning.bounds.linear import Linear, Solver
from swapkit.simulation.problems import Problem
from swapkit.simulation.running import Moments
from swapkit.simulation.timeline import KEEP, RECOMPUTE, SWAP, run
from tests.oracles.exact import WholeProgram, solve_integral
from tests.support.problems import kept_peak, machine_for, random_problem
from tests.unit.planning.drawing import draw_actions, draw_case


def make_problem(**changes: Any) -> Problem:
    """Eight slots of a second; two items of 4 bytes, made in slots 0 and 1, used in 6 and 5.

    In slot 3 four bytes are too many. Only item 0 can be swapped: 2 s to leave, 3 s to come back.
    """
    arrays: dict[str, Any] = {
        "slot_seconds": np.ones(8),
        "slot_bytes": np.array([0, 0, 0, 4, 0, 0, 0, 0]),
        "since": np.arange(8, dtype=np.int32),
        "waits": np.empty(0, np.int32),
        "slot_operators": np.arange(9, dtype=np.int32),
        "item_bytes": np.array([4, 4]),
        "item_storages": np.array([0, 1], np.int32),
        "births": np.array([0, 1], np.int32),
        "readies": np.array([0, 1], np.int32),
        "releases": np.array([0, 1], np.int32),
        "uses": np.array([6, 5], np.int32),
        "deaths": np.array([6, 5], np.int32),
        "can_swap": np.array([True, False]),
        "can_recompute": np.array([False, False]),
        "chain_bytes": np.zeros(2, np.int64),
        "classes": np.zeros(2, np.int32),
        "own_steps": np.array([-1, -1], np.int32),
        "step_seconds": np.array([0.25, 0.5]),
        "chain_starts": np.array([0, 0, 0], np.int32),
        "chain_steps": np.array([], np.int32),
        "input_starts": np.array([0, 0, 0], np.int32),
        "inputs": np.array([], np.int32),
    }
    arrays |= changes
    count = len(arrays["item_bytes"])
    weights = {
        "tails": np.full(count, -1, np.int32),
        "formers": np.full(count, -1, np.int32),
        "is_weight": np.zeros(count, np.bool_),
    }
    return Problem(**(weights | arrays))


def make_recomputable(steps: list[list[int]], **changes: Any) -> Problem:
    """The same, recomputed by these steps and never swapped."""
    return make_problem(
        can_swap=np.array([False, False]),
        can_recompute=np.array([True, True]),
        own_steps=np.array([chain[-1] for chain in steps], np.int32),
        chain_starts=np.cumsum([0, *map(len, steps)], dtype=np.int32),
        chain_steps=np.concatenate(steps).astype(np.int32),
        **changes,
    )


def make_three(**changes: Any) -> Problem:
    """Three items that all have to be gone for slots 3 to 5; items 0 and 1 are recomputed."""
    three = {
        "item_bytes": np.array([4, 4, 4]),
        "item_storages": np.array([0, 1, 2], np.int32),
        "births": np.array([0, 1, 0], np.int32),
        "readies": np.array([0, 1, -1], np.int32),
        "releases": np.array([0, 1, -1], np.int32),
        "uses": np.array([6, 5, 6], np.int32),
        "deaths": np.array([6, 5, 6], np.int32),
        "can_swap": np.array([False, False, True]),
        "can_recompute": np.array([True, True, False]),
        "chain_bytes": np.zeros(3, np.int64),
        "classes": np.zeros(3, np.int32),
        "own_steps": np.array([0, 1, -1], np.int32),
        "step_seconds": np.array([1.0, 0.5]),
        "chain_starts": np.array([0, 1, 2, 2], np.int32),
        "chain_steps": np.array([0, 1], np.int32),
        "input_starts": np.array([0, 0, 0, 0], np.int32),
        "inputs": np.array([], np.int32),
        "slot_bytes": np.array([0, 0, 0, 12, 12, 8, 0, 0]),
    }
    return make_problem(**(three | changes))


def make_layers(items: int, seed: int = 0) -> Problem:
    """Forward through slots with an item each, then backward through them."""
    return random_problem(seed, items=items, shuffle=0)


def solve(problem: Problem, limits: Machine) -> float:
    """What the linear program alone says."""
    relaxation = Program(problem, limits).solve()
    return math.inf if relaxation is None else relaxation.seconds


def machine(budget: int, speed: float = 4.0, **changes: Any) -> Machine:
    return Machine(
        budget_bytes=budget, out_bytes_per_second=speed, in_bytes_per_second=speed, **changes
    )


def test_solve_when_everything_fits_then_plain_seconds() -> None:
    assert solve(make_problem(), machine(12, 1e-3)) == pytest.approx(8.0)


def test_solve_when_a_slot_alone_is_too_large_then_infinite() -> None:
    problem = make_problem(slot_bytes=np.array([0, 0, 0, 9, 0, 0, 0, 0]))
    assert solve(problem, machine(8)) == math.inf


def test_solve_when_the_copies_are_hidden_then_plain_seconds() -> None:
    assert solve(make_problem(), machine(8, speed=2.0)) == pytest.approx(8.0)


@pytest.mark.parametrize(("speed", "seconds"), [(1.0, 11.0), (0.5, 19.0)])
def test_solve_when_the_link_is_too_slow_then_out_and_in_are_waited_for(
    speed: float, seconds: float
) -> None:
    assert solve(make_problem(), machine(8, speed)) == pytest.approx(seconds)


def test_solve_when_bytes_are_let_go_late_then_leaving_early_does_not_help() -> None:
    # Both are final early and used until slot 4, in which they are too many.
    problem = make_problem(
        releases=np.array([4, 4], np.int32), slot_bytes=np.array([0, 0, 0, 0, 4, 0, 0, 0])
    )
    assert solve(problem, machine(8)) == math.inf


@pytest.mark.parametrize(("duplex", "seconds"), [(2.0, 8.0), (1.0, 8.5)])
def test_solve_when_copies_have_to_run_both_ways_then_a_shared_link_is_waited_for(
    duplex: float, seconds: float
) -> None:
    # During slot 3 the second half of item 1 has to leave and item 0 to come back, a second each.
    # If slot 3 waits half a second, half of that is done before: more leaves, so some comes back.
    problem = make_problem(
        can_swap=np.array([True, True]),
        item_bytes=np.array([4, 8]),
        births=np.array([0, 1], np.int32),
        readies=np.array([-1, 1], np.int32),
        releases=np.array([-1, 1], np.int32),
        uses=np.array([4, 6], np.int32),
        deaths=np.array([4, 6], np.int32),
        slot_bytes=np.array([0, 4, 4, 8, 8, 0, 0, 0]),
    )
    assert solve(problem, machine(12, 4.0, duplex=duplex)) == pytest.approx(seconds)


def test_solve_when_copies_slow_computing_then_they_cost_their_time() -> None:
    # Copies run for four seconds, in which a fifth of the time is lost: 0.2 / 1.2 each.
    problem = make_problem()
    slowed = solve(problem, machine(8, 2.0, interference=0.2))
    assert slowed == pytest.approx(8.0 + 4.0 * 0.2 / 1.2)


def test_solve_when_copies_have_latency_then_each_takes_it() -> None:
    problem = make_problem()
    slow = machine(8, 2.0, out_latency_seconds=1.0, in_latency_seconds=1.5)
    assert solve(problem, slow) == pytest.approx(8.0 + (3.0 - 2.0) + (3.5 - 3.0))


def test_solve_when_the_host_is_full_then_infinite() -> None:
    assert solve(make_problem(), machine(8, host_bytes=3)) == math.inf


def test_solve_when_only_the_disk_has_room_then_its_speed_counts() -> None:
    problem = make_problem()
    disk = {"disk_write_bytes_per_second": 1.0, "disk_read_bytes_per_second": 0.5}
    with_disk = machine(8, 4.0, host_bytes=0, disk_bytes=8, **disk)
    assert solve(problem, with_disk) == pytest.approx(8.0 + (4.0 - 2.0) + (8.0 - 3.0))


def test_solve_when_bytes_are_recomputed_then_the_cheaper_step_is_paid() -> None:
    problem = make_recomputable([[0], [1]])
    assert solve(problem, machine(8)) == pytest.approx(8.25)


@pytest.mark.parametrize(("uses", "seconds"), [([6, 6], 9.0), ([6, 5], 9.25)])
def test_solve_when_items_share_a_step_then_it_is_paid_once_for_each_slot(
    uses: list[int], seconds: float
) -> None:
    problem = make_recomputable(
        [[0, 1], [0, 2]],
        slot_bytes=np.array([0, 0, 0, 8, 0, 0, 0, 0]),
        step_seconds=np.array([0.25, 0.25, 0.5]),
        uses=np.array(uses, np.int32),
        deaths=np.array(uses, np.int32),
    )
    assert solve(problem, machine(8)) == pytest.approx(seconds)


def test_solve_when_a_chain_takes_memory_then_only_what_fits_is_recomputed() -> None:
    # Of item 0 four ninths, with 9 bytes beside it in slot 6; five of item 1.
    problem = make_recomputable([[0], [1]], chain_bytes=np.array([9, 0]))
    expected = 8.0 + (4 * 0.25 + 5 * 0.5) / 9
    assert solve(problem, machine(8)) == pytest.approx(expected)


def test_solve_when_host_memory_is_free_again_then_it_is_used_again() -> None:
    problem = make_problem(
        can_swap=np.array([True, True]),
        births=np.array([0, 4], np.int32),
        readies=np.array([0, 4], np.int32),
        releases=np.array([0, 4], np.int32),
        uses=np.array([3, 7], np.int32),
        deaths=np.array([3, 7], np.int32),
        slot_bytes=np.array([0, 0, 4, 0, 0, 0, 4, 0]),
    )
    assert solve(problem, machine(4, 8.0, host_bytes=4)) == pytest.approx(8.0)
    assert solve(problem, machine(4, 8.0, host_bytes=3)) == math.inf


def test_solve_when_it_is_uncertain_where_a_chain_runs_then_its_memory_is_not_counted() -> None:
    # Item 1 is made from item 0, so that is made in slot 5; in slot 6 its chain would not fit.
    problem = make_recomputable(
        [[0], [1]],
        chain_bytes=np.array([4, 0]),
        slot_bytes=np.array([0, 0, 0, 12, 0, 0, 8, 0]),
        input_starts=np.array([0, 0, 1], np.int32),
        inputs=np.array([0], np.int32),
    )
    simulated = run(problem, machine(12), np.array([RECOMPUTE, RECOMPUTE], np.int8)).seconds
    assert solve(problem, machine(12)) == pytest.approx(simulated) == pytest.approx(8.75)


def test_solve_when_something_is_recomputed_early_then_it_hides_copies() -> None:
    # Item 0 is made for item 1 in slot 5: so that takes 2.5 s, in which item 2 comes back.
    problem = make_three(inputs=np.array([0], np.int32), input_starts=np.array([0, 0, 1, 1]))
    assert solve(problem, machine(12, 1.6)) == pytest.approx(8.0 + 1.5)


def test_solve_when_nothing_is_recomputed_early_then_copies_are_waited_for() -> None:
    assert solve(make_three(), machine(12, 1.6)) == pytest.approx(8.0 + 1.5 + 1.0)


def test_lower_bound_when_what_has_left_was_not_let_go_then_the_closed_form_knows() -> None:
    # Item 0 has left but is still used in slot 3; item 1 is let go but can leave only in a stall.
    problem = make_problem(
        can_swap=np.array([True, True]),
        births=np.array([0, 2], np.int32),
        readies=np.array([0, 2], np.int32),
        releases=np.array([3, 2], np.int32),
    )
    assert solve(problem, machine(8)) == pytest.approx(8.0)
    assert lower_bound(problem, machine(8)) == pytest.approx(9.0)


@pytest.mark.parametrize("seed", range(60))
def test_lower_bound_when_a_step_is_simulated_then_never_above_its_seconds(seed: int) -> None:
    problem, limits, rng = draw_case(seed, 30)
    bounds = (lower_bound(problem, limits), closed_form_bound(problem, limits))
    for actions in draw_actions(problem, limits, rng, 30):
        early = np.array([rng.integers(0, use + 1) for use in problem.uses], np.int32)
        for prefetches in (None, early):
            simulated = run(problem, limits, actions, Moments(prefetches)).seconds
            assert simulated >= max(bounds) - 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_solve_when_the_budget_changes_then_as_if_built_anew(seed: int) -> None:
    problem = make_layers(24, seed)
    limits = machine_for(problem, 0.5, 3e9)
    program = Program(problem, limits)
    for share in (0.5, 0.3, 0.8, 0.4, 0.6):
        budget = kept_peak(problem) * share
        again = program.solve(budget)
        anew = Program(problem, limits).solve(budget)
        assert (again is None) == (anew is None)
        if again is not None and anew is not None:
            assert again.seconds == pytest.approx(anew.seconds, rel=1e-9)


def test_solve_when_the_budget_grows_then_no_slower() -> None:
    problem = make_layers(24)
    program = Program(problem, machine_for(problem, 0.5, 3e9))
    solved = [program.solve(kept_peak(problem) * share) for share in (0.3, 0.4, 0.6, 0.9, 1.0)]
    seconds = [math.inf if each is None else each.seconds for each in solved]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == pytest.approx(float(problem.slot_seconds.sum()))


def test_solve_when_ties_are_broken_then_early_items_are_swapped_at_the_same_cost() -> None:
    program = Program(make_problem(can_swap=np.array([True, True])), machine(8, 8.0))
    solved = program.solve(tie_break=1e-6)
    assert solved is not None
    assert solved.swapped == pytest.approx([1.0, 0.0])
    assert solved.seconds == pytest.approx(8.0)


def test_program_when_something_is_not_allowed_then_it_is_not_done() -> None:
    problem = make_layers(24)
    limits = machine_for(problem, 0.8, 4e9)
    swapping = Program(problem, limits, can_recompute=False).solve()
    assert swapping is not None
    assert not swapping.recomputed.any()
    recomputing = Program(problem, limits, can_swap=False).solve()
    assert recomputing is None or not recomputing.swapped.any()


def test_fix_when_all_items_are_decided_then_near_what_is_simulated() -> None:
    problem = make_problem()
    limits = machine(8, 1.0)
    program = WholeProgram(problem, limits)
    program.fix(0, [0.0, 1.0])
    program.fix(1, [0.0, 0.0])
    fixed = program.solve()
    assert fixed is not None
    simulated = run(problem, limits, np.array([SWAP, KEEP], np.int8)).seconds
    assert fixed.seconds <= simulated <= fixed.seconds + 2.0
    program.fix(0, None)
    freed = program.solve()
    assert freed is not None
    assert freed.seconds <= fixed.seconds


def test_solve_when_recomputing_is_simulated_then_equal() -> None:
    problem = make_recomputable([[0], [1]])
    simulated = run(problem, machine(8), np.array([RECOMPUTE, KEEP], np.int8)).seconds
    assert simulated == pytest.approx(solve(problem, machine(8)))


def test_program_when_the_solver_gives_up_twice_then_it_is_solved_from_other_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = make_problem()
    program = Program(problem, machine_for(problem, 0.7))
    expected = program.solve()
    presolves = []
    solve = Solver._run

    def give_up_twice(self: Solver) -> highspy.HighsModelStatus:
        presolves.append(self._highs.getOptionValue("presolve")[1])
        status = solve(self)
        return highspy.HighsModelStatus.kUnknown if len(presolves) < 3 else status

    monkeypatch.setattr(Solver, "_run", give_up_twice)
    found = program.solve()
    assert presolves == ["off", "off", "on"]
    assert found is not None
    assert expected is not None
    assert found.seconds == pytest.approx(expected.seconds)


def test_solvers_when_highs_prints_as_it_enables_callbacks_then_silence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def enable(self: highspy.Highs) -> None:  # as release 1.16, in its constructor
        if self.getOptionValue("output_flag")[1]:
            sys.stdout.write("Running HiGHS")

    monkeypatch.setattr(highspy.Highs, "enableCallbacks", enable)
    one, none = np.ones(1), np.empty(0, np.int32)
    linear = Linear(
        costs=one,
        lowers=one,
        uppers=2 * one,
        row_lowers=np.empty(0),
        row_uppers=np.empty(0),
        rows=none,
        columns=none,
        values=np.empty(0),
    )
    assert Solver(linear, (none, none)).solve() is not None
    found = solve_integral(
        linear, np.zeros(1, np.int32), offset=0.0, gap=0.0, time_limit_s=math.inf
    )
    assert found.values == pytest.approx([1.0])
    assert capfd.readouterr().out == ""
