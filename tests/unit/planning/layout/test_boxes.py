"""Boxes of blocks whose sizes vary: which blocks share one, and how much room they have."""

from __future__ import annotations

import numpy as np

from swapkit.planning.layout.steps import Box, VaryingLives, make_boxes

UNIT = 512


def boxes_of(*blocks: tuple[int, int, int, int], most: int = 0) -> list[Box]:
    """Return the boxes of blocks: start, end, and sizes in two steps."""
    starts, ends, first, second = np.array(blocks, np.int64).T
    return make_boxes(
        VaryingLives(
            starts=starts,
            ends=ends,
            nbytes=(first * UNIT, second * UNIT),
            most_bytes=np.full(len(blocks), most * UNIT),
        )
    )


def test_boxes_when_blocks_are_in_use_together_then_they_share_the_sum_of_their_sizes() -> None:
    (box,) = boxes_of((0, 100, 30, 50), (2, 98, 60, 40), (4, 96, 10, 10))
    assert sorted(box.members) == [0, 1, 2]
    assert (box.start, box.end) == (0, 100)
    assert box.room_bytes == (100 + 2) * UNIT  # each size is rounded


def test_boxes_when_the_sum_varies_too_then_there_is_more_room() -> None:
    (box,) = boxes_of((0, 100, 30, 50), (2, 98, 60, 50))
    assert box.room_bytes == (100 + 10 + 1) * UNIT


def test_boxes_when_a_block_is_alone_then_its_room_follows_the_largest_size_seen() -> None:
    (box,) = boxes_of((0, 10, 30, 34), most=40)
    assert box.room_bytes == 44 * UNIT


def test_boxes_when_blocks_are_not_in_use_at_the_same_time_then_each_has_its_own() -> None:
    assert [box.members for box in boxes_of((0, 10, 5, 5), (10, 20, 5, 5))] == [[0], [1]]


def test_boxes_when_lives_are_too_unlike_then_each_has_its_own() -> None:
    """A box would be reserved for the long life with the size of both."""
    assert len(boxes_of((0, 100, 5, 5), (10, 20, 50, 50))) == 2


def test_boxes_when_several_groups_are_open_then_each_block_joins_its_own() -> None:
    layers = [
        (10 * layer + expert, 400 - 10 * layer - expert) for layer in (0, 9) for expert in (0, 1)
    ]
    boxes = boxes_of(*((start, end, 8, 8) for start, end in layers))
    assert [box.members for box in boxes] == [[0, 1], [2, 3]]


def test_boxes_when_there_are_no_blocks_then_none() -> None:
    empty = np.zeros(0, np.int64)
    lives = VaryingLives(starts=empty, ends=empty, nbytes=(empty, empty), most_bytes=empty)
    assert make_boxes(lives) == []
