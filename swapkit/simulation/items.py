"""Items: the idle storages of a trace; and the bytes in use in each slot."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from swapkit.ir.traces import BEFORE, EventKind, Kind, Phase, Storage, Trace
from swapkit.simulation.problems import Bytes, Indexes, Problem
from swapkit.simulation.running import KEEP, RECOMPUTE, SWAP, SWAP_TO_DISK, Run

# ---- items ---------------------------------------------------------------------------------------
#
# Items: the idle storages of a trace, with their gaps and their classes of alike items.

# Share of all items' bytes: the smallest items, up to this share in total, are not moved.
SMALL_SHARE = 0.005
NEVER = -1
_NUMBER = re.compile(r"(?:^|\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A storage with a gap, in operators; `problems.py` defines the terms."""

    storage: int
    birth: int
    ready: int  # NEVER: before the step; then `release` is, too
    release: int
    use: int
    death: int  # the last operator that runs while it exists
    tail: int = NEVER  # the operator after a weight's last use, from where it is idle again
    former: int = NEVER  # a weight's part before with the same bytes; its own: it stays as it is
    key: tuple[object, ...]  # alike items have equal keys


class Touches:
    """The uses of each storage by the operators of a trace. One pass; lists are by storage."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        count = len(trace.storages)
        self.last_forward = [NEVER] * count  # last operator of a forward that read or wrote it
        self.next_read = [NEVER] * count  # the first read after that, in another phase
        self.last_backward = [NEVER] * count  # last operator of a backward pass that read it
        self.first_optimizer = [NEVER] * count
        self.first_touch = [NEVER] * count
        self.last_touch = [NEVER] * count
        self.writers: list[list[int]] = [[] for _ in range(count)]
        self.is_disturbed = [False] * count  # written between `last_forward` and `next_read`
        self.blocks = [block_of(operator.module) for operator in trace.operators]
        self.is_shared = [False] * count  # made in one block and read by forward in another
        for index, operator in enumerate(trace.operators):
            for storage in (*operator.reads, *operator.writes):
                self.last_touch[storage] = index
                if self.first_touch[storage] == NEVER:
                    self.first_touch[storage] = index
            if operator.phase is Phase.FORWARD:
                self._note_forward(index)
            else:
                self._note_other(index)
        self.first_save = [len(trace.operators)] * count  # the first operator after the first save
        for event in reversed(trace.events):
            if event.kind is EventKind.SAVE and event.storage is not None:
                self.first_save[event.storage] = event.operator

    def is_written(self, number: int) -> bool:
        """Return whether an operator writes any part of a weight."""
        part = number
        while not self.writers[part]:
            continues = self.trace.storages[part].continues
            assert continues is not None
            part = continues
            if part == number:
                return False
        return True

    def _note_forward(self, index: int) -> None:
        operator = self.trace.operators[index]
        block = self.blocks[index]
        for storage in operator.reads:
            self.last_forward[storage] = index
            self.next_read[storage] = NEVER
            birth = self.trace.storages[storage].birth
            if birth != BEFORE and self.blocks[birth] != block:
                self.is_shared[storage] = True
        for storage in operator.writes:
            self.last_forward[storage] = index
            self.next_read[storage] = NEVER
            self.is_disturbed[storage] = False
            self.writers[storage].append(index)

    def _note_other(self, index: int) -> None:
        operator = self.trace.operators[index]
        is_optimizer = operator.phase is Phase.OPTIMIZER
        is_backward = operator.phase is Phase.BACKWARD
        for storage in operator.reads:
            if self.next_read[storage] == NEVER:
                self.next_read[storage] = index
            if is_backward:
                self.last_backward[storage] = index
            if is_optimizer and self.first_optimizer[storage] == NEVER:
                self.first_optimizer[storage] = index
        for storage in operator.writes:
            if self.next_read[storage] == NEVER:
                self.is_disturbed[storage] = True
            self.writers[storage].append(index)


@lru_cache(maxsize=1 << 14)  # a trace has few module paths, each of them often
def block_of(module: str) -> str:
    """Return the numbered part of a module's path: "model.layers.7" of "model.layers.7.mlp.up"."""
    number = _NUMBER.search(module)
    return module[: number.end()] if number else ""


def is_weight(storage: Storage) -> bool:
    """Return whether a storage is a part of a weight that may leave (`ir/passes.py`)."""
    return storage.kind is Kind.STATE and storage.continues is not None


def find_items(touches: Touches, *, optimizer_states: bool, least_bytes: int | None) -> list[Item]:
    """Return the items of a trace, in the order of their storages."""
    items = []
    for number, storage in enumerate(touches.trace.storages):
        item = None
        if storage.kind is Kind.OPTIMIZER_STATE:
            item = _state_item(touches, number) if optimizer_states else None
        elif is_weight(storage):
            item = _weight_item(touches, number)
        elif storage.is_saved and storage.birth != BEFORE:
            item = _saved_item(touches, number)
        if item is not None:
            items.append(item)
    least = _least_bytes(touches.trace, items) if least_bytes is None else least_bytes
    return [item for item in items if touches.trace.storages[item.storage].nbytes >= least]


def _saved_item(touches: Touches, number: int) -> Item | None:
    storage = touches.trace.storages[number]
    last, use = touches.last_forward[number], touches.next_read[number]
    if storage.continues is not None:
        last = max(last, storage.birth)  # a backward pass has just used it, so its bytes are final
    release = max(last, storage.held)
    is_idle = storage.birth <= last and release < use
    if not is_idle or touches.is_disturbed[number]:
        return None
    if touches.trace.operators[use].phase is not Phase.BACKWARD:
        return None
    ready = storage.birth
    for writer in touches.writers[number]:  # in order
        if ready < writer <= last:
            ready = writer
    if ready >= touches.first_save[number]:
        return None  # written after its first save, piece by piece: a copy would be too early
    return Item(
        storage=number,
        birth=storage.birth,
        ready=ready,
        release=release,
        use=use,
        death=max(storage.death - 1, use),
        key=_key_of(touches.trace, storage),
    )


def _weight_item(touches: Touches, number: int) -> Item | None:
    storage = touches.trace.storages[number]
    assert storage.continues is not None
    is_first = storage.birth == BEFORE
    start = NEVER if is_first else storage.birth
    use = touches.first_touch[number]
    if use <= start:
        return None
    former = storage.continues
    if touches.writers[former]:
        former = NEVER
    elif not touches.is_written(number):
        former = number
    return Item(
        storage=number,
        birth=max(start, 0),
        ready=start,
        release=start,
        use=use,
        death=touches.last_touch[number],
        tail=touches.last_touch[storage.continues] + 1 if is_first else NEVER,
        former=former,
        key=_key_of(touches.trace, storage),
    )


def _state_item(touches: Touches, number: int) -> Item | None:
    storage = touches.trace.storages[number]
    use = touches.first_optimizer[number]
    is_idle = touches.last_forward[number] == NEVER and touches.next_read[number] == use
    if storage.birth != BEFORE or use <= 0 or not is_idle or touches.is_disturbed[number]:
        return None
    return Item(
        storage=number,
        birth=0,
        ready=NEVER,
        release=NEVER,
        use=use,
        death=len(touches.trace.operators) - 1,
        key=_key_of(touches.trace, storage),
    )


def _key_of(trace: Trace, storage: Storage) -> tuple[object, ...]:
    """Return a key that is equal for alike storages of different blocks and microbatches."""
    key = (storage.kind, _alike(storage.module), storage.index, storage.nbytes)
    if storage.birth == BEFORE:
        return key
    if storage.continues is not None and storage.birth != BEFORE:
        return (*_key_of(trace, trace.storages[storage.continues]), "continued")
    maker = trace.operators[storage.birth]
    return (*key, _alike(maker.module), maker.name, maker.occurrence)


@lru_cache(maxsize=1 << 14)
def _alike(module: str) -> str:
    return _NUMBER.sub(".*", module)


def _least_bytes(trace: Trace, items: list[Item]) -> int:
    """Return the size of the smallest item that matters."""
    sizes = sorted(trace.storages[item.storage].nbytes for item in items)
    allowed = sum(sizes) * SMALL_SHARE
    for nbytes in sizes:
        allowed -= nbytes
        if allowed < 0:
            return max(nbytes, 1)
    return 1


# ---- levels --------------------------------------------------------------------------------------
#
# The bytes in use in each slot of a simulated step.


def find_levels(
    problem: Problem, run: Run, actions: NDArray[np.int8], *, at_needs: bool = False
) -> Bytes:
    """Return the bytes in use in each slot: the most at any time in it.

    `at_needs`: as if copies back took their memory only in the slot that needs it.
    """
    slots = len(problem.slot_seconds)
    changes = np.zeros(slots + 1, np.int64)

    def add(firsts: Indexes, lasts: Indexes, nbytes: Bytes) -> None:
        are_there = firsts <= lasts
        np.add.at(changes, firsts[are_there], nbytes[are_there])
        np.subtract.at(changes, lasts[are_there] + 1, nbytes[are_there])

    births, deaths, sizes = problem.births, problem.deaths, problem.item_bytes
    kept = actions == KEEP
    add(births[kept], deaths[kept], sizes[kept])
    goes_on = kept & (problem.tails >= 0)
    ends = np.full(slots, slots - 1, np.int32)
    add(problem.tails[goes_on], ends[: np.count_nonzero(goes_on)], sizes[goes_on])
    again = actions == RECOMPUTE
    add(births[again], problem.releases[again], sizes[again])
    add(run.needs[again], deaths[again], sizes[again])
    add(run.needs[again], run.needs[again], problem.chain_bytes[again])
    swapped = (actions == SWAP) | (actions == SWAP_TO_DISK)
    left = np.searchsorted(run.slot_starts, run.released[swapped], side="left") - 1
    tails = problem.tails[swapped]
    add(np.where(tails >= 0, tails, slots), left, sizes[swapped])
    left[tails >= 0] = -1
    back = run.needs[swapped]
    if not at_needs:
        started = np.searchsorted(run.slot_ends, run.in_starts[swapped], side="right")
        back = np.minimum(started, back)
    add(births[swapped], np.minimum(left, back - 1), sizes[swapped])
    add(back, deaths[swapped], sizes[swapped])
    levels: Bytes = problem.slot_bytes + np.cumsum(changes[:-1])
    return levels


def count_fitting(
    problem: Problem, needs: Indexes, items: NDArray[np.int64], levels: Bytes, budget_bytes: int
) -> int:
    """Return how many items, from the first, can be made ahead of their needs, before a slot.

    Args:
        problem: the step.
        needs: the slot before which each item is needed, counted from that one.
        items: the items.
        levels: the bytes in use from that slot on; overwritten.
        budget_bytes: limit.
    """
    for count, (need, item) in enumerate(zip(needs.tolist(), items.tolist(), strict=True)):
        levels[:need] += problem.item_bytes[item]
        most = max(int(levels.max()), int(levels[0] + problem.chain_bytes[item]))
        if need and most > budget_bytes:
            return count
    return len(items)
