"""Events of the Trace Event Format, which Perfetto and chrome://tracing read.

A *process* holds *threads*, which are the rows of a viewer, and counters. Times are nanoseconds
here and microseconds in the file, with three decimals, so that no nesting is lost by rounding.

Source:
    Trace Event Format, Google, 2016 (phases X, C, i, s, t, f and M).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Event: TypeAlias = dict[str, Any]
Values: TypeAlias = Mapping[str, "str | int | float | bool | None"]

_NS_PER_US = 1000
# Of events at the same time: a slice begins before those inside it and before arrows that bind to
# it.
_ORDER = {"M": 0, "C": 1, "X": 2, "i": 3, "s": 4, "t": 4, "f": 4}


@dataclass(frozen=True, slots=True)
class Slice:
    """A stretch of time on a row."""

    name: str
    start_ns: int
    end_ns: int
    category: str = ""
    values: Values = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Row:
    """Where a slice is drawn: a thread of a process."""

    process: int
    thread: int


class Tracks:
    """The events of one file so far."""

    def __init__(self) -> None:
        self._events: list[tuple[int, int, int, Event]] = []
        self._arrows = 0

    def name_process(self, process: int, name: str) -> None:
        """Name a process; viewers list processes in the order of their numbers."""
        self._describe(process, 0, "process_name", {"name": name})
        self._describe(process, 0, "process_sort_index", {"sort_index": process})

    def name_thread(self, row: Row, name: str) -> None:
        """Name a row; rows are listed in the order of their numbers."""
        self._describe(row.process, row.thread, "thread_name", {"name": name})
        self._describe(row.process, row.thread, "thread_sort_index", {"sort_index": row.thread})

    def add_slice(self, row: Row, each: Slice) -> None:
        """Add a slice. Slices of one row must be nested or apart."""
        event = _begin("X", each.name, each.start_ns, row)
        event["dur"] = _microseconds(each.end_ns - each.start_ns)
        event["cat"] = each.category or "slice"
        event["args"] = {name: value for name, value in each.values.items() if value is not None}
        self._add(each.start_ns, event, length=each.end_ns - each.start_ns)

    def add_instant(self, row: Row, name: str, time_ns: int, values: Values) -> None:
        """Add a mark on a row."""
        event = _begin("i", name, time_ns, row)
        event["s"] = "t"
        event["args"] = dict(values)
        self._add(time_ns, event)

    def add_count(self, process: int, name: str, time_ns: int, values: Mapping[str, float]) -> None:
        """Set a counter of a process from a time on; each key is a line."""
        event = _begin("C", name, time_ns, Row(process, 0))
        event["args"] = dict(values)
        self._add(time_ns, event)

    def add_arrow(self, name: str, points: list[tuple[Row, int]]) -> None:
        """Add an arrow through slices: at each point, the innermost one that begins there."""
        self._arrows += 1
        last = len(points) - 1
        for number, (row, time_ns) in enumerate(points):
            phase = "s" if number == 0 else "f" if number == last else "t"
            event = _begin(phase, name, time_ns, row)
            event["cat"], event["id"] = "storage", self._arrows
            if phase != "s":
                event["bp"] = "e"
            self._add(time_ns, event)

    def events(self) -> list[Event]:
        """Return all events in the order of time, enclosing slices first."""
        return [event for *_, event in sorted(self._events, key=lambda each: each[:3])]

    def _describe(self, process: int, thread: int, name: str, values: Values) -> None:
        event: Event = {"ph": "M", "name": name, "pid": process, "tid": thread}
        event["args"] = dict(values)
        self._events.append((-1, _ORDER["M"], 0, event))

    def _add(self, time_ns: int, event: Event, length: int = 0) -> None:
        self._events.append((time_ns, _ORDER[event["ph"]], -length, event))


def _begin(phase: str, name: str, time_ns: int, row: Row) -> Event:
    return {
        "ph": phase,
        "name": name,
        "pid": row.process,
        "tid": row.thread,
        "ts": _microseconds(time_ns),
    }


def _microseconds(nanoseconds: int) -> float:
    return nanoseconds / _NS_PER_US


def spread(slices: list[Slice]) -> list[list[Slice]]:
    """Return slices that may overlap as rows in which none do, as few as possible."""
    rows: list[list[Slice]] = []
    for each in sorted(slices, key=lambda one: (one.start_ns, one.end_ns)):
        row = next((row for row in rows if row[-1].end_ns <= each.start_ns), None)
        if row is None:
            rows.append([each])
        else:
            row.append(each)
    return rows


def format_document(tracks: Tracks, about: Values) -> dict[str, object]:
    """Return the content of a file. `about`: shown as the file's own information."""
    return {
        "traceEvents": tracks.events(),
        "displayTimeUnit": "ms",
        "otherData": dict(about),
    }
