"""Checks of a file in the Trace Event Format, after its specification.

There is no reader of this format among the packages of Python: Perfetto's own fetches a program
from a host of its vendor at its first use.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

# Of each phase: the members that it must have, besides `ph`, `name`, `pid` and `tid`.
MEMBERS = {
    "X": {"ts", "dur", "cat", "args"},
    "C": {"ts", "args"},
    "i": {"ts", "s", "args"},
    "s": {"ts", "cat", "id"},
    "t": {"ts", "cat", "id", "bp"},
    "f": {"ts", "cat", "id", "bp"},
    "M": {"args"},
}
COMMON = {"ph", "name", "pid", "tid"}
DESCRIPTIONS = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


def check_trace(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Check the whole file; return its events."""
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] in {"ms", "ns"}
    events: list[dict[str, Any]] = document["traceEvents"]
    for event in events:
        _check_members(event)
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    _check_names(events)
    _check_nesting(events)
    _check_arrows(events)
    return events


def slices_of(events: list[dict[str, Any]], process: str, thread: str = "") -> list[dict[str, Any]]:
    """Return the slices of a process, and of one of its threads, by their names."""
    names = {
        (event["pid"], event["tid"], event["name"]): event["args"].get("name")
        for event in events
        if event["ph"] == "M"
    }
    return [
        event
        for event in events
        if event["ph"] == "X"
        and names[event["pid"], 0, "process_name"].startswith(process)
        and (not thread or names[event["pid"], event["tid"], "thread_name"] == thread)
    ]


def counts_of(events: list[dict[str, Any]], pid: int, name: str) -> list[dict[str, float]]:
    """Return the values of a counter in the order of time."""
    return [
        each["args"]
        for each in events
        if each["ph"] == "C" and each["pid"] == pid and each["name"] == name
    ]


def _check_members(event: dict[str, Any]) -> None:
    assert set(event) == COMMON | MEMBERS[event["ph"]], event
    assert isinstance(event["name"], str), event
    assert event["name"], event
    assert type(event["pid"]) is int, event
    assert type(event["tid"]) is int, event
    for member in ("ts", "dur"):
        if member in event:
            assert math.isfinite(event[member]), event
            assert event[member] >= 0, event
    if event["ph"] == "C":
        assert event["args"], event
        assert all(type(value) in {int, float} for value in event["args"].values()), event
    if event["ph"] == "M":
        assert event["name"] in DESCRIPTIONS, event
    assert event.get("s", "t") in {"g", "p", "t"}, event
    assert event.get("bp", "e") == "e", event


def _check_names(events: list[dict[str, Any]]) -> None:
    """Each process and each thread with events has exactly one name."""
    named: defaultdict[tuple[object, ...], list[str]] = defaultdict(list)
    for event in events:
        if event["ph"] == "M" and event["name"].endswith("_name"):
            tid = event["tid"] if event["name"] == "thread_name" else None
            named[event["pid"], tid].append(event["args"]["name"])
    assert all(len(names) == 1 for names in named.values()), named
    for event in events:
        assert (event["pid"], None) in named, event
        if event["ph"] not in {"M", "C"}:
            assert (event["pid"], event["tid"]) in named, event


def _check_nesting(events: list[dict[str, Any]]) -> None:
    """Slices of one thread are nested or apart; an outer one comes first."""
    rows: defaultdict[tuple[int, int], list[tuple[int, str]]] = defaultdict(list)
    for event in events:
        if event["ph"] != "X":
            continue
        begin, end = _nanoseconds(event["ts"]), _nanoseconds(event["ts"] + event["dur"])
        outer = rows[event["pid"], event["tid"]]
        while outer and outer[-1][0] <= begin:
            outer.pop()
        assert not outer or end <= outer[-1][0], (event, outer)
        outer.append((end, event["name"]))


def _check_arrows(events: list[dict[str, Any]]) -> None:
    """Each arrow starts once and ends once, in this order, and each point lies in a slice."""
    arrows: defaultdict[object, list[dict[str, Any]]] = defaultdict(list)
    begins: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for event in events:
        if event["ph"] in {"s", "t", "f"}:
            arrows[event["cat"], event["name"], event["id"]].append(event)
        if event["ph"] == "X":
            begins[event["pid"], event["tid"]].add(_nanoseconds(event["ts"]))
    for points in arrows.values():
        phases = "".join(each["ph"] for each in points)
        assert phases == "s" + "t" * (len(points) - 2) + "f", points
        for each in points:
            assert _nanoseconds(each["ts"]) in begins[each["pid"], each["tid"]], each
    ids = [key[2] for key in arrows]  # type: ignore[index]
    assert len(ids) == len(set(ids))


def _nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)
