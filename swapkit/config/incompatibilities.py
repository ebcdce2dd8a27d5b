"""Features that exclude each other, pairs that only MindSpeed refuses, and flags that need others.

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
    from collections.abc import Callable, Iterator, Mapping


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
    Pair(first="adaptive recompute", second="norm recompute", reason=_BY_HAND),
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
# Pairs that MindSpeed's code refuses, or its documents leave open, and swapkit accepts.
COMPATIBLE = (
    Pair(
        first="adaptive memory",
        second="activation recompute",
        reason="the plan respects the user's choice",
    ),
    Pair(
        first="adaptive memory",
        second="norm recompute",
        reason="the plan respects the user's choice",
    ),
    Pair(
        first="adaptive memory",
        second="recompute in advance",
        reason="swapkit warns that it recomputes nothing in advance",
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


# Flags that only tune a feature, and the flags that switch it on.
TUNES = {
    "adaptive-recompute-profiling-step": (
        "adaptive-recompute-device-swap",
        "adaptive-recompute-device-size",
    ),
    "enable-recompute-layers-per-pp-rank": (
        "recompute-granularity",
        "recompute-activation-function",
        "recompute-norm",
        "swap-attention",
    ),
    "moe-adaptive-recompute-activation-scale": ("moe-adaptive-recompute-activation",),
    "recompute-activation-function-num-layers": ("recompute-activation-function",),
    "recompute-norm-num-layers": ("recompute-norm",),
    "recompute-type": ("recompute-module-list",),
    "save-memory-ratio": ("automated-pipeline",),
    "smart-swap-config": ("smart-swap",),
    "swap-modules": ("swap-attention",),
    "swap-optimizer-times": ("swap-optimizer",),
}


def list_idle(is_set: Callable[[str], bool]) -> Iterator[str]:
    """Yield a warning for each flag that tunes a feature which is off.

    Args:
        is_set: returns whether a flag has another value than its default.
    """
    for flag, switches in TUNES.items():
        if is_set(flag) and not any(map(is_set, switches)):
            yield f"--{flag} has no effect without --{' or --'.join(switches)}"


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
