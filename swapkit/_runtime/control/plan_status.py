"""The status of a session's search for a plan, as plain values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from swapkit._runtime.execution.plan_compiler import pace
from swapkit.ir.machines import Machine
from swapkit.ir.plans import Action, Plan
from swapkit.ir.traces import BEFORE, Trace
from swapkit.planning.selection.cases import (
    FOLLOWING_FIRST,
    NO_PLAN,
    PLANNING,
    SETTLED,
    Case,
    Stage,
)
from swapkit.planning.selection.learner import Learner
from swapkit.reporting.machines import format_seconds
from swapkit.texts import get_logger
from swapkit.units import format_bytes

_log = get_logger("plan")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStatus:
    """The status of the search for a plan."""

    stage: Stage = Stage.STABLE
    plan: Plan | None = None
    trace: Trace | None = None
    machine: Machine | None = None  # that plans are made for
    progress: str = ""  # as `Case.progress`; empty: no plan is wanted
    since_step: int = 0  # the number of steps after which the progress began
    planning_seconds: float = 0.0  # since plans were asked for that are not made yet
    why_none: str = ""  # why there is no plan and will be none
    refused: str = ""  # why the given plan is not followed
    resharding: str = ""  # what was chosen about gathered weights, and why
    replans: int = 0  # how often another plan was needed
    reason: str = ""  # of the latest replan
    pace: float = 1.0  # measured step time / recorded or predicted step time
    # Median seconds of the latest steps, each from its first forward on: for the current kind, to
    # which the plan belongs, and for each other kind.
    step_seconds: float | None = None
    other_step_seconds: tuple[float, ...] = ()
    # The places with the longest waits for copies, and the total seconds waited.
    stalls: tuple[tuple[str, float], ...] = ()
    pipeline: str = ""  # a sentence about this stage and the slowest one; empty: not known


def describe_learner(learner: Learner) -> dict[str, Any]:
    """Return the fields of a status that are a learner's, for the current kind of steps."""
    case = learner.case or Case()
    return {
        "stage": learner.stage,
        "plan": None if case.chosen is None else pace(case.chosen, case.pace),
        "trace": case.trace,
        "progress": case.progress,
        "since_step": case.since_step,
        "planning_seconds": learner.planning_seconds,
        "why_none": case.why_none,
        "replans": learner.replans,
        "reason": learner.reason,
        "pace": case.pace,
    }


def log_progress(status: PlanStatus, budget_bytes: int) -> None:
    """Log how far the search for a plan is, after a step that changed it.

    Args:
        status: the session's.
        budget_bytes: the session's limit.
    """
    if status.why_none:
        _log.warning("%s: %s", NO_PLAN, status.why_none)
        return
    text = describe_progress(status)
    is_settled = status.progress == SETTLED and status.trace is not None
    _log.info("%s", f"{text}: {describe(status, budget_bytes)}" if is_settled else text)


def describe_progress(status: PlanStatus) -> str:
    """Return how far the search for a plan is, in a few words; empty: no plan is wanted."""
    progress, step = status.progress, status.since_step
    seconds = format_seconds(status.planning_seconds)
    if progress == SETTLED:
        return f"{progress} at step {step}" if step else "following the given plan"
    if progress == PLANNING:
        return f"{progress} since step {step} ({seconds})"
    if progress == FOLLOWING_FIRST:
        return f"{progress} since step {step}, searching for better ones ({seconds})"
    return progress


def describe(status: PlanStatus, budget_bytes: int) -> str:
    """Return one line on the plan: what moves, and its prediction beside a step without a budget.

    Args:
        status: of a session with a plan and its trace.
        budget_bytes: the session's limit.
    """
    plan, trace = status.plan, status.trace
    assert plan is not None
    assert trace is not None
    counts = Counter(decision.action for decision in plan.decisions)
    total = sum(storage.is_saved and storage.birth != BEFORE for storage in trace.storages)
    parts = [
        f"{counts[action]} of {total} storages {done}"
        for action, done in ((Action.SWAP, "swapped"), (Action.RECOMPUTE, "recomputed"))
        if counts[action]
    ] or [f"all {total} storages stay on the device"]
    prediction = plan.prediction
    if prediction is not None:
        plain_seconds = trace.seconds * status.pace
        if plain_seconds > 0:  # a step may be too short for the clock
            parts.append(f"{prediction.step_seconds / plain_seconds - 1:+.1%} step time predicted")
        used_bytes = prediction.reserved_bytes or prediction.peak_bytes
        parts.append(f"{format_bytes(used_bytes)} of {format_bytes(budget_bytes)}")
    return ", ".join(parts)
