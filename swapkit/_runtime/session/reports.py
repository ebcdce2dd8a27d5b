"""A session in words, as a record for its report, and as a trace. Any thread, with no lock held."""

from __future__ import annotations

import datetime
import gzip
import importlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from swapkit._native.layout import LayoutStats
from swapkit._runtime.allocators.installed_pool import Installation
from swapkit._runtime.allocators.memory_holders import UNCOLLECTED_AGE
from swapkit._runtime.control.plan_status import PlanStatus, describe, describe_progress
from swapkit._runtime.model.ranks import count_node_ranks
from swapkit._runtime.optimizer.chunked_step import attached
from swapkit._runtime.saved.swapper import Swapper
from swapkit.errors import SwapkitError
from swapkit.ir.documents import write_file
from swapkit.ir.pool_histories import PoolHistory
from swapkit.ir.runs import SessionStats, StepRecord
from swapkit.planning.planner import POLICIES, trade_offs
from swapkit.planning.reasons import explain_decisions
from swapkit.planning.search.solving import TradeOff
from swapkit.planning.selection.cases import PLANNING, RECORDING
from swapkit.reporting.machines import format_seconds
from swapkit.reporting.paths import PACKED_TRACE, check_trace
from swapkit.reporting.plans import format_plan, format_trade_offs
from swapkit.reporting.run_records import RunRecord
from swapkit.reporting.steps import simulate_step
from swapkit.reporting.text import Holder, format_holders, format_per_rank
from swapkit.reporting.traces.session import MeasuredRun, PlannedStep, track_measured
from swapkit.reporting.traces.tracks import format_document
from swapkit.units import format_bytes

MOST_KINDS = 4  # of steps that are listed, besides the current kind


def explain(stats: SessionStats, status: PlanStatus, policy: str, outside: Sequence[Holder]) -> str:
    """Return a text about a session's work, its plan, and memory outside of its budget."""
    copies = format_per_rank(stats.host_peak_bytes, count_node_ranks(waits=False))
    lines = [
        f"budget {format_bytes(stats.budget_bytes)}, peak {format_bytes(stats.peak_bytes)} "
        f"reserved, after {stats.steps} steps",
        f"policy {policy}: {stats.oom_rescues} rescues (allocations that did not fit at first), "
        f"{format_bytes(stats.swapped_out_bytes)} copied out, "
        f"{format_bytes(stats.swapped_in_bytes)} back, {stats.stall_seconds:.3f} s stalled",
        f"host copies: {copies} at most",
        *_explain_stalls(status),
        *_explain_replans(status),
        *([status.pipeline] if status.pipeline else []),
        *_explain_plan(stats, status, policy),
    ]
    if status.other_step_seconds:
        lines += ["", _describe_others(status.other_step_seconds)]
    if outside:
        total_bytes = sum(holder.nbytes for holder in outside)
        lines.append(
            "outside the budget (allocated before swapkit was installed, or not by torch): "
            f"{format_bytes(total_bytes)}"
        )
        lines += format_holders(outside)
    return "\n".join(lines)


def list_notes(status: PlanStatus) -> list[str]:
    """Return sentences about waits for copies, other plans that were needed, and other steps."""
    others = status.other_step_seconds
    return [
        *_explain_stalls(status),
        *_explain_replans(status),
        *([status.pipeline] if status.pipeline else []),
        *([_describe_others(others)] if others else []),
    ]


def explain_uncollected(holders: Sequence[Holder]) -> list[str]:
    """Return lines about memory that steps made and that stays in use, if there is any."""
    if not holders:
        return []
    total_bytes = sum(holder.nbytes for holder in holders)
    return [
        f"uncollected (made in a step, and still in use {UNCOLLECTED_AGE} steps later or more): "
        f"{format_bytes(total_bytes)}",
        *format_holders(holders),
    ]


def explain_placed(swapper: Swapper) -> list[str]:
    """Return lines about weights that leave the device, and states that are offloaded."""
    optimizers = (each for each in swapper.trained() if isinstance(each, torch.optim.Optimizer))
    states = [each for optimizer in optimizers if (each := attached(optimizer)) is not None]
    places = [str(place) for state in states if (place := state.places()) is not None]
    all_bytes, here_bytes, kept_bytes, _, late = swapper.mover.held
    if not all_bytes:
        return places
    stay_bytes = swapper.weights.staying_bytes()
    kept = f"; {format_bytes(kept_bytes)} stay: a collective has used them"
    seen = f"; {format_bytes(stay_bytes)} stay: others view them, know their address or keep them"
    return [
        f"weights: {format_bytes(all_bytes)} leave the device between two uses, "
        f"{format_bytes(here_bytes)} are on it now; {late} uses waited"
        + (kept if kept_bytes else "")
        + (seen if stay_bytes > kept_bytes else ""),
        *places,
    ]


def explain_regions() -> list[str]:
    """Return a line about each compiled region that has run in this process, in order."""
    return list(torch.ops.swapkit.compiled_regions())


def explain_layout(stats: LayoutStats) -> list[str]:
    """Return a line about planned addresses, if there are any."""
    if stats.height_bytes == 0:
        return []
    return [
        f"planned addresses: {format_bytes(stats.height_bytes)} for {stats.places} requests of a "
        f"step; {stats.hit_share:.1%} of the bytes lie there"
    ]


def _describe_others(medians: Sequence[float]) -> str:
    """Return a line about the steps of other kinds than the plan's."""
    shown = ", ".join(format_seconds(seconds) for seconds in medians[:MOST_KINDS])
    rest = f" and {len(medians) - MOST_KINDS} more" if len(medians) > MOST_KINDS else ""
    kinds = "one other kind" if len(medians) == 1 else f"{len(medians)} other kinds"
    return f"steps of {kinds}, with plans of their own: {shown}{rest}"


def _explain_stalls(status: PlanStatus) -> Iterator[str]:
    if status.stalls:
        longest = ", ".join(f"{where} ({seconds:.3f} s)" for where, seconds in status.stalls)
        yield f"slowest waits for copies: {longest}"


def _explain_replans(status: PlanStatus) -> Iterator[str]:
    if status.refused:
        yield status.refused
    if status.resharding:
        yield status.resharding
    if status.replans:
        times = "once" if status.replans == 1 else f"{status.replans} times"
        yield f"replanned {times}; the last time, {status.reason}"


def _explain_plan(stats: SessionStats, status: PlanStatus, policy: str) -> Iterator[str]:
    progress = describe_progress(status)
    if status.why_none:
        yield f"{progress}: {status.why_none}"
    elif progress:
        is_none = status.progress in {RECORDING, PLANNING}
        yield f"no plan yet: {progress}" if is_none else progress
    plan, trace, machine = status.plan, status.trace, status.machine
    if plan is None or trace is None:
        return
    yield ""
    if machine is None:  # a saved plan, perhaps from another machine
        yield format_plan(plan, (), step_seconds=stats.step_seconds)
        return
    machine = replace(machine, budget_bytes=plan.budget_bytes)
    reasons = explain_decisions(trace, plan, machine)
    yield format_plan(plan, reasons, step_seconds=stats.step_seconds)
    yield ""
    yield format_trade_offs(find_trade_offs(status, policy), plan=plan, pace=status.pace)


def find_trade_offs(status: PlanStatus, policy: str) -> tuple[TradeOff, ...]:
    """Return the predicted step for other budgets; none: it is not known. Takes seconds.

    Args:
        status: of the search for a plan.
        policy: the name of the session's policy; for the user's own, the first of ours stands in.

    Raises:
        SwapkitError: no plan can be made.
    """
    plan, trace, machine = status.plan, status.trace, status.machine
    if plan is None or trace is None or machine is None:
        return ()
    machine = replace(machine, budget_bytes=plan.budget_bytes)
    return trade_offs(trace, machine, policy=policy if policy in POLICIES else POLICIES[0])


def gather(
    installation: Installation,
    stats: SessionStats,
    status: PlanStatus,
    steps: Sequence[StepRecord],
    *,
    policy: str,
    is_ended: bool,
) -> RunRecord:
    """Return the record of a session. Other budgets are planned for, which may take seconds.

    Args:
        installation: of the session's device.
        stats: the statistics.
        status: of the search for a plan.
        steps: the latest steps.
        policy: the name of the policy.
        is_ended: whether the session has ended.
    """
    layout = installation.layout
    places = [] if layout is None or is_ended else explain_layout(layout.stats())
    machine = status.machine
    return RunRecord(
        created=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        swapkit_version=importlib.import_module("swapkit").__version__,
        torch_version=torch.__version__,
        device=str(installation.device.name),
        hardware="" if machine is None else machine.name,
        policy=policy,
        stage=status.stage.value,
        is_ended=is_ended,
        stats=stats,
        steps=tuple(steps),
        pace=status.pace,
        plan_text=describe_plan(status, stats.budget_bytes),
        why_no_plan=status.why_none,
        notes=(*list_notes(status), *places),
        trace=status.trace,
        plan=None if status.trace is None else status.plan,
        machine=machine,
        trade_offs=_find_trade_offs(status, policy),
    )


def describe_plan(status: PlanStatus, budget_bytes: int) -> str:
    """Return the plan in one line; empty: there is none.

    Args:
        status: of the search for a plan.
        budget_bytes: the session's limit.
    """
    is_known = status.plan is not None and status.trace is not None
    return describe(status, budget_bytes) if is_known else ""


def _find_trade_offs(status: PlanStatus, policy: str) -> tuple[TradeOff, ...]:
    try:
        return find_trade_offs(status, policy)
    except SwapkitError:  # a report shows what there is
        return ()


def write_trace_file(
    path: str | os.PathLike[str],
    status: PlanStatus,
    timed: tuple[Sequence[StepRecord], float],
    budget_bytes: int,
    memory: PoolHistory | None,
) -> None:
    """Write a session's steps for a viewer.

    Args:
        path: the file.
        status: of the search for a plan.
        timed: the latest steps, and when the last one ended (`perf_counter`).
        budget_bytes: the session's limit.
        memory: what was recorded; None: nothing.

    Raises:
        InvalidType, InvalidArgument: as for `check_trace`.
        DiskError: the file cannot be written. A subclass of `OSError`.
    """
    steps, ended_at = timed
    ended_ns = round(ended_at * 1e9)
    run = MeasuredRun(steps=steps, ended_ns=ended_ns, budget_bytes=budget_bytes, history=memory)
    document = _make_document(status, run)
    content = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    packed = gzip.compress(content, mtime=0) if check_trace(path) == PACKED_TRACE else content
    write_file(path, lambda file: file.write(packed))


def _make_document(status: PlanStatus, run: MeasuredRun) -> dict[str, object]:
    about: dict[str, str | int | float] = {
        "times": "microseconds",
        "budget_bytes": run.budget_bytes,
        "measured_over_predicted": status.pace,
    }
    processes = [track_measured(run)]
    if status.trace is None:
        about["no_schedule"] = status.why_none or "no step was recorded"
    else:
        why_none = status.why_none or "there is no plan yet"
        step = simulate_step(status.trace, status.plan, status.machine, why_none)
        # Beside the latest measured step.
        begin_ns = run.begins()[-1] - run.first_ns if run.steps else 0
        processes.append(PlannedStep(step, begin_ns).track(run.budget_bytes))
        about["policy"] = step.plan.policy
        if step.why_not_planned:
            about["no_schedule"] = step.why_not_planned
    if run.history is not None:
        about["lost_events"] = run.history.lost_events
    return format_document(processes, about)
