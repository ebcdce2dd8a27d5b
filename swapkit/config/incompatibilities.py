"""Features that exclude each other, and flags that need others.

A feature that one flag switches on has the flag's name.

A pair that MindSpeed's documents name as exclusive raises, even where both could hold: a user who
sets both expects an error, not a guess about which one holds. Other pairs that MindSpeed's code
refuses are accepted; the tests list them, each with the reason.

Source:
    MindSpeed: the documents of adaptive selective recomputation and of adaptive memory
    optimisation, and the checks in its code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from swapkit.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


class Pair(NamedTuple):
    """Two features, and the reason why they exclude each other."""

    first: str
    second: str
    reason: str


_PLANS = "the first plans what to recompute and swap"
_BY_HAND = f"{_PLANS}, so omit the second, or choose everything by hand and omit the first"
_ONE_PLAN = "only one of them can plan a step, so omit one"
_BUBBLE = f"{_PLANS}, at every point of the schedule, so omit the second"
_FRAGMENTS = "both would install their own allocator; swapkit's pool does the work of either"
_METHOD = "a method selects which layers to recompute in full"
_CHOSEN = ("full recompute", "selective recompute", "recompute method", "swap attention")
_FINE = ("recompute activation function", "recompute norm")

INCOMPATIBLE = tuple(
    Pair(first, second, reason)
    for first, reason, seconds in (
        ("adaptive recompute", _BY_HAND, (*_CHOSEN, *_FINE)),
        ("adaptive recompute", _BUBBLE, ("recompute in bubble", "recompute in advance")),
        ("adaptive recompute", _ONE_PLAN, ("adaptive memory optimization", "smart swap")),
        ("adaptive recompute", _FRAGMENTS, ("memory fragmentation",)),
        ("adaptive memory optimization", _BY_HAND, _CHOSEN),
        ("adaptive memory optimization", _BUBBLE, ("recompute in bubble",)),
        ("adaptive memory optimization", _ONE_PLAN, ("smart swap",)),
        ("adaptive memory optimization", _FRAGMENTS, ("memory fragmentation",)),
        ("selective recompute", _METHOD, ("recompute method",)),
    )
    for second in seconds
)
# Flags that only tune a feature, and the flags that switch it on.
_RECOMPUTES = ("recompute-granularity", "recompute-activation-function", "recompute-norm")
TUNES: dict[str, tuple[str, ...]] = {
    "adaptive-recompute-profiling-step": (
        "adaptive-recompute-device-swap",
        "adaptive-recompute-device-size",
    ),
    "enable-recompute-layers-per-pp-rank": (*_RECOMPUTES, "swap-attention"),
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
        asked: the requested features, each with its flag or variable; may have others.

    Raises:
        InvalidArgument: two features exclude each other; names all such pairs, with reasons.
    """
    found = [
        f"{asked[first]} and {asked[second]} exclude each other: {reason}"
        for first, second, reason in INCOMPATIBLE
        if first in asked and second in asked
    ]
    if found:
        raise InvalidArgument("; ".join(found))
