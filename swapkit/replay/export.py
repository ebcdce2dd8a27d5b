"""A replay as a JSON document."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swapkit.ir.allocations import AllocationTrace
    from swapkit.reporting.replays import AllocatorReport, TraceDemand
    from swapkit.simulation.allocators.replaying import ReplayOutcome

FORMAT = "swapkit replay"
VERSION = 1


def encode_replay(
    trace: AllocationTrace,
    demand: TraceDemand,
    reports: Sequence[AllocatorReport],
    *,
    budget_bytes: int | None,
) -> dict[str, object]:
    """Return the document of a replay; amounts are bytes, fragmentation is a share."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "trace": trace.label,
        "device": trace.device,
        "budget_bytes": budget_bytes,
        "blocks": demand.requests,
        "events": demand.events,
        "steps": demand.steps,
        "present_blocks": demand.present,
        "present_bytes": demand.present_bytes,
        "kept_blocks": demand.kept,
        "kept_bytes": demand.kept_bytes,
        "max_live_bytes": demand.max_live_bytes,
        "max_live_rounded_bytes": demand.max_live_rounded_bytes,
        "internal": demand.internal,
        "allocators": {each.key: _encode_report(each, demand) for each in reports},
    }


def _encode_report(report: AllocatorReport, demand: TraceDemand) -> dict[str, object]:
    return {
        "name": report.name,
        "external": report.external(demand),
        "layout_excess": report.layout_excess,
        "layout": None if report.layout is None else asdict(report.layout),
        "active_utilisation": report.active_utilisation,
        "requested_utilisation": report.requested_utilisation(demand),
        **_encode_outcome(report.free),
        "least_budget_bytes": report.least_bytes,
        "within_budget": None if report.within is None else _encode_outcome(report.within),
    }


def _encode_outcome(outcome: ReplayOutcome) -> dict[str, object]:
    failure = outcome.failure
    return {
        "peak_reserved_bytes": outcome.peak_reserved_bytes,
        "peak_allocated_bytes": outcome.peak_allocated_bytes,
        "stranded_bytes": outcome.stranded_bytes,
        "fits": failure is None,
        "failure": None
        if failure is None
        else {
            "event": failure.event,
            "block": failure.block,
            "asked_bytes": failure.asked_bytes,
            "reserved_bytes": failure.reserved_bytes,
            "allocated_bytes": failure.allocated_bytes,
        },
    }
