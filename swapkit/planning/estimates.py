"""What memory and time a step needs at any budget, from one recorded step or two.

A session frees saved tensors in the middle of an operator, so the smallest budget at which it
trains is the one that the most demanding operator needs, when everything that can be elsewhere is.
That is the smallest budget that has a plan.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from swapkit.ir.machines import Machine
from swapkit.ir.passes import divide_weights
from swapkit.ir.traces import BEFORE, Kind, Operator, Storage, Trace
from swapkit.planning.layout.lifetimes import ROUNDING_BYTES
from swapkit.planning.search.feasibility import Least, find_least, name_operators
from swapkit.planning.search.solving import SHARES, TradeOff, measure_budgets
from swapkit.simulation.lowering import lower
from swapkit.simulation.problems import Problem
from swapkit.units import round_up

MOST_TIMES = 1024  # the larger recorded batch size: larger batches are not considered
# The smallest budget depends on the machine only by its host memory. For an unknown machine.
ANY_MACHINE = Machine(budget_bytes=1, out_bytes_per_second=1e9, in_bytes_per_second=1e9)
_STAYING = {
    Kind.STATE: "state",
    Kind.GRADIENT: "gradient",
    Kind.OPTIMIZER_STATE: "optimizer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """The memory of one step, in bytes."""

    plain_bytes: int  # with this budget nothing moves
    smallest_bytes: int  # the smallest budget, with all weights on the device
    streamed_bytes: int  # the smallest one if weights leave; 0: that is no smaller
    floor_bytes: int  # most of what stays on the device at once, whatever the budget
    state_bytes: int  # parameters and buffers
    gradient_bytes: int  # most at once
    optimizer_bytes: int  # the optimizer's states
    operator: str = ""  # the first of those that need the smallest budget


def find_need(trace: Trace, machine: Machine | None, granule_bytes: int) -> MemoryNeed:
    """Return the memory that a step needs.

    Args:
        trace: the step.
        machine: its host memory may limit what can be elsewhere; None: enough.
        granule_bytes: the pool reserves whole granules of this size.
    """
    plain_bytes = round_up(trace.peak_bytes, granule_bytes)
    problem, least = _find_least(trace, machine)
    smallest_bytes = min(plain_bytes, round_up(least.budget_bytes, granule_bytes))
    streamed_bytes = 0
    if (divided := divide_weights(trace)).storages != trace.storages:
        streamed_bytes = find_smallest(divided, machine, granule_bytes)
    staying = [_stays(each) for each in trace.storages]
    kinds = {
        name: max(_levels(trace, [each.kind is kind for each in trace.storages]), default=0)
        for kind, name in _STAYING.items()
    }
    return MemoryNeed(
        plain_bytes=plain_bytes,
        smallest_bytes=smallest_bytes,
        streamed_bytes=streamed_bytes if streamed_bytes < smallest_bytes else 0,
        floor_bytes=trace.base_bytes + max(_levels(trace, staying), default=0),
        state_bytes=kinds["state"],
        gradient_bytes=kinds["gradient"],
        optimizer_bytes=kinds["optimizer"],
        operator=next(iter(name_operators(trace, problem, least)), ""),
    )


def find_smallest(trace: Trace, machine: Machine | None, granule_bytes: int) -> int:
    """Return the smallest budget at which a session with a plan trains, in bytes."""
    return round_up(_find_least(trace, machine)[1].budget_bytes, granule_bytes)


def _find_least(trace: Trace, machine: Machine | None) -> tuple[Problem, Least]:
    problem = lower(trace)
    return problem, find_least(problem, replace(machine or ANY_MACHINE, budget_bytes=1))


def find_times(
    trace: Trace, machine: Machine, need: MemoryNeed, budgets: Iterable[int] = ()
) -> tuple[TradeOff, ...]:
    """Return the time of the step at several budgets between its smallest one and its plain memory.

    Below the smallest budget with all weights on the device, weights leave.

    Args:
        trace: the step.
        machine: its budget is ignored.
        need: of the trace.
        budgets: others in bytes; left out if too small, or if nothing moves with them.
    """
    smallest, room = need.smallest_bytes, need.plain_bytes - need.smallest_bytes
    shared = [smallest + round(share * room) for share in (0, *SHARES)]
    asked = [each for each in budgets if each < trace.peak_bytes]
    above = [each for each in asked if each >= smallest]
    found = measure_budgets(lower(trace), machine, [*shared, *above])
    if not need.streamed_bytes:
        return found
    between = [need.streamed_bytes, (need.streamed_bytes + smallest) // 2]
    between += [each for each in asked if need.streamed_bytes <= each < smallest]
    problem = lower(divide_weights(trace))
    streamed = [
        replace(each, host_peak_bytes=each.host_peak_bytes + problem.frozen_bytes)
        for each in measure_budgets(problem, machine, between)
    ]
    best = min(streamed, key=lambda each: each.seconds)  # fits larger budgets, too
    return (
        *streamed,
        *(
            each if each.seconds <= best.seconds else replace(best, budget_bytes=each.budget_bytes)
            for each in found
        ),
    )


def _stays(storage: Storage) -> bool:
    return storage.kind in _STAYING or storage.birth == BEFORE


def _levels(trace: Trace, counted: Sequence[bool]) -> list[int]:
    """Return the bytes of some storages that exist while each operator runs."""
    changes: defaultdict[int, int] = defaultdict(int)
    for storage, counts in zip(trace.storages, counted, strict=True):
        if counts:
            changes[max(storage.birth, 0)] += storage.nbytes
            changes[storage.death] -= storage.nbytes
    return list(accumulate(changes[number] for number in range(len(trace.operators))))


# ---- batches of other sizes ----------------------------------------------------------------------


class Batches:
    """A step at any size of its batch, from two recorded sizes.

    Where both ran the same operators, each storage, workspace and time is assumed to grow along a
    straight line. Elsewhere (kernels may depend on sizes) the smallest budget itself is.
    """

    def __init__(
        self, sizes: tuple[int, int], traces: tuple[Trace, Trace], measure: Callable[[Trace], int]
    ) -> None:
        """Compute nothing yet.

        Args:
            sizes: the two batch sizes, the smaller one first.
            traces: their steps.
            measure: returns the smallest budget of a step in bytes.
        """
        self._sizes, self._traces, self._measure = sizes, traces, measure
        self._known: dict[int, int] = {}
        self.are_alike = _are_alike(*traces)

    def trace(self, size: int) -> Trace | None:
        """Return the step with a batch of this size; None: the recorded steps are not alike."""
        small, large = self._sizes
        return _between(*self._traces, (size - small) / (large - small)) if self.are_alike else None

    def smallest_bytes(self, size: int) -> int:
        """Return the smallest budget for a batch of this size."""
        if size not in self._known:
            self._known[size] = self._find_smallest(size)
        return self._known[size]

    def _find_smallest(self, size: int) -> int:
        if size in self._sizes:
            return self._measure(self._traces[self._sizes.index(size)])
        trace = self.trace(size)
        if trace is not None:
            return self._measure(trace)
        small, large = self._sizes
        share = (size - small) / (large - small)
        first, last = self.smallest_bytes(small), self.smallest_bytes(large)
        return max(0, math.ceil(first + (last - first) * share))

    def find_seconds(self, size: int, machine: Machine, budget_bytes: int) -> float | None:
        """Return the predicted time of the step within a budget; None: not known.

        `size` fits the budget; the machine's own budget is ignored.
        """
        trace = self.trace(size)
        if trace is None:
            return None
        return measure_budgets(lower(trace), machine, [budget_bytes])[0].seconds

    def is_capped(self, size: int) -> bool:
        """Return whether larger batches are not considered: `MOST_TIMES` the recorded size."""
        return size >= MOST_TIMES * self._sizes[1]

    def find_largest(self, budget_bytes: int) -> int:
        """Return the size of the largest batch that fits a budget; 0: not even one sample does.

        At most the size of `is_capped`.
        """
        low, high = 0, self._sizes[1]  # `low` fits
        while self.smallest_bytes(high) <= budget_bytes:
            low = high
            if self.is_capped(high):
                return high
            high *= 2
        sizes = range(low + 1, high)
        return low + bisect_right(sizes, budget_bytes, key=self.smallest_bytes)


def _are_alike(first: Trace, second: Trace) -> bool:
    """Return whether two steps differ only in sizes and times."""
    operators, storages = (
        len(first.operators) == len(second.operators),
        len(first.storages) == len(second.storages),
    )
    return (
        operators
        and storages
        and all(map(_is_same_operator, first.operators, second.operators))
        and all(map(_is_same_storage, first.storages, second.storages))
    )


def _is_same_operator(first: Operator, second: Operator) -> bool:
    return (first.name, first.reads, first.writes) == (second.name, second.reads, second.writes)


def _is_same_storage(first: Storage, second: Storage) -> bool:
    return (first.kind, first.birth, first.death) == (second.kind, second.birth, second.death)


def _between(first: Trace, second: Trace, share: float) -> Trace:
    """Return the step on the line through two alike steps: 0 is the first, 1 the second."""

    def grow(low: float, high: float) -> float:
        return max(0.0, low + (high - low) * share)

    def grow_seconds(low: float, high: float) -> float:
        return max(0.0, low + max(0.0, high - low) * share)  # a larger batch is never faster

    def grow_bytes(low: int, high: int) -> int:
        return low if low == high else round_up(math.ceil(grow(low, high)), ROUNDING_BYTES)

    return replace(
        second,
        operators=tuple(
            replace(
                high,
                seconds=grow_seconds(low.seconds, high.seconds),
                workspace_bytes=grow_bytes(low.workspace_bytes, high.workspace_bytes),
            )
            for low, high in zip(first.operators, second.operators, strict=True)
        ),
        storages=tuple(
            replace(high, nbytes=grow_bytes(low.nbytes, high.nbytes))
            for low, high in zip(first.storages, second.storages, strict=True)
        ),
        base_bytes=round(grow(first.base_bytes, second.base_bytes)),
        step_seconds=grow_seconds(first.step_seconds, second.step_seconds),
    )
