"""A step that repeats, and what passes from one repetition to the next."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.replay.allocations import AllocationTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedStep:
    """One step, after which the same step follows.

    A block that outlives the step takes the place of one of the same size that the next repetition
    gives: such as a gradient, which stays until the next step. Other blocks that outlive the step
    are given when it has ended, and others that it gives are taken then, such as its inputs.
    """

    handed: dict[int, int]  # block from before -> block of the former repetition with its memory
    dropped: tuple[int, ...]  # blocks of the former repetition, to give
    renewed: tuple[int, ...]  # blocks from before, to take


def repeat_step(trace: AllocationTrace) -> RepeatedStep:
    """Return what passes from a step to its repetition."""
    moves = trace.moves[trace.present :]
    given = {~move for move in moves if move < 0}
    kept = [move for move in moves if move >= 0 and move not in given]
    gone = [block for block in range(trace.present) if block in given]
    handed = _pair(trace, gone, kept)
    passed_on = set(handed.values())
    return RepeatedStep(
        handed=handed,
        dropped=tuple(block for block in kept if block not in passed_on),
        renewed=tuple(block for block in gone if block not in handed),
    )


def _pair(trace: AllocationTrace, gone: Iterable[int], kept: Iterable[int]) -> dict[int, int]:
    """Return a block of `kept` for as many of `gone` as have one of their size and stream."""
    spare: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for number in kept:
        block = trace.blocks[number]
        spare[block.nbytes, block.stream].append(number)
    pairs = {}
    for number in gone:
        block = trace.blocks[number]
        fitting = spare[block.nbytes, block.stream]
        if fitting:
            pairs[number] = fitting.pop(0)
    return pairs
