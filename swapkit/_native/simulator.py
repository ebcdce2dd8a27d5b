"""The simulated step: arrays in, arrays out. See `swapkit_plan.h` for the rules.

Arrays are objects with a buffer of the right type; this module does not use numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from swapkit._native.lib import check, ffi, lib

if TYPE_CHECKING:
    from swapkit._native._lib import CData

KEEP, SWAP, RECOMPUTE, SWAP_TO_DISK = (
    lib.SK_PLAN_KEEP,
    lib.SK_PLAN_SWAP,
    lib.SK_PLAN_RECOMPUTE,
    lib.SK_PLAN_SWAP_TO_DISK,
)
UNLIMITED = (1 << 63) - 1
MOST_SLOTS = (1 << 31) - 1

# The members of sk_plan_problem and sk_plan_run, by the type of their arrays.
SLOT_FLOATS = ("slot_starts", "slot_ends", "slot_stalls")
ITEM_FLOATS = ("out_starts", "out_ends", "released", "in_starts", "in_ends")
ITEM_SLOTS = ("needs", "release_slots", "prefetch_slots")
RESULTS = (
    "seconds", "stall_seconds", "recompute_seconds", "peak_bytes", "host_peak_bytes",
    "disk_peak_bytes", "swapped_bytes", "stuck_slot",
)  # fmt: skip
_MEMBERS = {
    "slot_seconds": "double[]",
    "slot_bytes": "int64_t[]",
    "since": "int32_t[]",
    "item_bytes": "int64_t[]",
    "births": "int32_t[]",
    "readies": "int32_t[]",
    "releases": "int32_t[]",
    "uses": "int32_t[]",
    "deaths": "int32_t[]",
    "tails": "int32_t[]",
    "formers": "int32_t[]",
    "is_weight": "bool[]",
    "can_swap": "bool[]",
    "can_recompute": "bool[]",
    "chain_bytes": "int64_t[]",
    "own_steps": "int32_t[]",
    "step_seconds": "double[]",
    "chain_starts": "int32_t[]",
    "chain_steps": "int32_t[]",
    "input_starts": "int32_t[]",
    "inputs": "int32_t[]",
}
MEMBERS = tuple(_MEMBERS)


class Links:
    """A machine's budget, speeds and room. Any thread."""

    def __init__(self, **values: float) -> None:
        """Take the members of sk_plan_machine."""
        self.pointer: CData = ffi.new("sk_plan_machine *", values)


class Simulator:
    """The slots and items of one step. Any thread."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        """Take `MEMBERS`, each as a contiguous buffer, which must not be resized later.

        Raises:
            InvalidArgument: an index is out of range, or the slots of an item are out of order.
        """
        self._buffers = {
            name: ffi.from_buffer(kind, arrays[name]) for name, kind in _MEMBERS.items()
        }
        self.nslots = len(self._buffers["slot_seconds"])
        self.nitems = len(self._buffers["item_bytes"])
        self._problem = ffi.new("sk_plan_problem *", self._buffers)
        self._problem.nslots = self.nslots
        self._problem.nitems = self.nitems
        self._problem.nsteps = len(self._buffers["step_seconds"])
        check(lib.sk_plan_check(self._problem))

    def simulate(
        self,
        links: Links,
        request: tuple[Any, Any | None, Any | None, Any | None, int],
        floats: Any,
        slots: Any,
    ) -> dict[str, Any]:
        """Run the step; return `RESULTS` by name.

        Args:
            links: of the machine.
            request: actions (int8); prefetch, release and early slots (int32) or None; window.
            floats: float64, filled with `SLOT_FLOATS`, then `ITEM_FLOATS`.
            slots: int32, filled with `ITEM_SLOTS`.

        Raises:
            InvalidArgument: an action that the item cannot have or the machine cannot do.
        """
        actions, prefetches, releases, earlies, window = request
        asked = ffi.new("sk_plan_request *")
        asked.actions = actions = ffi.from_buffer("int8_t[]", actions)
        if prefetches is not None:
            asked.prefetches = prefetches = ffi.from_buffer("int32_t[]", prefetches)
        if releases is not None:
            asked.releases = releases = ffi.from_buffer("int32_t[]", releases)
        if earlies is not None:
            asked.earlies = earlies = ffi.from_buffer("int32_t[]", earlies)
        asked.window = window
        run = ffi.new("sk_plan_run *")
        self._point(run, floats, slots)
        check(lib.sk_plan_simulate(self._problem, links.pointer, asked, run))
        return {name: getattr(run, name) for name in RESULTS}

    def _point(self, run: Any, floats: Any, slots: Any) -> None:
        """Point the members of `run` to parts of the two arrays."""
        at = ffi.from_buffer("double[]", floats, require_writable=True) + 0
        for name in SLOT_FLOATS:
            setattr(run, name, at)
            at += self.nslots
        for name in ITEM_FLOATS:
            setattr(run, name, at)
            at += self.nitems
        at = ffi.from_buffer("int32_t[]", slots, require_writable=True) + 0
        for name in ITEM_SLOTS:
            setattr(run, name, at)
            at += self.nitems
