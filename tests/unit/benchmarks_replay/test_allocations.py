"""Allocation traces: lives, most in use, and the requests of intervals and recorded steps."""

from __future__ import annotations

from benchmarks.replay.allocations import (
    allocations_of_intervals,
    allocations_of_step,
    max_live_bytes,
)
from swapkit.ir.traces import Kind, Operator, Phase, Storage, Trace
from tests.unit.benchmarks_replay.values import ALLOCATIONS, moves_of


def test_max_live_when_rounded_then_of_rounded_blocks() -> None:
    assert max_live_bytes(ALLOCATIONS) == 4096 + 513
    assert max_live_bytes(ALLOCATIONS, rounding=512) == 4096 + 1024


def test_intervals_when_they_touch_then_gives_come_first() -> None:
    trace = allocations_of_intervals([(2, 9, 20), (0, 2, 10), (2, 3, 30)])
    assert [block.nbytes for block in trace.blocks] == [10, 20, 30]
    assert moves_of(trace) == ["+0", "-0", "+1", "+2", "-2", "-1"]
    assert max_live_bytes(trace) == 50


def test_intervals_when_one_is_empty_then_left_out() -> None:
    trace = allocations_of_intervals([(1, 1, 5), (0, 1, 0), (0, 1, 7)])
    assert [block.nbytes for block in trace.blocks] == [7]
    assert moves_of(trace) == ["+0", "-0"]


def operator(name: str, workspace_bytes: int = 0, module: str = "") -> Operator:
    return Operator(
        name=name, seconds=0.1, phase=Phase.FORWARD, workspace_bytes=workspace_bytes, module=module
    )


STEP = Trace(
    operators=(operator("mm", 64, "layers.0"), operator("relu"), operator("add")),
    storages=(
        Storage(nbytes=1000, kind=Kind.STATE, death=3),
        Storage(nbytes=10, birth=0, death=2),
        Storage(nbytes=20, birth=1, death=2),
        Storage(nbytes=20, birth=2, death=3, continues=2),
        Storage(nbytes=0, birth=1, death=3),
        Storage(nbytes=7, death=1, kind=Kind.INPUT),
        Storage(nbytes=9, birth=1, death=1),
    ),
    base_bytes=5000,
    device="cuda:1",
    label="tiny",
)


def test_step_when_converted_then_memory_lives_as_recorded() -> None:
    trace = allocations_of_step(STEP)
    assert trace.present == 3
    names = [(block.nbytes, block.label) for block in trace.blocks]
    assert names == [
        (5000, "outside the recorded storages"), (1000, "state"), (7, "input"),
        (10, "layers.0: mm"), (64, "workspace of mm"), (20, "relu"),
    ]  # fmt: skip
    # The input ends before relu. The storage that continues relu's keeps its memory to the end.
    assert moves_of(trace) == ["+0", "+1", "+2", "+3", "+4", "-4", "-2", "+5", "-3"]
    assert trace.label == "tiny"
    assert [block.phase for block in trace.blocks[2:4]] == [None, Phase.FORWARD]


def test_step_when_converted_then_its_peak_is_the_trace_s() -> None:
    trace = allocations_of_step(STEP)
    assert max_live_bytes(trace) == STEP.peak_bytes == 5000 + 1000 + 7 + 10 + 64
