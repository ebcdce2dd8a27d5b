"""The bound without a solver, and what bytes cost."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from swapkit.planning.bounds.bound import Program, closed_form_bound
from tests.support.problems import machine_for, random_problem
from tests.unit.planning.bounds.test_bound import machine, make_problem, make_recomputable
from tests.unit.planning.drawing import draw_case


def test_closed_form_bound_when_everything_fits_then_plain_seconds() -> None:
    assert closed_form_bound(make_problem(), machine(12, 1e-3)) == pytest.approx(8.0)


def test_closed_form_bound_when_the_link_is_slow_then_what_is_not_hidden_both_ways() -> None:
    # Four seconds each way, of which two and three are hidden.
    assert closed_form_bound(make_problem(), machine(8, 1.0)) == pytest.approx(11.0)


def test_closed_form_bound_when_recomputing_is_cheaper_then_it_is_mixed_with_hidden_copies() -> (
    None
):
    problem = replace(make_recomputable([[0], [1]]), can_swap=np.array([False, True]))
    # Of item 1, 4 bytes ready a second before slot 3, a quarter leaves; 3 bytes of item 0 remain.
    assert closed_form_bound(problem, machine(8, 1.0)) == pytest.approx(8.0 + 0.25 * 3 / 4)


@pytest.mark.parametrize("room", [3, 4])
def test_closed_form_bound_when_the_host_is_too_small_then_infinite(room: int) -> None:
    bound = closed_form_bound(make_problem(), machine(8, 4.0, host_bytes=room))
    assert math.isinf(bound) == (room < 4)


@pytest.mark.parametrize("seed", range(80))
def test_closed_form_bound_when_items_are_let_go_at_once_then_not_above_the_program(
    seed: int,
) -> None:
    # Elsewhere it may be: it sees that only what has both left and been let go is freed.
    problem, limits, _ = draw_case(seed, 30)
    problem = replace(problem, releases=problem.readies)
    relaxation = Program(problem, limits).solve()
    seconds = math.inf if relaxation is None else relaxation.seconds
    assert closed_form_bound(problem, limits) <= seconds * (1 + 1e-9)


def test_closed_form_bound_when_memory_is_short_then_most_of_what_the_program_adds() -> None:
    problem = random_problem(3, items=24, shuffle=0)
    limits = machine_for(problem, 0.5, 1e9)
    plain = float(problem.slot_seconds.sum())
    relaxation = Program(problem, limits).solve()
    assert relaxation is not None
    assert closed_form_bound(problem, limits) - plain > 0.5 * (relaxation.seconds - plain) > 0
