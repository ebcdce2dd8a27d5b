"""Features that exclude each other, and pairs that only MindSpeed refuses.

A pair that MindSpeed's documents name as exclusive raises, even where both could hold: a user who
sets both expects an error, not a guess about which one holds. `COMPATIBLE` lists other pairs that
MindSpeed's code refuses, each with the reason why swapkit accepts it.

Source:
    MindSpeed: the documents of adaptive selective recomputation and of adaptive memory
    optimisation, and the checks in its code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swapkit.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two features, and the reason why they exclude each other (in `COMPATIBLE`: why not)."""

    first: str
    second: str
    reason: str


_PLANS = "the first plans what to recompute and swap"
_BY_HAND = f"{_PLANS}, so omit the second, or choose everything by hand and omit the first"
_ONE_PLAN = "only one of them can plan a step, so omit one"
_BUBBLE = f"{_PLANS}, at every point of the schedule, so omit the second"
_FRAGMENTS = "both would install their own allocator; swapkit's pool does the work of either"

INCOMPATIBLE = (
    Pair(first="adaptive recompute", second="full recompute", reason=_BY_HAND),
    Pair(first="adaptive recompute", second="selective recompute", reason=_BY_HAND),
    Pair(first="adaptive recompute", second="recompute method", reason=_BY_HAND),
    Pair(first="adaptive recompute", second="activation recompute", reason=_BY_HAND),
    Pair(first="adaptive recompute", second="swap attention", reason=_BY_HAND),
    Pair(first="adaptive recompute", second="recompute in bubble", reason=_BUBBLE),
    Pair(first="adaptive recompute", second="recompute in advance", reason=_BUBBLE),
    Pair(first="adaptive recompute", second="adaptive memory", reason=_ONE_PLAN),
    Pair(first="adaptive recompute", second="smart swap", reason=_ONE_PLAN),
    Pair(first="adaptive recompute", second="memory fragmentation", reason=_FRAGMENTS),
    Pair(first="adaptive memory", second="full recompute", reason=_BY_HAND),
    Pair(first="adaptive memory", second="selective recompute", reason=_BY_HAND),
    Pair(first="adaptive memory", second="recompute method", reason=_BY_HAND),
    Pair(first="adaptive memory", second="swap attention", reason=_BY_HAND),
    Pair(first="adaptive memory", second="recompute in bubble", reason=_BUBBLE),
    Pair(first="adaptive memory", second="smart swap", reason=_ONE_PLAN),
    Pair(first="adaptive memory", second="memory fragmentation", reason=_FRAGMENTS),
    Pair(
        first="selective recompute",
        second="recompute method",
        reason="a method selects which layers to recompute in full",
    ),
)
# Pairs that MindSpeed's code refuses and swapkit accepts.
COMPATIBLE = (
    Pair(
        first="adaptive memory",
        second="activation recompute",
        reason="the plan respects the user's choice",
    ),
    Pair(
        first="selective recompute",
        second="activation recompute",
        reason="both are choices for different parts of a layer",
    ),
    Pair(
        first="selective recompute",
        second="norm recompute",
        reason="both are choices for different parts of a layer",
    ),
    Pair(
        first="smart swap",
        second="memory fragmentation",
        reason="one pool serves both",
    ),
    Pair(
        first="swap attention",
        second="recompute in bubble",
        reason="swapkit warns that without a plan nothing is recomputed in bubbles",
    ),
    Pair(
        first="swap optimizer",
        second="reuse of fp32 parameters",
        reason="swapkit warns that it reuses nothing",
    ),
)


def check_pairs(asked: Mapping[str, str]) -> None:
    """Raise if two features exclude each other.

    Args:
        asked: the requested features by their names in the table, each with its flag or variable.

    Raises:
        InvalidArgument: two features exclude each other; names all such pairs, with reasons.
    """
    found = [
        f"{asked[pair.first]} and {asked[pair.second]} exclude each other: {pair.reason}"
        for pair in INCOMPATIBLE
        if pair.first in asked and pair.second in asked
    ]
    if found:
        raise InvalidArgument("; ".join(found))
