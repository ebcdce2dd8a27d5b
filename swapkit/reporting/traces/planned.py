"""A recorded step, and its plan as simulated, as tracks for a viewer of traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swapkit.ir.plans import Action, Tier
from swapkit.ir.traces import Phase
from swapkit.reporting.traces.planned_memory import (
    OperatorTimes,
    device_levels,
    host_levels,
    times_of,
)
from swapkit.reporting.traces.tracks import Row, Slice, spread
from swapkit.simulation.event_moves import find_event_lives

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from swapkit.ir.plans import Decision, Plan, Schedule
    from swapkit.ir.traces import Operator, Trace
    from swapkit.planning.reasons import Reason
    from swapkit.reporting.traces.tracks import Tracks

PROCESS = 1
COMPUTE = Row(PROCESS, 1)
RECOMPUTE = Row(PROCESS, 2)
_COPY_OUT, _COPY_IN = 100, 200  # the first row of each, if copies overlap
_NS_PER_S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A recorded step and, once there is a plan, the plan with its simulated schedule."""

    trace: Trace
    plan: Plan | None = None
    schedule: Schedule | None = None  # None: nothing waits, nothing moves
    reasons: Sequence[Reason] = ()
    budget_bytes: int = 0


def add_planned_step(tracks: Tracks, step: PlannedStep, *, begin_ns: int) -> None:
    """Add the tracks of a step: operators, copies, recomputations, and its memory.

    Args:
        tracks: to add to.
        step: the step.
        begin_ns: where it begins on the time axis.
    """
    _PlannedTracks(tracks, step, begin_ns).add()


class _PlannedTracks:
    """The tracks of one step."""

    def __init__(self, tracks: Tracks, step: PlannedStep, begin_ns: int) -> None:
        self.tracks = tracks
        self.step = step
        self.trace = step.trace
        self.begin_ns = begin_ns
        schedule = step.schedule
        self.times = (
            times_of(step.trace)
            if schedule is None
            else OperatorTimes(schedule.starts, schedule.ends)
        )
        self.reasons: Mapping[int, Reason] = {each.storage: each for each in step.reasons}
        self.decisions: Mapping[int, Decision] = (
            {} if step.plan is None else {each.storage: each for each in step.plan.decisions}
        )
        self.again = self._share_recomputation()

    def add(self) -> None:
        """Add everything."""
        is_planned = self.step.schedule is not None
        name = "planned step (simulated)" if is_planned else "recorded step (without a plan)"
        self.tracks.name_process(PROCESS, name)
        self.tracks.name_thread(COMPUTE, "compute")
        self._add_operators()
        if self.step.schedule is not None:
            self._add_stalls(self.step.schedule)
            self._add_recomputations(self.step.schedule)
            self._add_copies(self.step.schedule)
        self._add_counters()

    def at(self, seconds: float) -> int:
        """Return a time of the step on the time axis."""
        return self.begin_ns + round(seconds * _NS_PER_S)

    # ---- computing -------------------------------------------------------------------------------

    def _add_operators(self) -> None:
        """Add a slice for each operator, inside slices of its phase and its modules."""
        has_microbatches = len({each.microbatch for each in self.trace.operators}) > 1
        open_slices: list[tuple[str, int]] = []  # name and begin, the outermost first
        end = self.at(0.0)
        for number, operator in enumerate(self.trace.operators):
            begin = self.at(self.times.starts[number])
            path = _path_of(operator, has_microbatches=has_microbatches)
            same = _count_common([name for name, _ in open_slices], path)
            self._close(open_slices, same, end)
            open_slices += [(name, begin) for name in path[same:]]
            end = self.at(self.times.ends[number])
            self.tracks.add_slice(
                COMPUTE,
                Slice(
                    operator.name or "idle",
                    self.starts_of(number),
                    end,
                    "operator" if operator.name else "idle",
                    self._operator_values(number, operator),
                ),
            )
        self._close(open_slices, 0, end)

    def _close(self, open_slices: list[tuple[str, int]], keep: int, end: int) -> None:
        while len(open_slices) > keep:
            name, begin = open_slices.pop()
            category = "module" if open_slices else "phase"
            self.tracks.add_slice(COMPUTE, Slice(name, begin, end, category))

    def starts_of(self, number: int) -> int:
        """Return when an operator itself starts, after what is recomputed for it."""
        return self.at(self.times.starts[number]) + sum(
            nanoseconds for _, nanoseconds in self.again.get(number, ())
        )

    def _operator_values(self, number: int, operator: Operator) -> dict[str, str | int | None]:
        made = sum(
            self.trace.storages[each].nbytes
            for each in operator.writes
            if self.trace.storages[each].birth == number
        )
        return {
            "operator": number,
            "module": operator.module or None,
            "phase": operator.phase.value,
            "made_bytes": made,
            "workspace_bytes": operator.workspace_bytes or None,
        }

    def _add_stalls(self, schedule: Schedule) -> None:
        for stall in schedule.stalls:
            end = self.at(self.times.starts[stall.operator])
            before = (
                self.at(self.times.ends[stall.operator - 1]) if stall.operator else self.begin_ns
            )
            values = {"storage": stall.storage, "module": self._site(stall.storage)}
            begin = max(before, end - round(stall.seconds * _NS_PER_S))
            self.tracks.add_slice(COMPUTE, Slice("wait for a copy", begin, end, "stall", values))

    # ---- recomputing -----------------------------------------------------------------------------

    def _share_recomputation(self) -> dict[int, list[tuple[int, int]]]:
        """Return by operator the storages made before it, each with its nanoseconds.

        A schedule has the time of all of them together with the operator's own. It is divided in
        proportion to the time that each would take alone.
        """
        schedule = self.step.schedule
        if schedule is None:
            return {}
        made: dict[int, list[int]] = {}
        for each in schedule.recomputations:
            made.setdefault(each.operator, []).append(each.storage)
        shared = {}
        for number, storages in made.items():
            alone = [self._seconds_alone(storage) for storage in storages]
            work = sum(alone) + self.trace.operators[number].seconds
            span = self.times.ends[number] - self.times.starts[number]
            rate = span / work if work > 0 else 0.0
            shared[number] = [
                (storage, int(seconds * rate * _NS_PER_S))
                for storage, seconds in zip(storages, alone, strict=True)
            ]
        return shared

    def _seconds_alone(self, storage: int) -> float:
        reason = self.reasons.get(storage)
        return 0.0 if reason is None else reason.recompute_seconds or 0.0

    def _add_recomputations(self, schedule: Schedule) -> None:
        if schedule.recomputations:
            self.tracks.name_thread(RECOMPUTE, "recompute")
        for number, made in self.again.items():
            begin = self.at(self.times.starts[number])
            for storage, nanoseconds in made:
                values = {**self._storage_values(storage), "before_operator": number}
                name = f"recompute {self._name(storage)}"
                each = Slice(name, begin, begin + nanoseconds, "recompute", values)
                self.tracks.add_slice(RECOMPUTE, each)
                begin += nanoseconds

    # ---- copies ----------------------------------------------------------------------------------

    def _add_copies(self, schedule: Schedule) -> None:
        out: list[Slice] = []
        back: list[Slice] = []
        for each in schedule.transfers:
            values = self._storage_values(each.storage)
            name = self._name(each.storage)
            spans = ((each.out_start, each.out_end), (each.in_start, each.in_end))
            for slices, (begin, end) in zip((out, back), spans, strict=True):
                slices.append(
                    Slice(
                        name, self.at(begin), self.at(end), "copy", _with_speed(values, end - begin)
                    )
                )
        rows = {}
        for title, first, slices in (("copy out", _COPY_OUT, out), ("copy in", _COPY_IN, back)):
            rows[title] = self._add_rows(title, first, slices)
        lives = find_event_lives(self.trace)
        events = self.trace.events
        for each, leaving, coming in zip(schedule.transfers, out, back, strict=True):
            life = lives.get(each.storage)
            save = self.trace.storages[each.storage].birth
            points = []
            if life is not None and life.last_save < len(events):
                save = max(events[life.last_save].operator - 1, 0)
            if save >= 0:
                points.append((COMPUTE, self.starts_of(save)))
            points.append((rows["copy out"][id(leaving)], leaving.start_ns))
            points.append((rows["copy in"][id(coming)], coming.start_ns))
            if life is not None and life.first_use < len(events):
                use = min(events[life.first_use].operator, len(self.trace.operators) - 1)
                points.append((COMPUTE, self.starts_of(use)))
            self.tracks.add_arrow(self._name(each.storage), points)

    def _add_rows(self, title: str, first: int, slices: list[Slice]) -> dict[int, Row]:
        """Add copies on as many rows as run at once; return the row of each, by its identity."""
        found = {}
        for number, row_slices in enumerate(spread(slices)):
            row = Row(PROCESS, first + number)
            self.tracks.name_thread(row, f"{title} {number + 1}" if number else title)
            for each in row_slices:
                self.tracks.add_slice(row, each)
                found[id(each)] = row
        return found

    def _site(self, storage: int) -> str | None:
        return self.trace.storages[storage].module or None

    def _name(self, storage: int) -> str:
        found = self.trace.storages[storage]
        return f"{found.module} #{found.index}" if found.module else f"storage {storage}"

    def _storage_values(self, storage: int) -> dict[str, str | int | float | None]:
        found = self.trace.storages[storage]
        decision = self.decisions.get(storage)
        reason = self.reasons.get(storage)
        is_swap = decision is not None and decision.action is Action.SWAP
        return {
            "storage": storage,
            "bytes": found.nbytes,
            "kind": found.kind.value,
            "module": found.module or None,
            "index": found.index,
            "action": None if decision is None else decision.action.value,
            "tier": Tier(decision.tier).name.lower() if decision is not None and is_swap else None,
            "reason": None if reason is None else reason.why.value,
            "exposed_us": None if reason is None else reason.exposed_seconds * 1e6,
        }

    # ---- memory ----------------------------------------------------------------------------------

    def _add_counters(self) -> None:
        trace, plan, schedule = self.trace, self.step.plan, self.step.schedule
        add = self.tracks.add_count
        for level in device_levels(trace, self.times, plan, schedule):
            add(PROCESS, "device bytes", self.at(level.seconds), {"in use": level.nbytes})
        if plan is not None and schedule is not None:
            for level in device_levels(trace, self.times):
                add(PROCESS, "without moves", self.at(level.seconds), {"bytes": level.nbytes})
            for level in host_levels(plan, trace, schedule):
                add(PROCESS, "host bytes", self.at(level.seconds), {"copies": level.nbytes})
        if self.step.budget_bytes:
            for seconds in (0.0, self.times.end):
                add(PROCESS, "budget", self.at(seconds), {"bytes": self.step.budget_bytes})


def _path_of(operator: Operator, *, has_microbatches: bool) -> list[str]:
    """Return the names of the slices around an operator, the outermost first."""
    if operator.phase is Phase.IDLE:
        return []
    phase = operator.phase.value
    if has_microbatches and operator.phase is not Phase.OPTIMIZER:
        phase = f"{phase}, microbatch {operator.microbatch}"
    return [phase, *_outer_modules(operator.module)]


def _outer_modules(module: str) -> Iterator[str]:
    """Yield the paths of a module and the modules around it: `a`, `a.b` and `a.b.c` of `a.b.c`."""
    end = module.find(".")
    while end >= 0:
        yield module[:end]
        end = module.find(".", end + 1)
    if module:
        yield module


def _count_common(names: Sequence[str], others: Sequence[str]) -> int:
    count = 0
    while count < min(len(names), len(others)) and names[count] == others[count]:
        count += 1
    return count


def _with_speed(
    values: dict[str, str | int | float | None], seconds: float
) -> dict[str, str | int | float | None]:
    nbytes = values["bytes"]
    assert isinstance(nbytes, int)
    return {**values, "GB_per_s": round(nbytes / seconds / 1e9, 3) if seconds > 0 else None}
