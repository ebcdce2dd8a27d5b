"""Conversion of a trace to a problem: items, slots of time, and recompute steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import chain as join
from typing import TypeAlias

import numpy as np

from swapkit.errors import InvalidArgument
from swapkit.ir.traces import BEFORE, WAIT, Trace, is_wait, starts_transfer
from swapkit.simulation.chains import Chain, find_chains
from swapkit.simulation.items import Item, Touches, find_items
from swapkit.simulation.problems import Bytes, Flags, Indexes, Problem

Row: TypeAlias = tuple[int, ...]


def lower(
    trace: Trace,
    *,
    optimizer_states: bool = False,
    least_bytes: int | None = None,
    boundaries: Collection[int] = (),
) -> Problem:
    """Return the planning problem of a step.

    Args:
        trace: the step.
        optimizer_states: whether optimizer states may be swapped, too.
        least_bytes: size of the smallest item. None: leave out the smallest storages, up to half a
            percent of all bytes.
        boundaries: operators that begin a slot, even if nothing happens to items there.

    Raises:
        InvalidArgument: a trace without operators.
    """
    if not trace.operators:
        message = "a trace without operators has nothing to plan"
        raise InvalidArgument(message)
    touches = Touches(trace)
    items = find_items(touches, optimizer_states=optimizer_states, least_bytes=least_bytes)
    rows, inputs, extra_bytes = _columns_of_chains(find_chains(touches, items))
    steps = {operator: step for step, operator in enumerate(sorted(set(join(*rows))))}
    storages, *lives = _columns(items)
    can_recompute = np.array(list(map(bool, rows)), np.bool_)
    transfers = _find_transfers(trace)
    edges = {*boundaries, *transfers, *(each + 1 for both in transfers.items() for each in both)}
    slots = _Slots(trace, lives, can_recompute, _indexes(edges))
    births, readies, releases, uses, deaths = map(slots.of, lives)
    nbytes = _sizes(trace)
    seconds = np.array([operator.seconds for operator in trace.operators], np.float64)
    return Problem(
        slot_seconds=np.add.reduceat(seconds, slots.starts),
        slot_bytes=np.maximum.reduceat(_fixed_bytes(trace, nbytes, storages), slots.starts),
        slot_operators=np.append(slots.starts, len(trace.operators)).astype(np.int32),
        since=_since(slots, transfers),
        waits=slots.of(_indexes(each for each in transfers if trace.operators[each].name == WAIT)),
        item_bytes=nbytes[storages],
        item_storages=storages,
        births=births,
        readies=readies,
        releases=releases,
        uses=uses,
        deaths=deaths,
        can_swap=np.ones(len(items), np.bool_),
        can_recompute=can_recompute,
        chain_bytes=np.array(extra_bytes, np.int64),
        classes=_classes(items),
        own_steps=_own_steps(rows, steps),
        step_seconds=seconds[_indexes(steps)],
        chain_starts=_starts(rows),
        chain_steps=_indexes(steps[step] for step in join(*rows)),
        input_starts=_starts(inputs),
        inputs=_indexes(join(*inputs)),
    )


def _find_transfers(trace: Trace) -> dict[int, int]:
    """Return for each operator that waits the one that started the transfer: the latest before it.

    If none did in this step, it is the operator before.
    """
    found: dict[int, int] = {}
    latest = BEFORE
    for number, operator in enumerate(trace.operators):
        if is_wait(operator.name) and operator.seconds > 0 and number > 0:
            found[number] = number - 1 if latest == BEFORE else latest
        elif starts_transfer(operator.name):
            latest = number
    return found


def _since(slots: _Slots, transfers: Mapping[int, int]) -> Indexes:
    since = np.arange(len(slots.starts), dtype=np.int32)
    since[slots.of(_indexes(transfers))] = slots.of(_indexes(transfers.values()))
    return since


class _Slots:
    """Runs of operators between which nothing happens to an item and no boundary lies.

    An operator before which items are recomputed is a slot of its own, because the extra memory of
    recomputing counts for a whole slot, in which another operator may have the most bytes.
    """

    def __init__(
        self, trace: Trace, lives: list[Indexes], can_recompute: Flags, boundaries: Indexes
    ) -> None:
        births, readies, releases, uses, deaths = lives
        begins = np.zeros(len(trace.operators) + 1, np.bool_)
        begins[0] = True
        made = uses[can_recompute]  # operators before which items are recomputed
        for firsts in (births, readies + 1, releases + 1, uses, made + 1, deaths + 1, boundaries):
            begins[firsts] = True
        self.starts = np.flatnonzero(begins[:-1])
        self._slot_of = np.append(np.cumsum(begins[:-1]) - 1, -1).astype(np.int32)

    def of(self, operators: Indexes) -> Indexes:
        """Return the slots of operators; -1 stays -1."""
        slots: Indexes = self._slot_of[operators]
        return slots


def _columns(items: list[Item]) -> list[Indexes]:
    """Return storages, births, readies, releases, uses and deaths, in operators."""
    rows = [
        (item.storage, item.birth, item.ready, item.release, item.use, item.death) for item in items
    ]
    return list(np.array(rows, np.int32).reshape(-1, 6).T.copy())


def _columns_of_chains(chains: list[Chain | None]) -> tuple[list[Row], list[Row], list[int]]:
    """Return steps, inputs and extra bytes; an item without a chain has empty rows."""
    rows = [(each.steps, each.inputs, each.extra_bytes) if each else ((), (), 0) for each in chains]
    steps, inputs, extra_bytes = zip(*rows, strict=True) if rows else ((), (), ())
    return list(steps), list(inputs), list(extra_bytes)


def _own_steps(rows: list[Row], steps: dict[int, int]) -> Indexes:
    return _indexes(steps[row[-1]] if row else -1 for row in rows)


def _sizes(trace: Trace) -> Bytes:
    return np.array([storage.nbytes for storage in trace.storages], np.int64)


def _fixed_bytes(trace: Trace, nbytes: Bytes, moved: Indexes) -> Bytes:
    """Return the bytes in memory at each operator, without the storages `moved`."""
    births = np.array([max(storage.birth, 0) for storage in trace.storages], np.int64)
    deaths = np.array([storage.death for storage in trace.storages], np.int64)
    fixed = nbytes.copy()
    fixed[moved] = 0
    changes = np.zeros(len(trace.operators) + 1, np.int64)
    np.add.at(changes, births, fixed)
    np.subtract.at(changes, np.maximum(deaths, births), fixed)
    workspace = np.array([operator.workspace_bytes for operator in trace.operators], np.int64)
    total: Bytes = np.cumsum(changes[:-1]) + trace.base_bytes + workspace
    return total


def _classes(items: list[Item]) -> Indexes:
    numbers: dict[tuple[object, ...], int] = {}
    return _indexes(numbers.setdefault(item.key, len(numbers)) for item in items)


def _starts(rows: list[Row]) -> Indexes:
    return np.cumsum([0, *map(len, rows)], dtype=np.int32)


def _indexes(values: Iterable[int]) -> Indexes:
    return np.fromiter(values, np.int32)
