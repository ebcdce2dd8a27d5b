"""The verdict sees everything that may break."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swapkit.demo.messages import Finished, OutOfMemory, RunKind, RunSpec
from swapkit.demo.results import PlainTrial, RaceResult, RunResult, race_problems, verdict

BUDGET_BYTES = 600 << 20
FAILURE = OutOfMemory(text="no room\nat all", step=0)
LABELS = {
    RunKind.PLAIN: "plain",
    RunKind.TORCH: "torch",
    RunKind.RECOMPUTE: "recompute",
    RunKind.SWAPKIT: "swapkit at 60%",
}


def make(label: str, kind: RunKind) -> RunResult:
    is_limited, has_pool = kind == RunKind.SWAPKIT, kind != RunKind.TORCH
    peak_bytes = BUDGET_BYTES if is_limited else 1000 << 20 if has_pool else 0
    return RunResult(
        spec=RunSpec(label=label, kind=kind, size="tiny", seed=0, threads=1, parent_pid=1),
        budget_bytes=BUDGET_BYTES if is_limited else None,
        losses=("0x1p+2", "0x1p+1"),
        seconds=(1.0, 2.0, 4.0),
        state_bytes=100 << 20,
        finished=Finished(
            digest="abc",
            reserved_peak_bytes=peak_bytes,
            stage="stable" if is_limited else "",
        ),
        out_of_memory=None,
        series=(),
        series_seconds=1.0,
        process_peak_bytes=None,
        witness_peak_bytes=peak_bytes if has_pool else None,
        witness_looks=9,
    )


PLAIN, TORCH, RECOMPUTE, SWAPKIT = (make(LABELS[kind], kind) for kind in LABELS)
TRIAL = PlainTrial(label="plain at 60%", budget_bytes=BUDGET_BYTES, out_of_memory=FAILURE)
RACE = RaceResult(runs=(PLAIN, TORCH, RECOMPUTE, SWAPKIT), trials=(TRIAL,))


def change(result: RunResult, **finished: object) -> RunResult:
    return replace(result, finished=replace(result.finished, **finished))  # type: ignore[arg-type]


def exchange(result: RunResult) -> RaceResult:
    """The race with another run of the same label."""
    runs = (result if each.spec == result.spec else each for each in RACE.runs)
    return replace(RACE, runs=tuple(runs))


def test_problems_when_all_is_well_then_none() -> None:
    assert not list(race_problems(RACE))


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (
            replace(SWAPKIT, out_of_memory=FAILURE),
            "swapkit at 60% ran out of memory in step 1: no room",
        ),
        (replace(PLAIN, out_of_memory=FAILURE), "plain ran out of memory in step 1: no room"),
        (
            replace(SWAPKIT, losses=("0x1p+2", "0x1.8p+1")),
            "swapkit at 60% is not bit-equal to torch: the losses differ from step 2 on",
        ),
        (
            change(SWAPKIT, digest="x"),
            "swapkit at 60% is not bit-equal to torch: the losses are equal, but the final "
            "parameters, buffers or optimizer states differ",
        ),
        (
            replace(SWAPKIT, losses=("0x1p+2",)),
            "swapkit at 60% is not bit-equal to torch: it trained 1 steps instead of 2",
        ),
        (change(PLAIN, digest="x"), "plain is not bit-equal to torch"),
        (change(RECOMPUTE, digest="x"), "recompute is not bit-equal to torch"),
        (
            change(SWAPKIT, stage="search"),
            "swapkit at 60% has no stable plan after 2 steps",
        ),
        (
            change(SWAPKIT, reserved_peak_bytes=BUDGET_BYTES + 1),
            "swapkit at 60% reserved 600.00 MiB, more than the budget of 600.00 MiB",
        ),
        (
            replace(SWAPKIT, witness_peak_bytes=BUDGET_BYTES + 4096),
            "swapkit at 60% had 600.00 MiB of the pool's mapping resident",
        ),
        (
            replace(SWAPKIT, witness_peak_bytes=0, witness_looks=0),
            "swapkit at 60% had nothing of its pool resident in any of 0",
        ),
    ],
)
def test_problems_when_one_run_breaks_then_named(broken: RunResult, said: str) -> None:
    (found,) = race_problems(exchange(broken))
    assert found.startswith(said)


def test_problems_when_plain_training_fits_then_named() -> None:
    fits = replace(TRIAL, out_of_memory=None)
    (found,) = race_problems(replace(RACE, trials=(fits,)))
    assert found.startswith("plain at 60% did not run out of memory")


def test_problems_when_the_kernel_tells_nothing_then_none() -> None:
    unseen = replace(SWAPKIT, witness_peak_bytes=None, witness_looks=0)
    assert not list(race_problems(exchange(unseen)))


def test_ratio_when_rounds_differ_then_the_median_of_their_ratios() -> None:
    slower = replace(SWAPKIT, seconds=(1.5, 2.0, 8.0))
    assert slower.ratio_to(PLAIN) == 1.5
    assert slower.median_seconds == 2.0
    assert replace(slower, seconds=()).ratio_to(PLAIN) is None


def test_verdict_when_there_are_two_budgets_then_of_the_smaller_one() -> None:
    smaller = replace(
        SWAPKIT,
        spec=replace(SWAPKIT.spec, label="swapkit at 45%"),
        budget_bytes=450 << 20,
        seconds=(1.1, 2.2, 4.4),
    )
    slow = replace(change(RECOMPUTE, reserved_peak_bytes=400 << 20), seconds=(1.5, 3.0, 6.0))
    race = replace(RACE, runs=(PLAIN, TORCH, slow, SWAPKIT, smaller))
    said = verdict(race)
    assert said.startswith("swapkit trains within 45% of the memory")
    assert "at 1.10 times the step time, with the same bits" in said
    assert "recomputing every block needs 40% and 1.50 times the step time" in said


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (SWAPKIT, "swapkit at 60%: 2 steps, peak 600.00 MiB, 2000 ms a step"),
        (TORCH, "torch: 2 steps, 2000 ms a step"),
        (replace(SWAPKIT, out_of_memory=FAILURE), "swapkit at 60%: out of memory in step 1"),
    ],
)
def test_summary_when_asked_for_then_one_line(result: RunResult, said: str) -> None:
    assert result.summary() == said
