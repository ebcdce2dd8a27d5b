"""Lifetimes say what is wrong with their input."""

from __future__ import annotations

import numpy as np
import pytest

from swapkit.errors import CorruptState, InvalidArgument
from swapkit.planning.layout.lifetimes import Lifetimes
from tests.oracles import layout_twin

GOOD = {"starts": [0, 1], "ends": [2, 3], "nbytes": [8, 8]}


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("ends", [2, 1], r"ends\[1\] = 1 is not after its start"),
        ("nbytes", [8, 0], r"nbytes\[1\] = 0 is not above 0"),
        ("nbytes", [8, -8], r"nbytes\[1\] = -8 is not above 0"),
        ("nbytes", [8, 1 << 61], "more than .* bytes in total"),
        ("nbytes", [8], "one value for each item"),
        ("starts", [0.5, 1.0], "whole numbers"),
        ("starts", [[0, 1]], "one dimension"),
        ("fixed", [0, -2], r"fixed\[1\] = -2 is neither an offset nor -1"),
        ("starts", np.array([0, 1 << 63], np.uint64), "does not fit into 64 bits"),
        ("period", 1, r"starts\[1\] = 1 is not in the period of 1"),
    ],
)
def test_wrong_input_is_named(name: str, values: object, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        Lifetimes(**{**GOOD, name: values})  # type: ignore[arg-type]


def test_an_item_that_lives_for_longer_than_the_period_is_named() -> None:
    with pytest.raises(InvalidArgument, match=r"ends\[0\] = 10 is a period too late"):
        Lifetimes(np.array([4]), np.array([10]), np.array([8]), period=5)


def test_arrays_are_copies_that_cannot_be_written_to() -> None:
    starts = np.array([0, 1])
    lifetimes = Lifetimes(starts, np.array([2, 3]), np.array([8, 8]))
    starts[0] = 7
    assert lifetimes.starts[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        lifetimes.starts[0] = 1


@pytest.mark.parametrize(("offsets", "is_right"), [([0, 8], True), ([0, 7], False)])
def test_the_twin_finds_overlaps(offsets: list[int], is_right: bool) -> None:
    lifetimes = Lifetimes(**GOOD)  # type: ignore[arg-type]
    if is_right:
        assert layout_twin.verify(lifetimes, np.array(offsets)) == 16
    else:
        with pytest.raises(CorruptState, match="items 1 and 0 overlap"):
            layout_twin.verify(lifetimes, np.array(offsets))
