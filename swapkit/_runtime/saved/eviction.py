"""Making room: copying ahead while memory fills up, and evicting when an allocation would not fit.

While memory fills up, groups are copied to the host early, in the order of production
(*write-behind*), and stay on the device: clean. When an allocation fails, the pool asks for bytes
(*rescue*): clean groups are dropped first, then copies in flight are awaited, then the rest is
copied and dropped; oldest first, since backward needs the oldest last. What had already been
brought back ahead of its use goes last of all.

Where a `host_limit` leaves little room for copies, operators are captured while no plan has settled
(`shim/cpp/recompute/standby.hpp`), and what the host cannot take is dropped and computed again in
backward.

Only storages that nobody else holds are dropped: anything else would free nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swapkit._native.sched import CLEAN, COPYING_IN, COPYING_OUT, RESIDENT
from swapkit._runtime.operators.checksums import Digest, StorageDigests
from swapkit.config.environment import MIN_SWAP_BYTES
from swapkit.errors import DiskError

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._native.sched import Scheduler
    from swapkit._runtime.saved.device import Device
    from swapkit._runtime.shim.types import Mover, StorageGroup

# Write-behind begins when this share of the budget is in use, and keeps this many copies queued.
WATERMARK = 0.7
COPIES_IN_FLIGHT = 2
MOST_ASIDE = 256
# Torch's own allocator reserves more than is in use, and only what was copied can be taken from us.
WATERMARK_ASIDE = 0.5
# A step copies ahead at most this much more than the step before it had to evict.
AHEAD = 1.25
# A rescue frees at least this share of the budget, so that small tensors do not need one each.
LEAST = 1 / 256
# A clean group at most this much larger than what is needed is taken alone.
FIT = 1.25


class Evictor:
    """The policy of a swapper under a budget. The swapper's lock is held, or taken by `free`."""

    def __init__(
        self,
        mover: Mover,
        scheduler: Scheduler,
        device: Device,
        *,
        limit_bytes: int,
        adopt: Callable[[int], int],
        stand_by: Callable[[bool], None],
    ) -> None:
        """Begin with nothing saved.

        Args:
            mover: of the swapper.
            scheduler: which copies for it.
            device: whose memory is short.
            limit_bytes: of the budget; 0: there is none.
            adopt: takes in graphs, of saved tensors of at least so many bytes; returns how many.
            stand_by: lets the session's hooks capture what is saved, or not any more.
        """
        self._mover = mover
        self._scheduler = scheduler
        self._device = device
        self._limit_bytes = limit_bytes
        self._adopt = adopt
        self._stand_by = stand_by
        self._mover.sets_aside = is_aside = device.sets_aside
        if limit_bytes:
            share = WATERMARK_ASIDE if is_aside else WATERMARK
            self._mover.watermark_bytes = int(limit_bytes * share)
        # Of what is set aside, only what is copied, or under way, can be had without Python.
        self._mover.most_copying = MOST_ASIDE if is_aside else COPIES_IN_FLIGHT
        self._least_bytes = int(limit_bytes * LEAST)
        self._step_evicted_bytes = 0
        self.min_bytes = MIN_SWAP_BYTES  # of graphs that are taken in
        self.multiple = 1  # of the bytes that are missing: what a rescue frees
        self._count = 0
        self._count_before = self._count_elsewhere()
        self._digests: StorageDigests | None = (
            None  # of what is dropped without a copy; None: nothing is
        )
        self._may_stand_by = False  # in a session that has prepared it

    @property
    def count(self) -> int:
        """How often memory was freed because an allocation would have failed."""
        return self._count + self._count_elsewhere() - self._count_before

    def _count_elsewhere(self) -> int:
        device = self._device
        return device.shared.shim.native_rescues(device.index)[0] if device.sets_aside else 0

    # ---- write-behind ---------------------------------------------------------------------------

    def hold(self) -> None:
        """Copy nothing early: a plan says what leaves."""
        self._mover.holds_copies = True

    def resume(self) -> None:
        """Undo `hold`: every group that is on the device takes part."""
        self._mover.holds_copies = False
        self._mover.resume_copies()

    def end_step(self) -> None:
        """Learn from the step that ended how much is worth copying ahead in the next."""
        if not self._device.sets_aside:
            self._mover.ahead_bytes = int(self._step_evicted_bytes * AHEAD)
        self._step_evicted_bytes = 0
        self._mover.end_captures()

    # ---- without the host -----------------------------------------------------------------------

    def prepare_standby(self) -> None:
        """Let what the host has no room for be dropped, and computed again in backward.

        Operators have to be seen (`captures.see_everything`).
        """
        self._digests = StorageDigests(self._device.name)
        self._may_stand_by = True
        self.set_standby(is_on=True)

    def end_standby(self) -> None:
        """Capture nothing more, whatever a thread that still runs a step asks for."""
        self._may_stand_by = False
        self._stand_by(False)  # noqa: FBT003

    def set_standby(self, *, is_on: bool) -> None:
        """Capture what is saved from now on, if that was prepared, or not any more.

        What was captured can be dropped as before.
        """
        if self._may_stand_by:
            self._stand_by(is_on)
            # Another thread has ended the session meanwhile. It clears the flag before it switches
            # off, so that one of the two looks comes last.
            if not self._may_stand_by:
                self._stand_by(False)  # type: ignore[unreachable]  # noqa: FBT003

    def _forget_captured(self) -> int:
        """Let go of what only recipes keep that nobody needs; return the bytes that were freed."""
        before_bytes = self._device.in_use_bytes()
        self._mover.sweep_captured()
        return max(0, before_bytes - self._device.in_use_bytes())

    def _drop_spare(self, groups: list[StorageGroup], needed_bytes: int) -> int:
        """Drop what can be computed again, from the oldest on: backward needs that last."""
        freed = 0
        for group in groups:
            if freed >= needed_bytes or self._digests is None:
                break
            if group.is_spare and group.state == RESIDENT and group.is_exclusive:
                digest = self._digest(self._digests, group)
                if digest is not None and self._mover.drop(group, digest):
                    freed += group.nbytes
        return freed

    @staticmethod
    def _digest(digests: StorageDigests, group: StorageGroup) -> Digest | None:
        """Return a digest of what a group's operator has made; None: what it makes is not known."""
        if group.storage is None or group.made_bytes == 0:
            return None
        return digests.take(group.storage, group.made_bytes)

    # ---- rescue ---------------------------------------------------------------------------------

    def free(self, needed_bytes: int) -> int:
        """Free at least `needed_bytes` of the device if possible; return how many were freed."""
        leaving = self._release_leaving(needed_bytes)
        if leaving < needed_bytes:
            leaving += self._forget_captured()
        if leaving >= needed_bytes:
            return leaving
        groups = self._mover.resident
        wanted_bytes = max(needed_bytes * self.multiple, self._least_bytes)
        freed = leaving
        for evict in (
            self._take_aside,
            self._evict_clean,
            self._evict_copying_out,
            self._await_copies,
            self._evict_resident,
            self._drop_spare,
        ):
            if freed < wanted_bytes:
                freed += evict(groups, wanted_bytes - freed)
        # What costs more than it is worth if it is not needed: bytes that come back in a moment,
        # and a search for graphs.
        for last_resort in (self._evict_copying_in, self._evict_adopted):
            if freed < needed_bytes:
                freed += last_resort(groups, needed_bytes - freed)
        self._count += freed > leaving
        return freed

    def _release_leaving(self, needed_bytes: int) -> int:
        """Release what leaves anyway, waiting for its copies if need be: that is no rescue.

        A plan, too, lets an operator wait until there is room for it.
        """
        before_bytes = self._device.in_use_bytes()
        freed = 0
        while freed < needed_bytes and self._mover.release_next():
            freed = before_bytes - self._device.in_use_bytes()
        return max(0, freed)

    def _take_aside(self, _groups: list[StorageGroup], needed_bytes: int) -> int:
        if not self._device.sets_aside:
            return 0
        return self._device.shared.shim.native_take(self._device.index, needed_bytes)

    def _evict(self, group: StorageGroup) -> int:
        """Drop a clean group's storage; return the bytes that this frees."""
        if group.state != CLEAN or not group.is_exclusive:
            return 0
        freed = 0 if group.storage is None else group.storage.nbytes()
        self._mover.release(group)
        if group.storage is not None:
            return 0  # the program has exchanged its memory, and there is no room for another copy
        self._step_evicted_bytes += group.nbytes
        return freed

    def _evict_clean(self, groups: list[StorageGroup], needed_bytes: int) -> int:
        """Drop the oldest clean group that just fits, or else clean groups from the oldest on."""
        self._mover.settle_ahead()
        clean = [group for group in groups if group.state == CLEAN]
        for group in clean:
            if needed_bytes <= group.nbytes <= needed_bytes * FIT and group.is_exclusive:
                return self._evict(group)
        freed = 0
        for group in clean:
            if freed >= needed_bytes:
                break
            freed += self._evict(group)
        return freed

    def _evict_copying_out(self, groups: list[StorageGroup], needed_bytes: int) -> int:
        freed = 0
        for group in groups:
            if freed >= needed_bytes:
                break
            if group.state == COPYING_OUT and self._mover.finish_out(group):
                freed += self._evict(group)
        return freed

    def _await_copies(self, _groups: list[StorageGroup], _needed_bytes: int) -> int:
        """Wait for all copies: some may keep the storage of a graph that was dropped meanwhile."""
        before_bytes = self._device.in_use_bytes()
        self._scheduler.drain()
        return max(0, before_bytes - self._device.in_use_bytes())

    def _evict_resident(self, groups: list[StorageGroup], needed_bytes: int) -> int:
        """Copy and drop groups that have no copy yet; the copies are queued together."""
        chosen: list[StorageGroup] = []
        chosen_bytes = 0
        for group in groups:
            if chosen_bytes >= needed_bytes:
                break
            if group.state == RESIDENT and group.is_exclusive:
                if not self._mover.copy_out(group):
                    break
                chosen.append(group)
                chosen_bytes += group.nbytes
        return self._evict_copying_out(chosen, chosen_bytes)

    def _evict_adopted(self, _groups: list[StorageGroup], needed_bytes: int) -> int:
        """Take graphs in that were recorded without our hooks, and evict what they hold."""
        if not self._limit_bytes:
            return 0
        known = set(self._mover.resident)
        if self._adopt(self.min_bytes) == 0:
            return 0
        groups = [group for group in self._mover.resident if group not in known]
        return self._evict_resident(groups, needed_bytes)

    def _evict_copying_in(self, groups: list[StorageGroup], needed_bytes: int) -> int:
        """Send back what was brought back ahead of its use."""
        freed = 0
        for group in groups:
            if freed >= needed_bytes:
                break
            if group.state == COPYING_IN:
                try:
                    self._mover.finish_in(group)
                except DiskError:  # it is out again; whoever needs it will see why
                    freed += group.nbytes
                else:
                    freed += self._evict(group)
        return freed
