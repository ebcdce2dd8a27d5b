"""Packing, eviction and rescue: what happens to a saved tensor under a budget.

A saved tensor that can be swapped joins its storage's group. While memory fills up, groups are
copied to the host early, in the order of production (*write-behind*), and stay on the device:
clean. When an allocation fails, the pool asks for bytes (*rescue*): clean groups are dropped first,
then copies in flight are awaited, then the rest is copied and dropped; oldest first, since backward
needs the oldest last. Backward copies back what is out.

Only storages that nobody else holds are dropped: anything else would free nothing.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from typing import TYPE_CHECKING

import torch

from swapkit._native.lib import raise_interruption
from swapkit._native.pool import set_tag
from swapkit._runtime.groups import SavedTensor, State, StorageGroup
from swapkit._runtime.tracking import BACKWARD, ModuleTracker
from swapkit.errors import OutOfDeviceMemory, OverBudget

if TYPE_CHECKING:
    import threading

    from swapkit._native.pool import Pool
    from swapkit._runtime.session import SessionConfig
    from swapkit._runtime.transfers import CopyEngine


# Write-behind begins when this share of the budget is in use, and keeps this many copies queued.
WATERMARK = 0.7
COPIES_IN_FLIGHT = 2
# Groups looked at per save, so that a save stays cheap when all of them are still held elsewhere.
LOOKS_PER_SAVE = 8
# A step copies ahead at most this much more than the step before it had to evict.
AHEAD = 1.25
# A rescue frees at least this share of the budget, so that small tensors do not need one each.
LEAST = 1 / 256
# A clean group at most this much larger than what is needed is taken alone.
FIT = 1.25


# Together they hide the user's function and dispatch modes, tensor subclasses and function
# transforms from our own operations.
NoFunctionModes = torch._C.DisableTorchFunction  # noqa: SLF001
NoDispatchModes = torch._C._DisableTorchDispatch  # noqa: SLF001
NoTransforms = torch._C._DisableFuncTorch  # noqa: SLF001


def _is_special(tensor: torch.Tensor) -> bool:
    """Return whether a strided tensor has no plain memory of its own, or must not be aliased."""
    return (
        tensor.is_nested
        or tensor.is_quantized
        or tensor.is_inference()
        or tensor._is_zerotensor()  # noqa: SLF001
        or torch._C._is_cow_tensor(tensor)  # type: ignore[attr-defined]  # noqa: SLF001
    )


class Swapper:
    """The saved tensors of one session. Any thread."""

    def __init__(
        self,
        *,
        pool: Pool,
        engine: CopyEngine,
        tracker: ModuleTracker,
        lock: threading.RLock,
        config: SessionConfig,
    ) -> None:
        self._pool = pool
        self._engine = engine
        self._tracker = tracker
        self._min_swap_bytes = config.min_swap_bytes
        self._watermark_bytes = int(config.limit_bytes * WATERMARK)
        self._least_bytes = int(config.limit_bytes * LEAST)
        # Guards the groups of every session: bringing a storage back holds it while it allocates,
        # which may ask any session for a rescue. On the same thread that may even be this one: the
        # group at hand is then in a state that nothing evicts.
        self._lock = lock
        self._serial = itertools.count()
        # The groups whose storage is on the device, in the order in which it was made.
        self._resident: weakref.WeakValueDictionary[int, StorageGroup] = (
            weakref.WeakValueDictionary()
        )
        self._index: weakref.WeakValueDictionary[tuple[int, int], StorageGroup] = (
            weakref.WeakValueDictionary()
        )
        self._dirty: deque[weakref.ref[StorageGroup]] = deque()  # write-behind's queue
        self._ahead_bytes: int | None = None  # write-behind's allowance for this step; None: all
        self._step_evicted_bytes = 0
        self.host_is_full = False
        self.rescues = 0

    # ---- hooks of autograd ----------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> SavedTensor:
        """Return what autograd keeps for a tensor that it saves."""
        raise_interruption()
        if not self._is_swappable(tensor):
            return SavedTensor(tensor)
        with self._lock, NoFunctionModes(), NoDispatchModes(), NoTransforms():
            storage = tensor.untyped_storage()
            key = (storage._cdata, tensor._version)  # noqa: SLF001
            group = self._index.get(key)
            if group is None:
                group = self._add_group(storage, tensor._version)  # noqa: SLF001
            handle = SavedTensor(tensor, group)
            self._write_behind()
        return handle

    def unpack(self, handle: SavedTensor) -> torch.Tensor:
        """Return the saved tensor.

        Raises:
            SavedTensorModified: it was changed in place after it was saved.
            torch.OutOfMemoryError: there is no room to bring it back.
        """
        raise_interruption()
        group = handle.group
        if group is None:
            handle.check_version("")
            return handle.alias.detach()
        with self._lock, NoFunctionModes(), NoDispatchModes(), NoTransforms():
            handle.check_version(self._tracker.name(group.tag))
            if self._tracker.is_on:
                set_tag(group.tag | BACKWARD)
            if group.state is State.OUT:
                self._bring_back(group)
            if handle.is_stripped and group.storage is not None:
                handle.fill(group.storage)
            # A tensor of its own: the alias may be stripped again while this one is in use.
            return handle.alias.detach()

    def _is_swappable(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return False
        if tensor.device.type != "cpu" or (tensor.is_leaf and tensor.requires_grad):
            return False
        if isinstance(tensor._base, torch.nn.Parameter):  # noqa: SLF001 - a view such as weight.t()
            return False
        if _is_special(tensor):
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= self._min_swap_bytes and self._pool.owns(storage.data_ptr())

    def _register(self, group: StorageGroup) -> None:
        """Make a group whose storage is on the device found: by its storage, and by its age."""
        group.serial = next(self._serial)
        self._resident[group.serial] = group
        self._index[group.key] = group

    def _add_group(self, storage: torch.UntypedStorage, version: int) -> StorageGroup:
        group = StorageGroup(storage, version, self._tracker.current())
        self._register(group)
        self._dirty.append(weakref.ref(group))
        if len(self._dirty) > 2 * len(self._resident) + LOOKS_PER_SAVE:
            self._forget_dead()
        return group

    # ---- moving ---------------------------------------------------------------------------------

    def _copy_out(self, group: StorageGroup) -> bool:
        """Start copying a resident group out; return False if the host has no room."""
        if group.storage is None:
            return False
        group.move(State.COPYING_OUT)
        try:
            group.transfer = self._engine.copy_out(group.storage)
        except (OverBudget, OutOfDeviceMemory):
            self.host_is_full = True
            group.move(State.RESIDENT)
            return False
        except BaseException:
            group.move(State.RESIDENT)
            raise
        return True

    def _settle(self, group: StorageGroup, *, wait: bool) -> None:
        """Note that a copy out is done, if it is or is to be waited for."""
        transfer = group.transfer
        if group.state is not State.COPYING_OUT or transfer is None:
            return
        if wait:
            self._engine.wait(transfer)
        if wait or transfer.is_done():
            group.host = transfer.host
            group.move(State.CLEAN)
            group.transfer = None

    def _evict(self, group: StorageGroup) -> int:
        """Drop a clean group's storage; return the bytes that this frees."""
        self._index.pop(group.key, None)
        self._resident.pop(group.serial, None)
        group.move(State.OUT)  # before it is true: interrupted here, the group can still be used
        group.strip()
        self._step_evicted_bytes += group.nbytes
        return group.nbytes

    def _bring_back(self, group: StorageGroup) -> None:
        """Give a group that is out a storage again, with its bytes."""
        host = group.host
        if host is None:
            return
        group.move(State.COPYING_IN)
        try:
            flat = torch.empty(group.nbytes, dtype=torch.uint8, device=group.device)
            storage = flat.untyped_storage()
            self._engine.wait(self._engine.copy_in(host, storage))
        except BaseException:
            group.move(State.OUT)
            raise
        group.restore(storage)
        group.move(State.CLEAN)
        self._register(group)

    # ---- write-behind ---------------------------------------------------------------------------

    def _write_behind(self) -> None:
        """Start copies of the oldest groups if memory is filling up."""
        if self.host_is_full or not self._dirty or self._ahead_bytes == 0:
            return
        if self._pool.in_use_bytes() < self._watermark_bytes:
            return
        for _ in range(min(LOOKS_PER_SAVE, len(self._dirty))):
            if self._engine.in_flight >= COPIES_IN_FLIGHT or self.host_is_full:
                return
            self._copy_ahead(self._dirty.popleft())

    def _copy_ahead(self, reference: weakref.ref[StorageGroup]) -> None:
        """Start copying one group out, if it still is of use and can be dropped afterwards."""
        group = reference()
        if group is None or group.state is not State.RESIDENT:
            return
        if not group.is_exclusive():
            self._dirty.append(reference)  # the forward pass still uses it
        elif self._copy_out(group) and self._ahead_bytes is not None:
            self._ahead_bytes = max(0, self._ahead_bytes - group.nbytes)

    def end_step(self) -> None:
        """Learn from the step that ended how much is worth copying ahead in the next."""
        with self._lock:
            self._ahead_bytes = int(self._step_evicted_bytes * AHEAD)
            self._step_evicted_bytes = 0
            self.host_is_full = False
            self._forget_dead()

    def _forget_dead(self) -> None:
        self._dirty = deque(ref for ref in self._dirty if ref() is not None)

    # ---- rescue ---------------------------------------------------------------------------------

    def rescue(self, needed_bytes: int) -> int:
        """Free at least `needed_bytes` of the device if possible; return how many were freed."""
        with self._lock, NoFunctionModes(), NoDispatchModes(), NoTransforms():
            groups = list(self._resident.values())
            needed_bytes = max(needed_bytes, self._least_bytes)
            freed = self._evict_clean(groups, needed_bytes)
            if freed < needed_bytes:
                freed += self._evict_copying(groups, needed_bytes - freed)
            if freed < needed_bytes:
                freed += self._await_copies()
            if freed < needed_bytes:
                freed += self._evict_resident(groups, needed_bytes - freed)
            self.rescues += freed > 0
            return freed

    def _evict_clean(self, groups: list[StorageGroup], needed_bytes: int) -> int:
        """Drop the oldest clean group that just fits, or else clean groups from the oldest on."""
        for group in groups:
            self._settle(group, wait=False)
        clean = [group for group in groups if group.state is State.CLEAN]
        for group in clean:
            if needed_bytes <= group.nbytes <= needed_bytes * FIT and group.is_exclusive():
                return self._evict(group)
        freed = 0
        for group in clean:
            if freed >= needed_bytes:
                break
            freed += self._evict(group) if group.is_exclusive() else 0
        return freed

    def _evict_copying(self, groups: list[StorageGroup], needed_bytes: int) -> int:
        freed = 0
        for group in groups:
            if freed >= needed_bytes:
                break
            if group.state is State.COPYING_OUT:
                self._settle(group, wait=True)
                freed += self._evict(group) if group.is_exclusive() else 0
        return freed

    def _await_copies(self) -> int:
        """Wait for all copies: some may keep the storage of a graph that was dropped meanwhile."""
        before_bytes = self._pool.in_use_bytes()
        self._engine.drain()
        return max(0, before_bytes - self._pool.in_use_bytes())

    def _evict_resident(self, groups: list[StorageGroup], needed_bytes: int) -> int:
        """Copy and drop groups that have no copy yet; the copies are queued together."""
        chosen: list[StorageGroup] = []
        chosen_bytes = 0
        for group in groups:
            if chosen_bytes >= needed_bytes:
                break
            if group.state is State.RESIDENT and group.is_exclusive():
                if not self._copy_out(group):
                    break
                chosen.append(group)
                chosen_bytes += group.nbytes
        return self._evict_copying(chosen, chosen_bytes)

    def resident_bytes(self) -> int:
        """Return the bytes of saved storages that are on the device."""
        return sum(group.nbytes for group in list(self._resident.values()))
