"""Events of the Trace Event Format, which Perfetto and chrome://tracing read.

A *process* holds *threads*, which are the rows of a viewer, and counters. Times are nanoseconds
here and microseconds in the file, with three decimals, so that no nesting is lost by rounding.

Source:
    Trace Event Format, Google, 2016 (phases X, C, i, s, t, f and M).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Event: TypeAlias = dict[str, Any]
Values: TypeAlias = Mapping[str, "str | int | float | bool | None"]

_NS_PER_US = 1000
# Of events at the same time: a slice begins before those inside it and before arrows that bind to
# it.
_ORDER = {"M": 0, "C": 1, "X": 2, "i": 3, "s": 4, "t": 4, "f": 4}


class Slice(NamedTuple):
    """A stretch of time on a row. A value that is None is left out."""

    name: str
    start_ns: int
    end_ns: int
    category: str
    values: Values | None = None


class Tracks:
    """The rows and counters of one process."""

    def __init__(self, process: int, name: str) -> None:
        """Begin without a row; viewers list processes in the order of their numbers."""
        self.events: list[tuple[int, int, int, Event]] = []  # each after what it is sorted by
        self._process = process
        self._arrows = 0
        self._describe(0, "process", name, process)

    def name_row(self, row: int, name: str) -> None:
        """Name a row; rows are listed in the order of their numbers."""
        self._describe(row, "thread", name, row)

    def add_slice(self, row: int, each: Slice) -> None:
        """Add a slice. Slices of one row must be nested or apart."""
        length = each.end_ns - each.start_ns
        values = {name: value for name, value in (each.values or {}).items() if value is not None}
        more: Event = {"dur": length / _NS_PER_US, "cat": each.category, "args": values}
        self._add("X", each.name, row, each.start_ns, more, length)

    def add_rows(self, title: str, first: int, slices: Sequence[Slice]) -> list[int]:
        """Add slices that may overlap to as few rows as possible, from row `first` on.

        Returns:
            The row of each.
        """
        rows, ends = [first] * len(slices), list[int]()
        for at in sorted(range(len(slices)), key=lambda at: slices[at][1:3]):
            each = slices[at]
            number = next((n for n, end in enumerate(ends) if end <= each.start_ns), len(ends))
            if number == len(ends):
                ends.append(0)
                self.name_row(first + number, f"{title} {number + 1}" if number else title)
            ends[number], rows[at] = each.end_ns, first + number
            self.add_slice(rows[at], each)
        return rows

    def add_mark(self, row: int, name: str, time_ns: int, values: Values) -> None:
        """Add a mark on a row."""
        self._add("i", name, row, time_ns, {"s": "t", "args": values})

    def add_count(self, name: str, time_ns: int, values: Mapping[str, float]) -> None:
        """Set a counter from a time on; each key is a line."""
        self._add("C", name, 0, time_ns, {"args": values})

    def add_arrow(self, name: str, points: Sequence[tuple[int, int]]) -> None:
        """Add an arrow through slices: by row and time, the innermost one that begins there."""
        self._arrows += 1
        label: Event = {"cat": "storage", "id": f"{self._process}.{self._arrows}"}
        for number, (row, time_ns) in enumerate(points):
            phase = "s" if number == 0 else "f" if number == len(points) - 1 else "t"
            more = label if phase == "s" else {**label, "bp": "e"}
            self._add(phase, name, row, time_ns, more)

    def _describe(self, row: int, what: str, name: str, place: int) -> None:
        self._add("M", f"{what}_name", row, None, {"args": {"name": name}})
        self._add("M", f"{what}_sort_index", row, None, {"args": {"sort_index": place}})

    def _add(
        self, phase: str, name: str, row: int, time_ns: int | None, more: Event, length: int = 0
    ) -> None:
        event: Event = {"ph": phase, "name": name, "pid": self._process, "tid": row}
        if time_ns is not None:
            event["ts"] = time_ns / _NS_PER_US
        order = (-1 if time_ns is None else time_ns, _ORDER[phase], -length)
        self.events.append((*order, {**event, **more}))


def format_document(processes: Iterable[Tracks], about: Values) -> dict[str, object]:
    """Return the content of a file: events in the order of time, enclosing slices first.

    Args:
        processes: whose events it has.
        about: shown as the file's own information.
    """
    events = [each for process in processes for each in process.events]
    return {
        "traceEvents": [event for *_, event in sorted(events, key=lambda each: each[:3])],
        "displayTimeUnit": "ms",
        "otherData": dict(about),
    }
