"""The memory of a schedule on the device, the host and the disk.

A step is cut into windows: the wait before operator k is window 2k, the operator itself 2k + 1. A
wait counts the storages that exist on both of its sides. Storages that move during a window are
followed in time; `tolerance` at either end of their stay does not count.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swapkit.ir.plans import Action, Schedule, Tier
from swapkit.ir.traces import BEFORE, Trace
from swapkit.simulation.validation.computing import Demand
from swapkit.simulation.validation.gaps import find_tails
from swapkit.simulation.validation.transfers import SwappedStorage


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupation:
    """Bytes in use on the device.

    `windows` has a lower bound of the peak of each window. A valid prediction lies between `peak`,
    the maximum of `windows`, and `most`, which counts all storages that exist at any time around
    the span between two events as if they existed at the same time.
    """

    windows: tuple[int, ...]
    most: int

    @property
    def peak(self) -> int:
        """Return the most bytes in use at any time."""
        return max(self.windows)

    @property
    def peak_operator(self) -> int:
        """Return the operator that runs, or is about to run, at the peak."""
        return self.windows.index(self.peak) // 2


class _Ledger:
    """Bytes added over ranges of windows."""

    def __init__(self, count: int) -> None:
        self.changes = [0] * (count + 1)

    def add(self, first: int, last: int, nbytes: int) -> None:
        """Add bytes to the windows from `first` to `last`, inclusive; none if `last < first`."""
        if first <= last:
            self.changes[first] += nbytes
            self.changes[last + 1] -= nbytes

    def totals(self) -> list[int]:
        """Return the sum of each window."""
        return list(itertools.accumulate(self.changes[:-1]))


def measure_device(
    trace: Trace,
    schedule: Schedule,
    demand: Demand,
    moves: Sequence[SwappedStorage],
    tolerance: float,
) -> Occupation:
    """Return the device memory of a schedule."""
    settled = _sum_settled(trace, demand)
    least, most = _sum_operators(trace, demand)
    moving = _follow_moves(schedule, moves, tolerance)
    windows = tuple(map(sum, zip(settled, least, moving, strict=True)))
    around = _follow_moves(schedule, moves, -tolerance)
    cuts = sorted(_find_cuts(trace, demand))
    upper = 0
    for first, last in itertools.pairwise(cuts):
        span = slice(2 * first, 2 * last)
        there = max(map(sum, zip(settled[span], most[span], strict=True)))
        upper = max(upper, there + max(around[span]))
    return Occupation(windows=windows, most=upper)


def _sum_settled(trace: Trace, demand: Demand) -> list[int]:
    """Return the bytes in each window that do not depend on the times of copies."""
    ledger = _Ledger(2 * len(trace.operators))
    ledger.add(0, 2 * len(trace.operators) - 1, trace.base_bytes)
    tails = find_tails(trace, demand.actions)
    for number, storage in enumerate(trace.storages):
        first = max(2 * storage.birth + 1, 0)
        last = 2 * tails.get(number, storage.death - 1) + 1
        if number in demand.actions:
            ledger.add(first, 2 * demand.gaps[number].last + 1, storage.nbytes)
            first = 2 * demand.needs[number] + 1
        ledger.add(first, last, storage.nbytes)
    return ledger.totals()


def _sum_operators(trace: Trace, demand: Demand) -> tuple[list[int], list[int]]:
    """Return lower and upper bounds of the bytes that operators need for themselves, by window.

    Reruns before operator k fall into k's window, but k's own outputs and workspace do not exist
    yet; so the lower bound is the larger of the two parts.
    """
    made: defaultdict[int, int] = defaultdict(int)
    for each in trace.storages:
        if 0 <= each.birth < each.death:
            made[each.birth] += each.nbytes
    again: defaultdict[int, set[int]] = defaultdict(set)
    for storage, action in demand.actions.items():
        if action is Action.RECOMPUTE:
            again[demand.needs[storage]].add(storage)
    least, most = [], []
    for number, operator in enumerate(trace.operators):
        workspace = operator.workspace_bytes
        steps = demand.reruns.get(number, set())
        beside, together = _measure_reruns(trace, steps, again.get(number, set()))
        least += [0, max(workspace, beside - made[number])]
        most += [0, workspace + together]
    return least, most


def _measure_reruns(trace: Trace, steps: set[int], again: set[int]) -> tuple[int, int]:
    """Return bounds of the memory of `steps`, which rerun in a row, besides the storages `again`.

    The lower bound is that of one step with the intermediate storages that it reads and makes. The
    upper bound assumes that each storage is made separately, and that no step frees anything.
    """
    made = {storage for step in steps for storage in trace.operators[step].writes}
    least = together = 0
    for step in steps:
        operator = trace.operators[step]
        beside = ({*operator.writes, *operator.reads} & made) - again
        needed = operator.workspace_bytes + sum(trace.storages[each].nbytes for each in beside)
        least = max(least, needed)
        together += operator.workspace_bytes
    together += sum(trace.storages[storage].nbytes for storage in made)
    return least, together * len(again)


def _follow_moves(
    schedule: Schedule, moves: Sequence[SwappedStorage], tolerance: float
) -> list[int]:
    """Return the peak bytes in each window of swapped storages that are present in their gap.

    A positive tolerance shortens the time that a storage counts; a negative one extends it.
    """
    begins, ends = _list_windows(schedule)
    ledger = _Ledger(len(begins))
    inside: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
    for move in moves:
        first, last = 2 * move.gap.last + 2, 2 * move.need
        free_at = move.free_at - tolerance
        taken_at = move.transfer.in_start + tolerance
        if free_at > taken_at:  # back before it is gone
            ledger.add(first, last, move.nbytes)
            continue
        # The storage exists at the start of each window up to the one in which it goes, and of each
        # window after the one in which it comes back.
        goes = min(bisect_left(begins, free_at) - 1, last)
        comes = max(bisect_right(ends, taken_at), first)
        ledger.add(first, goes, move.nbytes)
        ledger.add(comes + 1, last, move.nbytes)
        if goes >= first:
            inside[goes].append((free_at, -move.nbytes))
        if comes <= last:
            inside[comes].append((taken_at, move.nbytes))
    for move in (each for each in moves if each.tail != BEFORE and not each.is_clean):
        first, free_at = 2 * move.tail + 2, move.transfer.released - tolerance
        goes = bisect_left(begins, free_at) - 1
        ledger.add(first, goes, move.nbytes)
        if first <= goes:
            inside[goes].append((free_at, -move.nbytes))
    totals = ledger.totals()
    for window, changes in inside.items():
        totals[window] = _most_of(totals[window], changes, ends[window])
    return totals


def _list_windows(schedule: Schedule) -> tuple[list[float], list[float]]:
    """Return the start and end time of each window."""
    begins, ends, before = [], [], 0.0
    for start, end in zip(schedule.starts, schedule.ends, strict=True):
        begins += [before, start]
        ends += [start, end]
        before = end
    return begins, ends


def _most_of(present: int, changes: list[tuple[float, int]], end: float) -> int:
    most = present
    for time, change in sorted(changes):
        if time >= end:
            break
        present += change
        most = max(most, present)
    return most


def _find_cuts(trace: Trace, demand: Demand) -> set[int]:
    """Return the operators at which something begins or ends for a storage that is not kept."""
    cuts = {0, len(trace.operators)}
    for number in demand.actions:
        storage = trace.storages[number]
        cuts |= {
            max(storage.birth, 0),
            demand.gaps[number].last + 1,
            demand.needs[number],
            storage.death,
        }
    return cuts | {last + 1 for last in find_tails(trace, demand.actions).values()}


def measure_copies(
    moves: Iterable[SwappedStorage], tier: Tier, tolerance: float
) -> tuple[int, int]:
    """Return a lower and an upper bound of the peak bytes of copies on a tier.

    A copy exists at least until it is back, and at most until its storage dies.
    """
    least, most = [], []
    for move in moves:
        if move.decision.tier is tier and not move.is_clean:
            start, end = move.transfer.out_start, move.transfer.in_end
            if move.tail != BEFORE:  # there is one from the step before
                least += [(0.0, move.nbytes), (end - tolerance, -move.nbytes)]
                least.append((start + tolerance, move.nbytes))
                most.append((0.0, move.nbytes))
                continue
            least += [(start + tolerance, move.nbytes), (end - tolerance, -move.nbytes)]
            most += [(start - tolerance, move.nbytes), (move.gone_at + tolerance, -move.nbytes)]
    return _most_of(0, least, float("inf")), _most_of(0, most, float("inf"))
