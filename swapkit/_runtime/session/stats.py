"""The statistics of a session as metrics and text, and the part that comes from its plan."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from swapkit.planning.selection.cases import Stage
from swapkit.units import format_bytes

if TYPE_CHECKING:
    from swapkit._runtime.control.plan_status import PlanStatus
    from swapkit.ir.runs import SessionStats

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
