"""Without a solver: a weaker bound, and what a byte costs either way.

At a boundary k where too much is alive, the excess V has to be gone: h bytes swapped, the others
recomputed later. By then the link has moved at most what computing hid, and more only in stalls or
while something else was recomputed; the same holds for the way back afterwards. So with the
cheapest items first, R(v) being the seconds to recompute v bytes of those that are idle at k,

    added seconds >= min over h of A(h) + max(B(h), R(V - h))
    A(h) = max(0, h - hidden before k) * seconds per byte out,  B(h) likewise after k and in

because what is gone at k is recomputed after k: that may hide copies in, but not copies out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from swapkit.planning.bounds.fluid import find_alive_bytes
from swapkit.planning.bounds.windows import find_windows

if TYPE_CHECKING:
    from swapkit.ir.machines import Machine
    from swapkit.simulation.problems import Flags, Floats, Problem

_PEAKS = 16  # boundaries that are looked at, those with the most alive


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRate:
    """What freeing a byte of the items of a class costs. Items alike in all layers are one class.

    Where copies cannot be hidden, a byte is cheaper to recompute than to swap if
    `recompute_seconds_per_byte` is below `link_seconds_per_byte`.
    """

    class_number: int
    items: int
    nbytes: int
    recompute_seconds_per_byte: float  # math.inf: some of them cannot be recomputed
    link_seconds_per_byte: float  # of the slower direction; math.inf: cannot be swapped


def exchange_rates(problem: Problem, machine: Machine) -> tuple[ExchangeRate, ...]:
    """Return the rates of all classes, the cheapest to recompute first."""
    seconds = _find_seconds(problem)
    slowest = min(machine.out_bytes_per_second, machine.in_bytes_per_second)
    rates = []
    for number in np.unique(problem.classes):
        items = problem.classes == number
        nbytes = int(np.sum(problem.item_bytes[items]))
        spent = float(np.sum(seconds[items]))
        can_recompute = bool(np.all(problem.can_recompute[items]))
        can_swap = bool(np.all(problem.can_swap[items]))
        rates.append(
            ExchangeRate(
                class_number=int(number),
                items=int(np.sum(items)),
                nbytes=nbytes,
                recompute_seconds_per_byte=spent / max(nbytes, 1) if can_recompute else math.inf,
                link_seconds_per_byte=1.0 / slowest if can_swap else math.inf,
            )
        )
    return tuple(sorted(rates, key=lambda rate: rate.recompute_seconds_per_byte))


def closed_form_bound(problem: Problem, machine: Machine) -> float:
    """Return seconds that no schedule goes below; math.inf: nothing fits into the budget."""
    seconds = _find_seconds(problem)
    excess = find_alive_bytes(problem) - machine.budget_bytes
    peaks = [int(k) for k in np.argsort(-excess, kind="stable")[:_PEAKS] if excess[k] > 0]
    added = [_Boundary(problem, machine, seconds, k).added_seconds(excess[k]) for k in peaks]
    return float(np.sum(problem.slot_seconds)) + max(added, default=0.0)


def _find_seconds(problem: Problem) -> Floats:
    """Return what recomputing each item costs, an even part of what items may share."""
    windows = find_windows(problem, problem.can_recompute)
    seconds = windows.own_seconds.copy()
    for group in windows.shared:
        seconds[list(group.items)] += group.seconds / len(group.items)
    return np.where(problem.can_recompute, seconds, 0.0)


class _Boundary:
    """The start of slot k, and what is idle there."""

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
        """Return what the step takes longer at least."""
        most = min(excess, self._swappable)
        least = max(0.0, excess - self._bytes[-1])
        if least > most:
            return math.inf
        corners = np.concatenate((excess - self._bytes, self._hidden, (least, most)))
        corners = np.unique(np.clip(corners, least, most))
        out, back, remade = self._price(corners, excess)
        # Between corners all three are straight: the best is at one, or where the larger changes.
        gaps = remade - back
        changes = np.flatnonzero(gaps[:-1] * gaps[1:] < 0)
        shares = gaps[changes] / (gaps[changes] - gaps[changes + 1])
        crossings = corners[changes] + shares * (corners[changes + 1] - corners[changes])
        out, back, remade = self._price(np.concatenate((corners, crossings)), excess)
        return float(np.min(out + np.maximum(back, remade)))

    def _price(self, swapped: Floats, excess: float) -> tuple[Floats, Floats, Floats]:
        """Return the seconds out and in that are not hidden, and those of recomputing the rest."""
        out = np.maximum(0.0, swapped - self._hidden[0]) * self._paces[0]
        back = np.maximum(0.0, swapped - self._hidden[1]) * self._paces[1]
        return out, back, np.interp(excess - swapped, self._bytes, self._costs)

    def _find_swappable(self, items: Flags) -> float:
        """Return how many bytes may be swapped at most; note how many are hidden out and in."""
        problem, machine, k = self._problem, self._machine, self._slot
        sizes = problem.item_bytes.astype(np.float64)
        # The largest copy is the fastest.
        largest = float(np.max(sizes[problem.can_swap], initial=1.0))
        self._paces = (
            machine.out_latency_seconds / largest + 1.0 / machine.out_bytes_per_second,
            machine.in_latency_seconds / largest + 1.0 / machine.in_bytes_per_second,
        )
        count = len(problem.slot_seconds)
        times = np.concatenate(([0.0], np.cumsum(problem.slot_seconds)))[:count]
        # Before slot i at most what was final could leave, since then what the link moves.
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
