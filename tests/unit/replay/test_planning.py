"""Planned addresses of a trace: no overlap, and streams apart."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from swapkit.ir.allocations import allocations_of_intervals, spans_of
from swapkit.replay.planning import plan_addresses
from swapkit.simulation.allocators.rounding import MIB

if TYPE_CHECKING:
    from swapkit.ir.allocations import AllocationTrace

TRACE = allocations_of_intervals([(0, 4, MIB - 5), (1, 6, 2 * MIB), (5, 9, MIB), (6, 9, 100)])


def overlaps(trace: AllocationTrace, offsets: tuple[int, ...]) -> list[tuple[int, int]]:
    spans = spans_of(trace)
    return [
        (one, other)
        for one in range(len(offsets))
        for other in range(one)
        if spans.starts[one] < spans.ends[other]
        and spans.starts[other] < spans.ends[one]
        and offsets[one] < offsets[other] + spans.nbytes[other]
        and offsets[other] < offsets[one] + spans.nbytes[one]
    ]


def test_addresses_when_planned_then_live_blocks_do_not_overlap() -> None:
    planned = plan_addresses(TRACE)
    assert overlaps(TRACE, planned.offsets) == []
    assert planned.height_bytes == planned.lower_bound_bytes == 3 * MIB  # of whole 512 bytes


def test_streams_when_there_are_several_then_share_no_addresses() -> None:
    blocks = tuple(
        dataclasses.replace(block, stream=7 * (number > 1))
        for number, block in enumerate(TRACE.blocks)
    )
    trace = dataclasses.replace(TRACE, blocks=blocks)
    planned = plan_addresses(trace)
    assert overlaps(trace, planned.offsets) == []
    assert planned.height_bytes == 3 * MIB + MIB + 512
    assert min(planned.offsets[2:]) == 3 * MIB
