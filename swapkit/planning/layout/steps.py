"""From the lives of a step's blocks to lifetimes that a layout places."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from swapkit._native import layout as native
from swapkit.planning.layout.lifetimes import Lifetimes
from swapkit.units import round_up

Numbers = NDArray[np.int64]

# ---- boxes ---------------------------------------------------------------------------------------
#
# Boxes: ranges of addresses for blocks whose sizes differ from step to step.
#
# The experts of a layer get other tokens in each step, but all of them together about as many. So
# blocks that are in use together share a box, with room for the sum of their sizes. A block that is
# alone gets a box with room for more than the sizes seen so far.

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


# ---- steps ---------------------------------------------------------------------------------------
#
# From the lives of a step's blocks, as the pool noted them, to lifetimes that a layout places.
#
# A step repeats, so its lifetimes lie on a circle: a gradient may live from one backward pass to
# the beginning of the next step. Blocks that last longer stay where they are. Blocks whose sizes
# vary share boxes.


def _type_of(fields: Sequence[native.Field], nbytes: int) -> np.dtype[np.void]:
    """Return the type of an array of C structures."""
    return np.dtype(
        {
            "names": [each.name for each in fields],
            "formats": [
                (f"u{each.nbytes}", (each.count,) if each.count > 1 else ()) for each in fields
            ],
            "offsets": [each.offset for each in fields],
            "itemsize": nbytes,
        }
    )


JITTER = 4  # takes and frees by which lives may differ and still count as alike,
JITTER_SHARE = 32  # and this part of the longer life: others may be missing or additional
LIFE = _type_of(native.LIFE_FIELDS, native.LIFE_BYTES)
PLACE = _type_of(native.PLACE_FIELDS, native.PLACE_BYTES)


@dataclass(frozen=True, eq=False, kw_only=True)
class StepLives:
    """The blocks of one step that a layout may place. Times count takes and frees of the step.

    `starts`, `ends` and `nbytes` are those of items: blocks, and boxes of several blocks. An item
    that ends behind `length` lives on in the next step.
    """

    requests: NDArray[np.void]  # of `LIFE`, in the pool's order
    items: Numbers  # the item of each request
    starts: Numbers
    ends: Numbers  # exclusive
    nbytes: Numbers
    length: int
    step_bytes: int  # of all requests of the step

    @property
    def placed_bytes(self) -> int:
        """The bytes of the requests that a layout may place."""
        return int(self.requests["nbytes"].sum())

    def lifetimes(self) -> Lifetimes:
        """Return the lifetimes of the items, for `place`."""
        return Lifetimes(self.starts, self.ends, self.nbytes, period=self.length)

    def places(self, offsets: Numbers) -> NDArray[np.void]:
        """Return the requests with the addresses of their items, as the pool takes them."""
        places = np.zeros(len(self.requests), PLACE)
        for name in ("phase", "tag", "turn"):
            places[name] = self.requests[name]
        places["nbytes"] = np.where(self.requests["varies"] != 0, 0, self.requests["nbytes"])
        places["offset"] = offsets[self.items]
        places["room_bytes"] = self.nbytes[self.items]
        crosses = self.ends > self.length  # counts as needed at any time
        places["begin"] = np.where(crosses, 0, self.starts)[self.items]
        places["end"] = np.where(crosses, 0, self.ends)[self.items]
        return places


def _in_step(lives: NDArray[np.void], step: int) -> tuple[NDArray[np.bool_], Numbers, Numbers]:
    """Return which requests a step made, and when their blocks were taken and freed; 0: not yet."""
    steps = lives["step"]
    which = np.where(steps[:, 0] == step, 0, 1)
    rows = np.arange(len(lives))
    made = (steps[rows, which] == step) & (steps[rows, which] != native.NO_STEP)
    taken = lives["taken_at"][rows, which].astype(np.int64)
    freed = lives["freed_at"][rows, which].astype(np.int64)
    return made, taken, freed


def _in_both(lives: NDArray[np.void], times: native.StepMarks) -> NDArray[np.bool_]:
    """Return which requests the last step and the step before it made."""
    steps = lives["step"]
    both = (steps[:, 0] == times.step - 1) & (steps[:, 1] == times.step - 2)
    return np.asarray(both, np.bool_)


def repeated_share(buffer: bytes, times: native.StepMarks) -> float:
    """Return the share of the last step's requested bytes that the step before served alike.

    Its blocks lived as long then; those that live on do so in both steps.
    """
    lives = np.frombuffer(buffer, LIFE)
    last = lives["step"][:, 0] == times.step - 1
    both = _in_both(lives, times)
    taken, freed = lives["taken_at"].astype(np.int64), lives["freed_at"].astype(np.int64)
    lengths = freed - taken
    jitter = np.maximum(JITTER, lengths.max(axis=1, initial=0) // JITTER_SHARE)
    same = np.abs(lengths[:, 0] - lengths[:, 1]) <= jitter
    lives_on = (freed[:, 0] == 0) & ((freed[:, 1] == 0) | (freed[:, 1] > times.began_at[1]))
    nbytes = lives["nbytes"]
    total = int(nbytes[last].sum())
    return int(nbytes[both & (same | lives_on)].sum()) / total if total else 0.0


def read_step(buffer: bytes, times: native.StepMarks, *, longest: bool = False) -> StepLives:
    """Return the blocks of the step before the last: each was freed since, or lasts.

    Only blocks of the stream with the most bytes: blocks of others are free only after a wait.

    Args:
        buffer: lives, as `Lives.read` returns them right after the end of a step.
        times: when steps began, from the same call.
        longest: leave room for the longest lives of several steps: some end with copies, which take
            longer at times.
    """
    lives = np.frombuffer(buffer, LIFE)
    made, taken, freed = _in_step(lives, times.step - 2)
    step_bytes = int(lives["nbytes"][made].sum())
    now, last, before = times.began_at
    length = last - before
    starts, ends = taken - before, freed - before
    # One life at a time: it ends before the next step makes the request, if it does.
    again = np.where(lives["step"][:, 0] == times.step - 1, lives["taken_at"][:, 0], now)
    again = again.astype(np.int64)
    made &= (freed != 0) & (freed <= again) & (ends - starts <= length)
    if longest:  # as far as the next step's block of the request allows
        most = np.minimum(lives["longest"].astype(np.int64), np.minimum(again - taken, length))
        ends = np.maximum(ends, starts + most)
    # Where sizes vary, a request of one step alone was an additional one.
    made &= (lives["varies"] == 0) | _in_both(lives, times)
    streams, inverse = np.unique(lives["stream"][made], return_inverse=True)
    if len(streams):
        nbytes = np.bincount(inverse, weights=lives["nbytes"][made].astype(np.float64))
        made &= lives["stream"] == streams[int(np.argmax(nbytes))]
    requests = lives[made].copy()
    return _with_boxes(requests, starts[made], ends[made], length=length, step_bytes=step_bytes)


def _with_boxes(
    requests: NDArray[np.void], starts: Numbers, ends: Numbers, *, length: int, step_bytes: int
) -> StepLives:
    """Return the step with an item for each block of a fixed size, then with its boxes."""
    varies = requests["varies"] != 0
    fixed, varying = np.flatnonzero(~varies), np.flatnonzero(varies)
    sizes = {
        name: requests[name][varying].astype(np.int64)
        for name in ("former_bytes", "nbytes", "most_bytes")
    }
    boxes = make_boxes(
        VaryingLives(
            starts=starts[varying],
            ends=ends[varying],
            nbytes=(sizes["former_bytes"], sizes["nbytes"]),
            most_bytes=sizes["most_bytes"],
        )
    )
    items = np.zeros(len(requests), np.int64)
    items[fixed] = np.arange(len(fixed))
    for item, box in enumerate(boxes, len(fixed)):
        items[varying[box.members]] = item
    fixed_bytes = requests["nbytes"][fixed].astype(np.int64)
    return StepLives(
        requests=requests,
        items=items,
        starts=np.append(starts[fixed], np.array([box.start for box in boxes], np.int64)),
        ends=np.append(
            ends[fixed], np.array([min(box.end, box.start + length) for box in boxes], np.int64)
        ),
        nbytes=np.append(fixed_bytes, np.array([box.room_bytes for box in boxes], np.int64)),
        length=length,
        step_bytes=step_bytes,
    )
