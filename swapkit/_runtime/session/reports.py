"""A session as a record, for its report. All functions may run on any thread, with no lock held."""

from __future__ import annotations

import datetime
import importlib
from typing import TYPE_CHECKING

import torch

from swapkit._runtime.control.plan_status import describe
from swapkit._runtime.session.explanation import explain_layout, find_trade_offs, list_notes
from swapkit.errors import SwapkitError
from swapkit.reporting.run_records import RunRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swapkit._runtime.allocators.installed_pool import Installation
    from swapkit._runtime.control.plan_status import PlanStatus
    from swapkit.ir.runs import SessionStats, StepRecord
    from swapkit.planning.search.trade_offs import TradeOff


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
        plan_text=tell_plan(status, stats.budget_bytes),
        why_no_plan=status.why_none,
        notes=(*list_notes(status), *places),
        trace=status.trace,
        plan=None if status.trace is None else status.plan,
        machine=machine,
        trade_offs=_find_trade_offs(status, policy),
    )


def tell_plan(status: PlanStatus, budget_bytes: int) -> str:
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
