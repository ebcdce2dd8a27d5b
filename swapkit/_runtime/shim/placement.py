"""What is to become of the tensors that a scope's operators save."""

from __future__ import annotations

import enum
from typing import NamedTuple

from swapkit._native.sched import Tier
from swapkit.config.environment import MIN_SWAP_BYTES
from swapkit.registry import Source, Swap

TIERS = {"host": Tier.ANY, "disk": Tier.DISK}


class Action(enum.Enum):
    """What is to become of a saved tensor."""

    KEEP = "keep"  # on the device, whatever happens
    SWAP = "swap"  # to the host as soon as it is saved, back ahead of its use
    AUTO = "auto"  # on the device while memory lasts
    PASS = "pass"  # on the device, but for what choices for operators say (`choosing/operators.py`)


class Placement(NamedTuple):
    """One scope's choice. `prefetch` None: as early as memory allows; else in operators.

    `spares_regions`: what a recomputed region inside is handed does not move.
    """

    action: Action
    tier: Tier = Tier.ANY
    prefetch: int | None = None
    min_bytes: int = MIN_SWAP_BYTES
    spares_regions: bool = False


def choice_of(swap: Swap, source: Source | None) -> Placement:
    """Return what a scope has to know of a row of the registry."""
    return Placement(
        Action.SWAP,
        TIERS[swap.to],
        swap.prefetch,
        swap.min_bytes,
        spares_regions=source is Source.CONFIGURATION,
    )
