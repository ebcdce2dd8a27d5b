"""Recompute chains: the operators that recompute each item, their inputs, and where chains end.

A chain begins at storages that still exist when backward needs the item, with the bytes that
forward read: states, and storages that autograd saved. Any other storage is made again, even if it
still exists.

The inputs of an item may have to be recomputed, too, and so on back to the start of the network.
Then recomputing one item would recompute everything. Two rules prevent that. If the model consists
of blocks, a storage that one block passes to another is an *anchor*: it is never recomputed. And an
item is an anchor if it is too many operators away from the anchors before it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from swapkit.ir.traces import BEFORE, Phase
from swapkit.simulation.items import Item, Touches

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
        self._items = items
        self._has_modules = any(operator.module for operator in self._operators)

    def find_chain(self, item: Item) -> Chain | None:
        """Return the chain of an item, without regard to anchors."""
        if item.ready != item.birth or not self._can_repeat(item.storage):
            return None
        draft = _Draft(item=item, steps={item.birth}, pending=[item.birth])
        while draft.pending:
            operator = draft.pending.pop()
            for storage in self._operators[operator].reads:
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
            return self._can_be_input(self._items[number], operator, draft.item)
        maker = self._storages[storage].birth
        if not self._can_repeat(storage) or maker >= operator or len(draft.steps) >= MOST_STEPS:
            return False
        if maker not in draft.steps:
            draft.steps.add(maker)
            draft.pending.append(maker)
        return True

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
