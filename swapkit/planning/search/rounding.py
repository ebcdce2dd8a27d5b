"""Rounding of item shares to whole actions."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from swapkit.planning.search.moves import list_rows
from swapkit.simulation.timeline import KEEP, RECOMPUTE, SWAP, SWAP_TO_DISK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swapkit.ir.machines import Machine
    from swapkit.planning.search.trials import Actions
    from swapkit.simulation.problems import Floats, Problem


class Shares(NamedTuple):
    """The shares of each item that are swapped and recomputed, from 0 to 1."""

    swapped: Floats
    recomputed: Floats

    def blend(self, other: Shares, part: float) -> Shares:
        """Return these shares, moved by `part` of the way to the other shares."""
        return Shares(
            self.swapped + part * (other.swapped - self.swapped),
            self.recomputed + part * (other.recomputed - self.recomputed),
        )


class Rounder:
    """A rounder for the shares of one problem."""

    def __init__(self, problem: Problem, machine: Machine) -> None:
        self._problem = problem
        self._machine = machine
        self._order = np.lexsort((problem.item_storages, problem.births)).tolist()
        self._classes = problem.classes.tolist()
        self._can_swap = problem.can_swap.tolist()
        self._can_recompute = problem.can_recompute.tolist()
        self._rows = [np.array(row, np.intp) for row in list_rows(problem)]
        self.nclasses = max(self._classes, default=-1) + 1

    def diffuse(self, shares: Shares, phases: Sequence[tuple[float, float]]) -> Actions:
        """Return actions whose running sums stay close to those of the shares, in each class.

        Args:
            shares: the shares of all items.
            phases: for each class, the initial values of its swapped and recomputed sums.
        """
        actions = [KEEP] * len(self._order)
        sums = [list(phase) for phase in phases]
        swapped, recomputed = shares.swapped.tolist(), shares.recomputed.tolist()
        for item in self._order:
            owed = sums[self._classes[item]]
            owed[0] += swapped[item]
            owed[1] += recomputed[item]
            for index in (1, 0) if owed[1] >= owed[0] else (0, 1):
                allowed = (self._can_recompute if index else self._can_swap)[item]
                if allowed and owed[index] >= 0.5:
                    actions[item] = RECOMPUTE if index else SWAP
                    owed[index] -= 1
                    break
        return self.spill(np.array(actions, np.int8))

    def take_first(self, shares: Shares) -> Actions:
        """Return actions that swap the first of each row, recompute the next, and keep the last.

        A row is a class in one pass through the model. The items used soonest are kept.
        """
        actions = np.zeros(len(self._order), np.int8)
        for row in self._rows:
            nswapped = int(np.ceil(shares.swapped[row].sum() - 1e-6))
            nrecomputed = int(np.ceil(shares.recomputed[row].sum() - 1e-6))
            swappable = row[self._problem.can_swap[row]][:nswapped]
            actions[swappable] = SWAP
            rest = row[self._problem.can_recompute[row] & (actions[row] == KEEP)]
            actions[rest[:nrecomputed]] = RECOMPUTE
        return self.spill(actions)

    def spill(self, actions: Actions) -> Actions:
        """Swap items to disk that do not fit on the host, those that are away longest."""
        problem, machine = self._problem, self._machine
        if machine.host_bytes is None or not machine.disk_bytes:
            return actions
        held = np.zeros(len(problem.slot_seconds) + 2, np.int64)
        order = np.argsort(problem.births - problem.deaths, kind="stable")  # the longest away first
        for item in order[::-1]:
            if actions[item] not in {SWAP, SWAP_TO_DISK}:
                continue
            span = slice(max(int(problem.readies[item]), 0), int(problem.deaths[item]) + 1)
            held[span] += problem.item_bytes[item]
            if held[span].max() > machine.host_bytes:
                held[span] -= problem.item_bytes[item]
                actions[item] = SWAP_TO_DISK
        return actions
