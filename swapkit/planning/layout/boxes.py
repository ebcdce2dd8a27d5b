"""Boxes: ranges of addresses for blocks whose sizes differ from step to step.

The experts of a layer get other tokens in each step, but all of them together about as many. So
blocks that are in use together share a box, with room for the sum of their sizes. A block that is
alone gets a box with room for more than the sizes seen so far.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from swapkit.units import round_up

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]

LARGEST_WASTE = 1.15  # area of a box, of bytes and time, in areas of its blocks
MOST_OPEN = 64  # boxes that a block is compared with
ROUNDING = 512


@dataclass(frozen=True, eq=False, kw_only=True)
class VaryingLives:
    """Lifetimes of blocks whose sizes vary, with their sizes in two steps."""

    starts: Numbers
    ends: Numbers  # exclusive
    nbytes: tuple[Numbers, Numbers]  # in each of the steps
    most_bytes: Numbers  # in any of the latest steps


@dataclass(slots=True)
class Box:
    """Blocks that share a range of addresses: all of them are in use at some time."""

    start: int
    end: int
    earliest_end: int
    area: int = 0
    members: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=lambda: [0, 0])
    most_bytes: int = 0

    @property
    def room_bytes(self) -> int:
        """The bytes for the blocks of a step that differs from the others as these do."""
        larger, smaller = max(self.sums), min(self.sums)
        seen = max(larger, self.most_bytes) if len(self.members) == 1 else larger
        rounding = ROUNDING * (len(self.members) - 1)
        return round_up(seen + (larger - smaller) + rounding, ROUNDING)

    def add(self, index: int, end: int, area: int, sizes: Iterable[int], most_bytes: int) -> None:
        """Add the block `index`, which begins no earlier than the others."""
        self.end, self.earliest_end = max(self.end, end), min(self.earliest_end, end)
        self.area += area
        self.members.append(index)
        self.sums = [total + nbytes for total, nbytes in zip(self.sums, sizes, strict=True)]
        self.most_bytes = max(self.most_bytes, most_bytes)

    def admits(self, start: int, end: int, nbytes: int) -> bool:
        """Whether a block with this life and size shares the box without much waste."""
        if start >= self.earliest_end:
            return False
        length = max(end, self.end) - self.start
        area = self.area + nbytes * (end - start)
        return (max(self.sums) + nbytes) * length <= LARGEST_WASTE * area


def make_boxes(lives: VaryingLives) -> list[Box]:
    """Return boxes that hold each of the blocks once."""
    boxes: list[Box] = []
    open_boxes: list[Box] = []
    for index in np.argsort(lives.starts, kind="stable").tolist():
        start, end = int(lives.starts[index]), int(lives.ends[index])
        sizes = [int(each[index]) for each in lives.nbytes]
        nbytes = max(sizes)
        open_boxes = [box for box in open_boxes if box.earliest_end > start][-MOST_OPEN:]
        box = next((each for each in open_boxes if each.admits(start, end, nbytes)), None)
        if box is None:
            box = Box(start=start, end=end, earliest_end=end)
            boxes.append(box)
            open_boxes.append(box)
        box.add(index, end, nbytes * (end - start), sizes, int(lives.most_bytes[index]))
    return boxes
