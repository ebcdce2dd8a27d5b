"""Values made by hand: what is wrong with them is found, and named as in a document."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from swapkit.errors import InvalidDocument
from swapkit.ir.checks import MOST_TOTAL_BYTES, check_machine, check_plan, check_trace
from swapkit.ir.plans import Action, Decision
from swapkit.ir.traces import EventKind, Operator, Phase, Storage, Trace
from tests.unit.ir.values import MACHINE, PLAN, TRACE


def replaced(value: Any, **changes: Any) -> Any:
    """Return a value with other fields, of whatever types."""
    return dataclasses.replace(value, **changes)


def with_row(table: str, row: int, **changes: Any) -> Any:
    """Return the trace with one operator, storage or event changed."""
    rows = list(getattr(TRACE, table))
    rows[row] = replaced(rows[row], **changes)
    return replaced(TRACE, **{table: tuple(rows)})


def test_values_when_sound_then_pass() -> None:
    check_trace(TRACE)
    check_machine(MACHINE)
    check_plan(PLAN)
    check_plan(PLAN, TRACE)


@pytest.mark.parametrize(
    ("trace", "expected"),
    [
        (with_row("operators", 1, seconds=math.nan), r"operators\[1\]\.seconds: .*got nan"),
        (with_row("operators", 1, phase="forward"), r"operators\[1\]\.phase: expected a Phase"),
        (with_row("operators", 1, reads=[0]), r"operators\[1\]\.reads: expected a list"),
        (with_row("operators", 1, reads=(0, 4)), r"operators\[1\]\.reads: .*below 4, got 4"),
        (with_row("operators", 0, writes=(2,)), r"operators\[0\]\.writes: .*2 lives from"),
        (with_row("operators", 4, reads=(2,)), r"operators\[4\]\.reads: .*until before 4"),
        (with_row("storages", 0, nbytes=10**5000), r"storages\[0\]\.nbytes: .*too many digits"),
        (with_row("storages", 0, birth=5), r"storages\[0\]\.birth: expected an operator"),
        (with_row("storages", 2, death=0), r"storages\[2\]\.death: .*from 1 to 5, got 0"),
        (with_row("events", 1, storage=4), r"events\[1\]\.storage: .*below 4, got 4"),
        (with_row("events", 4, kind=EventKind.SAVE, operator=2), r"events\[4\]\.operator"),
        (with_row("events", 2, kind=EventKind.USE), r"events\[2\]\.storage: .*earlier event"),
        (replaced(TRACE, operators=()), "operators: expected at least one"),
        (replaced(TRACE, operators=[]), "operators: expected a tuple of Operator"),
        (replaced(TRACE, storages=(3,)), r"storages\[0\]: expected a Storage, got 3"),
        (replaced(TRACE, reserved_ratio=0), "reserved_ratio"),
        (replaced(TRACE, version=2), "version: expected 1, got 2"),
        (replaced(TRACE, version=True), "version: expected 1, got True"),
        (PLAN, "trace: expected a Trace, got <Plan auto"),
    ],
)  # fmt: skip
def test_trace_when_wrong_then_says_where(trace: Any, expected: str) -> None:
    with pytest.raises(InvalidDocument, match=f"^{expected}"):
        check_trace(trace)


def test_storages_when_more_than_any_sum_holds_then_refused() -> None:
    operator = Operator(name="", seconds=0.0, phase=Phase.IDLE)
    storages = (Storage(nbytes=1 << 60, death=1),) * 4
    check_trace(Trace(operators=(operator,), storages=storages))
    with pytest.raises(InvalidDocument, match=f"storages: expected at most {MOST_TOTAL_BYTES}"):
        check_trace(Trace(operators=(operator,), storages=storages, base_bytes=1))


def test_use_when_saved_in_an_earlier_step_then_sound() -> None:
    check_trace(with_row("storages", 1, birth=-1))
    events = tuple(each for each in TRACE.events if each.kind is EventKind.USE)
    trace = with_row("storages", 1, birth=-1)
    with pytest.raises(InvalidDocument, match=r"events\[0\]\.storage"):
        check_trace(replaced(trace, events=events))
    check_trace(replaced(trace, events=events[1:]))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"budget_bytes": -1}, "budget_bytes: .*got -1"),
        ({"out_bytes_per_second": 0.0}, "out_bytes_per_second"),
        ({"in_bytes_per_second": math.inf}, "in_bytes_per_second: .*got inf"),
        ({"out_latency_seconds": -1e-9}, "out_latency_seconds"),
        ({"duplex": 0.5}, "duplex: expected a number from 1 to 2, got 0.5"),
        ({"interference": math.nan}, "interference"),
        ({"host_bytes": 1.5}, "host_bytes: .*or nothing, got 1.5"),
        ({"disk_write_bytes_per_second": 0.0}, "disk_write_bytes_per_second: .*there is a disk"),
        ({"name": None}, "name: expected text"),
        ({"version": 0}, "version"),
    ],
)
def test_machine_when_wrong_then_says_where(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidDocument, match=f"^{expected}"):
        check_machine(replaced(MACHINE, **changes))


def test_machine_when_without_disk_then_needs_no_speeds() -> None:
    check_machine(
        replaced(
            MACHINE, disk_bytes=0, disk_write_bytes_per_second=0.0, disk_read_bytes_per_second=0.0
        )
    )


def plan_of(*decisions: Decision, **changes: Any) -> Any:
    return replaced(PLAN, decisions=decisions, **changes)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (plan_of(Decision(storage=-1, action=Action.KEEP)), r"decisions\[0\]\.storage"),
        (plan_of(Decision(storage=4, action=Action.KEEP)), r"decisions\[0\]\.storage: .*below 4"),
        (
            plan_of(*(Decision(storage=1, action=Action.KEEP),) * 2),
            r"decisions\[1\]\.storage: expected at most one decision",
        ),
        (
            plan_of(Decision(storage=1, action=Action.KEEP, release=2)),
            r"decisions\[0\]\.release: expected nothing, as it is not swapped, got 2",
        ),
        (
            plan_of(Decision(storage=1, action=Action.KEEP, prefetch=2)),
            r"decisions\[0\]\.prefetch: expected nothing, as it stays, got 2",
        ),
        (
            plan_of(Decision(storage=1, action=Action.SWAP, release=3, prefetch=2)),
            r"decisions\[0\]\.prefetch: expected an operator of at least 3, its release, got 2",
        ),
        (
            plan_of(Decision(storage=1, action=Action.SWAP, release=5)),
            r"decisions\[0\]\.release: expected an operator below 5, got 5",
        ),
        (plan_of(signature="other"), "signature: expected 'abc', the signature .*got 'other'"),
        (plan_of(bound_seconds=math.nan), "bound_seconds"),
        (plan_of(prediction=3), "prediction: expected a Prediction, got 3"),
        (plan_of(prediction=replaced(PLAN.prediction, seconds=-1)), r"prediction\.seconds"),
    ],
)  # fmt: skip
def test_plan_when_wrong_then_says_where(plan: Any, expected: str) -> None:
    with pytest.raises(InvalidDocument, match=f"^{expected}"):
        check_plan(plan, TRACE)


def test_plan_when_one_has_no_signature_then_fits() -> None:
    check_plan(plan_of(signature=""), TRACE)
    check_plan(PLAN, replaced(TRACE, signature=""))
