"""The replay of requests through an allocator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from benchmarks.replay.allocations import AllocationTrace


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A request that an allocator could not serve.

    `reserved_bytes` is what it holds after the attempt, which gives back what can be given back.
    """

    event: int  # the number of the move
    block: int
    asked_bytes: int
    reserved_bytes: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(slots=True, kw_only=True)
class ReplayFigures:
    """The figures of a replay so far."""

    reserved: int = 0
    allocated: int = 0
    stranded: int = 0
    last_reserved: int = 0

    def note(self, allocator: ReplayedAllocator) -> None:
        """Look at the allocator after it has served a block."""
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
        )


def replay(trace: AllocationTrace, allocator: ReplayedAllocator) -> ReplayOutcome:
    """Send the requests of a trace to an allocator, until one fails."""
    figures = ReplayFigures()
    at: dict[int, int] = {}
    for number, move in enumerate(trace.moves):
        if move < 0:
            allocator.give(at.pop(~move))
            continue
        block = trace.blocks[move]
        address = allocator.take(block.nbytes, block.stream)
        if address is None:
            return figures.outcome(describe_failure(allocator, number, move, block.nbytes))
        at[move] = address
        figures.note(allocator)
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
