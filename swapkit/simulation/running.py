"""Simulation of a step under given actions: its time, its memory and the times of all copies.

`swapkit_plan.h` has the rules; `problems.py` explains the arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swapkit._native.simulator import (
    ITEM_FLOATS,
    ITEM_SLOTS,
    KEEP,
    MEMBERS,
    MOST_SLOTS,
    RECOMPUTE,
    SLOT_FLOATS,
    SWAP,
    SWAP_TO_DISK,
    UNLIMITED,
    Links,
    Simulator,
)
from swapkit.errors import InvalidArgument
from swapkit.ir.machines import Machine
from swapkit.simulation.problems import Floats, Indexes, Problem

__all__ = ["KEEP", "RECOMPUTE", "SWAP", "SWAP_TO_DISK", "Moments", "Run", "run"]

_TYPES = {
    "slot_seconds": np.float64,
    "step_seconds": np.float64,
    "slot_bytes": np.int64,
    "item_bytes": np.int64,
    "chain_bytes": np.int64,
    "is_weight": np.bool_,
    "can_swap": np.bool_,
    "can_recompute": np.bool_,
}  # all others: int32


class Moments(NamedTuple):
    """Slots that a run of a plan names, for each item."""

    # The earliest slot before which the copy back starts; -1: not before the need. None: as early
    # as there is room that computing will not need by then.
    prefetches: Indexes | None = None
    # The slot that waits until the item's memory is free; -1, None: no slot waits.
    releases: Indexes | None = None
    # The slot before which a recomputed item is made if that is before its need, and after
    # forward's last use; -1, None: at its need.
    earlies: Indexes | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """The result of a simulated step. Times are seconds from its start; nan: did not happen.

    A step that gets stuck has `seconds` inf, and only the times before that point.
    """

    seconds: float
    stall_seconds: float  # computing waited for copies
    recompute_seconds: float
    peak_bytes: int
    host_peak_bytes: int
    disk_peak_bytes: int
    swapped_bytes: int  # copied back
    stuck_slot: int  # the slot that can never begin; -1: the step ran
    slot_starts: Floats  # K; including the recomputation right before
    slot_ends: Floats
    slot_stalls: Floats  # waited before the slot
    out_starts: Floats  # N
    out_ends: Floats
    released: Floats  # its memory is free
    in_starts: Floats  # its memory is taken again
    in_ends: Floats
    needs: Indexes  # N: the slot before which the item must be present
    # The moments that a plan must name so that following it gives the same step; -1: none.
    release_slots: Indexes  # the first slot that would not fit with the item still present
    prefetch_slots: Indexes  # the slot that ran, or was about to, when the copy back started
    earlies: Indexes | None = None  # as asked (`Moments`)


def run(
    problem: Problem,
    machine: Machine,
    actions: NDArray[np.int8],
    moments: Moments = Moments(),  # noqa: B008 - immutable
    *,
    window: int = MOST_SLOTS,
) -> Run:
    """Simulate a step.

    Args:
        problem: the step; its arrays must not change later.
        machine: the machine that the step runs on.
        actions: the action of each item.
        moments: of copies and recomputing.
        window: if the moments have no prefetches, a copy back starts at most this many slots before
            the need.

    Raises:
        InvalidArgument: an action that an item cannot have, or an array of the wrong length.
    """
    simulator = _simulator_of(problem)
    nslots, nitems = simulator.nslots, simulator.nitems
    chosen = _check_length(np.ascontiguousarray(actions, np.int8), nitems)
    prefetches, releases, earlies = (
        None if each is None else _check_length(np.ascontiguousarray(each, np.int32), nitems)
        for each in moments
    )
    floats = np.empty(len(SLOT_FLOATS) * nslots + len(ITEM_FLOATS) * nitems, np.float64)
    slots = np.empty(len(ITEM_SLOTS) * nitems, np.int32)
    results: dict[str, Any] = simulator.simulate(
        _links_of(machine),
        (chosen, prefetches, releases, earlies, min(window, MOST_SLOTS)),
        floats,
        slots,
    )
    split = len(SLOT_FLOATS) * nslots
    results.update(zip(SLOT_FLOATS, floats[:split].reshape(-1, nslots), strict=True))
    results.update(zip(ITEM_FLOATS, floats[split:].reshape(len(ITEM_FLOATS), -1), strict=True))
    results.update(zip(ITEM_SLOTS, slots.reshape(len(ITEM_SLOTS), -1), strict=True))
    return Run(**results, earlies=earlies)


def _check_length(array: NDArray[Any], nitems: int) -> NDArray[Any]:
    if array.shape != (nitems,):
        message = f"expected an action or slot for each of {nitems} items, got shape {array.shape}"
        raise InvalidArgument(message)
    return array


@lru_cache(maxsize=8)  # problems are equal only to themselves
def _simulator_of(problem: Problem) -> Simulator:
    return Simulator(
        {
            name: np.ascontiguousarray(getattr(problem, name), _TYPES.get(name, np.int32))
            for name in MEMBERS
        }
    )


@lru_cache(maxsize=64)
def _links_of(machine: Machine) -> Links:
    values = {each.name: getattr(machine, each.name) for each in fields(machine)}
    del values["name"], values["version"]
    if machine.host_bytes is None:
        values["host_bytes"] = UNLIMITED
    return Links(**values)
