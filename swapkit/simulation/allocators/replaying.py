"""The replay of requests through an allocator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, SupportsInt

from swapkit.ir.allocations import AllocationEventKind
from swapkit.simulation.allocators.expandable import ExpandableAllocator
from swapkit.simulation.allocators.native import NativeAllocator
from swapkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from swapkit.ir.allocations import AllocationEvent, AllocationTrace

STEP = None  # in a list of moves: a training step ends


class ReplayedAllocator(Protocol):
    """An allocator of one device: a model, or the real pool. All amounts are bytes."""

    @property
    def reserved_bytes(self) -> int:
        """The bytes that it holds of the device's memory."""

    @property
    def allocated_bytes(self) -> int:
        """The bytes of the blocks in use, as it rounds them."""

    def take(self, nbytes: int, stream: int = 0) -> int | None:
        """Return the address of a block; None: there is no memory for it."""

    def give(self, address: int) -> None:
        """Take back the block in use at an address."""


class Intervals(Protocol):
    """Lives of blocks: block `i` of `nbytes[i]` is in use from `starts[i]` until before `ends[i]`.

    Arrays of whole numbers, one value for each block.
    """

    @property
    def starts(self) -> Iterable[SupportsInt]:
        """When each block is taken."""

    @property
    def ends(self) -> Iterable[SupportsInt]:
        """When each block is given."""

    @property
    def nbytes(self) -> Iterable[SupportsInt]:
        """The bytes of each block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A request that an allocator could not serve.

    `reserved_bytes` is what it holds after the attempt, which gives back what can be given back.
    """

    event: int  # its number
    block: int
    asked_bytes: int
    reserved_bytes: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ReplayOutcome:
    """How an allocator served a trace, up to its end or its first failure.

    `stranded_bytes`: the most bytes that were reserved and not allocated when the allocator took
    more memory from the device or failed. That is fragmentation: memory that is cached because less
    is needed for a while does not count.
    """

    peak_reserved_bytes: int
    peak_allocated_bytes: int
    stranded_bytes: int
    failure: Failure | None = None
    addresses: tuple[int | None, ...] = ()  # of each block; None, or no value: it was not taken

    def __repr__(self) -> str:
        """Return one line without the addresses."""
        return (
            f"<ReplayOutcome {format_bytes(self.peak_reserved_bytes)} reserved, "
            f"{format_bytes(self.peak_allocated_bytes)} allocated, failure {self.failure}>"
        )


@dataclass(slots=True, kw_only=True)
class ReplayFigures:
    """The figures of a replay so far."""

    reserved: int = 0
    allocated: int = 0
    stranded: int = 0
    last_reserved: int = 0
    addresses: list[int | None] = field(default_factory=list)

    def note(self, allocator: ReplayedAllocator, block: int, address: int) -> None:
        """Look at the allocator after it has served a block."""
        self.addresses += [None] * (block + 1 - len(self.addresses))
        self.addresses[block] = address
        reserved, allocated = allocator.reserved_bytes, allocator.allocated_bytes
        self.allocated = max(self.allocated, allocated)
        if reserved > self.last_reserved:
            self.reserved = max(self.reserved, reserved)
            self.stranded = max(self.stranded, reserved - allocated)
        self.last_reserved = reserved

    def outcome(self, failure: Failure | None) -> ReplayOutcome:
        """Return the figures."""
        stranded = self.stranded
        if failure is not None:
            stranded = max(stranded, failure.reserved_bytes - failure.allocated_bytes)
        return ReplayOutcome(
            peak_reserved_bytes=self.reserved,
            peak_allocated_bytes=self.allocated,
            stranded_bytes=stranded,
            failure=failure,
            addresses=tuple(self.addresses),
        )


def replay(trace: AllocationTrace, allocator: ReplayedAllocator) -> ReplayOutcome:
    """Send the requests of a trace to an allocator, until one fails.

    The end of a step is passed on to an allocator that has a method `end_step`.
    """
    moves = [_move_of(event) for event in trace.events]
    nbytes = [block.nbytes for block in trace.blocks]
    return _replay(moves, nbytes, [block.stream for block in trace.blocks], allocator)


def native_peak(lifetimes: Intervals) -> int:
    """Return the most bytes that torch's allocator reserves for these blocks, on one stream.

    At the same time, blocks are given before others are taken. Blocks without bytes take no part.
    """
    return _peak(lifetimes, NativeAllocator())


def expandable_peak(lifetimes: Intervals) -> int:
    """Return the same as `native_peak` with `expandable_segments:True`."""
    return _peak(lifetimes, ExpandableAllocator())


def _move_of(event: AllocationEvent) -> int | None:
    if event.block is None:
        return STEP
    return event.block if event.kind is AllocationEventKind.TAKE else ~event.block


def _peak(lifetimes: Intervals, allocator: ReplayedAllocator) -> int:
    starts, ends, nbytes = (
        list(map(int, values)) for values in (lifetimes.starts, lifetimes.ends, lifetimes.nbytes)
    )
    present = [
        block
        for block, (start, end) in enumerate(zip(starts, ends, strict=True))
        if nbytes[block] > 0 and start < end
    ]
    order = [(starts[block], 1, block) for block in present]
    order += [(ends[block], 0, block) for block in present]
    moves = [block if is_take else ~block for _, is_take, block in sorted(order)]
    return _replay(moves, nbytes, [0] * len(nbytes), allocator).peak_reserved_bytes


def _replay(
    moves: Sequence[int | None],
    nbytes: Sequence[int],
    streams: Sequence[int],
    allocator: ReplayedAllocator,
) -> ReplayOutcome:
    """Take block `m` for each move `m` of at least 0, and give block `~m` for others."""
    figures = ReplayFigures()
    at: dict[int, int] = {}
    end_step = getattr(allocator, "end_step", None)
    for number, move in enumerate(moves):
        if move is STEP:
            if end_step is not None:
                end_step()
        elif move < 0:
            allocator.give(at.pop(~move))
        else:
            address = allocator.take(nbytes[move], streams[move])
            if address is None:
                return figures.outcome(describe_failure(allocator, number, move, nbytes[move]))
            at[move] = address
            figures.note(allocator, move, address)
    return figures.outcome(None)


def describe_failure(
    allocator: ReplayedAllocator, event: int, block: int, asked_bytes: int
) -> Failure:
    """Return a request that an allocator could not serve, right after the attempt."""
    return Failure(
        event=event,
        block=block,
        asked_bytes=asked_bytes,
        reserved_bytes=allocator.reserved_bytes,
        allocated_bytes=allocator.allocated_bytes,
    )
