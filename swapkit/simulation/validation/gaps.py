"""The gaps in which storages are idle, and the operators that touch them."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from swapkit.ir.traces import BEFORE, EventKind, Kind, Phase, Storage, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The operators `last` and `need`, with no touch of a storage in between.

    `final` is the last operator that changes the bytes before the gap. BEFORE: there is none.
    """

    final: int
    last: int
    need: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Touch:
    """An operator that reads or writes a storage, or both."""

    operator: int
    phase: Phase
    is_read: bool
    is_write: bool


def find_touches(trace: Trace) -> list[list[Touch]]:
    """Return for each storage the operators that touch it, in order."""
    touches: list[list[Touch]] = [[] for _ in trace.storages]
    for number, operator in enumerate(trace.operators):
        reads, writes = set(operator.reads), set(operator.writes)
        for storage in reads | writes:
            touches[storage].append(
                Touch(
                    operator=number,
                    phase=operator.phase,
                    is_read=storage in reads,
                    is_write=storage in writes,
                )
            )
    return touches


def find_gaps(trace: Trace, touches: list[list[Touch]]) -> dict[int, Gap]:
    """Return the gap of each storage that may be swapped or recomputed, by storage."""
    gaps = {}
    saved_at = _find_first_saves(trace)
    for number, storage in enumerate(trace.storages):
        if storage.kind is Kind.OPTIMIZER_STATE and storage.birth == BEFORE:
            gap = _find_first_use(touches[number])
        elif is_streamed(storage):
            gap = _find_fetch(storage, touches[number])
        elif storage.is_saved:
            gap = _find_idle_time(storage, touches[number])
        else:
            continue
        # A copy may begin at the first save of a storage, so the bytes must be final by then.
        if gap is not None and gap.final < saved_at.get(number, gap.need):
            gaps[number] = gap
    return gaps


def is_streamed(storage: Storage) -> bool:
    """Return whether a storage is a part of a weight that may leave."""
    return storage.kind is Kind.STATE and storage.continues is not None


def find_tails(trace: Trace, moved: Container[int]) -> dict[int, int]:
    """Return the last touches of weights that are not there when the next step begins.

    By the storage that each of them is when the step ends.
    """
    ends = {
        each.continues
        for number, each in enumerate(trace.storages)
        if each.continues is not None and each.birth == BEFORE and number in moved
    }
    return {
        number: index
        for index, operator in enumerate(trace.operators)
        for number in ends & {*operator.reads, *operator.writes}
    }


def is_clean(
    trace: Trace, touches: Sequence[Sequence[Touch]], storage: int, swapped: Container[int]
) -> bool:
    """Return whether there is a copy of a storage's bytes when it becomes idle.

    That of an earlier stretch of a weight, if no operator has written the bytes since.
    """
    if not is_streamed(trace.storages[storage]):
        return False
    part = storage
    while True:
        former = trace.storages[part].continues
        assert former is not None
        if any(each.is_write for each in touches[former]):
            return False
        if former in swapped or former == storage:
            return True
        part = former


def find_part(trace: Trace, touches: Sequence[Sequence[Touch]], storage: int, operator: int) -> int:
    """Return the part of a weight that has its bytes at an operator; of others, the storage."""
    if not is_streamed(trace.storages[storage]):
        return storage
    for number, each in enumerate(trace.storages[storage + 1 :], storage + 1):
        is_over = each.continues == storage and trace.storages[storage].death <= operator
        if is_over and not any(touch.is_write for touch in touches[storage]):
            storage = number
    return storage


def _find_fetch(storage: Storage, touches: list[Touch]) -> Gap | None:
    """Return the gap from the birth of a part of a weight to its first use."""
    if not touches:
        return None
    need = touches[0].operator
    return Gap(final=storage.birth, last=storage.birth, need=need) if storage.birth < need else None


def _find_first_saves(trace: Trace) -> dict[int, int]:
    """Return the first operator after the first save of each storage, by storage."""
    found: dict[int, int] = {}
    for event in trace.events:
        if event.kind is EventKind.SAVE and event.storage is not None:
            found.setdefault(event.storage, event.operator)
    return found


def _find_first_use(touches: list[Touch]) -> Gap | None:
    """Return the gap from the start of a step to the first touch, if the optimizer reads there."""
    if not touches or touches[0].phase is not Phase.OPTIMIZER or not touches[0].is_read:
        return None
    return Gap(final=BEFORE, last=BEFORE, need=touches[0].operator)


def _find_idle_time(storage: Storage, touches: list[Touch]) -> Gap | None:
    """Return the gap between forward, or a backward pass, and the first read after that."""
    forward = [number for number, each in enumerate(touches) if each.phase is Phase.FORWARD]
    count = forward[-1] + 1 if forward else 0
    # A backward pass used a continuing storage right before its birth.
    is_known = bool(forward) or storage.continues is not None
    if count == len(touches) or not is_known:
        return None
    last = touches[count - 1].operator if forward else storage.birth
    return _find_rest(storage, touches[:count], touches[count], max(last, storage.held))


def _find_rest(storage: Storage, before: list[Touch], after: Touch, last: int) -> Gap | None:
    """Return the gap between operator `last` and `after`, if there is one."""
    phases = {Phase.BACKWARD}
    if storage.kind is Kind.OPTIMIZER_STATE:
        phases.add(Phase.OPTIMIZER)
    if not after.is_read or after.phase not in phases or last >= after.operator:
        return None
    writes = [each.operator for each in before if each.is_write]
    # A storage without a recorded write exists when the operator of its birth begins.
    final = writes[-1] if writes else max(storage.birth - 1, BEFORE)
    return Gap(final=final, last=last, need=after.operator)
