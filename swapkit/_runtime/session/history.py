"""What a session did: each step, and statistics of all."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import fields

from swapkit._runtime.control.plan_status import PlanStatus
from swapkit._runtime.saved.swapper import Swapper
from swapkit.ir.runs import SessionStats, StepRecord
from swapkit.planning.selection.cases import Stage
from swapkit.units import format_bytes

# ---- stats ---------------------------------------------------------------------------------------
#
# The statistics of a session as metrics and text, and the part that comes from its plan.

# Stages as numbers, which dashboards can plot.
STAGE_NUMBERS = {stage: number for number, stage in enumerate(Stage)}


def list_metrics(stats: SessionStats, stage: Stage, prefix: str) -> dict[str, int | float]:
    """Return the known statistics and the stage as numbers, by flat names."""
    values = {field.name: getattr(stats, field.name) for field in fields(stats)}
    known = {f"{prefix}{name}": value for name, value in values.items() if value is not None}
    return {**known, f"{prefix}stage": STAGE_NUMBERS[stage]}


def summarize(stats: SessionStats, state: str, progress: str = "") -> str:
    """Return a one-line summary.

    Args:
        stats: the session's.
        state: the stage, or "ended".
        progress: how far the search for a plan is; empty: no plan is wanted.
    """
    where = f"{state}: {progress}" if progress else state
    return (
        f"{where}, peak {format_bytes(stats.peak_bytes)} of {format_bytes(stats.budget_bytes)}, "
        f"{stats.steps} {'step' if stats.steps == 1 else 'steps'}"
    )


def predictions(status: PlanStatus) -> dict[str, float | int | None]:
    """Return the fields of the statistics that come from the current plan."""
    plan = status.plan
    if plan is None:
        return {}
    found, trace = plan.prediction, status.trace
    return {
        "predicted_step_seconds": None if found is None else found.step_seconds,
        "predicted_peak_bytes": None if found is None else found.peak_bytes,
        "predicted_reserved_bytes": None if found is None else found.reserved_bytes or None,
        "bound_step_seconds": plan.bound_seconds,
        "unlimited_step_seconds": None if trace is None else trace.seconds * status.pace,
    }


# ---- history -------------------------------------------------------------------------------------
#
# What each step of a session took, for reports and callbacks.

STEPS_KEPT = 10_000


class StepHistory:
    """The latest steps of one session.

    `add_peak` may be called on any thread; `end_step` on the one that ends a step.
    """

    def __init__(self, swapper: Swapper) -> None:
        """Begin before the first step."""
        self.steps = 0  # that ended
        self.peak_bytes = 0  # of all steps
        self._swapper = swapper
        self._records: deque[StepRecord] = deque(maxlen=STEPS_KEPT)
        self._counters = swapper.counters()
        self._began = time.perf_counter()
        self._step_peak_bytes = 0

    def begin(self) -> None:
        """Start the clock: the session begins."""
        self._began = time.perf_counter()

    def add_peak(self, peak_bytes: int) -> None:
        """Note a peak of reserved bytes in the present step."""
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        self._step_peak_bytes = max(self._step_peak_bytes, peak_bytes)

    def end_step(self, stage: Stage) -> StepRecord:
        """Store the step that ended, and return it. Its peak was noted.

        Args:
            stage: in which the step ran.
        """
        self.steps += 1
        now, counters = time.perf_counter(), self._swapper.counters()
        done = counters - self._counters
        record = StepRecord(
            step=self.steps,
            stage=stage.value,
            seconds=now - self._began,
            peak_bytes=self._step_peak_bytes,
            rescues=done.rescues,
            swapped_out_bytes=done.copied_out_bytes,
            swapped_in_bytes=done.copied_in_bytes,
            stall_seconds=done.stall_seconds,
        )
        self._records.append(record)
        self._began, self._counters, self._step_peak_bytes = now, counters, 0
        return record

    def timed_records(self) -> tuple[tuple[StepRecord, ...], float]:
        """Return the latest steps, and when the last one ended (`perf_counter`). Any thread."""
        while True:
            ended_at = self._began
            records = self.records()
            if ended_at == self._began:
                return records, ended_at

    def records(self) -> tuple[StepRecord, ...]:
        """Return the latest steps, at most `STEPS_KEPT`. Any thread."""
        while True:
            try:
                return tuple(self._records)
            except RuntimeError:  # another thread ended a step meanwhile
                continue
