"""The choice of modules that keep their gathered weights, on steps made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swapkit.ir.machines import Machine
from swapkit.planning.resharding import RESERVE, WORTH, KeptWeights, choose_kept
from tests.support.gathered_steps import GATHER_SECONDS, WAIT_SECONDS, make_step

PATHS = ("0", "1", "2")
ONCE = 4 * GATHER_SECONDS + WAIT_SECONDS


def machine(budget_bytes: float, speed: float = 1e9) -> Machine:
    return Machine(
        budget_bytes=int(budget_bytes), out_bytes_per_second=speed, in_bytes_per_second=speed
    )


def choose(kept: tuple[int, ...], budget_bytes: float, speed: float = 1e9) -> KeptWeights:
    found = choose_kept(make_step(kept), PATHS, machine(budget_bytes, speed), "swap")
    assert found is not None
    return found


def test_choice_when_there_is_room_then_all_weights_stay_and_the_gathers_are_saved() -> None:
    found = choose((), 1e6)
    assert found.changes
    assert found.kept == PATHS
    assert found.freed == ()
    assert found.seconds_before - found.seconds == pytest.approx(3 * ONCE)


def test_choice_when_weights_stay_already_then_nothing_changes() -> None:
    found = choose((0, 1, 2), 1e6)
    assert not found.changes
    assert found.kept == PATHS


def test_choice_when_only_one_more_fits_then_the_one_that_is_away_shortest_stays() -> None:
    room = make_step((2,)).peak_bytes / (1 - RESERVE) + 10
    assert room < make_step((1, 2)).peak_bytes
    found = choose((), room, speed=1.0)  # nothing can be swapped in time
    assert found.changes
    assert found.kept == ("2",)
    assert found.freed == ("0", "1")


def test_choice_when_kept_weights_have_no_plan_then_some_are_freed() -> None:
    steps = [make_step(kept, activation_bytes=10) for kept in ((), (0, 1, 2))]
    freed, kept = (each.peak_bytes for each in steps)
    room = freed / (1 - RESERVE) + 200
    assert room < kept - 100
    found = choose_kept(steps[1], PATHS, machine(room), "swap")
    assert found is not None
    assert found.changes
    assert len(found.freed) > 0
    assert found.seconds_before == 0 < found.seconds


def test_choice_when_no_setting_has_a_plan_then_nothing_changes() -> None:
    found = choose((), 1000)
    assert not found.changes
    assert found.seconds_before == 0


@pytest.mark.parametrize(("share", "changes"), [(1.5, True), (0.5, False)])
def test_choice_when_the_gain_is_about_the_threshold_then_it_decides(
    share: float, *, changes: bool
) -> None:
    trace = make_step(())
    gain = 3 * ONCE
    longer = gain / (WORTH * share) - trace.seconds
    last = replace(trace.operators[-1], seconds=trace.operators[-1].seconds + longer)
    trace = replace(trace, operators=(*trace.operators[:-1], last))
    found = choose_kept(trace, PATHS, machine(1e6), "swap")
    assert found is not None
    assert found.changes is changes


@pytest.mark.parametrize(("device", "changes"), [("cpu", True), ("cuda", False)])
def test_choice_when_gathers_run_beside_computing_then_only_the_rest_counts(
    device: str, *, changes: bool
) -> None:
    trace = make_step(())
    trace = replace(trace, device=device, step_seconds=trace.seconds - 3 * ONCE)
    found = choose_kept(trace, PATHS, machine(1e6), "swap")
    assert found is not None
    assert found.changes is changes


def test_choice_when_modules_may_not_change_then_there_is_none() -> None:
    assert choose_kept(make_step(()), ("other",), machine(1e6), "swap") is None


def test_choice_when_some_may_not_change_then_only_the_others_do() -> None:
    found = choose_kept(make_step(()), ("1",), machine(1e6), "swap")
    assert found is not None
    assert found.kept == ("1",)
    assert found.freed == ()


def test_choice_when_another_module_keeps_its_weights_then_it_goes_on() -> None:
    found = choose_kept(make_step((2,)), ("0", "1"), machine(1e6), "swap")
    assert found is not None
    assert found.kept == ("0", "1")
    assert found.seconds == pytest.approx(make_step((0, 1, 2)).seconds)
