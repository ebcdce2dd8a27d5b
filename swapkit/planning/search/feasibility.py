"""The smallest budget that has a plan, and the slots that prevent a smaller one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from swapkit.ir.machines import Machine
from swapkit.ir.traces import Phase, Trace
from swapkit.planning.search.moves import Actions, Rounder, Trial, Trials, list_choices
from swapkit.simulation.problems import Bytes, Flags, Problem
from swapkit.simulation.timeline import KEEP, RECOMPUTE, SWAP, SWAP_TO_DISK

Measure: TypeAlias = tuple[int, int, int]

PLENTY = 1 << 60
PASSES = 3  # over all classes, and over the items at the peak
MOST_EXCHANGED = 16
OPTIMIZER_STEP = "the optimizer's step"
MOST_ITEMS = 64  # items at the peak to examine in one pass


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Least:
    """The smallest budget that was found, and the `trial` that ran within it."""

    budget_bytes: int
    trial: Trial
    slots: tuple[int, ...]  # slots at the peak


def find_least(problem: Problem, machine: Machine) -> Least:
    """Return the smallest budget, regardless of the step's time."""
    shrinker = _Shrinker(problem, machine)
    actions = min(
        (shrinker.shrink(start) for start in _list_extremes(problem, machine)), key=shrinker.measure
    )
    budget, trial = _verify(problem, machine, actions, shrinker.peak(actions))
    levels = shrinker.levels(actions)
    slots = np.flatnonzero(levels == levels.max())
    return Least(budget_bytes=budget, trial=trial, slots=tuple(slots.tolist()))


def name_operators(trace: Trace, problem: Problem, least: Least) -> tuple[str, ...]:
    """Return the operators that need the smallest budget, in order, each once."""
    names: dict[str, None] = {}
    for slot in least.slots:
        operators = range(int(problem.slot_operators[slot]), int(problem.slot_operators[slot + 1]))
        largest = max(operators, key=lambda number: trace.operators[number].workspace_bytes)
        operator = trace.operators[largest]
        is_step = operator.phase is Phase.OPTIMIZER
        place = OPTIMIZER_STEP if is_step else operator.module
        names[f"{operator.name} in {place}" if place else operator.name] = None
    return tuple(names)


def _list_extremes(problem: Problem, machine: Machine) -> Iterator[Actions]:
    """Yield actions that keep as little as possible: swapped where possible, or recomputed."""
    swapped = np.where(problem.can_swap, SWAP, KEEP).astype(np.int8)
    rounder = Rounder(problem, machine)
    yield rounder.spill(np.where(problem.can_swap, swapped, problem.can_recompute * RECOMPUTE))
    recomputed = np.where(problem.can_recompute, RECOMPUTE, swapped).astype(np.int8)
    yield rounder.spill(recomputed)
    yield (problem.can_recompute * RECOMPUTE).astype(np.int8)
    if machine.host_bytes is not None:
        yield _fill_host(problem, machine, recomputed)


def _fill_host(problem: Problem, machine: Machine, actions: Actions) -> Actions:
    """Swap the largest items, as many as fit on the host and the disk, and no others."""
    room = (machine.host_bytes or 0) + machine.disk_bytes
    filled = actions.copy()
    for item in np.argsort(-problem.item_bytes, kind="stable"):
        if not problem.can_swap[item]:
            continue
        fits = problem.item_bytes[item] <= room
        if fits:
            room -= int(problem.item_bytes[item])
        rest = RECOMPUTE if problem.can_recompute[item] else KEEP
        filled[item] = SWAP if fits else rest
    return Rounder(problem, machine).spill(filled)


class _Shrinker:
    """A search that lowers the minimum memory of a step, from slots alone, regardless of time."""

    def __init__(self, problem: Problem, machine: Machine) -> None:
        self._problem, self._machine = problem, machine
        # Needs do not depend on the budget; with plenty of memory, every step runs.
        self._trials = Trials(problem, replace(machine, budget_bytes=PLENTY, host_bytes=None))
        self._choices = list_choices(problem, machine)

    def levels(self, actions: Actions) -> Bytes:
        """Return the minimum bytes of each slot, with swapped items gone during their gaps."""
        problem = self._problem
        needs = self._trials.simulate(actions).run.needs
        changes = np.zeros(len(problem.slot_seconds) + 2, np.int64)
        leaves = np.where(actions == KEEP, problem.deaths, problem.releases)
        np.add.at(changes, problem.births, problem.item_bytes)
        np.subtract.at(changes, np.maximum(leaves + 1, problem.births), problem.item_bytes)
        goes_on = (actions == KEEP) & (problem.tails >= 0)
        np.add.at(changes, problem.tails[goes_on], problem.item_bytes[goes_on])
        moved = np.flatnonzero(actions != KEEP)
        np.add.at(changes, needs[moved], problem.item_bytes[moved])
        np.subtract.at(changes, problem.deaths[moved] + 1, problem.item_bytes[moved])
        levels: Bytes = np.cumsum(changes[:-2]) + problem.slot_bytes
        recomputed = np.flatnonzero(actions == RECOMPUTE)
        np.add.at(levels, needs[recomputed], problem.chain_bytes[recomputed])
        return levels

    def peak(self, actions: Actions) -> int:
        """Return the most bytes that a slot needs."""
        return int(self.levels(actions).max())

    def measure(self, actions: Actions) -> Measure:
        """Return the values to minimize, in order of priority.

        These are the bytes that exceed host and disk, the peak, and the number of slots at it.
        """
        machine = self._machine
        too_much = max(self._stored(actions == SWAP_TO_DISK) - machine.disk_bytes, 0)
        if machine.host_bytes is not None:
            too_much += max(self._stored(actions == SWAP) - machine.host_bytes, 0)
        levels = self.levels(actions)
        peak = int(levels.max())
        return too_much, peak, int((levels == peak).sum())

    def _stored(self, chosen: Flags) -> int:
        """Return the most bytes of chosen items that are away at the same time."""
        problem = self._problem
        changes = np.zeros(len(problem.slot_seconds) + 2, np.int64)
        items = np.flatnonzero(chosen & problem.is_copied)
        firsts, lasts = problem.copies
        np.add.at(changes, firsts[items], problem.item_bytes[items])
        np.subtract.at(changes, lasts[items] + 1, problem.item_bytes[items])
        return int(np.cumsum(changes).max())

    def shrink(self, actions: Actions) -> Actions:
        """Change whole classes, then single items at the peak, as long as changes help."""
        classes = [
            np.flatnonzero(self._problem.classes == number)
            for number in range(int(self._problem.classes.max(initial=-1)) + 1)
        ]
        for _ in range(PASSES):
            changed = self._try_each(actions, classes)
            at_peak = self._at_peak(changed)
            changed = self._try_each(changed, [np.array([item]) for item in at_peak])
            if self._machine.host_bytes is not None:
                changed = self._exchange(changed, at_peak)
            if np.array_equal(changed, actions):
                break
            actions = changed
        return actions

    def _try_each(self, actions: Actions, groups: list[np.ndarray]) -> Actions:
        best = self.measure(actions)
        for group in groups:
            for action in (KEEP, SWAP, RECOMPUTE, SWAP_TO_DISK):
                allowed = [item for item in group if action in self._choices[item]]
                if not allowed or (actions[allowed] == action).all():
                    continue
                changed = actions.copy()
                changed[allowed] = action
                measure = self.measure(changed)
                if measure < best:
                    actions, best = changed, measure
        return actions

    def _exchange(self, actions: Actions, at_peak: list[int]) -> Actions:
        """Give the host's room to items at the peak instead of other items."""
        best = self.measure(actions)
        for item in at_peak[:MOST_EXCHANGED]:
            for other in np.flatnonzero(actions == SWAP)[:MOST_EXCHANGED]:
                for action in set(self._choices[other]) - {SWAP}:
                    changed = actions.copy()
                    changed[item], changed[other] = SWAP, action
                    if SWAP not in self._choices[item] or item == other:
                        continue
                    measure = self.measure(changed)
                    if measure < best:
                        actions, best = changed, measure
        return actions

    def _at_peak(self, actions: Actions) -> list[int]:
        """Return the items that are alive at the peak, the largest first."""
        problem = self._problem
        slot = int(self.levels(actions).argmax())
        alive = np.flatnonzero((problem.births <= slot) & (slot <= problem.deaths))
        order = alive[np.argsort(-problem.item_bytes[alive], kind="stable")]
        return [item for item in order.tolist() if len(self._choices[item]) > 1][:MOST_ITEMS]


def _verify(
    problem: Problem, machine: Machine, actions: Actions, least_bytes: int
) -> tuple[int, Trial]:
    """Return the smallest budget, at least `least_bytes`, in which the actions run."""

    def run(budget_bytes: int, chosen: Actions) -> Trial:
        return Trials(problem, replace(machine, budget_bytes=budget_bytes)).simulate(chosen)

    trial = run(least_bytes, actions)
    if trial.is_possible:
        return least_bytes, trial
    kept = np.zeros_like(actions)
    high_bytes = int(run(PLENTY, kept).run.peak_bytes)
    if not run(high_bytes, actions).is_possible:  # such as for lack of room on the host
        return high_bytes, run(high_bytes, kept)
    trial = run(high_bytes, actions)
    while high_bytes - least_bytes > 1:
        middle = (least_bytes + high_bytes) // 2
        attempt = run(middle, actions)
        if attempt.is_possible:
            high_bytes, trial = middle, attempt
        else:
            least_bytes = middle
    return high_bytes, trial
