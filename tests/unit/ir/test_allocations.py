"""Allocation traces: lives, most in use, and the requests of intervals and recorded steps."""

from __future__ import annotations

import dataclasses

import pytest

from swapkit.errors import InvalidDocument
from swapkit.ir.allocations import (
    AllocationTrace,
    allocations_of_intervals,
    allocations_of_step,
    max_live_bytes,
    spans_of,
)
from swapkit.ir.checks import MOST_TOTAL_BYTES, check_allocations
from swapkit.ir.traces import Kind, Operator, Phase, Storage, Trace
from tests.unit.ir.values import ALLOCATIONS


def moves_of(trace: AllocationTrace) -> list[str]:
    """Return the events as short words: +0 takes block 0, -0 gives it, | ends a step."""
    sign = {"take": "+", "give": "-", "step": "|"}
    return [sign[each.kind.value] + str("" if each.block is None else each.block)
            for each in trace.events]  # fmt: skip


def test_spans_when_a_block_is_not_given_then_to_the_end() -> None:
    assert spans_of(ALLOCATIONS) == ((0, 1, 4), (6, 3, 5), (4096, 100, 513))


def test_max_live_when_rounded_then_of_rounded_blocks() -> None:
    assert max_live_bytes(ALLOCATIONS) == 4096 + 513
    assert max_live_bytes(ALLOCATIONS, rounding=512) == 4096 + 1024


def test_repr_when_there_are_many_blocks_then_one_line() -> None:
    assert repr(ALLOCATIONS) == ("<AllocationTrace Bündel: 3 blocks, 6 events, most live 4.50 KiB>")


def test_intervals_when_they_touch_then_gives_come_first() -> None:
    trace = allocations_of_intervals([(2, 9, 20), (0, 2, 10), (2, 3, 30)])
    assert [block.nbytes for block in trace.blocks] == [10, 20, 30]
    assert moves_of(trace) == ["+0", "-0", "+1", "+2", "-2", "-1"]
    assert max_live_bytes(trace) == 50
    check_allocations(trace)


@pytest.mark.parametrize("interval", [(1, 1, 5), (2, 1, 5), (0, 1, 0)])
def test_intervals_when_one_is_empty_then_named(interval: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidDocument, match=r"intervals\[1\]: expected a start before the end"):
        allocations_of_intervals([(0, 1, 1), interval])


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
    check_allocations(trace)
    assert trace.present == 3
    names = [(block.nbytes, block.label) for block in trace.blocks]
    assert names == [
        (5000, "outside the recorded storages"), (1000, "state"), (7, "input"),
        (10, "layers.0: mm"), (64, "workspace of mm"), (20, "relu"),
    ]  # fmt: skip
    # The input ends before relu. The storage that continues relu's keeps its memory to the end.
    assert moves_of(trace) == ["+0", "+1", "+2", "+3", "+4", "-4", "-2", "+5", "-3", "|"]
    assert (trace.device, trace.label) == ("cuda:1", "tiny")
    assert [block.phase for block in trace.blocks[2:4]] == [None, Phase.FORWARD]


def test_step_when_converted_then_its_peak_is_the_trace_s() -> None:
    trace = allocations_of_step(STEP)
    assert max_live_bytes(trace) == STEP.peak_bytes == 5000 + 1000 + 7 + 10 + 64


def test_check_when_the_bytes_overflow_then_refused() -> None:
    block = dataclasses.replace(ALLOCATIONS.blocks[0], nbytes=1 << 60)
    trace = dataclasses.replace(ALLOCATIONS, blocks=(block,) * 5, events=())
    with pytest.raises(InvalidDocument, match=f"at most {MOST_TOTAL_BYTES} bytes together"):
        check_allocations(trace)
