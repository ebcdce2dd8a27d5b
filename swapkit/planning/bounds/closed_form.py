"""A weaker bound without a solver.

At a boundary k where too many bytes are alive, the excess V must be gone: h bytes are swapped, the
others are recomputed later. Before k, the link moves at most the bytes that computing hides, and
more only in stalls or during recomputing. The same is true for copies back after k. Let R(v) be the
seconds to recompute v bytes of the items that are idle at k, cheapest items first. Then

    added seconds >= min over h of A(h) + max(B(h), R(V - h))
    A(h) = max(0, h - hidden before k) * seconds per byte out,  B(h): the same after k, and back

because items gone at k are recomputed after k, which may hide copies back, but not copies out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from swapkit.planning.bounds.fluid import find_alive_bytes
from swapkit.planning.bounds.windows import find_windows

if TYPE_CHECKING:
    from swapkit.ir.machines import Machine
    from swapkit.simulation.problems import Flags, Floats, Problem

_PEAKS = 16  # number of boundaries to examine, those with the most bytes alive


def closed_form_bound(problem: Problem, machine: Machine) -> float:
    """Return a lower bound of the seconds of any schedule; math.inf: none fits the budget."""
    seconds = _find_seconds(problem)
    excess = find_alive_bytes(problem) - machine.budget_bytes
    peaks = [int(k) for k in np.argsort(-excess, kind="stable")[:_PEAKS] if excess[k] > 0]
    added = [_Boundary(problem, machine, seconds, k).added_seconds(excess[k]) for k in peaks]
    least = max(0.0, max(added, default=0.0) - problem.wait_seconds())  # see bound.py
    return float(np.sum(problem.slot_seconds)) + least


def _find_seconds(problem: Problem) -> Floats:
    """Return the recompute time of each item, with shared steps divided evenly."""
    windows = find_windows(problem, problem.can_recompute)
    seconds = windows.own_seconds.copy()
    for group in windows.shared:
        seconds[list(group.items)] += group.seconds / len(group.items)
    return np.where(problem.can_recompute, seconds, 0.0)


class _Boundary:
    """The start of slot k, and the items that are idle there."""

    def __init__(self, problem: Problem, machine: Machine, seconds: Floats, k: int) -> None:
        self._problem = problem
        self._machine = machine
        self._slot = k
        idle = (problem.releases < k) & (k < problem.uses)
        remade = idle & problem.can_recompute
        order = np.argsort(seconds[remade] / problem.item_bytes[remade], kind="stable")
        self._bytes = np.concatenate(([0.0], np.cumsum(problem.item_bytes[remade][order])))
        self._costs = np.concatenate(([0.0], np.cumsum(seconds[remade][order])))
        self._swappable = self._find_swappable(idle & problem.can_swap)

    def added_seconds(self, excess: float) -> float:
        """Return a lower bound of the seconds added to the step."""
        most = min(excess, self._swappable)
        least = max(0.0, excess - self._bytes[-1])
        if least > most:
            return math.inf
        corners = np.concatenate((excess - self._bytes, self._hidden, (least, most)))
        corners = np.unique(np.clip(corners, least, most))
        out, back, remade = self._price(corners, excess)
        # Between corners all three are linear: the best is at a corner, or where the max changes.
        gaps = remade - back
        changes = np.flatnonzero(gaps[:-1] * gaps[1:] < 0)
        shares = gaps[changes] / (gaps[changes] - gaps[changes + 1])
        crossings = corners[changes] + shares * (corners[changes + 1] - corners[changes])
        out, back, remade = self._price(np.concatenate((corners, crossings)), excess)
        return float(np.min(out + np.maximum(back, remade)))

    def _price(self, swapped: Floats, excess: float) -> tuple[Floats, Floats, Floats]:
        """Return the unhidden seconds out and back, and the seconds to recompute the rest."""
        out = np.maximum(0.0, swapped - self._hidden[0]) * self._paces[0]
        back = np.maximum(0.0, swapped - self._hidden[1]) * self._paces[1]
        return out, back, np.interp(excess - swapped, self._bytes, self._costs)

    def _find_swappable(self, items: Flags) -> float:
        """Return the most bytes that may be swapped; store the bytes hidden out and back."""
        problem, machine, k = self._problem, self._machine, self._slot
        sizes = problem.item_bytes.astype(np.float64)
        # The largest copy takes the least time per byte.
        largest = float(np.max(sizes[problem.can_swap], initial=1.0))
        self._paces = (
            machine.out_latency_seconds / largest + 1.0 / machine.out_bytes_per_second,
            machine.in_latency_seconds / largest + 1.0 / machine.in_bytes_per_second,
        )
        count = len(problem.slot_seconds)
        times = np.concatenate(([0.0], np.cumsum(problem.slot_seconds)))[:count]
        # Before slot i, at most all final bytes can leave; after it, the link is the limit.
        final = np.bincount(problem.readies[items] + 1, sizes[items], count)
        before = np.cumsum(final)[: k + 1] - final[: k + 1]
        needed = np.bincount(problem.uses[items], sizes[items], count)
        after = (np.sum(needed) - np.cumsum(needed))[k:]
        self._hidden = (
            float(np.min(before + (times[k] - times[: k + 1]) / self._paces[0])),
            float(np.min(after + (times[k:] - times[k]) / self._paces[1])),
        )
        total = float(np.sum(sizes[items]))
        if machine.host_bytes is None:
            return total
        return min(total, float(machine.host_bytes + machine.disk_bytes))
