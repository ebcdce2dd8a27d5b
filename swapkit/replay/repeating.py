"""The step of a trace that repeats, and what passes from one repetition to the next."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swapkit.ir.allocations import AllocationEventKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from swapkit.ir.allocations import AllocationTrace

TAKE, GIVE = True, False


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A take or a give of a block, by the number of its event in the trace."""

    event: int
    block: int
    kind: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedStep:
    """One step, after which the same step follows.

    A block that outlives the step takes the place of one of the same size that the next repetition
    gives: such as a gradient, which stays until the next step. Other blocks that outlive the step
    are given when it has ended, and others that it gives are taken then, such as its inputs.
    """

    present: tuple[Move, ...]  # takes of the blocks that are in use when the step begins
    moves: tuple[Move, ...]
    handed: dict[int, int]  # block of `present` -> block of the former repetition with its memory
    dropped: tuple[int, ...]  # blocks of the former repetition, to give
    renewed: tuple[Move, ...]  # of `present`, to take


@dataclass(slots=True, kw_only=True)
class _Part:
    """The events from one mark to the next."""

    present: tuple[Move, ...]
    moves: list[Move]
    most_bytes: int


def find_repeated_step(trace: AllocationTrace) -> RepeatedStep:
    """Return the step of a trace with the most bytes in use; a trace without marks is one step."""
    part = max(_list_parts(trace), key=lambda part: part.most_bytes)  # the first of several
    given = {move.block for move in part.moves if move.kind is GIVE}
    kept = [move.block for move in part.moves if move.kind is TAKE and move.block not in given]
    gone = [move.block for move in part.present if move.block in given]
    handed = _pair(trace, gone, kept)
    passed_on = set(handed.values())
    return RepeatedStep(
        present=part.present,
        moves=tuple(part.moves),
        handed=handed,
        dropped=tuple(block for block in kept if block not in passed_on),
        renewed=tuple(
            move for move in part.present if move.block in given and move.block not in handed
        ),
    )


def _list_parts(trace: AllocationTrace) -> Iterator[_Part]:
    """Yield the steps, and what follows the last mark."""
    in_use: dict[int, Move] = {}
    live_bytes = 0
    part = _Part(present=(), moves=[], most_bytes=0)
    for number, event in enumerate(trace.events):
        if event.block is None:
            yield part
            part = _Part(present=tuple(in_use.values()), moves=[], most_bytes=live_bytes)
            continue
        kind = TAKE if event.kind is AllocationEventKind.TAKE else GIVE
        move = Move(event=number, block=event.block, kind=kind)
        nbytes = trace.blocks[event.block].nbytes
        live_bytes += nbytes if kind is TAKE else -nbytes
        part.most_bytes = max(part.most_bytes, live_bytes)
        if kind is TAKE:
            in_use[event.block] = move
        else:
            del in_use[event.block]
        if number + 1 == trace.present:
            part.present = tuple(in_use.values())
        elif number >= trace.present:
            part.moves.append(move)
    yield part


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
