"""Records of sessions that never ran: steps of a made-up model with a real plan."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from swapkit.errors import InfeasibleBudget
from swapkit.ir.runs import SessionStats, StepRecord
from swapkit.planning.planner import make_plan, trade_offs
from swapkit.reporting.run_records import RunRecord
from swapkit.simulation.lowering import lower
from swapkit.simulation.timeline import KEEP, SWAP, as_plan, run
from tests.support.problems import layered_trace, machine_for

if TYPE_CHECKING:
    from pathlib import Path

    from swapkit.ir.traces import Trace

__all__ = ["make_large", "make_record", "make_steps", "read_page", "rename"]

STAGES = ("warmup", "warmup", "search", "search")


@functools.cache
def make_record(*, layers: int = 3, share: float = 0.5, policy: str = "auto") -> RunRecord:
    """Return the record of a settled session, with all that a record can have."""
    trace = replace(layered_trace(layers, numbered=True, optimizer=True), label="Decoder")
    machine = replace(machine_for(lower(trace), share, 4e9), name="a made-up machine")
    try:
        plan = make_plan(trace, machine, policy)
    except InfeasibleBudget as error:
        machine = replace(machine, budget_bytes=error.least_bytes)
        plan = make_plan(trace, machine, policy)
    assert plan.decisions
    assert plan.prediction is not None
    steps = make_steps(30, machine.budget_bytes)
    stats = SessionStats(
        budget_bytes=machine.budget_bytes,
        peak_bytes=max(each.peak_bytes for each in steps),
        steps=len(steps),
        oom_rescues=sum(each.rescues for each in steps),
        swapped_out_bytes=sum(each.swapped_out_bytes for each in steps),
        swapped_in_bytes=sum(each.swapped_in_bytes for each in steps),
        recomputed_regions=3,
        stall_seconds=0.001,
        host_peak_bytes=plan.prediction.host_peak_bytes,
        disk_peak_bytes=0,
        step_seconds=1.3 * plan.prediction.seconds,
        predicted_step_seconds=1.25 * plan.prediction.seconds,
        predicted_peak_bytes=plan.prediction.peak_bytes,
        bound_step_seconds=plan.bound_seconds,
        unlimited_step_seconds=1.25 * trace.seconds,
    )
    return RunRecord(
        created="2026-11-26T12:00:00+00:00",
        swapkit_version="0.1.0",
        torch_version="2.13.0",
        device="cpu",
        hardware=machine.name,
        policy=policy,
        stage="stable",
        is_ended=False,
        stats=stats,
        steps=steps,
        pace=1.25,
        plan_text="9 of 12 storages swapped, +0.1% step time, 14.50 MiB of 15.50 MiB",
        notes=("replanned once; the last time, the budget changed",),
        trace=trace,
        plan=plan,
        machine=machine,
        trade_offs=trade_offs(trace, machine, shares=(0.5, 0.8, 1.0)),
    )


def make_large(layers: int, *, steps: int) -> RunRecord:
    """Return the record of a long run of a deep model, half of whose storages are swapped."""
    record = make_record()
    trace = layered_trace(layers, numbered=True, optimizer=True)
    problem = lower(trace)
    machine = machine_for(problem, 2.0, 1e10)
    actions = np.where(np.arange(len(problem.item_bytes)) % 2, SWAP, KEEP).astype(np.int8)
    found = run(problem, machine, actions)
    plan = as_plan(trace, problem, machine, actions, found, policy="swap")
    return replace(
        record,
        trace=trace,
        plan=plan,
        machine=machine,
        steps=make_steps(steps, machine.budget_bytes),
        stats=replace(record.stats, steps=10 * steps),
    )


def make_steps(count: int, budget_bytes: int) -> tuple[StepRecord, ...]:
    """Return steps that warm up, search and settle."""
    return tuple(
        StepRecord(
            step=number + 1,
            stage=STAGES[number] if number < len(STAGES) else "stable",
            seconds=0.05 + 0.001 * (number % 7),
            peak_bytes=budget_bytes - (number % 5),
            rescues=max(0, 12 - 5 * number),
            swapped_out_bytes=1 << 20,
            swapped_in_bytes=1 << 20,
            stall_seconds=0.0,
        )
        for number in range(count)
    )


def read_page(path: Path) -> dict[str, Any]:
    """Return the values that a page shows."""
    text = path.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="record">(.*)</script>', text)
    assert found is not None
    values: dict[str, Any] = json.loads(found[1])
    return values


def rename(record: RunRecord, name: str) -> RunRecord:
    """Return the record with all names of modules, operators and people's texts replaced."""
    trace = record.trace
    assert trace is not None
    operators = tuple(replace(each, module=name, name=name) for each in trace.operators)
    storages = tuple(replace(each, module=name) for each in trace.storages)
    renamed: Trace = replace(trace, operators=operators, storages=storages, label=name)
    return replace(
        record,
        trace=renamed,
        policy=name,
        notes=(name,),
        hardware=name,
        plan_text=name,
        torch_version=name,
        created=name,
    )
