"""The statistics of a session, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from swapkit.planning.selection.cases import Stage
from swapkit.units import format_bytes

if TYPE_CHECKING:
    from swapkit._runtime.control.plan_status import PlanStatus

# Stages as numbers, which dashboards can plot.
STAGE_NUMBERS = {stage: number for number, stage in enumerate(Stage)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStats:
    """The statistics of a session so far. Peaks are of reserved bytes; counters accumulate.

    `recomputed_regions` counts every recomputation of a part or of a single operator.
    `step_seconds` is the median of the latest steps of the current kind, each from its first
    forward on. The predictions are for the plan in use; None: there is no plan. No plan for the
    budget has faster steps than `bound_step_seconds`. Without a budget a step would take
    `unlimited_step_seconds`.
    """

    budget_bytes: int
    peak_bytes: int
    steps: int
    oom_rescues: int
    swapped_out_bytes: int
    swapped_in_bytes: int
    recomputed_regions: int
    stall_seconds: float
    host_peak_bytes: int
    disk_peak_bytes: int
    replans: int = 0
    step_seconds: float | None = None
    predicted_step_seconds: float | None = None
    predicted_peak_bytes: int | None = None
    predicted_reserved_bytes: int | None = None
    bound_step_seconds: float | None = None
    unlimited_step_seconds: float | None = None


def list_metrics(stats: SessionStats, stage: Stage, prefix: str) -> dict[str, int | float]:
    """Return the known statistics and the stage as numbers, by flat names."""
    values = {field.name: getattr(stats, field.name) for field in fields(stats)}
    known = {f"{prefix}{name}": value for name, value in values.items() if value is not None}
    return {**known, f"{prefix}stage": STAGE_NUMBERS[stage]}


def summarize(stats: SessionStats, state: str) -> str:
    """Return a one-line summary. `state`: the stage, or "ended"."""
    return (
        f"{state}, peak {format_bytes(stats.peak_bytes)} of {format_bytes(stats.budget_bytes)}, "
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
