"""The requests of a small step."""

from __future__ import annotations

from benchmarks.replay.allocations import Allocation, AllocationTrace
from swapkit.ir.traces import Phase

ALLOCATIONS = AllocationTrace(
    blocks=(
        Allocation(nbytes=4096, label="weights"),
        Allocation(nbytes=100, stream=1, label="forward (model.py:12)", phase=Phase.FORWARD),
        Allocation(nbytes=513, phase=Phase.BACKWARD),
    ),
    moves=(0, 1, ~1, 2, ~2),
    present=1,
    label="Bündel",
)


def make_trace(
    sizes: tuple[int, ...], moves: str, *, present: int = 0, streams: dict[int, int] | None = None
) -> AllocationTrace:
    """Return a trace: "+" takes the next block, "-2" gives block 2."""
    blocks = (
        Allocation(nbytes=nbytes, stream=(streams or {}).get(number, 0))
        for number, nbytes in enumerate(sizes)
    )
    taken = iter(range(len(sizes)))
    return AllocationTrace(
        blocks=tuple(blocks),
        moves=tuple(
            next(taken) if word == "+" else ~int(word.removeprefix("-")) for word in moves.split()
        ),
        present=present,
    )


def moves_of(trace: AllocationTrace) -> list[str]:
    """Return the moves as short words: +0 takes block 0, -0 gives it."""
    return [f"+{move}" if move >= 0 else f"-{~move}" for move in trace.moves]
