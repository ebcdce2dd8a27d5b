"""The status of a session's search for a plan, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swapkit.ir.plans import Action
from swapkit.planning.selection.cases import Stage
from swapkit.units import format_bytes

if TYPE_CHECKING:
    import logging

    from swapkit.ir.machines import Machine
    from swapkit.ir.plans import Plan
    from swapkit.ir.traces import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStatus:
    """The status of the search for a plan."""

    stage: Stage = Stage.STABLE
    plan: Plan | None = None
    trace: Trace | None = None
    machine: Machine | None = None  # that plans are made for
    why_none: str = ""  # why there is no plan and will be none
    replans: int = 0  # how often another plan was needed
    reason: str = ""  # of the latest replan
    pace: float = 1.0  # measured step time / recorded or predicted step time
    # Median seconds of the latest steps, each from its first forward on: for the current kind, to
    # which the plan belongs, and for each other kind.
    step_seconds: float | None = None
    other_step_seconds: tuple[float, ...] = ()
    # The places with the longest waits for copies, and the total seconds waited.
    stalls: tuple[tuple[str, float], ...] = ()


def describe(plan: Plan) -> str:
    """Return a one-line description of a plan."""
    counts = dict.fromkeys(Action, 0)
    for decision in plan.decisions:
        counts[decision.action] += 1
    swapped, recomputed = counts[Action.SWAP], counts[Action.RECOMPUTE]
    text = f"{swapped} storages swapped, {recomputed} recomputed"
    prediction = plan.prediction
    if prediction is None:
        return text
    return (
        f"{text}; predicted {prediction.step_seconds:.4g} s a step, "
        f"{format_bytes(prediction.peak_bytes)} at most"
    )


def tell_stage(log: logging.Logger, status: PlanStatus) -> None:
    """Log the current stage."""
    if status.why_none:
        log.warning("no plan, rescue only: %s", status.why_none)
    elif status.stage is Stage.STABLE and status.plan is not None:
        log.info("stable: %s", describe(status.plan))
    else:
        log.info("%s", status.stage.value)
