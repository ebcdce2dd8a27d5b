"""Simulated steps at random: what has to hold for each of them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from swapkit.simulation.running import KEEP, RECOMPUTE, Moments, Run, run
from tests.support.problems import (
    copied_items,
    kept_peak,
    machine_for,
    random_actions,
    random_problem,
)

if TYPE_CHECKING:
    from swapkit.ir.machines import Machine
    from swapkit.simulation.problems import Problem

SEEDS = range(60)


def draw(seed: int) -> tuple[Problem, Machine, np.ndarray]:
    rng = np.random.default_rng(seed)
    problem = random_problem(
        seed,
        items=int(rng.integers(1, 40)),
        shuffle=int(rng.integers(0, 5)),
        weights=int(np.random.default_rng(seed).integers(0, 12)) if seed % 2 else 0,
    )
    machine = replace(
        machine_for(problem, float(rng.uniform(0.3, 1.1)), float(rng.uniform(1e9, 2e10))),
        duplex=float(rng.choice([1.0, 1.4, 2.0])),
        interference=float(rng.choice([0.0, 0.2])),
        out_latency_seconds=float(rng.choice([0.0, 1e-4])),
        in_latency_seconds=float(rng.choice([0.0, 1e-4])),
        host_bytes=None if rng.integers(2) else kept_peak(problem) // 2,
        disk_bytes=1 << 40,
        disk_write_bytes_per_second=3e9,
        disk_read_bytes_per_second=5e9,
    )
    return problem, machine, random_actions(problem, seed, disk=bool(rng.integers(2)))


def draw_running(seed: int) -> tuple[Problem, Machine, np.ndarray, Run]:
    """Draw something that fits, with what is needed for that."""
    problem, machine, actions = draw(seed)
    result = run(problem, machine, actions)
    for _ in range(40):
        if result.stuck_slot < 0:
            return problem, machine, actions, result
        host = machine.host_bytes
        machine = replace(
            machine,
            budget_bytes=machine.budget_bytes * 11 // 10,
            host_bytes=None if host is None else host * 11 // 10,
        )
        result = run(problem, machine, actions)
    raise AssertionError


def tail_of(problem: Problem, item: int, result: Run) -> tuple[float, float]:
    """Return when a kept item is in memory for the next step."""
    tail, end = int(problem.tails[item]), float(result.slot_ends[-1])
    is_there = 0 <= tail < len(result.slot_starts)
    return (float(result.slot_ends[tail - 1]), end) if is_there else (0.0, 0.0)


def lives_of(problem: Problem, actions: np.ndarray, result: Run) -> list[list[tuple[float, float]]]:
    """Return when each item is in memory, from the run's times alone."""
    lives = []
    for item, action in enumerate(actions):
        before = problem.readies[item] < 0
        birth = 0.0 if before else result.slot_starts[problem.births[item]]
        death = result.slot_ends[problem.deaths[item]]
        if action == KEEP:
            lives.append([(birth, death), tail_of(problem, item, result)])
        elif action == RECOMPUTE:
            made = result.slot_starts[result.needs[item]]
            lives.append([(birth, result.slot_ends[problem.releases[item]]), (made, death)])
        else:
            if problem.tails[item] >= 0:  # it is not there when the step begins
                birth = float(result.slot_ends[problem.tails[item] - 1])
            lives.append([(birth, result.released[item]), (result.in_starts[item], death)])
    return lives


def chain_bytes_of(problem: Problem, actions: np.ndarray, result: Run) -> np.ndarray:
    """Return what chains take in each slot: for operators that are siblings' own, the most."""
    most: dict[tuple[int, int], int] = {}
    for item in np.flatnonzero(actions == RECOMPUTE):
        key = int(result.needs[item]), int(problem.own_steps[item])
        most[key] = max(most.get(key, 0), int(problem.chain_bytes[item]))
    total = np.zeros(len(problem.slot_bytes), np.int64)
    for (slot, _), nbytes in most.items():
        total[slot] += nbytes
    return total


def peak_of(problem: Problem, actions: np.ndarray, result: Run) -> int:
    """Return the most in use at any instant at which something begins."""
    held = problem.slot_bytes + chain_bytes_of(problem, actions, result)
    lives = [life for both in lives_of(problem, actions, result) for life in both]
    begins = np.array([life[0] for life in lives])
    ends = np.array([life[1] for life in lives])
    nbytes = np.repeat(problem.item_bytes, 2)
    peak = 0
    copied_back = result.in_starts[actions % 2 == 1].tolist()
    for time in {0.0, *copied_back, *result.slot_starts.tolist()}:
        there = int(nbytes[(begins <= time) & (time < ends)].sum())
        running = np.flatnonzero((result.slot_starts <= time) & (time < result.slot_ends))
        if running.size:
            there += int(held[running[0]])
        else:
            slot = int(np.searchsorted(result.slot_starts, time))
            there += int(min(problem.slot_bytes[slot - 1], problem.slot_bytes[slot]))
        peak = max(peak, there)
    return peak


@pytest.mark.parametrize("seed", SEEDS)
def test_follow_when_moments_are_those_of_a_free_run_then_everything_is_the_same(
    seed: int,
) -> None:
    problem, machine, actions, free = draw_running(seed)
    followed = run(problem, machine, actions, Moments(free.prefetch_slots, free.release_slots))
    for each in fields(Run):
        np.testing.assert_array_equal(getattr(free, each.name), getattr(followed, each.name))


@pytest.mark.parametrize("seed", SEEDS)
def test_run_when_it_ends_then_memory_is_what_was_reported_and_within_the_budget(
    seed: int,
) -> None:
    problem, machine, actions, result = draw_running(seed)
    assert result.peak_bytes <= machine.budget_bytes
    assert peak_of(problem, actions, result) == result.peak_bytes


@pytest.mark.parametrize("seed", SEEDS)
def test_run_when_it_ends_then_times_are_in_order_and_queues_do_one_thing_at_a_time(
    seed: int,
) -> None:
    problem, machine, actions, result = draw_running(seed)
    swapped = actions % 2 == 1
    recomputed = np.flatnonzero(actions == RECOMPUTE)
    assert (result.slot_ends[:-1] <= result.slot_starts[1:]).all()
    waits = result.slot_starts - np.concatenate(([0.0], result.slot_ends[:-1]))
    np.testing.assert_allclose(waits, result.slot_stalls, atol=1e-12)
    assert result.stall_seconds == pytest.approx(
        waits.sum() + result.seconds - result.slot_ends[-1]
    )
    copied = copied_items(problem, actions)
    goes_on = problem.tails >= 0
    ends = np.append(result.slot_ends, 0.0)  # -1: when the step begins
    lasts = np.where(goes_on & np.isin(np.arange(len(actions)), copied), problem.tails - 1, -1)
    assert (result.out_starts >= ends[np.where(lasts < 0, problem.readies, lasts)])[swapped].all()
    assert (result.released >= ends[np.where(lasts < 0, problem.releases, lasts)])[swapped].all()
    assert (result.in_starts >= result.released)[swapped & ~goes_on].all()
    assert (result.in_ends <= result.slot_starts[result.needs])[swapped].all()
    assert result.seconds == max([result.slot_ends[-1], *result.out_ends[copied]])
    for moved, starts, ends in (
        (copied, result.out_starts, result.out_ends),
        (np.flatnonzero(swapped), result.in_starts, result.in_ends),
    ):
        order = moved[np.argsort(starts[moved], kind="stable")]
        assert (ends[order][:-1] <= starts[order][1:]).all()
    assert (result.needs[recomputed] > problem.releases[recomputed]).all()
    host = machine.host_bytes
    assert host is None or result.host_peak_bytes <= host


def is_away(problem: Problem, item: int, spans: list[tuple[float, float]], time: float) -> bool:
    """Return whether an item is idle, so that its copy out decides whether it is in memory."""
    if problem.tails[item] >= 0:
        return spans[0][0] <= time
    return spans[0][0] <= time < spans[1][1]


@pytest.mark.parametrize("seed", SEEDS)
def test_run_when_every_item_were_there_at_its_release_slot_then_that_would_not_fit(
    seed: int,
) -> None:
    problem, machine, actions, result = draw_running(seed)
    copied = copied_items(problem, actions)
    order = copied[np.argsort(result.out_starts[copied], kind="stable")].tolist()
    lives = lives_of(problem, actions, result)
    held = problem.slot_bytes + chain_bytes_of(problem, actions, result)
    for place, item in enumerate(order):
        slot = result.release_slots[item]
        if slot < 0:
            continue
        time = result.slot_starts[slot]
        assert result.released[item] <= time
        assert problem.tails[item] >= 0 or time < result.in_starts[item]
        there = int(held[slot])
        for other, spans in enumerate(lives):
            stays = other in order[place:] and is_away(problem, other, spans, time)
            in_memory = any(begin <= time < end for begin, end in spans)
            there += int(problem.item_bytes[other]) if in_memory or stays else 0
        assert there > machine.budget_bytes


@pytest.mark.parametrize("seed", SEEDS)
def test_run_when_items_go_only_at_their_release_slots_then_every_slot_fits(seed: int) -> None:
    problem, machine, actions, result = draw_running(seed)
    lives = lives_of(problem, actions, result)
    held = problem.slot_bytes + chain_bytes_of(problem, actions, result)
    copied = copied_items(problem, actions).tolist()
    for slot, time in enumerate(result.slot_starts):
        there = int(held[slot])
        for item, spans in enumerate(lives):
            is_in_memory = any(begin <= time < end for begin, end in spans)
            release = result.release_slots[item]
            is_awaited = item in copied and not 0 <= release <= slot
            stays = is_awaited and is_away(problem, item, spans, time)
            there += int(problem.item_bytes[item]) if is_in_memory or stays else 0
        assert there <= machine.budget_bytes


@pytest.mark.parametrize("seed", SEEDS)
def test_run_when_nothing_limits_memory_then_no_slot_waits_for_any(seed: int) -> None:
    problem, machine, actions = draw(seed)
    unlimited = replace(machine, budget_bytes=1 << 60, host_bytes=None)
    result = run(problem, unlimited, actions)
    assert (result.release_slots == -1).all()
    waited = np.flatnonzero(result.slot_stalls > 0)
    ends = {float(end) for end in result.in_ends[np.isfinite(result.in_ends)]}
    assert all(float(result.slot_starts[slot]) in ends for slot in waited)


@pytest.mark.parametrize("seed", SEEDS)
def test_run_when_copies_in_could_be_on_demand_then_choosing_is_no_slower(seed: int) -> None:
    problem, machine, actions = draw(seed)
    machine = replace(machine, duplex=2.0, interference=0.0)
    chosen = run(problem, machine, actions)
    never_ahead = run(problem, machine, actions, window=0)
    assert (chosen.stuck_slot < 0) == (never_ahead.stuck_slot < 0)
    assert chosen.seconds <= never_ahead.seconds * (1 + 1e-12)
