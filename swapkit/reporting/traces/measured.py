"""The steps that a session measured, and what its pool recorded, as tracks for a viewer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from swapkit.ir.pool_histories import PoolEventKind
from swapkit.reporting.traces.tracks import Row, Slice, spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swapkit.ir.pool_histories import PoolEvent, PoolHistory
    from swapkit.reporting.traces.tracks import Tracks, Values

PROCESS = 2
STEPS = Row(PROCESS, 1)
EVENTS = Row(PROCESS, 2)
_COPY_OUT, _COPY_IN = 100, 200
_NS_PER_S = 1e9
_COPIES = (
    (PoolEventKind.COPY_OUT, "copy out", _COPY_OUT),
    (PoolEventKind.COPY_IN, "copy in", _COPY_IN),
)
_MARKS = {
    PoolEventKind.RESCUE: "rescue",
    PoolEventKind.OUT_OF_MEMORY: "out of memory",
}


class MeasuredStep(Protocol):
    """One step of a session (`StepRecord`)."""

    @property
    def step(self) -> int:
        """Its number, from 1."""

    @property
    def stage(self) -> str:
        """Of the session."""

    @property
    def seconds(self) -> float:
        """From the end of the step before it to its own."""

    @property
    def peak_bytes(self) -> int:
        """Most bytes reserved."""

    @property
    def rescues(self) -> int:
        """How often memory was freed in the middle of an operator."""

    @property
    def swapped_out_bytes(self) -> int:
        """Copied from the device."""

    @property
    def swapped_in_bytes(self) -> int:
        """Copied back."""

    @property
    def stall_seconds(self) -> float:
        """That threads waited for copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """Steps one right after the other; the last of them ended at `ended_ns` (monotonic)."""

    steps: Sequence[MeasuredStep]
    ended_ns: int
    budget_bytes: int
    history: PoolHistory | None = None  # None, or without events: nothing was recorded

    def begins(self) -> list[int]:
        """Return when each step began (monotonic)."""
        begin, found = self.ended_ns, []
        for each in reversed(self.steps):
            begin -= round(each.seconds * _NS_PER_S)
            found.append(begin)
        return found[::-1]

    @property
    def first_ns(self) -> int:
        """The earliest time of all."""
        events = () if self.history is None else self.history.events
        return min([self.ended_ns, *self.begins()[:1], *(_begin_of(each) for each in events)])


def add_measured_run(tracks: Tracks, run: MeasuredRun) -> None:
    """Add the tracks of measured steps; their time axis begins at `run.first_ns`."""
    tracks.name_process(PROCESS, "measured")
    tracks.name_thread(STEPS, "steps")
    _add_steps(tracks, run)
    if run.history is not None and run.history.events:
        _add_events(tracks, run.history.events, run)
        _add_copies(tracks, run, run.history.events)


def _add_steps(tracks: Tracks, run: MeasuredRun) -> None:
    if not run.steps:
        return
    begins = [begin - run.first_ns for begin in run.begins()]
    ends = [*begins[1:], run.ended_ns - run.first_ns]
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
        tracks.add_slice(STEPS, Slice(f"step {each.step}", begin, end, "step", values))
        if each.stage != stage:
            stage = each.stage
            tracks.add_instant(STEPS, f"stage: {stage}", begin, {"step": each.step})
        tracks.add_count(PROCESS, "step peak", begin, {"reserved": each.peak_bytes})
    for time_ns in (begins[0], ends[-1]):
        tracks.add_count(PROCESS, "budget", time_ns, {"bytes": run.budget_bytes})


def _add_events(tracks: Tracks, events: Sequence[PoolEvent], run: MeasuredRun) -> None:
    """Add the pool's bytes over time, and marks where it had no room."""
    copies = {kind for kind, *_ in _COPIES}
    has_marks = False
    for each in events:
        if each.kind in copies:
            continue
        time_ns = each.time_ns - run.first_ns
        values = {"in use": each.in_use_bytes, "reserved": each.reserved_bytes}
        tracks.add_count(PROCESS, "device bytes", time_ns, values)
        if each.kind in _MARKS:
            has_marks = True
            amount = {"bytes": each.nbytes}
            tracks.add_instant(EVENTS, _MARKS[each.kind], time_ns, amount)
    if has_marks:
        tracks.name_thread(EVENTS, "rescues")


def _add_copies(tracks: Tracks, run: MeasuredRun, events: Sequence[PoolEvent]) -> None:
    """Add a slice for each copy, and an arrow from each copy out to the copies back."""
    places: dict[tuple[PoolEventKind, int], list[tuple[Row, int]]] = {}
    for kind, title, first in _COPIES:
        slices = [_copy_slice(each, run.first_ns) for each in events if each.kind is kind]
        for number, row_slices in enumerate(spread(slices)):
            row = Row(PROCESS, first + number)
            tracks.name_thread(row, f"{title} {number + 1}" if number else title)
            for copy in row_slices:
                tracks.add_slice(row, copy)
                group = copy.values["group"]
                assert isinstance(group, int)
                places.setdefault((kind, group), []).append((row, copy.start_ns))
    for (kind, group), points in places.items():
        back = places.get((PoolEventKind.COPY_IN, group), [])
        if kind is PoolEventKind.COPY_OUT and back:
            tracks.add_arrow(f"group {group}", sorted([*points, *back], key=lambda each: each[1]))


def _copy_slice(event: PoolEvent, first_ns: int) -> Slice:
    begin = _begin_of(event) - first_ns
    seconds = event.duration_ns / _NS_PER_S
    values = {
        "bytes": event.nbytes,
        "module": event.label or None,
        "group": event.group,
        "address": f"{event.address:#x}",
        "GB_per_s": round(event.nbytes / seconds / 1e9, 3) if seconds > 0 else None,
    }
    name = event.label or f"group {event.group}"
    return Slice(name, begin, begin + event.duration_ns, "copy", values)


def _begin_of(event: PoolEvent) -> int:
    return event.time_ns - event.duration_ns
