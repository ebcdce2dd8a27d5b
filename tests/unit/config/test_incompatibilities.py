"""Features that exclude each other, and those that only did in the original."""

from __future__ import annotations

import pytest

from swapkit.config.flags import INCOMPATIBLE, Pair, check_pairs
from swapkit.errors import InvalidArgument

_RESPECTED = "the plan respects the user's choice"
_PARTS = "both are choices for different parts of a layer"
# Pairs that the original's code refuses, or its documents leave open, and why swapkit accepts them.
COMPATIBLE = (
    Pair("adaptive memory optimization", "recompute activation function", _RESPECTED),
    Pair("adaptive memory optimization", "recompute norm", _RESPECTED),
    Pair(
        "adaptive memory optimization",
        "recompute in advance",
        "a warning says that nothing is recomputed so",
    ),
    Pair("selective recompute", "recompute activation function", _PARTS),
    Pair("selective recompute", "recompute norm", _PARTS),
    Pair("smart swap", "memory fragmentation", "one pool serves both"),
    Pair("swap attention", "recompute in bubble", "a warning says that only plans recompute there"),
    Pair("swap optimizer", "reuse fp32 param", "a warning says that nothing is reused"),
)
NAMES = sorted(
    {name for pair in (*INCOMPATIBLE, *COMPATIBLE) for name in (pair.first, pair.second)}
)


@pytest.mark.parametrize("pair", INCOMPATIBLE, ids=lambda pair: f"{pair.first}, {pair.second}")
def test_pair_when_both_are_asked_for_then_the_error_has_both_and_why(pair: Pair) -> None:
    asked = {pair.first: "--one", pair.second: "--other"}
    with pytest.raises(InvalidArgument) as caught:
        check_pairs(asked)
    assert str(caught.value) == f"--one and --other exclude each other: {pair.reason}"


@pytest.mark.parametrize("pair", COMPATIBLE, ids=lambda pair: f"{pair.first}, {pair.second}")
def test_pair_when_fine_here_then_no_error_and_a_reason_in_the_table(pair: Pair) -> None:
    check_pairs({pair.first: "--one", pair.second: "--other"})
    assert pair.reason


@pytest.mark.parametrize("name", NAMES)
def test_feature_when_alone_then_no_error(name: str) -> None:
    check_pairs({name: "--one"})


def test_pairs_when_several_are_asked_for_then_all_are_named() -> None:
    asked = {"adaptive recompute": "--a", "swap attention": "--b", "smart swap": "--c"}
    with pytest.raises(InvalidArgument, match=r"--a and --b exclude .*; --a and --c exclude"):
        check_pairs(asked)


def test_table_when_read_then_no_pair_stands_in_it_twice() -> None:
    pairs = [frozenset({pair.first, pair.second}) for pair in (*INCOMPATIBLE, *COMPATIBLE)]
    assert len(pairs) == len(set(pairs))
    assert all(len(pair) == 2 for pair in pairs)
