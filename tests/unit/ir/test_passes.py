"""Storages that several backward passes use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swapkit.errors import InvalidDocument
from swapkit.ir.checks import check_trace
from swapkit.ir.codec import decode_trace, encode_trace
from swapkit.ir.passes import SHORTEST_WITHIN, continue_after_passes, divide_weights
from swapkit.ir.traces import BEFORE, Event, EventKind, Kind, Operator, Phase, Storage, Trace


def operator(phase: Phase, reads: tuple[int, ...] = (), writes: tuple[int, ...] = ()) -> Operator:
    return Operator(name="work", seconds=1.0, phase=phase, reads=reads, writes=writes)


F, B = Phase.FORWARD, Phase.BACKWARD

# Forward makes 0, which is used by two passes, and 1, which only the first one uses.
TRACE = Trace(
    operators=(
        operator(F, writes=(0,)),
        operator(F, writes=(1,)),
        operator(B, reads=(1,)),
        operator(B, reads=(0,)),
        operator(B),
        operator(F),
        operator(B),
        operator(B, reads=(0,)),
        operator(Phase.OPTIMIZER),
    ),
    storages=(
        Storage(nbytes=100, birth=0, death=8, is_saved=True, module="a", held=1),
        Storage(nbytes=10, birth=1, death=3, is_saved=True, module="b"),
    ),
    events=(
        Event(kind=EventKind.SAVE, storage=0, operator=1),
        Event(kind=EventKind.SAVE, storage=1, operator=2),
        Event(kind=EventKind.USE, storage=1, operator=2),
        Event(kind=EventKind.USE, storage=0, operator=3),
        Event(kind=EventKind.USE, storage=0, operator=7),
    ),
)


def test_trace_when_two_passes_use_a_storage_then_it_is_divided_after_the_first() -> None:
    divided = continue_after_passes(TRACE)
    check_trace(divided)
    assert divided.storages == (
        replace(TRACE.storages[0], death=4),
        TRACE.storages[1],
        replace(TRACE.storages[0], birth=4, held=BEFORE, continues=0),
    )
    assert [each.reads for each in divided.operators if each.reads] == [(1,), (0,), (2,)]
    assert [each.storage for each in divided.events] == [0, 1, 1, 0, 2]
    assert divided.memory() == TRACE.memory()
    assert decode_trace(encode_trace(divided)) == divided


def test_trace_when_a_pass_saves_for_a_later_one_then_what_it_saves_is_divided_too() -> None:
    first = replace(TRACE.operators[2], writes=(1,))
    second = replace(TRACE.operators[7], reads=(1,))
    operators = (TRACE.operators[0], operator(F), first, *TRACE.operators[3:7], second)
    created = replace(TRACE.storages[1], birth=2, death=8, held=2)
    divided = continue_after_passes(
        replace(TRACE, operators=operators, storages=(TRACE.storages[0], created), events=())
    )
    assert divided.storages[2:] == (replace(created, birth=3, held=BEFORE, continues=1),)


def use_again_later(trace: Trace, idle: int) -> Trace:
    """Return a trace whose last pass uses storage 0 once more, after so many other operators."""
    again = (*(operator(B) for _ in range(idle)), operator(B, reads=(0,)))
    operators = (*trace.operators[:8], *again, trace.operators[8])
    whole = replace(trace.storages[0], death=len(operators) - 1)
    return replace(trace, operators=operators, storages=(whole, trace.storages[1]), events=())


def test_trace_when_a_later_pass_uses_a_storage_twice_then_it_is_divided_in_between_too() -> None:
    trace = use_again_later(TRACE, SHORTEST_WITHIN)
    divided = continue_after_passes(trace)
    check_trace(divided)
    lives = [(each.birth, each.death) for each in divided.storages]
    assert lives == [(0, 4), (1, 3), (4, 8), (8, 17)]
    assert [each.continues for each in divided.storages] == [None, None, 0, 2]
    assert divided.memory() == trace.memory()
    near = continue_after_passes(use_again_later(TRACE, SHORTEST_WITHIN - 1))
    assert [each.continues for each in near.storages] == [None, None, 0]


def test_trace_when_only_one_pass_uses_a_storage_twice_then_it_stays_whole() -> None:
    trace = use_again_later(TRACE, SHORTEST_WITHIN)
    first = replace(trace.operators[3], reads=())
    trace = replace(trace, operators=(*trace.operators[:3], first, *trace.operators[4:]))
    assert continue_after_passes(trace) == trace


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"is_saved": False}, id="not saved"),
        pytest.param({"birth": BEFORE}, id="from before the step"),
    ],
)
def test_trace_when_no_plan_could_move_a_storage_then_it_stays_whole(
    change: dict[str, object],
) -> None:
    storages = (replace(TRACE.storages[0], **change), TRACE.storages[1])  # type: ignore[arg-type]
    trace = replace(TRACE, storages=storages)
    assert continue_after_passes(trace) == trace


def test_trace_when_a_storage_is_changed_after_a_pass_then_it_stays_whole() -> None:
    changing = operator(F, writes=(0,))
    trace = replace(TRACE, operators=(*TRACE.operators[:5], changing, *TRACE.operators[6:]))
    assert continue_after_passes(trace) == trace


def test_trace_when_there_is_one_pass_then_it_is_the_same() -> None:
    trace = replace(TRACE, operators=(*TRACE.operators[:5], *[operator(B, (0,))] * 4))
    assert continue_after_passes(trace) is trace


@pytest.mark.parametrize(
    ("former", "reason"), [(2, "below 2"), (1, "whose death is the birth of this one")]
)
def test_document_when_a_storage_continues_what_it_cannot_then_refused(
    former: int, reason: str
) -> None:
    divided = continue_after_passes(TRACE)
    wrong = replace(divided.storages[2], continues=former)
    with pytest.raises(InvalidDocument, match=rf"storages\[2\]\.continues: .*{reason}"):
        check_trace(replace(divided, storages=(*divided.storages[:2], wrong)))


def test_weights_when_used_far_apart_then_divided_and_the_first_part_continues_the_last() -> None:
    # 0 is used at the start and at the end, 1 twice in a row, 2 is written last, 3 is no weight.
    idle = [operator(F) for _ in range(SHORTEST_WITHIN)]
    steps = (operator(F, (0, 1)), operator(F, (1, 2, 3)), *idle, operator(B, (0, 3), (2,)))
    kinds = (Kind.STATE, Kind.STATE, Kind.STATE, Kind.INPUT)
    storages = tuple(Storage(nbytes=10, kind=kind, death=len(steps)) for kind in kinds)
    trace = Trace(operators=steps, storages=storages)
    divided = divide_weights(trace)
    check_trace(divided)
    assert [each.continues for each in divided.storages] == [4, 1, 5, None, 0, 2]
    assert [(each.birth, each.death) for each in divided.storages[::4]] == [(BEFORE, 1), (1, 11)]
    assert (divided.operators[-1].reads, divided.operators[-1].writes) == ((4, 3), (5,))
    assert divided.memory() == trace.memory()
    assert decode_trace(encode_trace(divided)) == divided
    assert divide_weights(divided) == divided
    assert [each.continues for each in divide_weights(trace, {1}).storages] == [None, 1, None, None]
    wrong = replace(divided.storages[0], continues=6)
    with pytest.raises(InvalidDocument, match=r"storages\[0\]\.continues: .*when the step ends"):
        check_trace(replace(divided, storages=(wrong, *divided.storages[1:])))
