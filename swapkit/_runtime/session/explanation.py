"""The text that `Session.explain` returns."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from swapkit._runtime.allocators.memory_holders import UNCOLLECTED_AGE
from swapkit._runtime.control.plan_status import describe_progress
from swapkit._runtime.model.node_ranks import count_node_ranks
from swapkit._runtime.optimizer.chunked_step import attached
from swapkit.planning.planner import POLICIES, trade_offs
from swapkit.planning.reasons import explain_decisions
from swapkit.planning.selection.cases import PLANNING, RECORDING
from swapkit.reporting.machines import format_seconds
from swapkit.reporting.plans import format_plan, format_trade_offs
from swapkit.reporting.text import format_holders, format_per_rank
from swapkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from swapkit._native.lives import LayoutStats
    from swapkit._runtime.control.plan_status import PlanStatus
    from swapkit.ir.runs import SessionStats
    from swapkit.planning.search.trade_offs import TradeOff
    from swapkit.reporting.text import Holder

MOST_KINDS = 4  # of steps that are listed, besides the current kind


def explain(stats: SessionStats, status: PlanStatus, policy: str, outside: Sequence[Holder]) -> str:
    """Return a text about a session's work, its plan, and memory outside of its budget."""
    copies = format_per_rank(stats.host_peak_bytes, count_node_ranks(waits=False))
    lines = [
        f"budget {format_bytes(stats.budget_bytes)}, peak {format_bytes(stats.peak_bytes)} "
        f"reserved, after {stats.steps} steps",
        f"policy {policy}: {stats.oom_rescues} rescues, "
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


def explain_states(trained: Iterable[object]) -> list[str]:
    """Return a line for each optimizer whose states are offloaded.

    `trained`: what a session trains.
    """
    states = [attached(each) for each in trained if isinstance(each, torch.optim.Optimizer)]
    places = [each.places() for each in states if each is not None]
    return [str(each) for each in places if each is not None]


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
        yield f"longest waits for copies of tensors saved in: {longest}"


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
    offers = find_trade_offs(status, policy)
    paced = [
        replace(
            offer,
            seconds=offer.seconds * status.pace,
            bound_seconds=offer.bound_seconds * status.pace,
        )
        for offer in offers
    ]
    yield format_trade_offs(paced, plan=plan)


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
