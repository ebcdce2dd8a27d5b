"""When weights leave and come under a plan, by their uses and by events of saved tensors."""

from __future__ import annotations

import pytest

from swapkit._runtime.execution.weight_moves import WeightMoves, find_weight_moves
from swapkit.ir.passes import divide_weights
from swapkit.ir.plans import Action, Decision, Plan
from swapkit.ir.traces import BEFORE, Event, EventKind, Kind, Operator, Phase, Storage, Trace
from swapkit.simulation.items import is_weight

# What operators read: the first weight, nothing, the second one twice, nothing, the first one.
READS: tuple[tuple[int, ...], ...] = ((0,), *[()] * 19, (1,), (1,), *[()] * 18, (0,))
ADDRESSES = {"first": 100, "second": 200}


def moves(prefetch: int | None) -> WeightMoves:
    """Return the moves of a plan that lets the first weight leave in between."""
    operators = [
        Operator(name="op", seconds=1.0, phase=Phase.FORWARD, reads=reads) for reads in READS
    ]
    storages = [
        Storage(nbytes=4, kind=Kind.STATE, birth=BEFORE, death=len(READS), module=name)
        for name in ADDRESSES
    ]
    events = [Event(operator=at, kind=EventKind.USE, storage=None) for at in (1, 30)]
    trace = Trace(operators=tuple(operators), storages=tuple(storages), events=tuple(events))
    trace = divide_weights(trace)
    (behind,) = [
        number
        for number, each in enumerate(trace.storages)
        if is_weight(each) and each.birth != BEFORE and each.module == "first"
    ]
    decision = Decision(storage=behind, action=Action.SWAP, prefetch=prefetch)
    return find_weight_moves(trace, Plan(decisions=(decision,), budget_bytes=8))


@pytest.mark.parametrize(
    ("prefetch", "where"),
    [
        (15, "comes"),  # at the second weight's use: there is no event in between
        (21, "follows"),  # behind the first operator that uses the second weight
        (25, "event"),
        (35, "use"),  # its own: the operator brings it
        (None, "use"),
    ],
)
def test_weight_when_a_plan_prefetches_it_then_it_comes_as_soon_as_a_session_can(
    prefetch: int | None, where: str
) -> None:
    uses, events = moves(prefetch).as_rows(ADDRESSES)
    first, second, last = uses
    assert (first.address, second.address, last.address) == (100, 200, 100)
    assert (first.leaves, second.leaves, last.leaves) == (1, 0, 0)
    assert second.comes == ([100] if where == "comes" else [])
    assert second.follows == ([100] if where == "follows" else [])
    assert events == ([(1, 100)] if where == "event" else [])
    assert not first.comes + first.follows + last.comes + last.follows


def test_weight_when_operators_in_a_row_use_it_then_it_leaves_behind_the_last_one() -> None:
    second = moves(None).uses[1]
    second.leaves = True
    assert moves(None).as_rows(ADDRESSES)[0][1].leaves == 0
    assert WeightMoves([second], []).as_rows(ADDRESSES)[0][0].leaves == 2


def test_weights_when_one_is_not_there_then_a_plan_moves_none() -> None:
    assert moves(21).as_rows({"first": 100}) == ([], [])
