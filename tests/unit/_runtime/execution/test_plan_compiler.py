"""From a plan's operators to a step's events."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
import torch

from swapkit._runtime.execution.plan_compiler import FIRST_SAVE, SAVE, USE, Table, compile_plan
from swapkit._runtime.model.tracker import ModuleTracker
from swapkit._runtime.process.captures import Capture
from swapkit.errors import PlanMismatch
from swapkit.ir import plans
from swapkit.ir.plans import Action, Decision, Plan, Tier
from swapkit.ir.traces import BEFORE, Event, EventKind, Kind, Operator, Phase, Storage, Trace


class Linear(torch.nn.Module):
    """Names a module: "Linear"."""


def operator(
    name: str, *, reads: tuple[int, ...] = (), writes: tuple[int, ...] = (), back: bool = False
) -> Operator:
    return Operator(
        name=name,
        seconds=1.0,
        phase=Phase.BACKWARD if back else Phase.FORWARD,
        module="" if back else "Linear",
        reads=reads,
        writes=writes,
        is_repeatable=not back,
    )


def save(storage: int | None, before: int) -> Event:
    return Event(kind=EventKind.SAVE, storage=storage, operator=before)


def use(storage: int | None, before: int) -> Event:
    return Event(kind=EventKind.USE, storage=storage, operator=before)


NEVER = -1

# 0: a weight; 1 from 0, unsaved; 2 from 1; 3 from 2.
TRACE = Trace(
    operators=(
        operator("one", reads=(0,), writes=(1,)),
        operator("two", reads=(1,), writes=(2,)),
        operator("three", reads=(2,), writes=(3,)),
        operator("four", reads=(3,)),
        operator("four back", reads=(3,), back=True),
        operator("three back", back=True),
        operator("three more", reads=(2,), back=True),
        operator("two back", back=True),
    ),
    storages=(
        Storage(nbytes=64, kind=Kind.STATE, death=8),
        Storage(nbytes=128, birth=0, death=2),
        Storage(nbytes=256, birth=1, death=7, is_saved=True, module="Linear"),
        Storage(nbytes=512, birth=2, death=5, is_saved=True, module="Linear", index=1),
    ),
    events=(save(None, 0), save(2, 2), save(3, 3), save(2, 3), use(3, 4), use(2, 6), use(None, 7)),
)


MODEL = Linear()  # trackers keep no module alive


def compiled(*decisions: Decision, trace: Trace = TRACE) -> Table:
    tracker = ModuleTracker()
    tracker.add_model(MODEL)
    return compile_plan(trace, Plan(decisions=decisions, budget_bytes=1), tracker)


def numbers(table: bytes, width: int) -> list[tuple[int, ...]]:
    values = array("q", table).tolist()
    return [tuple(values[at : at + width]) for at in range(0, len(values), width)]


def storage_row(table: Table, storage: int) -> tuple[int, ...]:
    """Return a storage's row, but for its place among those that go or come with it."""
    *treatment, goes, _, comes, _ = numbers(table.storages, 8)[storage]
    return (*treatment, goes, comes)


def test_events_when_a_trace_has_them_then_each_says_what_is_expected() -> None:
    table = compiled()
    tag = 1
    assert numbers(table.events, 5) == [
        (-1, 0, 0, 0, SAVE),
        (2, 256, tag, TRACE.storages[2].index, FIRST_SAVE),
        (3, 512, tag, TRACE.storages[3].index, FIRST_SAVE),
        (2, 0, 0, 0, SAVE),
        (3, 0, 0, 0, USE),
        (2, 0, 0, 0, USE),
        (-1, 0, 0, 0, USE),
    ]
    assert table.largest_bytes == 0


@pytest.mark.parametrize(
    ("release", "prefetch", "goes", "comes"),
    [
        (None, None, NEVER, NEVER),
        # The last event before the operator; but not before what is saved was saved last.
        (4, None, 4, NEVER),
        (3, None, 3, NEVER),
        (2, None, 3, NEVER),
        (5, None, 4, NEVER),
        # The last event right before the operator, or the first one after; but before the use.
        (None, 4, NEVER, 4),
        (None, 3, NEVER, 3),
        (None, 5, NEVER, 4),
        # It comes with its use: operators before that have the memory until then.
        (None, 6, NEVER, NEVER),
        (4, 4, 4, 4),
    ],
)
def test_moves_when_a_plan_names_operators_then_events_stand_for_them(
    release: int | None, prefetch: int | None, goes: int, comes: int
) -> None:
    decision = Decision(
        storage=2,
        action=Action.SWAP,
        tier=plans.Tier.DISK,
        release=release,
        prefetch=prefetch,
    )
    table = compiled(decision)
    assert storage_row(table, 2) == (3, Tier.DISK, 1, -1, goes, comes)
    assert storage_row(table, 3) == (2, Tier.ANY, 0, -1, NEVER, NEVER)
    assert numbers(table.continuing, 2) == []
    assert table.largest_bytes == 256
    assert table.curve == ((1, 256), (1, 256))


def test_moves_when_several_are_at_one_event_then_in_the_order_of_their_copies() -> None:
    table = compiled(
        Decision(storage=2, action=Action.SWAP, release=4, prefetch=3),
        Decision(storage=3, action=Action.SWAP, release=4, prefetch=3),
    )
    two, three = numbers(table.storages, 8)[2:]
    assert two[4] == three[4] == 4
    assert two[5] < three[5]  # its copy can be done first: it was saved first
    assert two[6] == three[6] == 3
    assert three[7] < two[7]


def test_captures_when_an_input_was_not_saved_then_its_operator_runs_again_too() -> None:
    table = compiled(Decision(storage=2, action=Action.RECOMPUTE))
    assert table.captures == (
        Capture(1, "one", 0, (True,), "Linear"),
        Capture(1, "two", 0, (True,), "Linear"),
    )
    assert storage_row(table, 2)[2] == 2
    # From a saved one: that is there.
    table = compiled(Decision(storage=3, action=Action.RECOMPUTE))
    assert table.captures == (Capture(2, "three", 0, (True,), "Linear"),)


def test_captures_when_an_operator_is_in_no_module_then_its_result_is_swapped() -> None:
    operators = tuple(
        Operator(name=each.name, seconds=1.0, phase=each.phase, writes=each.writes)
        for each in TRACE.operators
    )
    trace = Trace(operators=operators, storages=TRACE.storages, events=TRACE.events)
    table = compiled(Decision(storage=2, action=Action.RECOMPUTE), trace=trace)
    assert table.captures == ()
    assert storage_row(table, 2)[2] == 1


def test_plan_when_it_is_not_one_for_the_trace_then_refused() -> None:
    with pytest.raises(PlanMismatch, match="storage 4, which is not in the trace"):
        compiled(Decision(storage=4, action=Action.SWAP))
    with pytest.raises(PlanMismatch, match="no events"):
        compiled(trace=Trace(operators=TRACE.operators, storages=TRACE.storages))


def test_decisions_when_a_storage_has_no_events_then_they_are_not_ours() -> None:
    table = compiled(Decision(storage=1, action=Action.SWAP, release=BEFORE + 1))
    assert storage_row(table, 1) == (0, Tier.ANY, 0, -1, NEVER, NEVER)


# ---- several backward passes ---------------------------------------------------------------------

# 0 is saved, used by a backward pass, then by another one; 1 is 0 from the end of the first on.
TWICE = Trace(
    operators=(
        operator("one", writes=(0,)),
        operator("two"),
        operator("two back", reads=(0,), back=True),
        operator("one back", back=True),
        operator("another loss"),
        operator("two back", reads=(1,), back=True),
        operator("one back", back=True),
    ),
    storages=(
        Storage(nbytes=256, birth=0, death=3, is_saved=True, module="Linear"),
        Storage(nbytes=256, birth=3, death=7, is_saved=True, module="Linear", continues=0),
    ),
    events=(save(0, 1), use(0, 2), use(None, 3), use(1, 5), use(None, 6)),
)


def test_moves_when_a_later_pass_uses_a_storage_again_then_it_goes_and_comes_once_more() -> None:
    table = compiled(Decision(storage=1, action=Action.SWAP, release=4, prefetch=4), trace=TWICE)
    assert numbers(table.continuing, 2) == [(2, 1)]
    assert storage_row(table, 0) == (0, Tier.ANY, 0, -1, NEVER, NEVER)
    assert storage_row(table, 1) == (2, Tier.ANY, 1, 0, 2, 2)
    assert [kind for *_, kind in numbers(table.events, 5)] == [FIRST_SAVE, USE, USE, USE, USE]


def test_continuing_when_no_event_is_between_two_passes_then_it_is_known_in_time() -> None:
    events = (save(0, 1), use(0, 2), use(1, 5))
    table = compiled(trace=replace(TWICE, events=events))
    assert numbers(table.continuing, 2) == [(1, 1)]


def test_storages_when_a_continued_one_is_computed_again_then_so_is_what_continues_it() -> None:
    table = compiled(Decision(storage=0, action=Action.RECOMPUTE), trace=TWICE)
    assert [storage_row(table, each)[2] for each in (0, 1)] == [2, 2]
