"""The exact solver against all actions of tiny problems."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from swapkit.planning.bounds.bound import lower_bound
from swapkit.simulation.timeline import KEEP, RECOMPUTE, SWAP, SWAP_TO_DISK, run
from tests.oracles.exact import solve_exact
from tests.unit.planning.bounds.test_bound import machine, make_problem, make_recomputable
from tests.unit.planning.drawing import draw_case


@pytest.mark.parametrize("seed", range(40))
def test_solve_exact_when_all_actions_are_simulated_then_none_is_better(seed: int) -> None:
    problem, limits, _ = draw_case(seed, 6)
    choices = [
        [KEEP, SWAP]
        + [RECOMPUTE] * bool(can_recompute)
        + [SWAP_TO_DISK] * (limits.disk_bytes > 0 and not is_weight)
        for can_recompute, is_weight in zip(problem.can_recompute, problem.is_weight, strict=True)
    ]
    best = min(
        run(problem, limits, np.array(actions, np.int8)).seconds
        for actions in itertools.product(*choices)
    )
    exact = solve_exact(problem, limits)
    assert exact.is_proven
    assert exact.seconds == best
    assert lower_bound(problem, limits) <= exact.bound_seconds * (1 + 1e-12)
    assert exact.bound_seconds <= best + 1e-9
    if math.isfinite(best):
        assert run(problem, limits, exact.actions).seconds == best


def test_solve_exact_when_items_are_whole_then_the_bound_says_so() -> None:
    # One byte too many: a quarter of an item for the linear program, an item as a whole.
    problem = make_recomputable([[0], [1]])
    exact = solve_exact(problem, machine(11))
    assert lower_bound(problem, machine(11)) == pytest.approx(8.0 + 0.25 / 4)
    assert exact.bound_seconds == pytest.approx(8.25)
    assert exact.seconds == pytest.approx(8.25)
    assert exact.actions.tolist() == [RECOMPUTE, KEEP]


def test_solve_exact_when_nothing_fits_then_infinite() -> None:
    exact = solve_exact(make_problem(), machine(3))
    assert exact.seconds == exact.bound_seconds == math.inf


def test_solve_exact_when_there_is_no_time_then_still_a_bound() -> None:
    problem, limits, _ = draw_case(4, 6)
    exact = solve_exact(problem, limits, time_limit_s=0.0)
    assert exact.bound_seconds == lower_bound(problem, limits)
