"""Texts of a replay: the figures, where an allocator fails, and advice where it would help."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.replay.replaying import Failure, ReplayOutcome
from benchmarks.replay.texts import AllocatorReport, LayoutReport, TraceDemand, format_replay
from tests.unit.benchmarks_replay.values import ALLOCATIONS

GIB = 1 << 30
MIB = 1 << 20
DEMAND = TraceDemand(
    present_bytes=4096, kept=1, kept_bytes=4096,
    max_live_bytes=10 * GIB, max_live_rounded_bytes=10 * GIB + 64 * MIB,
)  # fmt: skip
TORCH = AllocatorReport(
    key="torch_native",
    name="torch",
    free=ReplayOutcome(
        peak_reserved_bytes=12 * GIB, peak_allocated_bytes=11 * GIB, stranded_bytes=900 * MIB
    ),
)
PLANNED = AllocatorReport(
    key="planned",
    name="planned addresses",
    free=ReplayOutcome(
        peak_reserved_bytes=int(10.2 * GIB), peak_allocated_bytes=10 * GIB, stranded_bytes=9 * GIB
    ),
    is_planned=True,
    layout=LayoutReport(
        height_bytes=int(10.2 * GIB), lower_bound_bytes=10 * GIB + 64 * MIB,
        hits=40, hit_bytes=30 * GIB, requests=43, request_bytes=32 * GIB, maps=3, splits=1,
        former_splits=35,
    ),
)  # fmt: skip
FAILURE = Failure(
    event=4,
    block=1,
    asked_bytes=3384 * MIB,
    reserved_bytes=int(56.6 * GIB),
    allocated_bytes=int(53.87 * GIB),
)


@pytest.mark.promise("F15")
def test_text_when_without_a_budget_then_the_figures() -> None:
    assert (
        format_replay(ALLOCATIONS, DEMAND, [TORCH, PLANNED])
        == """\
Bündel: 3 blocks in 5 events
from before the step: 1 (4.00 KiB); never given back: 1 (4.00 KiB)
most in use at once: 10.00 GiB requested, 10.06 GiB in blocks of whole 512 bytes (internal \
fragmentation 0.63%)

allocator                          reserved   in blocks  external  in blocks/reserved  \
requested/reserved  unused
torch                              12.00 GiB  11.00 GiB  +19.25%   91.7%               \
83.3%               900.00 MiB
planned addresses (layout +1.37%)  10.20 GiB  10.00 GiB  +1.37%    98.0%               \
98.0%               204.80 MiB

planned addresses: 40 of 43 requests of a step lie as planned (93.75% of the bytes), which maps 3 \
granules and splits 1 cached blocks (35 before)"""
    )


@pytest.mark.promise("E4")
def test_text_when_a_budget_is_too_small_then_where_and_what_is_held() -> None:
    within = dataclasses.replace(TORCH.free, failure=FAILURE, stranded_bytes=0)
    failing = dataclasses.replace(TORCH, within=within)
    fitting = dataclasses.replace(PLANNED, within=PLANNED.free)
    text = format_replay(ALLOCATIONS, DEMAND, [failing, fitting], budget_bytes=60 * GIB)
    *_, torch, planned, _, _, _, failure = text.splitlines()
    assert torch.endswith("out of memory")
    assert planned.endswith("fits")
    assert failure == (
        "torch: out of memory at event 4 of 5: 3.30 GiB requested in forward (model.py:12); "
        "56.60 GiB reserved, 53.87 GiB allocated"
    )


def test_text_when_a_step_gets_no_layout_then_why() -> None:
    report = dataclasses.replace(PLANNED, layout=None)
    text = format_replay(ALLOCATIONS, DEMAND, [TORCH, report])
    assert "(layout" not in text
    assert text.splitlines()[-1] == (
        "planned addresses: the step gets none, because too few of its bytes repeat or are of one "
        "stream"
    )
