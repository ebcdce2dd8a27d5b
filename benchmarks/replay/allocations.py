"""The requests of a step to an allocator as plain values: who takes and gives how much, in order.

A block is one request, numbered in the order of the takes. Where it lay is not recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from swapkit.units import round_up

if TYPE_CHECKING:
    from collections.abc import Iterable

    from swapkit.ir.traces import Phase, Storage, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One block: a request, and what is known of its origin."""

    nbytes: int  # as requested, not rounded
    stream: int = 0  # number of the stream it was taken on
    label: str = ""  # of the code that asked, such as "forward (model.py:12)"; empty: not known
    phase: Phase | None = None  # of the step; None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationTrace:
    """Blocks in the order of their takes, and the moves of one step.

    A move of at least 0 takes the block of that number; a move `~block` gives it. The first
    `present` blocks existed before the step: the first moves take them.
    """

    blocks: tuple[Allocation, ...]
    moves: tuple[int, ...]
    present: int = 0
    label: str = ""  # of the model or the file, for people


def max_live_bytes(trace: AllocationTrace, *, rounding: int = 1) -> int:
    """Return the most bytes in use at once, with blocks in multiples of `rounding`."""
    sizes = [round_up(block.nbytes, rounding) for block in trace.blocks]
    changes = (sizes[move] if move >= 0 else -sizes[~move] for move in trace.moves)
    return max(accumulate(changes), default=0)


def allocations_of_intervals(intervals: Iterable[tuple[int, int, int]]) -> AllocationTrace:
    """Return the requests of blocks that live from `start` until before `end`.

    Args:
        intervals: `(start, end, nbytes)` of each block; those without bytes or life are left out.
            At the same time, gives come before takes.
    """
    rows = sorted((each for each in intervals if each[0] < each[1] and each[2]), key=lambda r: r[0])
    changes = [(start, 1, block) for block, (start, _, _) in enumerate(rows)]
    changes += [(end, 0, block) for block, (_, end, _) in enumerate(rows)]
    return AllocationTrace(
        blocks=tuple(Allocation(nbytes=nbytes) for _, _, nbytes in rows),
        moves=tuple(block if is_take else ~block for _, is_take, block in sorted(changes)),
    )


def allocations_of_step(trace: Trace) -> AllocationTrace:
    """Return the requests of a recorded step.

    What existed before the step is taken first, `base_bytes` as one block. An operator's workspace
    is taken after the storages that it makes, and given when it ends. A storage that continues
    another has its memory. Storages without bytes are left out.
    """
    recorded = _StepRecord()
    if trace.base_bytes:
        recorded.take(Allocation(nbytes=trace.base_bytes, label="outside the recorded storages"))
    lives = _StorageLives(trace)
    for storage in lives.before:
        recorded.take_storage(storage, trace)
    present = len(recorded.blocks)
    for number, operator in enumerate(trace.operators):
        for storage in lives.deaths[number]:
            recorded.give_storage(storage)
        for storage in lives.births[number]:
            recorded.take_storage(storage, trace)
        if operator.workspace_bytes:
            label = f"workspace of {operator.name}"
            workspace = Allocation(
                nbytes=operator.workspace_bytes, label=label, phase=operator.phase
            )
            recorded.moves.append(~recorded.take(workspace))
    return AllocationTrace(
        blocks=tuple(recorded.blocks),
        moves=tuple(recorded.moves),
        present=present,
        label=trace.label,
    )


class _StorageLives:
    """The storages of a step by the operator before which their memory is taken and given."""

    def __init__(self, trace: Trace) -> None:
        ends = [storage.death for storage in trace.storages]
        for number in reversed(range(len(ends))):  # a continued storage keeps the memory
            former = trace.storages[number].continues
            if former is not None:
                ends[former] = ends[number]
        count = len(trace.operators)
        self.before: list[int] = []
        self.births: list[list[int]] = [[] for _ in range(count)]
        self.deaths: list[list[int]] = [[] for _ in range(count + 1)]
        for number, storage in enumerate(trace.storages):
            if storage.continues is None and storage.nbytes and ends[number] > storage.birth:
                self._add(number, storage, ends[number])

    def _add(self, number: int, storage: Storage, end: int) -> None:
        if storage.birth < 0:
            self.before.append(number)
        elif storage.birth < end:
            self.births[storage.birth].append(number)
        self.deaths[end].append(number)


@dataclass(slots=True)
class _StepRecord:
    """The blocks and moves so far."""

    blocks: list[Allocation] = field(default_factory=list)
    moves: list[int] = field(default_factory=list)
    block_of_storage: dict[int, int] = field(default_factory=dict)

    def take(self, block: Allocation) -> int:
        self.blocks.append(block)
        self.moves.append(len(self.blocks) - 1)
        return self.moves[-1]

    def take_storage(self, number: int, trace: Trace) -> None:
        storage = trace.storages[number]
        maker = trace.operators[storage.birth] if storage.birth >= 0 else None
        label = storage.kind.value
        if maker is not None:
            label = f"{maker.module}: {maker.name}" if maker.module else maker.name
        phase = None if maker is None else maker.phase
        block = Allocation(nbytes=storage.nbytes, label=label, phase=phase)
        self.block_of_storage[number] = self.take(block)

    def give_storage(self, number: int) -> None:
        self.moves.append(~self.block_of_storage[number])
