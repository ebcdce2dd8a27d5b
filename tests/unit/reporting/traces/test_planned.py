"""A planned step in a viewer of traces: what runs when, why, and with how much memory."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from swapkit.ir.machines import Machine
from swapkit.ir.plans import Action
from swapkit.ir.traces import Operator, Phase, Trace
from swapkit.planning.planner import find_floor, make_plan
from swapkit.reporting.steps import SimulatedStep, simulate_step
from swapkit.reporting.traces.session import PLANNED, PlannedStep
from swapkit.reporting.traces.tracks import Slice, Tracks, format_document
from swapkit.simulation.lowering import lower
from tests.support.layers import layered_trace
from tests.support.problems import kept_peak
from tests.support.random_traces import random_trace
from tests.support.trace_format import check_trace, counts_of, slices_of

US = 1e6
LEAST = 0.0  # share: the smallest budget with a plan


def planned(trace: Trace, share: float, speed: float = 4e9, policy: str = "auto") -> SimulatedStep:
    budget_bytes = int(share * kept_peak(lower(trace)))
    machine = Machine(
        budget_bytes=budget_bytes, out_bytes_per_second=speed, in_bytes_per_second=speed
    )
    if share == LEAST:
        machine = replace(machine, budget_bytes=find_floor(trace, machine, policy))
    step = simulate_step(trace, make_plan(trace, machine, policy=policy), machine, "")
    assert not step.why_not_planned
    return step


def recorded(trace: Trace) -> SimulatedStep:
    return simulate_step(trace, None, None, "nothing fits")


def events_of(step: SimulatedStep, begin_ns: int = 0) -> list[dict[str, Any]]:
    tracks = PlannedStep(step, begin_ns).track(step.plan.budget_bytes)
    document = format_document([tracks], {"times": "microseconds"})
    return check_trace(json.loads(json.dumps(document, allow_nan=False)))


def names_around(slices: list[dict[str, Any]], inner: dict[str, Any]) -> set[str]:
    """Return the names of the phases and modules that enclose a slice."""
    end = inner["ts"] + inner["dur"] - 0.002
    return {
        each["name"]
        for each in slices
        if each["cat"] in {"phase", "module"}
        and each["ts"] <= inner["ts"] + 0.002
        and end <= each["ts"] + each["dur"]
    }


def test_step_when_it_swaps_then_each_copy_has_its_times_bytes_and_reason() -> None:
    step = planned(layered_trace(4), 0.6)
    events = events_of(step)
    transfers = {each.storage: each for each in step.schedule.transfers}
    assert transfers
    for thread, begin, end in (
        ("copy out", "out_start", "out_end"),
        ("copy in", "in_start", "in_end"),
    ):
        copies = [
            each
            for each in slices_of(events, "planned step")
            if each["cat"] == "copy" and each in slices_of(events, "planned step", thread)
        ]
        assert {each["args"]["storage"] for each in copies} == set(transfers)
        for copy in copies:
            found = transfers[copy["args"]["storage"]]
            assert copy["ts"] == pytest.approx(getattr(found, begin) * US, abs=0.002)
            assert copy["ts"] + copy["dur"] == pytest.approx(getattr(found, end) * US, abs=0.002)
            storage = step.trace.storages[found.storage]
            assert copy["args"]["bytes"] == storage.nbytes
            assert copy["args"]["module"] == storage.module
            assert copy["args"]["action"] == "swap"
    reasons = {each.storage: each.why.value for each in step.reasons}
    told = {
        each["args"]["storage"]: each["args"]["reason"]
        for each in slices_of(events, "planned step")
        if each["cat"] == "copy"
    }
    assert told == {storage: reasons[storage] for storage in transfers}


def test_step_when_it_swaps_then_arrows_lead_from_the_save_over_both_copies_to_the_use() -> None:
    step = planned(layered_trace(4), 0.6)
    arrows: dict[int, list[dict[str, Any]]] = {}
    for event in events_of(step):
        if event["ph"] in {"s", "t", "f"}:
            arrows.setdefault(event["id"], []).append(event)
    assert len(arrows) == len(step.schedule.transfers)
    for points in arrows.values():
        assert [each["ph"] for each in points] == ["s", "t", "t", "f"]
        threads = [each["tid"] for each in points]
        assert threads[0] == threads[3] == 1  # compute
        assert threads[1] // 100 == 1
        assert threads[2] // 100 == 2


def test_step_when_operators_run_then_they_lie_inside_their_phase_and_modules() -> None:
    step = planned(layered_trace(3), 0.6)
    compute = slices_of(events_of(step), "planned step", "compute")
    operators = [each for each in compute if each["cat"] == "operator"]
    assert [each["args"]["operator"] for each in operators] == list(
        range(len(step.trace.operators))
    )
    for each in operators:
        operator = step.trace.operators[each["args"]["operator"]]
        parts = operator.module.split(".") if operator.module else []
        modules = {".".join(parts[: count + 1]) for count in range(len(parts))}
        assert {operator.phase.value, *modules} <= names_around(compute, each)
    assert {each["name"] for each in compute if each["cat"] == "phase"} == {
        phase.value for phase in {each.phase for each in step.trace.operators}
    }


@pytest.mark.parametrize("share", [0.45, 0.6, 0.8])
def test_memory_when_planned_then_it_peaks_where_predicted_and_within_the_budget(
    share: float,
) -> None:
    step = planned(layered_trace(4), share)
    events = events_of(step)
    most = max(each["in use"] for each in counts_of(events, PLANNED, "device bytes"))
    prediction = step.schedule.prediction
    assert most == prediction.peak_bytes <= step.plan.budget_bytes
    without = max(each["bytes"] for each in counts_of(events, PLANNED, "without moves"))
    assert without == step.trace.peak_bytes > step.plan.budget_bytes
    host = counts_of(events, PLANNED, "host bytes")
    assert max(each["copies"] for each in host) == prediction.host_peak_bytes
    assert host[-1] == {"copies": 0}
    assert {each["bytes"] for each in counts_of(events, PLANNED, "budget")} == {
        step.plan.budget_bytes
    }


def test_step_when_it_recomputes_then_the_operator_starts_after_it() -> None:
    step = planned(layered_trace(4), 0.5, speed=2e8)  # copies are dear
    assert step.schedule.recomputations
    events = events_of(step)
    again = slices_of(events, "planned step", "recompute")
    assert {each["args"]["storage"] for each in again} == {
        each.storage for each in step.schedule.recomputations
    }
    assert {each["args"]["action"] for each in again} == {Action.RECOMPUTE.value}
    assert sum(each["dur"] for each in again) > 0
    operators = {
        each["args"]["operator"]: each
        for each in slices_of(events, "planned step", "compute")
        if each["cat"] == "operator"
    }
    for each in again:
        operator = operators[each["args"]["before_operator"]]
        assert each["ts"] + each["dur"] <= operator["ts"] + 0.002


def test_step_when_it_waits_then_the_waits_are_those_of_the_schedule() -> None:
    step = planned(layered_trace(4), 0.6, speed=5e8, policy="swap")
    waits = [
        each
        for each in slices_of(events_of(step), "planned step", "compute")
        if each["cat"] == "stall"
    ]
    assert len(waits) == len(step.schedule.stalls) > 0
    assert sum(each["dur"] for each in waits) == pytest.approx(
        step.schedule.prediction.stall_seconds * US, rel=1e-4
    )


@pytest.mark.parametrize("seed", range(20))
def test_step_when_random_then_the_file_is_sound(seed: int) -> None:
    events = events_of(planned(random_trace(seed), LEAST), begin_ns=seed)
    assert slices_of(events, "planned step", "compute")


def test_step_when_there_is_no_plan_then_the_recorded_step() -> None:
    trace = layered_trace(2)
    events = events_of(recorded(trace), begin_ns=5000)
    operators = [each for each in slices_of(events, "recorded step") if each["cat"] == "operator"]
    assert len(operators) == len(trace.operators)
    assert operators[0]["ts"] == 5
    assert not slices_of(events, "recorded step", "copy out")
    most = max(each["in use"] for each in counts_of(events, PLANNED, "device bytes"))
    assert most == trace.peak_bytes


def test_step_when_it_has_bubbles_and_microbatches_then_both_are_told() -> None:
    trace = layered_trace(2)
    first = replace(trace.operators[0], microbatch=1)
    idle = Operator(name="", seconds=0.25, phase=Phase.IDLE)
    operators = (first, *trace.operators[1:-1], idle)
    events = events_of(recorded(replace(trace, operators=operators)))
    compute = slices_of(events, "recorded step", "compute")
    assert {each["name"] for each in compute if each["cat"] == "phase"} == {
        "forward, microbatch 1",
        "forward, microbatch 0",
        "backward, microbatch 0",
    }
    [bubble] = [each for each in compute if each["cat"] == "idle"]
    assert bubble["dur"] == pytest.approx(250_000, abs=0.002)


def test_slices_when_they_overlap_then_on_rows_of_their_own() -> None:
    slices = [
        Slice(name, begin, end, "") for name, begin, end in (("a", 0, 5), ("b", 2, 4), ("c", 4, 6))
    ]
    tracks = Tracks(1, "p")
    assert tracks.add_rows("t", 5, slices) == [5, 6, 6]
    events = check_trace(format_document([tracks], {}))
    assert [each["name"] for each in slices_of(events, "p", "t 2")] == ["b", "c"]
    for each in slices:
        tracks.add_slice(5, each)
    with pytest.raises(AssertionError):
        check_trace(format_document([tracks], {}))
