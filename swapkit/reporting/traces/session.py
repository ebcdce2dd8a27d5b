"""The steps of a session as tracks for a viewer: the simulated plan, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

from swapkit.ir.plans import Action
from swapkit.ir.pool_histories import PoolEvent, PoolEventKind, PoolHistory
from swapkit.ir.runs import StepRecord
from swapkit.ir.traces import Operator, Phase
from swapkit.reporting import steps
from swapkit.reporting.plans import name_site
from swapkit.reporting.traces.tracks import Slice, Tracks, Values
from swapkit.simulation.occupancy import Layer, measure_occupancy
from swapkit.simulation.schedules import EventLife, find_event_lives

PLANNED, MEASURED = 1, 2  # processes
_COMPUTE, _RECOMPUTE = 1, 2
_COPY_ROWS = {steps.COPY_OUT: 100, steps.COPY_IN: 200}  # the first row of each, if copies overlap
_STEPS, _EVENTS = 1, 2
_COPY_KINDS = {PoolEventKind.COPY_OUT: 100, PoolEventKind.COPY_IN: 200}  # the first row of each
_MARKS = (PoolEventKind.RESCUE, PoolEventKind.OUT_OF_MEMORY)
_NS_PER_S = 1e9


class PlannedStep:
    """A step for a viewer: its operators, copies, recomputations, and memory."""

    def __init__(self, step: steps.SimulatedStep, begin_ns: int) -> None:
        """Begin at a place of the time axis."""
        name = "recorded step (without a plan)" if step.why_not_planned else "planned step"
        self.tracks = Tracks(PLANNED, name if step.why_not_planned else f"{name} (simulated)")
        self.step = step
        self.begin_ns = begin_ns
        self.reasons = {each.storage: each for each in step.reasons}
        self.decisions = {each.storage: each for each in step.plan.decisions}
        self.starts: dict[int, int] = {}  # of the operators' slices

    def track(self, budget_bytes: int) -> Tracks:
        """Return the tracks of everything; `budget_bytes`: the limit, or 0."""
        self.tracks.name_row(_COMPUTE, "compute")
        works = list(steps.list_works(self.step))
        self._add_modules()
        self._add_computing(works)
        if self.step.schedule.recomputations:
            self.tracks.name_row(_RECOMPUTE, "recompute")
        self._add_copies(works)
        self._add_memory(budget_bytes)
        return self.tracks

    def at(self, seconds: float) -> int:
        """Return a time of the step on the time axis."""
        return self.begin_ns + round(seconds * _NS_PER_S)

    def _add_modules(self) -> None:
        """Add a slice for each stay in a phase or a module, around the operators there."""
        operators, schedule = self.step.trace.operators, self.step.schedule
        has_microbatches = len({each.microbatch for each in operators}) > 1
        open_slices: list[tuple[str, int]] = []  # name and begin, the outermost first
        end = self.at(0.0)
        for number, operator in enumerate(operators):
            path = _path_of(operator, has_microbatches=has_microbatches)
            both = zip(path, [name for name, _ in open_slices], strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
            self._close(open_slices, same, end)
            open_slices += [(name, self.at(schedule.starts[number])) for name in path[same:]]
            end = self.at(schedule.ends[number])
        self._close(open_slices, 0, end)

    def _close(self, open_slices: list[tuple[str, int]], keep: int, end: int) -> None:
        while len(open_slices) > keep:
            name, begin = open_slices.pop()
            category = "module" if open_slices else "phase"
            self.tracks.add_slice(_COMPUTE, Slice(name, begin, end, category))

    def _add_computing(self, works: list[steps.Work]) -> None:
        """Add operators, waits and recomputations."""
        for work in works:
            begin, end = self.at(work.start), self.at(work.end)
            if work.kind == steps.WAITING:
                module = self.step.trace.storages[work.storage].module or None
                values: Values = {"storage": work.storage, "module": module}
                self.tracks.add_slice(_COMPUTE, Slice(steps.WAITING, begin, end, "stall", values))
            elif work.kind == steps.RECOMPUTE:
                name = f"recompute {self._name(work.storage)}"
                values = {**self._storage_values(work.storage), "before_operator": work.operator}
                self.tracks.add_slice(_RECOMPUTE, Slice(name, begin, end, steps.RECOMPUTE, values))
            elif work.kind not in _COPY_ROWS:
                self.starts[work.operator] = begin
                name, values = self._describe_operator(work.operator)
                kind = "operator" if name else "idle"
                self.tracks.add_slice(_COMPUTE, Slice(name or kind, begin, end, kind, values))

    def _describe_operator(self, number: int) -> tuple[str, Values]:
        operator, storages = self.step.trace.operators[number], self.step.trace.storages
        made = [storages[each] for each in operator.writes if storages[each].birth == number]
        return operator.name, {
            "operator": number,
            "module": operator.module or None,
            "phase": operator.phase.value,
            "made_bytes": sum(each.nbytes for each in made),
            "workspace_bytes": operator.workspace_bytes or None,
        }

    def _add_copies(self, works: list[steps.Work]) -> None:
        """Add the copies, and arrows from what saves a storage over both to what needs it."""
        points: dict[int, list[tuple[int, int]]] = {}  # of each storage: row and begin
        for kind, first in _COPY_ROWS.items():
            copies = [work for work in works if work.kind == kind]
            slices = [self._copy_slice(work) for work in copies]
            rows = self.tracks.add_rows(kind, first, slices)
            for work, row, each in zip(copies, rows, slices, strict=True):
                points.setdefault(work.storage, []).append((row, each.start_ns))
        lives = find_event_lives(self.step.trace)
        for storage, between in points.items():
            save, use = self._find_ends(storage, lives.get(storage))
            self.tracks.add_arrow(self._name(storage), [*save, *between, *use])

    def _find_ends(self, storage: int, life: EventLife | None) -> list[list[tuple[int, int]]]:
        """Return row and begin of the operator that saves a storage, and of its first use."""
        trace = self.step.trace
        save, use = trace.storages[storage].birth, -1
        if life is not None and life.last_save < len(trace.events):
            save = max(trace.events[life.last_save].operator - 1, 0)
        if life is not None and life.first_use < len(trace.events):
            use = min(trace.events[life.first_use].operator, len(trace.operators) - 1)
        return [[(_COMPUTE, self.starts[each])] if each >= 0 else [] for each in (save, use)]

    def _copy_slice(self, work: steps.Work) -> Slice:
        nbytes = self.step.trace.storages[work.storage].nbytes
        seconds = work.end - work.start
        values = {
            **self._storage_values(work.storage),
            "GB_per_s": round(nbytes / seconds / 1e9, 3) if seconds > 0 else None,
        }
        begin, end = self.at(work.start), self.at(work.end)
        return Slice(self._name(work.storage), begin, end, "copy", values)

    def _name(self, storage: int) -> str:
        found = self.step.trace.storages[storage]
        return name_site(found.module, found.index)

    def _storage_values(self, storage: int) -> Values:
        found = self.step.trace.storages[storage]
        decision = self.decisions[storage]
        reason = self.reasons.get(storage)
        is_swap = decision.action is Action.SWAP
        return {
            "storage": storage,
            "bytes": found.nbytes,
            "kind": found.kind.value,
            "module": found.module or None,
            "index": found.index,
            "action": decision.action.value,
            "tier": decision.tier.name.lower() if is_swap else None,
            "reason": None if reason is None else reason.why.value,
            "exposed_us": None if reason is None else reason.exposed_seconds * 1e6,
        }

    def _add_memory(self, budget_bytes: int) -> None:
        step = self.step
        memory = measure_occupancy(step.trace, step.plan, step.schedule)
        counts = {"device bytes": ("in use", memory.in_use())}
        if not step.why_not_planned:
            counts["without moves"] = ("bytes", list(memory.layers[Layer.PLAIN]))
            counts["host bytes"] = ("copies", list(memory.layers[Layer.HOST]))
        for name, (key, row) in counts.items():
            before = None
            for seconds, nbytes in zip(memory.times, row, strict=True):
                if nbytes != before:
                    self.tracks.add_count(name, self.at(seconds), {key: nbytes})
                before = nbytes
        for seconds in (0.0, memory.end) if budget_bytes else ():
            self.tracks.add_count("budget", self.at(seconds), {"bytes": budget_bytes})


def _path_of(operator: Operator, *, has_microbatches: bool) -> list[str]:
    """Return the names of the slices around an operator, the outermost first."""
    if operator.phase is Phase.IDLE:
        return []
    phase = operator.phase.value
    if has_microbatches and operator.phase is not Phase.OPTIMIZER:
        phase = f"{phase}, microbatch {operator.microbatch}"
    parts = operator.module.split(".") if operator.module else []
    return [phase, *accumulate(parts, "{}.{}".format)]  # `a`, `a.b` and `a.b.c` of `a.b.c`


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """Steps one right after the other; the last of them ended at `ended_ns` (monotonic)."""

    steps: Sequence[StepRecord]
    ended_ns: int
    budget_bytes: int
    history: PoolHistory | None = None  # None: nothing was recorded

    @property
    def events(self) -> Sequence[PoolEvent]:
        """What was recorded."""
        return () if self.history is None else self.history.events

    def begins(self) -> list[int]:
        """Return when each step began (monotonic)."""
        spans = accumulate(round(each.seconds * _NS_PER_S) for each in reversed(self.steps))
        return [self.ended_ns - span for span in spans][::-1]

    @property
    def first_ns(self) -> int:
        """The earliest time of all, where the time axis begins."""
        events = [each.time_ns - each.duration_ns for each in self.events]
        return min([self.ended_ns, *self.begins()[:1], *events])


def track_measured(run: MeasuredRun) -> Tracks:
    """Return the tracks of measured steps."""
    tracks = Tracks(MEASURED, "measured")
    tracks.name_row(_STEPS, "steps")
    first_ns = run.first_ns
    _add_steps(tracks, run, first_ns)
    _add_events(tracks, run.events, first_ns)
    _add_measured_copies(tracks, run.events, first_ns)
    return tracks


def _add_steps(tracks: Tracks, run: MeasuredRun, first_ns: int) -> None:
    if not run.steps:
        return
    begins = [begin - first_ns for begin in run.begins()]
    ends = [*begins[1:], run.ended_ns - first_ns]
    stage = None
    for each, begin, end in zip(run.steps, begins, ends, strict=True):
        values: Values = {
            "step": each.step,
            "stage": each.stage,
            "peak_reserved_bytes": each.peak_bytes,
            "rescues": each.rescues,
            "swapped_out_bytes": each.swapped_out_bytes,
            "swapped_in_bytes": each.swapped_in_bytes,
            "stall_us": each.stall_seconds * 1e6,
        }
        tracks.add_slice(_STEPS, Slice(f"step {each.step}", begin, end, "step", values))
        if each.stage != stage:
            stage = each.stage
            tracks.add_mark(_STEPS, f"stage: {stage}", begin, {"step": each.step})
        tracks.add_count("step peak", begin, {"reserved": each.peak_bytes})
    for time_ns in (begins[0], ends[-1]):
        tracks.add_count("budget", time_ns, {"bytes": run.budget_bytes})


def _add_events(tracks: Tracks, events: Sequence[PoolEvent], first_ns: int) -> None:
    """Add the pool's bytes over time, and marks where it had no room."""
    if any(each.kind in _MARKS for each in events):
        tracks.name_row(_EVENTS, "rescues")
    for each in events:
        if each.kind in _COPY_KINDS:
            continue
        time_ns = each.time_ns - first_ns
        values = {"in use": each.in_use_bytes, "reserved": each.reserved_bytes}
        tracks.add_count("device bytes", time_ns, values)
        if each.kind in _MARKS:
            tracks.add_mark(_EVENTS, each.kind.value, time_ns, {"bytes": each.nbytes})


def _add_measured_copies(tracks: Tracks, events: Sequence[PoolEvent], first_ns: int) -> None:
    """Add a slice for each copy, and an arrow from each copy out to the copies back."""
    points: dict[int, list[tuple[int, int]]] = {}  # of each storage that went: row and begin
    for kind, first in _COPY_KINDS.items():
        copies = [each for each in events if each.kind is kind]
        slices = [_measured_slice(each, first_ns) for each in copies]
        rows = tracks.add_rows(kind.value, first, slices)
        for copy, row, each in zip(copies, rows, slices, strict=True):
            if kind is PoolEventKind.COPY_OUT or copy.group in points:
                points.setdefault(copy.group, []).append((row, each.start_ns))
    for group, found in points.items():
        if any(row >= _COPY_KINDS[PoolEventKind.COPY_IN] for row, _ in found):
            tracks.add_arrow(f"group {group}", sorted(found, key=lambda each: each[1]))


def _measured_slice(event: PoolEvent, first_ns: int) -> Slice:
    end = event.time_ns - first_ns
    seconds = event.duration_ns / _NS_PER_S
    values: Values = {
        "bytes": event.nbytes,
        "module": event.label or None,
        "group": event.group,
        "address": f"{event.address:#x}",
        "GB_per_s": round(event.nbytes / seconds / 1e9, 3) if seconds > 0 else None,
    }
    name = event.label or f"group {event.group}"
    return Slice(name, end - event.duration_ns, end, "copy", values)
