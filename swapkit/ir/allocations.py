"""The requests to an allocator as plain values: who takes and gives how much, in order.

A block is one request, numbered in the order of the takes. A trace does not say where a block lay
or how much was reserved: `swapkit.simulation.allocators` finds that out for an allocator.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from swapkit.errors import InvalidDocument
from swapkit.units import format_bytes, round_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from swapkit.ir.traces import Phase, Storage, Trace

VERSION = 1


class AllocationEventKind(enum.Enum):
    """The kind of an entry in the order of events."""

    TAKE = "take"
    GIVE = "give"  # the memory may serve another request from here on
    STEP = "step"  # a training step ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One block: a request, and what is known of its origin."""

    nbytes: int  # as requested, not rounded
    stream: int = 0  # number of the stream it was taken on
    label: str = ""  # of the code that asked, such as "forward (model.py:12)"; empty: not known
    phase: Phase | None = None  # of the step; None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationEvent:
    """A take or a give of a block, or the end of a step, which has no block."""

    kind: AllocationEventKind
    block: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class AllocationTrace:
    """Blocks in the order of their takes, and the events.

    The first `present` blocks existed before the recorded history: the first events take them.
    """

    blocks: tuple[Allocation, ...]
    events: tuple[AllocationEvent, ...]
    present: int = 0
    device: str = ""
    label: str = ""  # of the model or the file, for people
    version: int = VERSION

    def __repr__(self) -> str:
        """Return one line, because the tables have thousands of rows."""
        label = f"{self.label}: " if self.label else ""
        return (
            f"<AllocationTrace {label}{len(self.blocks)} blocks, {len(self.events)} events, "
            f"most live {format_bytes(max_live_bytes(self))}>"
        )


class Spans(NamedTuple):
    """Lives of blocks in events: block `i` is in use at the events `starts[i] <= e < ends[i]`."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]  # of a block that is never given: the number of events
    nbytes: tuple[int, ...]


def spans_of(trace: AllocationTrace) -> Spans:
    """Return when each block is in use; the clock counts events."""
    starts = [0] * len(trace.blocks)
    ends = [len(trace.events)] * len(trace.blocks)
    for number, event in enumerate(trace.events):
        if event.kind is AllocationEventKind.TAKE:
            starts[_block_of(event)] = number
        elif event.kind is AllocationEventKind.GIVE:
            ends[_block_of(event)] = number
    return Spans(tuple(starts), tuple(ends), tuple(block.nbytes for block in trace.blocks))


def live_bytes(trace: AllocationTrace, *, rounding: int = 1) -> Iterator[int]:
    """Yield the bytes in use after each event, with blocks in multiples of `rounding`."""
    live = 0
    for event in trace.events:
        if event.kind is not AllocationEventKind.STEP:
            nbytes = round_up(trace.blocks[_block_of(event)].nbytes, rounding)
            live += nbytes if event.kind is AllocationEventKind.TAKE else -nbytes
        yield live


def max_live_bytes(trace: AllocationTrace, *, rounding: int = 1) -> int:
    """Return the most bytes in use at once, with blocks in multiples of `rounding`."""
    return max(live_bytes(trace, rounding=rounding), default=0)


def allocations_of_intervals(
    intervals: Sequence[tuple[int, int, int]], *, label: str = ""
) -> AllocationTrace:
    """Return the requests of blocks that live from `start` until before `end`.

    Args:
        intervals: `(start, end, nbytes)` of each block. At the same time, gives come before takes.
        label: of the trace.

    Raises:
        InvalidDocument: an interval is empty, or a block has no bytes.
    """
    for number, (start, end, nbytes) in enumerate(intervals):
        if not start < end or nbytes < 1:
            raise InvalidDocument(
                f"intervals[{number}]: expected a start before the end and at least one byte, got "
                f"{start}, {end}, {nbytes}"
            )
    order = sorted(range(len(intervals)), key=lambda number: intervals[number][0])
    changes = [(intervals[number][0], 1, block) for block, number in enumerate(order)]
    changes += [(intervals[number][1], 0, block) for block, number in enumerate(order)]
    kinds = (AllocationEventKind.GIVE, AllocationEventKind.TAKE)
    return AllocationTrace(
        blocks=tuple(Allocation(nbytes=intervals[number][2]) for number in order),
        events=tuple(
            AllocationEvent(kind=kinds[is_take], block=block)
            for _, is_take, block in sorted(changes)
        ),
        label=label,
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
            recorded.give(recorded.take(workspace))
    recorded.events.append(AllocationEvent(kind=AllocationEventKind.STEP))
    return AllocationTrace(
        blocks=tuple(recorded.blocks),
        events=tuple(recorded.events),
        present=present,
        device=trace.device,
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


class _StepRecord:
    """The blocks and events so far."""

    def __init__(self) -> None:
        self.blocks: list[Allocation] = []
        self.events: list[AllocationEvent] = []
        self._block_of_storage: dict[int, int] = {}

    def take(self, block: Allocation) -> int:
        number = len(self.blocks)
        self.blocks.append(block)
        self.events.append(AllocationEvent(kind=AllocationEventKind.TAKE, block=number))
        return number

    def give(self, block: int) -> None:
        self.events.append(AllocationEvent(kind=AllocationEventKind.GIVE, block=block))

    def take_storage(self, number: int, trace: Trace) -> None:
        storage = trace.storages[number]
        maker = trace.operators[storage.birth] if storage.birth >= 0 else None
        label = storage.kind.value
        if maker is not None:
            label = f"{maker.module}: {maker.name}" if maker.module else maker.name
        phase = None if maker is None else maker.phase
        block = Allocation(nbytes=storage.nbytes, label=label, phase=phase)
        self._block_of_storage[number] = self.take(block)

    def give_storage(self, number: int) -> None:
        self.give(self._block_of_storage[number])


def _block_of(event: AllocationEvent) -> int:
    assert event.block is not None, "only the end of a step has no block"
    return event.block
