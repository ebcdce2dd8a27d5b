"""What is to become of the tensors that a scope's operators save."""

from __future__ import annotations

from typing import NamedTuple

from swapkit.config.environment import MIN_SWAP_BYTES
from swapkit.ir.plans import Action, Tier
from swapkit.registry import Source, Swap

TIERS = {"host": Tier.ANY, "disk": Tier.DISK}


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
