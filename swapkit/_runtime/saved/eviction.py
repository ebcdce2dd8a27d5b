"""Making room: copying ahead while memory fills up, and evicting when an allocation would not fit.

While memory fills up, groups are copied to the host early, in the order in which they were saved
(*write-behind*). They stay on the device and are *clean*. When an allocation fails, the pool asks
for bytes (*rescue*). A rescue drops clean groups first, then waits for copies in flight, then
copies and drops the rest. It goes oldest first, since backward needs the oldest group last.
Prefetched groups are evicted last of all. Weights that may leave (`weights.py`) do so before saved
tensors, since most of them are clean at all times; those that are used soon, after them.

Where a `host_limit` leaves little room for copies, operators are captured while no plan has settled
(`shim/cpp/recompute/standby.hpp`). Storages that the host has no room for are dropped and
recomputed in backward.

Only storages with no other references are dropped: dropping any other would free nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from swapkit._native.sched import CLEAN, COPYING_IN, COPYING_OUT, RESIDENT, Scheduler
from swapkit._runtime.operators.checksums import Digest, StorageDigests
from swapkit._runtime.saved.device import Device
from swapkit._runtime.shim.types import Mover, StorageGroup
from swapkit.config.environment import MIN_SWAP_BYTES
from swapkit.errors import DiskError

# Write-behind begins when this share of the budget is in use, and queues this many copies.
WATERMARK = 0.7
COPIES_IN_FLIGHT = 2
MOST_RECLAIMABLE = 256
# Torch's own allocator reserves more than is in use, and can take only storages that were copied.
WATERMARK_RECLAIMABLE = 0.5
# A step copies ahead at most this many times the bytes that the previous step evicted.
AHEAD = 1.25
# A rescue frees at least this share of the budget, so that not every small tensor needs a rescue.
LEAST = 1 / 256
# A clean group of at most this many times the needed bytes is dropped alone.
FIT = 1.25


class EvictionTerms(NamedTuple):
    """What a session asks of eviction."""

    limit_bytes: int = 0  # the budget; 0: none
    min_bytes: int = MIN_SWAP_BYTES  # the least size of an adopted saved tensor
    multiple: int = 1  # a rescue frees this many times the bytes that are missing


NO_BUDGET = EvictionTerms()


class Evictor:
    """The eviction policy of a swapper. Called with its lock held, except for standby methods."""

    def __init__(
        self,
        mover: Mover,
        scheduler: Scheduler,
        device: Device,
        terms: EvictionTerms,
        *,
        adopt: Callable[[int], int],
        stand_by: Callable[[bool], None],
    ) -> None:
        """Begin with nothing saved.

        Args:
            mover: the swapper's mover.
            scheduler: copies for the mover.
            device: the device to free memory on.
            terms: what the session asks for.
            adopt: adopts saved tensors of at least so many bytes; returns their number.
            stand_by: starts or stops capturing every operator in the session's hooks.
        """
        self._mover = mover
        self._scheduler = scheduler
        self._device = device
        self._terms = terms
        self._adopt = adopt
        self._stand_by = stand_by
        self._mover.makes_reclaimable = is_reclaimable = device.makes_reclaimable
        if terms.limit_bytes:
            share = WATERMARK_RECLAIMABLE if is_reclaimable else WATERMARK
            self._mover.watermark_bytes = int(terms.limit_bytes * share)
        # Without Python, only storages whose copy is done or in flight can be taken.
        self._mover.most_copying = MOST_RECLAIMABLE if is_reclaimable else COPIES_IN_FLIGHT
        self._least_bytes = int(terms.limit_bytes * LEAST)
        self._step_evicted_bytes = 0
        self._count = 0
        self._count_before = self._count_elsewhere()
        self._digests: StorageDigests | None = (
            None  # of storages dropped without a copy; None: standby was not prepared
        )
        self._may_stand_by = False  # whether standby was prepared and has not ended

    @property
    def min_bytes(self) -> int:
        """The least size of an adopted saved tensor."""
        return self._terms.min_bytes

    @property
    def count(self) -> int:
        """The number of rescues that freed memory."""
        return self._count + self._count_elsewhere() - self._count_before

    def _count_elsewhere(self) -> int:
        device = self._device
        return device.shared.shim.native_rescues(device.index)[0] if device.makes_reclaimable else 0

    # ---- write-behind ---------------------------------------------------------------------------

    def hold(self) -> None:
        """Stop write-behind: a plan decides which groups leave."""
        self._mover.holds_copies = True

    def resume(self) -> None:
        """Resume write-behind, for every group on the device."""
        self._mover.holds_copies = False
        self._mover.resume_copies()

    def end_step(self) -> None:
        """Set how many bytes the next step may copy ahead, from what this step evicted."""
        if not self._device.makes_reclaimable:
            self._mover.ahead_bytes = int(self._step_evicted_bytes * AHEAD)
        self._step_evicted_bytes = 0
        self._mover.end_held_step()
        self._mover.end_captures()

    # ---- standby: recomputation without room on the host ----------------------------------------

    def prepare_standby(self) -> None:
        """Allow dropping storages that the host has no room for; backward recomputes them.

        Operators have to be seen (`captures.see_everything`).
        """
        self._digests = StorageDigests(self._device.name)
        self._may_stand_by = True
        self.set_standby(is_on=True)

    def end_standby(self) -> None:
        """Stop capturing; later calls of `set_standby`, from any thread, have no effect."""
        self._may_stand_by = False
        self._stand_by(False)  # noqa: FBT003

    def set_standby(self, *, is_on: bool) -> None:
        """Start or stop capturing operators, if standby was prepared.

        Storages that were captured before can still be dropped.
        """
        if self._may_stand_by:
            self._stand_by(is_on)
            # Another thread may have ended the session meanwhile. It clears the flag before it
            # turns capturing off, so one of the two checks comes last and turns it off.
            if not self._may_stand_by:
                self._stand_by(False)  # type: ignore[unreachable]  # noqa: FBT003

    def _drop_spare(self, groups: list[StorageGroup], needed_bytes: int) -> int:
        """Drop storages that can be recomputed, oldest first: backward needs the oldest last."""
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
        """Return a digest of the bytes that a group's operator wrote; None: not known which."""
        if group.storage is None or group.made_bytes == 0:
            return None
        return digests.take(group.storage, group.made_bytes)

    # ---- rescue ---------------------------------------------------------------------------------

    def free(self, needed_bytes: int) -> int:
        """Free at least `needed_bytes` of the device if possible; return the bytes freed."""
        leaving = self._release_leaving(needed_bytes)
        if leaving >= needed_bytes:
            return leaving
        groups = self._mover.resident
        wanted_bytes = max(needed_bytes * self._terms.multiple, self._least_bytes)
        freed = leaving
        for evict in (
            self._take_reclaimable,
            self._free_weights,
            self._evict_clean,
            self._evict_copying_out,
            self._await_copies,
            self._evict_resident,
            self._drop_spare,
        ):
            if freed < wanted_bytes:
                freed += evict(groups, wanted_bytes - freed)
        # Last resorts, only for the bytes really needed: evicting groups that are used soon, and a
        # search for graphs.
        for last_resort in (
            self._free_weights_used_soon,
            self._evict_copying_in,
            self._evict_adopted,
        ):
            if freed < needed_bytes:
                freed += last_resort(groups, needed_bytes - freed)
        self._count += freed > leaving
        return freed

    def _release_leaving(self, needed_bytes: int) -> int:
        """Release groups that already leave, waiting for their copies. This is not a rescue.

        A plan also lets an operator wait until there is room for it. If groups that leave free too
        little, release storages that only recipes keep, and that are not needed.
        """
        before_bytes = self._device.in_use_bytes()
        freed = 0
        while freed < needed_bytes and self._mover.release_next():
            freed = before_bytes - self._device.in_use_bytes()
        if freed < needed_bytes and self._mover.sweep_captured():
            freed = before_bytes - self._device.in_use_bytes()
        return max(0, freed)

    def _take_reclaimable(self, _groups: list[StorageGroup], needed_bytes: int) -> int:
        if not self._device.makes_reclaimable:
            return 0
        return self._device.shared.shim.native_take(self._device.index, needed_bytes)

    def _free_weights(self, _groups: list[StorageGroup], needed_bytes: int) -> int:
        return self._mover.free_held(needed_bytes, True)  # noqa: FBT003 - positional only

    def _free_weights_used_soon(self, _groups: list[StorageGroup], needed_bytes: int) -> int:
        return self._mover.free_held(needed_bytes, False)  # noqa: FBT003 - positional only

    def _evict(self, group: StorageGroup) -> int:
        """Drop a clean group's storage; return the bytes freed."""
        if group.state != CLEAN or not group.is_exclusive:
            return 0
        freed = 0 if group.storage is None else group.storage.nbytes()
        self._mover.release(group)
        if group.storage is not None:
            return 0  # the program replaced its memory, and there is no room for another copy
        self._step_evicted_bytes += group.nbytes
        return freed

    def _evict_clean(self, groups: list[StorageGroup], needed_bytes: int) -> int:
        """Drop the oldest clean group of about the needed size, or else the oldest clean groups."""
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
        """Wait for all copies: some may keep storages of graphs that were dropped meanwhile."""
        before_bytes = self._device.in_use_bytes()
        self._scheduler.drain()
        return max(0, before_bytes - self._device.in_use_bytes())

    def _evict_resident(self, groups: list[StorageGroup], needed_bytes: int) -> int:
        """Copy and drop groups without a copy. All copies are queued before the first wait."""
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
        """Adopt graphs that were recorded without our hooks, and evict their groups."""
        if not self._terms.limit_bytes:
            return 0
        known = set(self._mover.resident)
        if self._adopt(self.min_bytes) == 0:
            return 0
        groups = [group for group in self._mover.resident if group not in known]
        return self._evict_resident(groups, needed_bytes)

    def _evict_copying_in(self, groups: list[StorageGroup], needed_bytes: int) -> int:
        """Evict groups that were prefetched."""
        freed = 0
        for group in groups:
            if freed >= needed_bytes:
                break
            if group.state == COPYING_IN:
                try:
                    self._mover.finish_in(group)
                except DiskError:  # the group is out again; its use in backward raises the error
                    freed += group.nbytes
                else:
                    freed += self._evict(group)
        return freed
