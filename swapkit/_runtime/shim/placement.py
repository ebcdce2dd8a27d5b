"""The placement of the tensors that are saved in a scope."""

from __future__ import annotations

from typing import NamedTuple

from swapkit.config.environment import MIN_SWAP_BYTES
from swapkit.ir.plans import Action, Tier
from swapkit.registry import Source, Swap

TIERS = {"host": Tier.HOST, "disk": Tier.DISK}
# Where a copy may live: the disk takes what the host has no room for.
COPY_TIERS = {Tier.HOST: Tier.ANY, Tier.DISK: Tier.DISK}


class Placement(NamedTuple):
    """One scope's placement. `prefetch`: a distance in operators; None: as early as memory allows.

    `spares_regions`: inputs of recomputed regions inside do not move.
    """

    action: Action
    tier: Tier = Tier.ANY
    prefetch: int | None = None
    min_bytes: int = MIN_SWAP_BYTES
    spares_regions: bool = False


def placement_of(swap: Swap, source: Source | None) -> Placement:
    """Return the placement that a swap choice of the registry asks for."""
    return Placement(
        Action.SWAP,
        COPY_TIERS[TIERS[swap.to]],
        swap.prefetch,
        swap.min_bytes,
        spares_regions=source is Source.CONFIGURATION,
    )
