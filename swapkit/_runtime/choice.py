"""What is to become of the tensors that a scope's operators save."""

from __future__ import annotations

import enum
from typing import NamedTuple

from swapkit._native.sched import Tier
from swapkit.config.environment import MIN_SWAP_BYTES


class Action(enum.Enum):
    """What is to become of a saved tensor."""

    KEEP = "keep"  # on the device, whatever happens
    SWAP = "swap"  # to the host as soon as it is saved, back ahead of its use
    AUTO = "auto"  # on the device while memory lasts


class Choice(NamedTuple):
    """One scope's choice. `prefetch` None: as early as memory allows; else in operators."""

    action: Action
    tier: Tier = Tier.ANY
    prefetch: int | None = None
    min_bytes: int = MIN_SWAP_BYTES
