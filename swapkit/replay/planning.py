"""Addresses for the blocks of a trace, by the layout planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from swapkit.ir.allocations import spans_of
from swapkit.planning.layout.placing import place
from swapkit.planning.layout.values import Lifetimes
from swapkit.simulation.allocators.layout import ROUNDING_BYTES
from swapkit.units import round_up

if TYPE_CHECKING:
    from swapkit.ir.allocations import AllocationTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedAddresses:
    """The address of each block of a trace, and how good the plan is; all in bytes."""

    offsets: tuple[int, ...]
    height_bytes: int
    lower_bound_bytes: int


def plan_addresses(trace: AllocationTrace) -> PlannedAddresses:
    """Plan the addresses of all blocks of a trace, with one range of addresses for each stream.

    Blocks of different streams share no addresses, because the memory that one stream gives is free
    for another only after a wait.
    """
    spans = spans_of(trace)
    sizes = [round_up(nbytes, ROUNDING_BYTES) for nbytes in spans.nbytes]
    starts, ends, nbytes = (
        np.array(values, dtype=np.int64) for values in (spans.starts, spans.ends, sizes)
    )
    streams = np.array([block.stream for block in trace.blocks], dtype=np.int64)
    offsets = np.zeros(len(trace.blocks), dtype=np.int64)
    height = bound = 0
    for stream in np.unique(streams):
        mine = np.flatnonzero(streams == stream)
        lifetimes = Lifetimes(
            starts=starts[mine],
            ends=ends[mine],
            nbytes=nbytes[mine],
        )
        layout = place(lifetimes)
        offsets[mine] = height + layout.offsets
        height += layout.height
        bound += layout.lower_bound
    return PlannedAddresses(
        offsets=tuple(offsets.tolist()), height_bytes=height, lower_bound_bytes=bound
    )
