"""From the lives of a step's blocks to lifetimes: what is placed, when, and for how long."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from swapkit._native.layout import NO_STEP, StepMarks
from swapkit.planning.layout.placing import place
from swapkit.planning.layout.steps import LIFE, PLACE, StepLives, read_step, repeated_share

BEGAN = (300, 200, 100)  # this step, the last one, and the one before: 100 takes and frees each
TIMES = StepMarks(step=5, began_at=BEGAN, now=310)
UNIT = 512


def make_lives(*rows: dict[str, Any]) -> bytes:
    """Return lives as the pool does; by default the request was made in both steps."""
    lives = np.zeros(len(rows), LIFE)
    lives["step"] = (4, 3)
    for index, row in enumerate(rows):
        for name, value in {"nbytes": UNIT, "turn": index, **row}.items():
            lives[name][index] = value
    return lives.tobytes()


def read(*rows: dict[str, Any]) -> StepLives:
    return read_step(make_lives(*rows), TIMES)


def intervals(lives: StepLives) -> list[tuple[int, int]]:
    return list(zip(lives.starts.tolist(), lives.ends.tolist(), strict=True))


def test_read_step_when_freed_in_its_step_then_the_times_are_those_of_the_step() -> None:
    lives = read({"taken_at": (210, 110), "freed_at": (230, 130)})
    ((start, end),) = intervals(lives)
    assert end - start == 20
    assert lives.length == 100


def test_read_step_when_freed_in_the_next_step_then_it_goes_on_behind_the_end() -> None:
    lives = read(
        {"taken_at": (250, 150), "freed_at": (0, 210)},  # a gradient
        {"taken_at": (220, 120), "freed_at": (270, 140)},
        {"taken_at": (250, 150), "freed_at": (0, 250)},  # there is one at any time
    )
    assert intervals(lives) == [(50, 110), (20, 40), (50, 150)]
    layout = place(lives.lifetimes())
    assert layout.height == 2 * UNIT  # the second lies where the first does
    places = lives.places(layout.offsets)
    assert places["end"].tolist() == [0, 40, 0]  # 0: at any time


@pytest.mark.parametrize(
    "row",
    [
        {"taken_at": (250, 150), "freed_at": (0, 0)},  # never freed
        {"taken_at": (220, 150), "freed_at": (0, 230)},  # lives twice at once
        {"step": (4, NO_STEP), "taken_at": (250, 0)},  # not made in the planned step
        {"step": (2, 1), "taken_at": (50, 20), "freed_at": (60, 30)},  # nor in the last
    ],
)
def test_read_step_when_a_block_lasts_or_is_not_of_the_step_then_left_out(
    row: dict[str, Any],
) -> None:
    assert not len(read(row).starts)


def test_read_step_when_missing_in_the_last_step_then_planned_all_the_same() -> None:
    lives = read({"step": (3, 2), "taken_at": (110, 20), "freed_at": (130, 40)})
    assert [end - start for start, end in intervals(lives)] == [20]


def test_read_step_when_several_streams_then_only_the_one_with_most_bytes() -> None:
    rows = [
        {"stream": stream, "nbytes": size} for stream, size in ((7, UNIT), (9, 4 * UNIT), (7, UNIT))
    ]
    times = {"taken_at": (210, 110), "freed_at": (230, 130)}
    lives = read(*({**times, **row} for row in rows))
    assert lives.nbytes.tolist() == [4 * UNIT]


def test_read_step_when_there_are_no_lives_then_none() -> None:
    assert not len(read().starts)


def test_places_when_made_then_requests_keep_their_sites() -> None:
    lives = read(
        {"taken_at": (210, 110), "freed_at": (230, 130), "phase": 1, "tag": 3, "turn": 2},
        {"taken_at": (211, 111), "freed_at": (231, 131), "phase": 1, "tag": 3, "turn": 4},
    )
    places = lives.places(np.array([0, UNIT]))
    assert places.dtype == PLACE
    assert places["offset"].tolist() == [0, UNIT]
    assert places["turn"].tolist() == [2, 4]
    assert (places["tag"] == 3).all()
    assert (places["phase"] == 1).all()
    assert (places["nbytes"] == UNIT).all()


def test_repeated_share_when_steps_differ_then_by_bytes() -> None:
    lives = make_lives({"nbytes": 3 * UNIT}, {"step": (4, 2)}, {"step": (3, 2), "nbytes": 9 * UNIT})
    assert repeated_share(lives, TIMES) == 0.75
    assert repeated_share(make_lives(), TIMES) == 0.0


def test_read_step_when_sizes_vary_then_blocks_in_use_together_are_one_item() -> None:
    shared = {"varies": 1, "phase": 1, "tag": 3}
    lives = read(
        {"taken_at": (210, 110), "freed_at": (290, 190), "nbytes": 3 * UNIT, "former_bytes": UNIT}
        | shared,
        {"taken_at": (205, 105), "freed_at": (225, 125)},
        {"taken_at": (212, 112), "freed_at": (288, 188), "nbytes": UNIT, "former_bytes": 3 * UNIT}
        | shared,
    )
    assert lives.items.tolist() == [1, 0, 1]
    assert lives.nbytes.tolist() == [UNIT, 5 * UNIT]
    places = lives.places(np.array([0, UNIT]))
    assert places["nbytes"].tolist() == [0, UNIT, 0]
    assert places["room_bytes"].tolist() == [5 * UNIT, UNIT, 5 * UNIT]
    assert places["offset"].tolist() == [UNIT, 0, UNIT]


def test_read_step_when_a_size_varies_and_was_requested_once_then_left_out() -> None:
    lives = read(
        {"step": (3, 1), "varies": 1, "taken_at": (110, 20), "freed_at": (130, 40)},
    )
    assert not len(lives.starts)


def test_repeated_share_when_other_requests_come_between_then_long_lives_are_alike() -> None:
    times = StepMarks(step=5, began_at=(3000, 2000, 1000), now=3010)
    lives = make_lives(
        {"taken_at": (2100, 1100), "freed_at": (2900, 1910)},  # 800 and 810 long
        {"taken_at": (2200, 1200), "freed_at": (2210, 1220)},  # 10 and 20: another life
    )
    assert repeated_share(lives, times) == 0.5
