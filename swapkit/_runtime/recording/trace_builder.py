"""Conversion of a recorder's notes to a `Trace`: phases, storage lives, events."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from swapkit._runtime.recording.microbatches import number_microbatches
from swapkit._runtime.recording.tables.blocks import ALIVE
from swapkit.ir.passes import continue_after_passes
from swapkit.ir.stages import join_places
from swapkit.ir.traces import BEFORE, Event, Kind, Operator, Phase, Storage, Trace, is_wait

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swapkit._runtime.recording.notes import NotedOperator, Notes
    from swapkit._runtime.recording.saved_events import SavedEvent
    from swapkit._runtime.recording.tables.storages import StorageLife

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
    return continue_after_passes(trace)


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
