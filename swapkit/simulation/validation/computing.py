"""Checks that operators run in order, and that recomputed ones find what they need."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from swapkit.ir.machines import Machine
from swapkit.ir.plans import Action, Schedule
from swapkit.ir.traces import BEFORE, Phase, Trace, is_wait, starts_transfer
from swapkit.simulation.validation.gaps import Gap, Touch, find_part

# ---- computing -----------------------------------------------------------------------------------
#
# Checks that operators run in order and long enough, and that stalls are as stated.
#
# An operator that only waits for a transfer between ranks may take less than in the trace, by what
# was delayed since the latest start of a transfer (or since the operator before, if there is none).

Span = tuple[float, float]


def check_computing(
    trace: Trace, schedule: Schedule, machine: Machine, demand: Demand, tolerance: float
) -> Iterator[str]:
    """Yield operators that start too early or are too short, and stalls that are not as stated."""
    before = 0.0
    for number, (start, end) in enumerate(zip(schedule.starts, schedule.ends, strict=True)):
        if start < before - tolerance:
            yield f"operator {number}: starts at {start:g}, but the previous one ends at {before:g}"
        work = demand.rerun_seconds(trace, number)
        if waits(trace, number):
            work = max(work, _find_arrival(trace, schedule, number) - start)
        else:
            work += trace.operators[number].seconds
        if end - start < work - tolerance:
            yield f"operator {number}: lasts {end - start:g} s, but needs {work:g}"
        before = end
    yield from _check_interference(trace, schedule, machine, demand, tolerance)
    yield from _check_stalls(schedule, tolerance)


def waits(trace: Trace, number: int) -> bool:
    """Return whether an operator waits for a transfer between ranks."""
    return is_wait(trace.operators[number].name) and number > 0


def _find_arrival(trace: Trace, schedule: Schedule, number: int) -> float:
    """Return when the transfer that an operator waits for is done."""
    began = number - 1
    while began > 0 and not starts_transfer(trace.operators[began].name):
        began -= 1
    if not starts_transfer(trace.operators[began].name):
        began = number - 1
    between = trace.operators[began + 1 : number + 1]
    return schedule.ends[began] + math.fsum(each.seconds for each in between)


def _check_interference(
    trace: Trace, schedule: Schedule, machine: Machine, demand: Demand, tolerance: float
) -> Iterator[str]:
    """Yield runs of operators without a wait that are too short for the concurrent copies."""
    copies = _join(
        [(each.out_start, each.out_end) for each in schedule.transfers]
        + [(each.in_start, each.in_end) for each in schedule.transfers]
    )
    slowed = machine.interference / (1 + machine.interference)
    first, work, disturbed = 0, 0.0, 0.0
    for number, (start, end) in enumerate(zip(schedule.starts, schedule.ends, strict=True)):
        if waits(trace, number):  # copies do not slow down others' transfers
            work += end - start
        else:
            work += trace.operators[number].seconds + demand.rerun_seconds(trace, number)
            disturbed += overlap(start, end, copies)[0]
        is_last = number + 1 == len(schedule.starts)
        if not is_last and schedule.starts[number + 1] - end <= tolerance:
            continue
        lasted = end - schedule.starts[first]
        if lasted - slowed * disturbed < work - tolerance * (number - first + 1):
            yield (
                f"operators {first} to {number}: last {lasted:g} s, but need {work:g}, and copies "
                f"slow them down for {disturbed:g}"
            )
        first, work, disturbed = number + 1, 0.0, 0.0


def _check_stalls(schedule: Schedule, tolerance: float) -> Iterator[str]:
    """Yield operators whose wait differs from the sum of their stalls."""
    stated: defaultdict[int, float] = defaultdict(float)
    for stall in schedule.stalls:
        if not 0 <= stall.operator < len(schedule.starts):
            yield f"operator {stall.operator}: has a stall, but does not exist"
        stated[stall.operator] += stall.seconds
    before = 0.0
    for number, (start, end) in enumerate(zip(schedule.starts, schedule.ends, strict=True)):
        if abs(start - before - stated[number]) > 2 * tolerance:
            yield (
                f"operator {number}: waits {start - before:g} s, but its stalls add up to "
                f"{stated[number]:g} s"
            )
        before = end


def _join(spans: list[Span]) -> list[Span]:
    """Return spans in order, with overlapping spans merged."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def overlap(start: float, end: float, spans: Sequence[Span]) -> tuple[float, int]:
    """Return the total time of sorted spans inside `start` to `end`, and how many overlap it."""
    first = max(0, bisect_left(spans, (start, start)) - 1)
    total, count = 0.0, 0
    for other_start, other_end in spans[first:]:
        if other_start >= end:
            break
        shared = min(end, other_end) - max(start, other_start)
        if shared > 0:
            total += shared
            count += 1
    return total, count


# ---- recomputing ---------------------------------------------------------------------------------
#
# The needs of recomputing: when storages must be present, and which operators run again.
#
# The operators that run again are fixed once forward has run. They make all inputs that no longer
# exist when the storage is first used, even if a plan recomputes the storage earlier, as an input
# of another one.


@dataclass(slots=True, kw_only=True)
class Demand:
    """The decisions of a plan, by storage, and their requirements.

    `actions` has the storages that are not kept, `gaps` the longest time that each may be away, and
    `needs` the operator by which each must be back. `reruns` has the operators that run again
    before an operator. `violations` lists storages that cannot be recomputed.
    """

    actions: Mapping[int, Action]
    gaps: Mapping[int, Gap]
    needs: dict[int, int] = field(default_factory=dict)
    reruns: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    violations: list[str] = field(default_factory=list)

    def rerun_seconds(self, trace: Trace, operator: int) -> float:
        """Return the total time of the operators that run again before `operator`."""
        return sum(trace.operators[step].seconds for step in self.reruns.get(operator, ()))


class Resolver:
    """Finds the demand of a plan.

    `actions` has the decisions for storages with a gap that are not kept. `scheduled` has the
    operator before which a schedule recomputes a storage; None: as late as possible.
    """

    def __init__(
        self,
        trace: Trace,
        touches: list[list[Touch]],
        gaps: Mapping[int, Gap],
        actions: Mapping[int, Action],
        scheduled: Mapping[int, int] | None = None,
    ) -> None:
        self.trace, self.touches, self.gaps, self.actions = trace, touches, gaps, actions
        self.scheduled = scheduled or {}
        needs = {storage: gaps[storage].need for storage in actions}
        self.demand = Demand(actions=actions, gaps=gaps, needs=needs)

    def resolve(self) -> Demand:
        """Return the demand. Newest storages come first, because inputs are always older."""
        makers: defaultdict[int, list[int]] = defaultdict(list)
        for storage, action in self.actions.items():
            if action is Action.RECOMPUTE:
                makers[self.trace.storages[storage].birth].append(storage)
        for maker in sorted(makers, reverse=True):
            self._resolve_together(maker, makers[maker])
        return self.demand

    def _resolve_together(self, maker: int, storages: list[int]) -> None:
        """Find the needs of recomputing `storages`, all made by `maker`."""
        needs = self.demand.needs
        if maker == BEFORE:
            named = ", ".join(map(str, storages))
            self._object(f"storage {named}: no operator of the step makes it")
            return
        need = min(needs[storage] for storage in storages)
        for storage in storages:
            asked = self.scheduled.get(storage, need)
            if self.gaps[storage].last < asked < need:
                need = asked
        for storage in storages:
            if self.gaps[storage].last < need:  # else forward still uses it, and it is made later
                needs[storage] = need
            self._check_sole_writer(storage, maker, needs[storage])
        for need, use in {(needs[storage], self.gaps[storage].need) for storage in storages}:
            self._rerun(maker, need, use)

    def _rerun(self, maker: int, need: int, use: int) -> None:
        """Add the rerun of `maker` before `need`, and the reruns that make its missing inputs.

        `use`: the first operator that uses the result.
        """
        waiting = [maker]
        seen: set[int] = set()
        while waiting:
            step = waiting.pop()
            if step in seen:
                continue
            seen.add(step)
            self.demand.reruns[need].add(step)
            operator = self.trace.operators[step]
            if not operator.is_repeatable:
                self._object(f"operator {step} ({operator.name}) is not repeatable")
            for storage in set(operator.writes):
                if self.trace.storages[storage].birth < step:
                    self._object(f"operator {step}, when rerun, changes storage {storage}")
            waiting += [
                self.trace.storages[storage].birth
                for storage in sorted(set(operator.reads))
                if self._is_missing(storage, step, need, use)
            ]

    def _is_missing(self, storage: int, step: int, need: int, use: int) -> bool:
        """Return whether `storage` must be made again for `step`; if not, require it by `need`."""
        storage = find_part(self.trace, self.touches, storage, use)
        about = self.trace.storages[storage]
        where = f"operator {step}, when rerun before operator {need}, reads storage {storage}"
        if any(touch.is_write and step <= touch.operator < need for touch in self.touches[storage]):
            self._object(f"{where}, which was written in between")
            return False
        is_there = use < about.death
        if is_there and about.keeps_bytes(self._last_use(storage), use):
            if storage in self.actions and self.gaps[storage].last < need:
                self.demand.needs[storage] = min(self.demand.needs[storage], need)
            return False
        if about.birth == BEFORE:
            why = "the training loop may have changed" if is_there else "is gone"
            self._object(f"{where}, which {why} by then")
            return False
        self._check_sole_writer(storage, about.birth, need)
        return True

    def _last_use(self, storage: int) -> int:
        """Return the last operator of backward that reads a storage; BEFORE: none."""
        touches = self.touches[storage]
        reads = [each for each in touches if each.phase is Phase.BACKWARD and each.is_read]
        return max((each.operator for each in reads), default=BEFORE)

    def _check_sole_writer(self, storage: int, maker: int, need: int) -> None:
        writers = [
            each.operator
            for each in self.touches[storage]
            if each.is_write and each.operator < need
        ]
        if writers != [maker]:
            self._object(
                f"storage {storage}: rerunning operator {maker} does not make it, as its writers "
                f"are {writers or 'none'}"
            )

    def _object(self, violation: str) -> None:
        if violation not in self.demand.violations:
            self.demand.violations.append(violation)
