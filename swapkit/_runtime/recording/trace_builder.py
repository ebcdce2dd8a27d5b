"""Conversion of a recorder's notes to a `Trace`: microbatches, phases, lives, events."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from swapkit._runtime.recording.notes import NotedOperator, Notes
from swapkit._runtime.recording.saved_events import SavedEvent
from swapkit._runtime.recording.tables.blocks import ALIVE
from swapkit._runtime.recording.tables.storages import StorageLife, Storages
from swapkit.ir.passes import continue_after_passes, divide_weights
from swapkit.ir.traces import (
    BEFORE,
    Event,
    EventKind,
    Kind,
    Operator,
    Phase,
    Storage,
    Trace,
    is_wait,
    join_places,
)

# ---- microbatches --------------------------------------------------------------------------------
#
# Assignment of the operators of a recorded step to microbatches.


def number_microbatches(
    rows: Sequence[NotedOperator], phases: Sequence[Phase], events: Sequence[SavedEvent]
) -> list[int]:
    """Return the microbatch number of each operator.

    In a pipeline, its schedule says. Elsewhere a microbatch begins with each call of the root
    module. Without such calls, it begins with a forward that saves something after a backward. A
    backward operator belongs to the microbatch that saved the tensor used last.
    """
    if not rows:
        return []
    if any(row.microbatch is not None for row in rows):
        return list(_by_schedule(rows))
    return _by_uses(rows, phases, events)


def _by_uses(
    rows: Sequence[NotedOperator], phases: Sequence[Phase], events: Sequence[SavedEvent]
) -> list[int]:
    """Number by calls or saves, and backward by the saved tensors that it uses."""
    by_calls = rows[-1].root_calls > 0
    numbers = _by_calls(rows, phases) if by_calls else _by_saves(phases, events)
    uses = [each for each in events if each.kind is EventKind.USE and each.save >= 0]
    where = [each.operator for each in uses]
    last = len(rows) - 1
    whose = [numbers[min(events[each.save].operator, last)] for each in uses]
    for start, end in _runs(phases, is_backward=True):
        first, stop = bisect_left(where, start), bisect_left(where, end)
        used = list(zip(where[first:stop], whose[first:stop], strict=True))
        before = numbers[start - 1] if start else 0
        if used:  # operators before the first use belong to the same microbatch
            before = used[0][1]
        numbers[start:end] = _spread(used, start, end, before)
    return numbers


def _by_schedule(rows: Sequence[NotedOperator]) -> Iterator[int]:
    """Yield the schedule's numbers; what runs between two of its jobs belongs to the former."""
    number = 0
    for row in rows:
        if row.microbatch is not None:
            number = row.microbatch
        yield number


def _spread(used: list[tuple[int, int]], start: int, end: int, current: int) -> Iterator[int]:
    """Yield for each operator the microbatch of the last use; `current` before the first use."""
    at = 0
    for index in range(start, end):
        while at < len(used) and used[at][0] <= index:
            current = used[at][1]
            at += 1
        yield current


def _runs(phases: Sequence[Phase], *, is_backward: bool) -> Iterator[tuple[int, int]]:
    """Yield the range of each run of operators that are, or are not, of backward."""
    end = 0
    for is_of_it, run in groupby(phases, lambda phase: phase is Phase.BACKWARD):
        start, end = end, end + len(list(run))
        if is_of_it == is_backward:
            yield start, end


def _by_calls(rows: Sequence[NotedOperator], phases: Sequence[Phase]) -> list[int]:
    """Number by root calls; forward operators between a backward and a root call join that call."""
    numbers = [max(0, row.root_calls - 1) for row in rows]
    for start, end in _runs(phases, is_backward=False):
        before = rows[start - 1].root_calls if start else 0
        if start and rows[end - 1].root_calls > before:
            for index in range(start, end):
                if rows[index].root_calls == before and phases[index] is Phase.FORWARD:
                    numbers[index] = before
    return numbers


def _by_saves(phases: Sequence[Phase], events: Sequence[SavedEvent]) -> list[int]:
    """Number by forward runs that save something."""
    saves = [each.operator for each in events if each.kind is EventKind.SAVE]
    numbers = [0] * len(phases)
    count = 0
    for start, end in _runs(phases, is_backward=False):
        before = count
        # A result is saved after its operator.
        if start and bisect_left(saves, start + 1) < bisect_left(saves, end + 1):
            count += 1
        for index in range(start, end):
            numbers[index] = count if phases[index] is Phase.FORWARD else before
    for index in range(1, len(phases)):
        if phases[index] is Phase.BACKWARD:
            numbers[index] = numbers[index - 1]
    return numbers


# ---- trace builder -------------------------------------------------------------------------------
#
# Conversion of a recorder's notes to a `Trace`: phases, storage lives, events.

_OPTIMIZERS = (Kind.GRADIENT, Kind.OPTIMIZER_STATE)


def build_trace(
    notes: Notes,
    saved: Sequence[SavedEvent],
    seconds: Sequence[float],
    *,
    step_seconds: float,
    reserved_ratio: float,
    base_bytes: int,
) -> Trace:
    """Return the trace of a recorded step; see `Recorder.trace`.

    Other threads may still add to the notes. The trace ends with the last operator that has a time.
    Storage lives are read last, so that they cover every storage of the operators and events.
    """
    rows = notes.rows[: len(seconds)]
    seconds = _shorten_waits(rows, seconds, step_seconds)
    events = [each for each in tuple(saved) if each.operator <= len(rows)]
    lives = tuple(notes.storages.lives)
    phases = _phases(rows, lives)
    microbatches = number_microbatches(rows, phases, events)
    tracker, setting = notes.setting.tracker, notes.setting
    for life in lives:
        if _is_held(life):
            life.is_saved = False
    storages = tuple(_storage(life, len(rows)) for life in lives)
    operators = tuple(
        Operator(
            name=row.name,
            seconds=max(0.0, seconds[index]),
            phase=phases[index],
            microbatch=microbatches[index],
            module=tracker.name(row.tag),
            occurrence=row.occurrence,
            reads=_there(row.reads, storages, index),
            writes=_there(row.writes, storages, index),
            workspace_bytes=notes.workspaces.bytes_of(row.workspace),
            is_repeatable=row.is_repeatable and index not in notes.bytes.changed,
            flops=row.flops,
            touched_bytes=row.touched_bytes,
        )
        for index, row in enumerate(rows)
    )
    trace = Trace(
        operators=operators,
        storages=storages,
        events=tuple(_event(each, storages) for each in events),
        base_bytes=base_bytes,
        device=setting.stands_for or str(setting.device),
        label="" if setting.root is None else type(setting.root).__name__,
        signature=_signature(operators, storages),
        step_seconds=step_seconds,
        reserved_ratio=reserved_ratio,
        place=join_places(notes.places),
    )
    return divide_weights(continue_after_passes(trace), notes.weights)


def _shorten_waits(
    rows: Sequence[NotedOperator], seconds: Sequence[float], step_seconds: float
) -> Sequence[float]:
    """Return the times of operators; waits have at most what such a step has besides the others.

    While a step is recorded, ranks wait longer for each other.
    """
    waits = sum(each for row, each in zip(rows, seconds, strict=True) if is_wait(row.name))
    most = step_seconds - (sum(seconds) - waits)
    if not step_seconds or not waits or waits <= most:
        return seconds
    share = max(0.0, most / waits)
    return [
        each * share if is_wait(row.name) else each for row, each in zip(rows, seconds, strict=True)
    ]


def _there(numbers: tuple[int, ...], storages: Sequence[Storage], operator: int) -> tuple[int, ...]:
    """Return the storages that exist while an operator runs: other threads may free some."""
    return tuple(
        number for number in numbers if storages[number].birth <= operator < storages[number].death
    )


def _event(event: SavedEvent, storages: Sequence[Storage]) -> Event:
    number = event.number
    if number is not None:
        storage = storages[number]
        is_there = storage.birth <= event.operator <= storage.death
        number = number if storage.is_saved and is_there else None
    return Event(kind=event.kind, storage=number, operator=event.operator)


def _is_held(life: StorageLife) -> bool:
    """Return whether the user holds the storage all step, as a batch: moving it frees nothing."""
    return life.kind is Kind.INPUT and life.birth == BEFORE and life.death == ALIVE


def _storage(life: StorageLife, count: int) -> Storage:
    # A storage that no operator was seen to make may appear after the last operator.
    birth = min(life.birth, count - 1)
    death = life.death  # read once: the storage may be freed meanwhile
    death = count if death == ALIVE else min(death, count)
    return Storage(
        nbytes=life.nbytes,
        kind=life.kind,
        birth=birth,
        death=max(death, birth + 1),
        is_saved=life.is_saved,
        held=min(life.held, max(death, birth + 1) - 1),
        module=life.module,
        index=life.index,
    )


def _phases(rows: Sequence[NotedOperator], lives: Sequence[StorageLife]) -> list[Phase]:
    """Return the phase of each operator.

    Operators on gradients between backward and the optimizer step, such as clipping, count as
    optimizer operators. So do operators on their results.
    """
    ours = {number for number, life in enumerate(lives) if life.kind in _OPTIMIZERS}
    phases = []
    has_backward = False
    for row in rows:
        phase = row.phase
        has_backward = has_backward or phase is Phase.BACKWARD
        is_free = phase is Phase.FORWARD and not row.is_inside and has_backward
        if is_free and not ours.isdisjoint((*row.reads, *row.writes)):
            phase = Phase.OPTIMIZER
        if phase is Phase.OPTIMIZER:
            ours.update(each for each in row.writes if lives[each].kind is Kind.ACTIVATION)
        phases.append(phase)
    return phases


def _signature(operators: Sequence[Operator], storages: Sequence[Storage]) -> str:
    """Return a short digest of the operators in order, and of the sizes that they write."""
    digest = hashlib.sha256()
    for operator in operators:
        sizes = [storages[each].nbytes for each in operator.writes]
        digest.update(
            f"{operator.phase.value} {operator.module} {operator.name} {sizes}\n".encode()
        )
    inputs = [each.nbytes for each in storages if each.kind is Kind.INPUT and each.birth == BEFORE]
    digest.update(str(inputs).encode())
    return digest.hexdigest()[:16]


# ---- next steps ----------------------------------------------------------------------------------
#
# Whether the next steps need the memory that a recorded step needed.

_LEFTOVERS = 0.01  # of the peak


def has_leftovers(trace: Trace, storages: Storages) -> bool:
    """Return whether the trace's peak has memory that the step before may have left once.

    Such as that of objects in cycles, which the garbage collector frees at some time.

    Args:
        trace: of the step.
        storages: what its recorder noted; the recorder has stopped.
    """
    leftovers = storages.leftovers
    own = tuple(each for i, each in enumerate(trace.storages) if i not in leftovers)
    return replace(trace, storages=own).peak_bytes < (1 - _LEFTOVERS) * trace.peak_bytes


def count_growth(trace: Trace, storages: Storages) -> int:
    """Return the bytes that the optimizer left behind, less those from before that it freed.

    Only the optimizer's: outputs that the caller still holds when the step ends are from forward,
    and the caller drops them. Gradients do not count: `zero_grad` frees them, now or later. The
    trace alone does not tell: temporaries that outlive the last operator die at its end, too.

    Args:
        trace: of the step.
        storages: what its recorder noted; the recorder has stopped.
    """
    growth = 0
    for life in storages.lives:
        was_there, is_there = life.birth == BEFORE, life.death == ALIVE
        if was_there == is_there or life.kind is Kind.GRADIENT:
            continue
        if _is_optimizers(trace, life.birth if is_there else life.death - 1):
            growth += life.nbytes if is_there else -life.nbytes
    return growth


def _is_optimizers(trace: Trace, operator: int) -> bool:
    """Return whether an operator is the optimizer's. After the last one, others count as that."""
    last = len(trace.operators) - 1
    return operator >= 0 and trace.operators[min(operator, last)].phase is Phase.OPTIMIZER
