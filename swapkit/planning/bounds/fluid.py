"""The planning problem with divisible items: rows and columns of the linear program.

Time is cut where slots start. *Boundary* k is the start of slot k and of the recomputing before it.
The stretch between the boundaries k - 1 and k is the computing of slot k - 1, and then a stall. The
variables are the shares of each item that are recomputed and swapped to each tier (host, disk), and
at each boundary

    waiting   bytes that may leave (they are final) and have not left, by tier
    early     bytes that are back before the slot that uses them, by tier
    freed     bytes that are alive and not on the device
    stalls    seconds, right before the boundary

Everything is a relaxation of the simulator, so the optimum is a lower bound of every run:

- *Copies* move bytes evenly over their time. Real copies free memory at their end and take memory
  at their start, so they never use less. No copy takes less time per byte than that of the largest
  item. While both directions run, each has duplex / 2 of its speed, so their shares of the time lie
  in the hull of (1, 0), (0, 1) and (duplex / 2, duplex / 2).
- *Out*: bytes leave after the slot in which they become final; before the next boundary only in the
  stall. *In*: bytes are back at the boundary of `uses`; the real need may only be earlier.
- *Memory* counts only at the boundaries. There the device holds all that is alive except items that
  are recomputed later (from after `releases` to before `uses`) and swapped bytes. The swapped bytes
  are limited to bytes that have left and are not back, and to bytes between `releases` and `uses`
  less those back early. `chain_bytes` count if the slot in which they are taken is certain.
- *Recomputing* costs the seconds of its steps, once for items that might share them, spread over
  the slots from the first possible need to the last one (windows.py). Copies go on meanwhile.
- *Interference*: during `busy` seconds of a slot a copy runs, and computing progresses at
  1 / (1 + interference) of its speed. Copies need busy seconds or stalls.
- *Clean* items leave without a copy, and take no room. A tail is freed as long as its item's other
  stretch is.
- *Host and disk* hold all bytes that have left until the slot `deaths` has ended.
- The shares of an item sum to at most one.
- If the host may be the limit: the step takes at least the host's time for it and for all moves.

Rows that keep `out` and `in` from running backwards exist only where running backwards could pay:
with shared links or limited room. Otherwise the running maximum of the bytes out, and the running
minimum of the bytes to come in, repair any solution.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from swapkit.ir.machines import Machine
from swapkit.ir.traces import HostTime
from swapkit.planning.bounds.linear import Assembly, Linear
from swapkit.planning.bounds.windows import find_windows
from swapkit.simulation.problems import Flags, Floats, Indexes, Problem

# Cost of a second in which the device is idle. Of two solutions with equal host time, the one that
# is faster on the device is better.
IDLE = 0.99


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TierColumns:
    """The columns of one tier, and units of time per unit of bytes in either direction."""

    shares: Indexes  # N
    waiting: Indexes  # K, and so is `early`
    early: Indexes
    out_seconds: float
    in_seconds: float
    room: float | None  # units of bytes; None: unlimited


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fluid:
    """The linear program, and the meaning of its columns. A unit of time moves out a unit of bytes.

    A budget sets the lower bound of the columns `freed`: the bytes alive at the boundary minus the
    budget. `ends` are finite upper ends of all columns; for stalls, 1.
    """

    linear: Linear
    unit_bytes: float
    unit_seconds: float
    alive: Floats  # K: units in use at each boundary if everything is kept
    recomputed: Indexes  # N
    tiers: tuple[TierColumns, ...]  # none, host, or host and disk
    freed: Indexes  # K or 2 K
    stalls: Indexes
    ends: Floats
    basis: tuple[Indexes, Indexes]  # initial basis: basic columns; rows that are not basic


class FluidBuilder:
    """Builds the program of one problem."""

    def __init__(
        self, problem: Problem, machine: Machine, may_swap: Flags, may_recompute: Flags
    ) -> None:
        self._problem = problem
        self._machine = machine
        self._may_recompute = may_recompute
        self._slots = np.arange(len(problem.slot_seconds), dtype=np.int32)
        self._movable = np.flatnonzero(may_swap).astype(np.int32)
        self._remakable = np.flatnonzero(may_recompute).astype(np.int32)
        sizes = problem.item_bytes.astype(np.float64)
        self._unit_bytes = max(1.0, float(np.mean(sizes))) if len(sizes) else 1.0
        self._largest = float(np.max(sizes[may_swap], initial=1.0))
        self._unit_seconds = self._unit_bytes * self._seconds_per_byte(
            machine.out_bytes_per_second, machine.out_latency_seconds
        )
        self._sizes = sizes / self._unit_bytes
        self._total = float(np.sum(self._sizes))
        self._seconds = problem.slot_seconds / self._unit_seconds
        self._windows = find_windows(problem, may_recompute)
        self._costs = self._windows.own_seconds / self._unit_seconds
        self._tiers: list[TierColumns] = []
        self._assembly = Assembly()
        self._ends: list[Floats] = []
        self._basic: list[Indexes] = []
        self._tight: list[Indexes] = []

    @property
    def _copied(self) -> Indexes:
        """The items that may be copied out."""
        movable: Indexes = self._movable[self._problem.is_copied[self._movable]]
        return movable

    def build(self, host: HostTime | None = None) -> Fluid:
        """Return the program. `host`: its time, if the host may take longer than the device."""
        self._recomputed = self._columns(
            len(self._sizes), 1.0, upper=self._may_recompute, cost=self._costs
        )
        self._add_placement()
        self._add_tiers()
        count = len(self._slots) if self._tiers else 0
        self._stalls = self._columns(count, 1.0, cost=1.0)
        self._add_overlap()
        freed = [self._add_freed(self._problem.readies, holds_waiting=True)]
        if self._tiers:
            freed.append(self._add_freed(self._problem.releases, holds_waiting=False))
            self._add_links()
            self._add_trails()
        for tier in self._tiers:
            self._add_room(tier)
        if host is not None:
            self._add_host(host)
        return Fluid(
            linear=self._assembly.finish(),
            unit_bytes=self._unit_bytes,
            unit_seconds=self._unit_seconds,
            alive=find_alive_bytes(self._problem) / self._unit_bytes,
            recomputed=self._recomputed,
            tiers=tuple(self._tiers),
            freed=np.concatenate(freed),
            stalls=self._stalls,
            ends=np.concatenate(self._ends),
            basis=(np.concatenate(self._basic), np.concatenate(self._tight)),
        )

    def _columns(
        self, count: int, end: ArrayLike, *, upper: ArrayLike = np.inf, cost: ArrayLike = 0.0
    ) -> Indexes:
        """Add variables whose values never exceed `end`, with or without a bound in the program."""
        self._ends.append(np.broadcast_to(np.asarray(end, dtype=np.float64), (count,)))
        return self._assembly.columns(count, upper=upper, cost=cost)

    def _seconds_per_byte(
        self, bytes_per_second: float, latency: float, disk: float = np.inf
    ) -> float:
        """Return the seconds per byte of the largest item, which are the fewest."""
        return latency / self._largest + 1.0 / min(bytes_per_second, disk)

    # ---- recomputing ---------------------------------------------------------------------------

    def _add_placement(self) -> None:
        """Place recomputing between the first slot that can need it and the last that must have it.

        Each slot has two non-negative states: the seconds of recomputing that were possible by its
        end but not spent, and the seconds that were spent but not yet required.
        """
        items, groups = self._remakable, self._windows.shared
        costs, group_costs = self._costs[items], np.array([g.seconds for g in groups])
        group_costs = group_costs / self._unit_seconds
        once = self._add_shared(group_costs)
        self._recompute_end = float(np.sum(costs) + np.sum(group_costs))
        spans = (
            (self._windows.earliest[items], np.array([g.first for g in groups], dtype=np.int32)),
            (self._problem.uses[items], np.array([g.last for g in groups], dtype=np.int32)),
        )
        self._placed = self._find_open(*(np.concatenate(span) for span in spans))
        self._placements = self._columns(len(self._placed), self._recompute_end)
        for sign, (of_items, of_groups) in zip((1.0, -1.0), spans, strict=True):
            state = self._columns(len(self._placed), self._recompute_end)
            rows = self._assembly.rows(len(self._placed), 0.0, 0.0)
            self._put_change(rows, state, 1.0)
            self._assembly.add(rows, self._placements, sign)
            at = np.searchsorted(self._placed, of_items)
            self._assembly.add(rows[at], self._recomputed[items], -sign * costs)
            at = np.searchsorted(self._placed, of_groups)
            self._assembly.add(rows[at], once, -sign * group_costs)
            self._basic.append(state)
            self._tight.append(rows)

    def _find_open(self, firsts: Indexes, lasts: Indexes) -> Indexes:
        """Return the slots in which something may be recomputed."""
        opened = np.bincount(firsts, minlength=len(self._slots))
        closed = np.bincount(lasts, minlength=len(self._slots))
        running = np.cumsum(opened) - np.cumsum(closed) + closed
        return np.flatnonzero(running).astype(np.int32)

    def _add_shared(self, seconds: Floats) -> Indexes:
        """Charge steps that several items share once, by the largest of the items' shares."""
        groups = self._windows.shared
        once = self._columns(len(groups), 1.0, cost=seconds)
        items = np.array([item for group in groups for item in group.items], dtype=np.int32)
        of = np.repeat(np.arange(len(groups)), [len(group.items) for group in groups])
        rows = self._assembly.rows(len(items), 0.0, np.inf)
        self._assembly.add(rows, once[of], 1.0)
        self._assembly.add(rows, self._recomputed[items], -1.0)
        return once

    def _put_recompute(self, rows: Indexes, factor: float) -> None:
        """Add the recompute time of each slot to the slot's row, from slot 0 on."""
        inside = self._placed < len(rows)
        self._assembly.add(rows[self._placed[inside]], self._placements[inside], factor)

    # ---- memory --------------------------------------------------------------------------------

    def _add_freed(self, leaves: Indexes, *, holds_waiting: bool) -> Indexes:
        """Define freed bytes: items from after `leaves` to before `uses`, less those present."""
        freed = self._columns(len(self._slots), self._total)
        rows = self._assembly.rows(len(self._slots), 0.0, 0.0)
        self._put_change(rows, freed, 1.0)
        self._put_gone(rows, self._remakable, self._recomputed, self._problem.releases)
        for tier in self._tiers:
            self._put_gone(rows, self._movable, tier.shares, leaves)
            self._put_change(rows, tier.early, 1.0)
            if holds_waiting:
                self._put_change(rows, tier.waiting, 1.0)
        items = self._windows.chains
        sizes = self._problem.chain_bytes[items] / self._unit_bytes
        at = self._problem.uses[items]
        self._assembly.add(rows[at], self._recomputed[items], sizes)
        after = at + 1 < len(rows)
        self._assembly.add(rows[at[after] + 1], self._recomputed[items[after]], -sizes[after])
        self._basic.append(freed)
        self._tight.append(rows)
        return freed

    def _put_gone(self, rows: Indexes, items: Indexes, shares: Indexes, leaves: Indexes) -> None:
        self._assembly.add(rows[leaves[items] + 1], shares[items], -self._sizes[items])
        self._assembly.add(rows[self._problem.uses[items]], shares[items], self._sizes[items])
        tails = self._problem.tails
        ending = items[(tails[items] >= 0) & (tails[items] < len(rows))]
        self._assembly.add(rows[tails[ending]], shares[ending], -self._sizes[ending])

    # ---- copies --------------------------------------------------------------------------------

    def _add_tiers(self) -> None:
        """Add the host, and the disk if the host may be full."""
        machine = self._machine
        if len(self._movable) == 0:
            return
        rows = self._assembly.rows(len(self._sizes), -np.inf, 1.0)
        self._assembly.add(rows, self._recomputed, 1.0)
        disk = machine.disk_bytes > 0 and machine.host_bytes is not None
        for room, out_limit, in_limit in (
            (machine.host_bytes, np.inf, np.inf),
            (
                machine.disk_bytes,
                machine.disk_write_bytes_per_second,
                machine.disk_read_bytes_per_second,
            ),
        )[: 1 + disk]:
            movable = (
                self._movable[~self._problem.is_weight[self._movable]]
                if self._tiers
                else self._movable
            )
            may_swap = np.isin(np.arange(len(self._sizes)), movable)
            shares = self._columns(len(self._sizes), may_swap, upper=may_swap)
            self._assembly.add(rows, shares, 1.0)
            scale = self._unit_bytes / self._unit_seconds
            self._tiers.append(
                TierColumns(
                    shares=shares,
                    waiting=self._columns(len(self._slots), self._total),
                    early=self._columns(len(self._slots), self._total),
                    out_seconds=scale
                    * self._seconds_per_byte(
                        machine.out_bytes_per_second, machine.out_latency_seconds, out_limit
                    ),
                    in_seconds=scale
                    * self._seconds_per_byte(
                        machine.in_bytes_per_second, machine.in_latency_seconds, in_limit
                    ),
                    room=None if room is None else room / self._unit_bytes,
                )
            )

    def _add_overlap(self) -> None:
        """With interference: add the time that copies run in each slot, and its cost."""
        factor = self._machine.interference
        count = len(self._slots) if factor > 0 and self._tiers else 0
        ends = (1 + factor) * (self._seconds[:count] + self._recompute_end)
        self._busy = self._columns(count, ends, cost=factor / (1 + factor))
        rows = self._assembly.rows(count, -np.inf, (1 + factor) * self._seconds[:count])
        self._assembly.add(rows, self._busy, 1.0)
        if count:
            self._put_recompute(rows, -(1 + factor))

    def _add_links(self) -> None:
        """Limit the copies in each stretch by its time of computing and stalls."""
        duplex = self._machine.duplex
        cross = (2 - duplex) / duplex
        before = np.concatenate(([0.0], self._seconds[:-1]))
        for own, other in ((1.0, cross), (cross, 1.0)):
            rows = self._assembly.rows(
                len(self._slots), -np.inf, 0.0 if len(self._busy) else before
            )
            for tier in self._tiers:
                self._put_out(rows, tier, own * tier.out_seconds)
                self._put_in(rows, tier, other * tier.in_seconds)
            self._assembly.add(rows, self._stalls, -1.0)
            if len(self._busy):
                self._assembly.add(rows[1:], self._busy[:-1], -1.0)
            else:
                self._put_recompute(rows[1:], -1.0)
        if cross > 0 or self._tiers[0].room is not None:
            for tier in self._tiers:
                self._put_out(self._assembly.rows(len(self._slots), 0.0, np.inf), tier, 1.0)
                self._put_in(self._assembly.rows(len(self._slots), 0.0, np.inf), tier, 1.0)

    def _add_trails(self) -> None:
        """Let bytes that have just become final leave only in the stall."""
        items = self._copied[self._problem.outs[self._copied] + 1 < len(self._slots)]
        finals, of = np.unique(self._problem.outs[items] + 1, return_inverse=True)
        rows = self._assembly.rows(len(finals), 0.0, np.inf)
        self._assembly.add(rows, self._stalls[finals], 1.0)
        for tier in self._tiers:
            self._assembly.add(rows, tier.waiting[finals], tier.out_seconds)
            sizes = tier.out_seconds * self._sizes[items]
            self._assembly.add(rows[of], tier.shares[items], -sizes)

    def _add_room(self, tier: TierColumns) -> None:
        """Limit the bytes that the tier holds."""
        if tier.room is None:
            return
        held = self._columns(len(self._slots), tier.room, upper=tier.room)
        rows = self._assembly.rows(len(self._slots), 0.0, 0.0)
        self._put_change(rows, held, 1.0)
        self._put_out(rows, tier, -1.0)
        tails = self._problem.tails[self._copied]
        ends = np.where(tails >= 0, tails, self._problem.deaths[self._copied] + 1)
        within = ends < len(self._slots)
        items = self._copied[within]
        self._assembly.add(rows[ends[within]], tier.shares[items], self._sizes[items])
        items = self._copied[tails >= 0]  # their copies of the step before
        self._assembly.add(
            rows[np.zeros(len(items), np.int32)], tier.shares[items], -self._sizes[items]
        )
        self._basic.append(held)
        self._tight.append(rows)

    def _add_host(self, host: HostTime) -> None:
        """Make the step at least as long as the host's time; the device is idle for the rest."""
        costs = self._assembly.costs()
        adding = np.flatnonzero(costs)
        scale = 1.0 / self._unit_seconds
        moved = [(self._recomputed, host.recompute_seconds * scale)]
        moved += [(tier.shares, host.swap_seconds * scale) for tier in self._tiers]
        least = host.step_seconds * scale - float(np.sum(self._seconds))
        most = sum(len(columns) * seconds for columns, seconds in moved)
        idle = self._columns(1, max(0.0, least) + most, cost=IDLE)
        row = self._assembly.rows(1, least, np.inf)
        self._assembly.add(row, idle, 1.0)
        self._assembly.add(row, adding, costs[adding])
        for columns, seconds in moved:
            self._assembly.add(row, columns, -seconds)

    def _put_change(self, rows: Indexes, columns: Indexes, factor: float) -> None:
        """Add the change of a boundary variable since the previous boundary."""
        self._assembly.add(rows, columns, factor)
        self._assembly.add(rows[1:], columns[:-1], -factor)

    def _put_out(self, rows: Indexes, tier: TierColumns, factor: float) -> None:
        """Add the bytes that leave before each boundary: newly final bytes that do not wait."""
        if factor:
            items = self._copied
            self._put_change(rows, tier.waiting, -factor)
            items = items[self._problem.outs[items] + 1 < len(rows)]
            at = self._problem.outs[items] + 1
            self._assembly.add(rows[at], tier.shares[items], factor * self._sizes[items])

    def _put_in(self, rows: Indexes, tier: TierColumns, factor: float) -> None:
        """Add the bytes that come back before each boundary: used bytes, and more early ones."""
        if factor:
            items = self._movable
            self._put_change(rows, tier.early, factor)
            at = self._problem.uses[items]
            self._assembly.add(rows[at], tier.shares[items], factor * self._sizes[items])


def find_alive_bytes(problem: Problem) -> Floats:
    """Return the bytes in use at the start of each slot if everything is kept."""
    changes = np.zeros(len(problem.slot_bytes) + 1)
    np.add.at(changes, problem.births, problem.item_bytes)
    np.add.at(changes, problem.deaths + 1, -problem.item_bytes)
    goes_on = problem.tails >= 0
    np.add.at(changes, problem.tails[goes_on], problem.item_bytes[goes_on])
    alive: Floats = np.cumsum(changes)[:-1] + problem.slot_bytes
    return alive
