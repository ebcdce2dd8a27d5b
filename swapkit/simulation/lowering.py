"""Conversion of a trace to a problem: items, slots of time, and recompute steps."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain as join
from typing import TypeAlias

import numpy as np

from swapkit.errors import InvalidArgument
from swapkit.ir.traces import BEFORE, WAIT, Kind, Phase, Trace, is_wait, starts_transfer
from swapkit.simulation.items import NEVER, Item, Touches, find_items, is_weight
from swapkit.simulation.problems import Bytes, Flags, Indexes, Problem

# ---- chains --------------------------------------------------------------------------------------
#
# Recompute chains: the operators that recompute each item, their inputs, and where chains end.
#
# A chain begins at storages that still exist when backward needs the item, with the bytes that
# forward read: states, and storages that autograd saved. Any other storage is made again, even if
# it still exists.
#
# The inputs of an item may have to be recomputed, too, and so on back to the start of the network.
# Then recomputing one item would recompute everything. Two rules prevent that. If the model
# consists of blocks, a storage that one block passes to another is an *anchor*: it is never
# recomputed. And an item is an anchor if it is too many operators away from the anchors before it.

MOST_STEPS = 64  # of one chain, through storages that autograd did not save
# Longest chain between two anchors: within blocks; without blocks, range of the limit.
DEEPEST_IN_BLOCK = 64
SHALLOWEST, DEEPEST = 4, 32
MOST_OF_ONE_BLOCK = 0.5  # share of the items; above it, the model does not consist of blocks
LEAST_INSIDE_BLOCKS = 0.25  # share of the recomputable bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The chain that recomputes one item; `steps` are operators in order, its own the last."""

    steps: tuple[int, ...]
    inputs: tuple[int, ...]  # other items
    extra_bytes: int  # in addition to the item itself, while the steps run


def find_chains(touches: Touches, items: list[Item]) -> list[Chain | None]:
    """Return the chain of each item; None: it cannot be recomputed, or is an anchor."""
    finder = _ChainFinder(touches, items)
    chains = [finder.find_chain(item) for item in items]
    shared = [touches.is_shared[item.storage] for item in items]
    if _consists_of_blocks(touches, items, chains):
        chains = [None if anchor else chain for chain, anchor in zip(chains, shared, strict=True)]
        return _cut(items, chains, DEEPEST_IN_BLOCK)
    deepest = min(max(math.isqrt(len(items)), SHALLOWEST), DEEPEST)
    return _cut(items, chains, deepest)


def _consists_of_blocks(touches: Touches, items: list[Item], chains: list[Chain | None]) -> bool:
    """Return whether block anchors leave enough to recompute, in more than one block."""
    counts = Counter(touches.blocks[item.birth] for item in items)
    if not items or max(counts.values()) > MOST_OF_ONE_BLOCK * len(items):
        return False
    storages = touches.trace.storages
    nbytes = {True: 0, False: 0}
    for item, chain in zip(items, chains, strict=True):
        if chain is not None:
            nbytes[touches.is_shared[item.storage]] += storages[item.storage].nbytes
    return nbytes[False] >= LEAST_INSIDE_BLOCKS * sum(nbytes.values())


def _cut(items: list[Item], chains: list[Chain | None], deepest: int) -> list[Chain | None]:
    """Turn items that are too deep into anchors."""
    depths = [0] * len(items)
    cut = list(chains)
    for number in sorted(range(len(items)), key=lambda number: items[number].birth):
        chain = chains[number]
        if chain is None:
            continue
        depth = len(chain.steps) + max((depths[other] for other in chain.inputs), default=0)
        if depth > deepest:
            cut[number] = None
        else:
            depths[number] = depth
    return cut


@dataclass(slots=True, kw_only=True)
class _Draft:
    """A chain under construction; `pending`: steps whose operands are not resolved yet."""

    item: Item
    steps: set[int]
    pending: list[int]
    inputs: set[int] = field(default_factory=set)


class _ChainFinder:
    """Finds the chain of each item, from storages that exist when backward needs the item."""

    def __init__(self, touches: Touches, items: list[Item]) -> None:
        self._touches = touches
        self._operators = touches.trace.operators
        self._storages = touches.trace.storages
        self._numbers = {item.storage: number for number, item in enumerate(items)}
        self._next_parts = {  # of weights
            each.continues: number
            for number, each in enumerate(self._storages)
            if each.continues is not None and each.kind is Kind.STATE and each.birth != BEFORE
            if not touches.writers[each.continues]
        }
        self._items = items
        self._has_modules = any(operator.module for operator in self._operators)

    def find_chain(self, item: Item) -> Chain | None:
        """Return the chain of an item, without regard to anchors."""
        if item.ready != item.birth or not self._can_repeat(item.storage):
            return None
        draft = _Draft(item=item, steps={item.birth}, pending=[item.birth])
        while draft.pending:
            operator = draft.pending.pop()
            for read in self._operators[operator].reads:
                storage = self._find_part(read, item.use)
                is_there = self._is_there(storage, operator, item.use)
                if not is_there and not self._ask(storage, operator, draft):
                    return None
        steps = tuple(sorted(draft.steps))
        return Chain(
            steps=steps,
            inputs=tuple(sorted(draft.inputs)),
            extra_bytes=self._extra_bytes(item, steps),
        )

    def _ask(self, storage: int, operator: int, draft: _Draft) -> bool:
        """Add a storage that `operator` reads to a chain; return whether that is possible."""
        number = self._numbers.get(storage)
        if number is not None:
            draft.inputs.add(number)
            if is_weight(self._storages[storage]):
                is_there = self._items[number].death >= draft.item.use
                return is_there and self._is_unchanged(storage, operator, draft.item.use)
            return self._can_be_input(self._items[number], operator, draft.item)
        maker = self._storages[storage].birth
        if not self._can_repeat(storage) or maker >= operator or len(draft.steps) >= MOST_STEPS:
            return False
        if maker not in draft.steps:
            draft.steps.add(maker)
            draft.pending.append(maker)
        return True

    def _find_part(self, storage: int, need: int) -> int:
        """Return the storage that has the same bytes at `need`: another part of a weight."""
        while self._storages[storage].death <= need and storage in self._next_parts:
            storage = self._next_parts[storage]
        return storage

    def _can_repeat(self, storage: int) -> bool:
        """Return whether its maker alone writes the storage, and changes no older one."""
        maker = self._storages[storage].birth
        if maker == BEFORE or self._touches.writers[storage] != [maker]:
            return False
        operator = self._operators[maker]
        if self._has_modules and not operator.module:
            return False  # at run time, an operator is identified by its module
        is_pure = all(self._storages[other].birth == maker for other in operator.writes)
        return is_pure and operator.is_repeatable and operator.phase is Phase.FORWARD

    def _is_there(self, storage: int, operator: int, need: int) -> bool:
        """Return whether the storage still exists at `need`, unchanged since `operator`."""
        about = self._storages[storage]
        if storage in self._numbers or about.death <= need:
            return False
        if not about.keeps_bytes(self._touches.last_backward[storage], need):
            return False
        return self._is_unchanged(storage, operator, need)

    def _is_unchanged(self, storage: int, operator: int, need: int) -> bool:
        writers = self._touches.writers[storage]
        next_write = bisect_left(writers, operator)
        return next_write == len(writers) or writers[next_write] >= need

    @staticmethod
    def _can_be_input(other: Item, operator: int, item: Item) -> bool:
        """Return whether `other` still has the bytes that `operator` read when `item` is needed."""
        return other.birth < item.birth and other.ready < operator and other.death >= item.use

    def _extra_bytes(self, item: Item, steps: tuple[int, ...]) -> int:
        """Return the most bytes that the steps take in addition to the item."""
        if len(steps) == 1:
            beside = self._made_by(item.birth) - {item.storage}
            return self._total(beside) + self._operators[item.birth].workspace_bytes
        last_reads = {storage: step for step in steps for storage in self._operators[step].reads}
        held: set[int] = set()
        most = 0
        for step in steps:
            held |= self._made_by(step) - {item.storage}
            most = max(most, self._total(held) + self._operators[step].workspace_bytes)
            held = {storage for storage in held if last_reads.get(storage, step) > step}
        return most

    def _made_by(self, operator: int) -> set[int]:
        writes = self._operators[operator].writes
        return {storage for storage in writes if self._storages[storage].birth == operator}

    def _total(self, storages: set[int]) -> int:
        return sum(self._storages[storage].nbytes for storage in storages)


# ---- lowering ------------------------------------------------------------------------------------

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
    tails = _indexes(item.tail for item in items)
    can_recompute = np.array(list(map(bool, rows)), np.bool_)
    transfers = _find_transfers(trace)
    edges = {*boundaries, *transfers, *(each + 1 for both in transfers.items() for each in both)}
    edges.update(tails[tails >= 0].tolist())
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
        tails=np.where(tails < len(trace.operators), slots.of(tails), len(slots.starts)),
        formers=_formers(items),
        is_weight=np.array([is_weight(trace.storages[item.storage]) for item in items], np.bool_),
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


def _formers(items: list[Item]) -> Indexes:
    numbers = {item.storage: number for number, item in enumerate(items)}
    return _indexes(numbers.get(item.former, NEVER) for item in items)


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
