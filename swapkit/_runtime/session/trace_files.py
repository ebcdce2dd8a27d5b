"""The files that `Session.export_trace` writes."""

from __future__ import annotations

import gzip
import json
import pickle
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, BinaryIO

from swapkit.errors import InfeasibleBudget, PlanMismatch
from swapkit.ir.documents import write_file
from swapkit.planning.reasons import explain_decisions
from swapkit.reporting.traces.measured import MeasuredRun, add_measured_run
from swapkit.reporting.traces.names import MEMORY
from swapkit.reporting.traces.planned import PlannedStep, add_planned_step
from swapkit.reporting.traces.snapshots import encode_snapshot
from swapkit.reporting.traces.tracks import Tracks, format_document
from swapkit.simulation.timeline import simulate

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from swapkit._runtime.control.plan_status import PlanStatus
    from swapkit._runtime.session.memory_history import PoolLook
    from swapkit.ir.runs import StepRecord

_PROTOCOL = 4  # as torch's snapshots; a pickle of lists, dictionaries, numbers and text
_NS_PER_S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSources:
    """What a session knows of its steps. `look_at_memory` raises SessionError without our pool.

    `ended_at`: when the latest step ended, on the clock of `time.perf_counter`.
    """

    status: PlanStatus
    steps: Sequence[StepRecord]
    ended_at: float
    budget_bytes: int
    look_at_memory: Callable[[], PoolLook]
    memory: PoolLook | None  # with its events, if they were recorded


def write_trace_file(path: str | os.PathLike[str], suffix: str, sources: TraceSources) -> None:
    """Write the file of a suffix that `check_suffix` returned.

    Raises:
        InvalidArgument: `path` is not a path.
        SessionError: a `.pickle` without a pool of ours.
        DiskError: the file cannot be written. A subclass of `OSError`.
    """
    if suffix == MEMORY:
        snapshot = encode_snapshot((sources.memory or sources.look_at_memory()).history())
        write_file(path, lambda file: pickle.dump(snapshot, file, protocol=_PROTOCOL))
        return
    content = json.dumps(_make_document(sources), separators=(",", ":"), allow_nan=False).encode()

    def write(file: BinaryIO) -> None:
        file.write(gzip.compress(content, mtime=0) if suffix == ".json.gz" else content)

    write_file(path, write)


def _make_document(sources: TraceSources) -> dict[str, object]:
    tracks = Tracks()
    memory = None if sources.memory is None else sources.memory.history()
    run = MeasuredRun(
        steps=sources.steps,
        ended_ns=round(sources.ended_at * _NS_PER_S),
        budget_bytes=sources.budget_bytes,
        history=memory,
    )
    about: dict[str, str | int | float | bool | None] = {
        "times": "microseconds",
        "budget_bytes": sources.budget_bytes,
        "measured_over_predicted": sources.status.pace,
    }
    step, why_none = _find_step(sources)
    if step is not None:
        begins = run.begins()
        # Beside the latest measured step.
        begin_ns = begins[-1] - run.first_ns if begins else 0
        add_planned_step(tracks, step, begin_ns=begin_ns)
        about["policy"] = "" if step.plan is None else step.plan.policy
    if why_none:
        about["no_schedule"] = why_none
    if memory is not None:
        about["lost_events"] = memory.lost_events
    add_measured_run(tracks, run)
    return format_document(tracks, about)


def _find_step(sources: TraceSources) -> tuple[PlannedStep | None, str]:
    """Return the recorded step with its plan as far as they are known, and what is missing."""
    status = sources.status
    trace, plan, machine = status.trace, status.plan, status.machine
    if trace is None:
        return None, status.why_none or "no step was recorded"
    recorded = PlannedStep(trace=trace, budget_bytes=sources.budget_bytes)
    if plan is None:
        return recorded, status.why_none or "there is no plan yet"
    if machine is None:
        return recorded, "the plan was given, and this machine's link was not measured"
    machine = replace(machine, budget_bytes=plan.budget_bytes)
    try:
        schedule = simulate(trace, plan, machine)
        reasons = explain_decisions(trace, plan, machine, schedule)
    except (InfeasibleBudget, PlanMismatch) as error:
        return recorded, str(error)
    return replace(recorded, plan=plan, schedule=schedule, reasons=reasons), ""
