"""The verdict sees everything that may break."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swapkit.demo.messages import Finished, OutOfMemory, RunKind, RunSpec
from swapkit.demo.results import RunResult, problems

BUDGET_BYTES = 600 << 20
FAILURE = OutOfMemory(text="no room\nat all", step=0, series=())


def make(label: str, kind: RunKind, *, failed: bool = False) -> RunResult:
    limited = kind in (RunKind.CAPPED, RunKind.BUDGETED)
    return RunResult(
        spec=RunSpec(
            label=label,
            kind=kind,
            budget_bytes=BUDGET_BYTES if limited else None,
            size="tiny",
            seed=0,
            threads=1,
            parent_pid=1,
        ),
        losses=("0x1p+2", "0x1p+1"),
        seconds=(1.0, 2.0, 4.0),
        peak_bytes=BUDGET_BYTES if limited else 1000 << 20,
        state_bytes=100 << 20,
        finished=Finished(digest="abc"),
        out_of_memory=FAILURE if failed else None,
        series=(),
        untimed_seconds=(1.0, 1.0),
        process_peak_bytes=None,
        witness_peak_bytes=None if kind == RunKind.PLAIN else BUDGET_BYTES,
        witness_looks=9,
    )


PLAIN = make("a", RunKind.PLAIN)
POOL = make("b", RunKind.POOL)
CAPPED = make("d60", RunKind.CAPPED, failed=True)
BUDGETED = make("e60", RunKind.BUDGETED)


def test_problems_when_all_is_well_then_none() -> None:
    assert problems((PLAIN, POOL, CAPPED, BUDGETED)) == ()


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (replace(CAPPED, out_of_memory=None), "d60 did not run out of memory"),
        (replace(BUDGETED, out_of_memory=FAILURE), "e60 ran out of memory in step 1: no room"),
        (replace(POOL, out_of_memory=FAILURE), "b ran out of memory in step 1: no room"),
        (
            replace(BUDGETED, losses=("0x1p+2", "0x1.8p+1")),
            "e60 is not bit-equal to a: the losses differ from step 2 on",
        ),
        (
            replace(BUDGETED, finished=Finished(digest="x")),
            "e60 is not bit-equal to a: the losses are equal, the final parameters differ",
        ),
        (replace(BUDGETED, losses=("0x1p+2",)), "e60 is not bit-equal to a"),
        (replace(POOL, finished=Finished(digest="x")), "b is not bit-equal to a"),
        (replace(BUDGETED, peak_bytes=BUDGET_BYTES + 1), "e60 reserved 600.00 MiB, more than"),
        (replace(CAPPED, peak_bytes=BUDGET_BYTES + 1), "d60 reserved 600.00 MiB, more than"),
        (
            replace(BUDGETED, witness_peak_bytes=BUDGET_BYTES + 4096),
            "e60 had 600.00 MiB of the pool's mapping resident",
        ),
        (
            replace(BUDGETED, witness_peak_bytes=0, witness_looks=0),
            "e60 was looked at 0 times, and nothing",
        ),
    ],
)
def test_problems_when_one_thing_breaks_then_named(broken: RunResult, said: str) -> None:
    (found,) = problems((PLAIN, broken))
    assert found.startswith(said)


def test_problems_when_the_kernel_tells_nothing_then_none() -> None:
    assert problems((PLAIN, replace(BUDGETED, witness_peak_bytes=None, witness_looks=0))) == ()


def test_ratio_when_rounds_differ_then_the_median_of_their_ratios() -> None:
    slower = replace(BUDGETED, seconds=(1.5, 2.0, 8.0))
    assert slower.ratio_to(PLAIN) == 1.5
    assert slower.median_seconds == 2.0
    assert replace(slower, seconds=()).ratio_to(PLAIN) is None
