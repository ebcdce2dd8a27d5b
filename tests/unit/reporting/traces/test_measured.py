"""Measured steps, and what a pool recorded, in a viewer of traces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from swapkit.ir.pool_histories import PoolEvent, PoolEventKind, PoolHistory
from swapkit.ir.runs import StepRecord
from swapkit.reporting.traces.session import MEASURED, MeasuredRun, track_measured
from swapkit.reporting.traces.tracks import format_document
from tests.support.trace_format import check_trace, counts_of, slices_of

MS = 1_000_000  # ns


STEPS = tuple(
    StepRecord(
        step=step,
        stage=stage,
        seconds=seconds,
        peak_bytes=100,
        rescues=0,
        swapped_out_bytes=7,
        swapped_in_bytes=5,
        stall_seconds=0.001,
    )
    for step, stage, seconds in ((3, "warmup", 0.010), (4, "search", 0.020), (5, "search", 0.005))
)
ENDED = 1_000 * MS


def events_of(*events: PoolEvent, steps: tuple[StepRecord, ...] = STEPS) -> list[dict[str, Any]]:
    history = PoolHistory(events=events) if events else None
    run = MeasuredRun(steps=steps, ended_ns=ENDED, budget_bytes=200, history=history)
    document = format_document([track_measured(run)], {})
    return check_trace(json.loads(json.dumps(document, allow_nan=False)))


def copy(kind: PoolEventKind, begin_ms: float, end_ms: float, group: int) -> PoolEvent:
    return PoolEvent(
        kind=kind,
        time_ns=int(end_ms * MS),
        duration_ns=int((end_ms - begin_ms) * MS),
        nbytes=4_000_000,
        group=group,
        label="layers.1",
        address=0x1000,
    )


def test_steps_when_measured_then_one_slice_each_with_its_figures() -> None:
    events = events_of()
    steps = slices_of(events, "measured", "steps")
    assert [each["name"] for each in steps] == ["step 3", "step 4", "step 5"]
    assert [each["ts"] for each in steps] == [0, 10_000, 30_000]
    assert [each["dur"] for each in steps] == [10_000, 20_000, 5_000]
    assert steps[0]["args"] == {
        "step": 3,
        "stage": "warmup",
        "peak_reserved_bytes": 100,
        "rescues": 0,
        "swapped_out_bytes": 7,
        "swapped_in_bytes": 5,
        "stall_us": pytest.approx(1000),
    }
    assert counts_of(events, MEASURED, "step peak") == [{"reserved": 100}] * 3
    assert counts_of(events, MEASURED, "budget") == [{"bytes": 200}] * 2


def test_steps_when_the_stage_changes_then_a_mark() -> None:
    marks = [each for each in events_of() if each["ph"] == "i"]
    assert [(each["name"], each["ts"]) for each in marks] == [
        ("stage: warmup", 0),
        ("stage: search", 10_000),
    ]


def test_copies_when_recorded_then_their_own_times_and_speed() -> None:
    events = events_of(
        copy(PoolEventKind.COPY_OUT, 970, 972, 1),
        copy(PoolEventKind.COPY_OUT, 971, 975, 2),  # at the same time as the first one
        copy(PoolEventKind.COPY_IN, 990, 991, 1),
    )
    [first] = slices_of(events, "measured", "copy out")
    [second] = slices_of(events, "measured", "copy out 2")
    [back] = slices_of(events, "measured", "copy in")
    assert (first["ts"], first["dur"]) == (5_000, 2_000)
    assert (second["ts"], second["dur"]) == (6_000, 4_000)
    assert (back["ts"], back["dur"]) == (25_000, 1_000)
    assert first["name"] == "layers.1"
    assert first["args"] == {
        "bytes": 4_000_000,
        "module": "layers.1",
        "group": 1,
        "address": "0x1000",
        "GB_per_s": 2.0,
    }
    arrow = [(each["ph"], each["tid"], each["ts"]) for each in events if each["ph"] in {"s", "f"}]
    assert arrow == [("s", first["tid"], 5_000), ("f", back["tid"], 25_000)]  # of group 1


def test_pool_when_recorded_then_its_bytes_and_where_it_had_no_room() -> None:
    events = events_of(
        PoolEvent(kind=PoolEventKind.CHANGE, time_ns=960 * MS, in_use_bytes=10, reserved_bytes=20),
        PoolEvent(kind=PoolEventKind.RESCUE, time_ns=970 * MS, nbytes=3, in_use_bytes=7),
        PoolEvent(kind=PoolEventKind.CHANGE, time_ns=980 * MS, in_use_bytes=0, reserved_bytes=20),
        PoolEvent(kind=PoolEventKind.OUT_OF_MEMORY, time_ns=990 * MS, nbytes=5, reserved_bytes=20),
    )
    assert counts_of(events, MEASURED, "device bytes") == [
        {"in use": 10, "reserved": 20},
        {"in use": 7, "reserved": 0},
        {"in use": 0, "reserved": 20},
        {"in use": 0, "reserved": 20},
    ]
    marks = [
        (each["name"], each["ts"], each["args"])
        for each in events
        if each["ph"] == "i" and not each["name"].startswith("stage")
    ]
    assert marks == [
        ("rescue", 10_000, {"bytes": 3}),
        ("out of memory", 30_000, {"bytes": 5}),
    ]
    # The axis begins at the earliest of all, here an event before the first step.
    assert slices_of(events, "measured", "steps")[0]["ts"] == 5_000


def test_run_when_nothing_was_measured_then_an_empty_track() -> None:
    events = events_of(steps=())
    assert not slices_of(events, "measured")
