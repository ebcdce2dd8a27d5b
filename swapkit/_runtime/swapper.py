"""Packing and unpacking: what happens to a saved tensor, as its scope chose.

A saved tensor that can be moved joins its storage's group. Groups of a scope that swaps are copied
out at once and released when the copy is done, or where the scope says (`timing.py`); groups of a
budget stay while memory lasts (`rescue.py`). In backward groups come back ahead of their use as far
as there is room, and at the latest when they are unpacked.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from swapkit._native.lib import raise_interruption
from swapkit._native.pool import set_tag
from swapkit._native.sched import CLEAN, COPYING_IN, OUT, RESIDENT
from swapkit._runtime.choice import Action
from swapkit._runtime.groups import GroupIndex, SavedTensor, StorageGroup
from swapkit._runtime.guards import function_mode_is_on, hidden, is_observed, untraced
from swapkit._runtime.rescue import Rescue
from swapkit._runtime.shim import CPU, Facts
from swapkit._runtime.timing import Timing
from swapkit._runtime.tracking import BACKWARD

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._runtime.choice import Choice
    from swapkit._runtime.executor import Executor
    from swapkit._runtime.runtime import Runtime

# Back ahead of use: at least so many groups, and at most so many more while they are small.
AHEAD_GROUPS = 2
AHEAD_MOST = 16
AHEAD_BYTES = 64 << 20

# What autocast casts weights to.
CAST_TO = (torch.bfloat16, torch.float16)

_serial_of = itemgetter(0)
_graph_task = torch._C._current_graph_task_id  # noqa: SLF001


class Coming(NamedTuple):
    """A group on its way back."""

    serial: int
    nbytes: int


class _Facts(threading.local):
    """Where a look at a tensor is written, one place a thread."""

    def __init__(self) -> None:
        self.place = Facts()


class Swapper:
    """The saved tensors that one executor moves. Any thread."""

    def __init__(self, runtime: Runtime, executor: Executor, *, limit_bytes: int = 0) -> None:
        """Start empty. `limit_bytes` 0: no budget to keep to."""
        self.runtime = runtime
        self.executor = executor
        self._shim = runtime.shim
        self._tracker = runtime.tracker
        # Guards the groups of every swapper: bringing a storage back holds it while it allocates,
        # which may ask any session for a rescue. On the same thread that may even be this one: the
        # group at hand is then in a state that nothing evicts.
        self._lock = runtime.lock
        self._facts = _Facts()
        self._serial = itertools.count()
        self.index: GroupIndex[tuple[int, int]] = GroupIndex()
        # The groups whose storage is on the device, in the order in which they were saved or came
        # back; and those that are out, by the order in which they were saved.
        self.resident: GroupIndex[int] = GroupIndex()
        self._out: list[tuple[int, weakref.ref[StorageGroup]]] = []
        # Brought back ahead of their use, the soonest first.
        self._coming: deque[Coming] = deque()
        self._coming_bytes = 0
        self._first_serial = 0  # of the backward pass under way: where it began
        self._leaving: deque[weakref.ref[StorageGroup]] = deque()  # released when copied
        self.host_is_full = False
        self.timing = Timing(self)
        self.rescue = Rescue(self, limit_bytes=limit_bytes)

    # ---- hooks of autograd ----------------------------------------------------------------------

    def packer(self, choice: Choice) -> Callable[[torch.Tensor], SavedTensor]:
        """Return the pack hook of a scope."""
        if choice.action is Action.KEEP:
            return SavedTensor
        look, places, least_bytes = self._shim.look, self._facts, choice.min_bytes

        @untraced
        def pack(tensor: torch.Tensor) -> SavedTensor:
            raise_interruption()
            facts = places.place
            if type(tensor) is not torch.Tensor or not look(
                tensor._cdata,  # noqa: SLF001
                least_bytes,
                facts,
            ):
                return SavedTensor(tensor)
            key = (facts.storage, tensor._version)  # noqa: SLF001
            span = (facts.begin_bytes, facts.end_bytes)
            if facts.modes_are_active or function_mode_is_on():
                with hidden():
                    return self._pack_plain(tensor, key, span, choice)
            return self._pack_plain(tensor, key, span, choice)

        return pack

    def _pack_plain(
        self, tensor: torch.Tensor, key: tuple[int, int], span: tuple[int, int], choice: Choice
    ) -> SavedTensor:
        """Return the handle of a tensor with plain memory of its own."""
        with self._lock:
            group = self.index.get(key)
            if group is None or not self._join(group, key[0], span):
                if not self._is_movable(tensor, key, choice):
                    return SavedTensor(tensor)
                group = self._add_group(tensor.untyped_storage(), key, choice)
            group.cover(span)
            handle = SavedTensor(tensor, group)
            if choice.action is Action.SWAP:
                if group.choice.action is Action.AUTO:
                    group.choice = choice  # saved before, outside of the scope: this one holds
                self._send(group)
            else:
                self.rescue.write_behind()
                if self._leaving:
                    self._release_done()
        return handle

    @untraced
    def unpack(self, handle: SavedTensor) -> torch.Tensor:
        """Return the saved tensor.

        Raises:
            SavedTensorModified: it was changed in place after it was saved.
            torch.OutOfMemoryError: there is no room to bring it back.
            DiskError: its copy could not be read.
        """
        raise_interruption()
        group = handle.group
        if group is None:
            handle.check_version("")
            return handle.alias
        with self._lock:
            handle.check_version(self._tracker.name(group.tag))
            if self._tracker.is_on:
                set_tag(group.tag | BACKWARD)
            if handle.is_stripped:
                self._bring_back(group)
                handle.fill(self._shim)
            # Not the alias: another thread may strip it before autograd has looked at it.
            if is_observed():
                with hidden():
                    return handle.alias.detach()
            return handle.alias.detach()

    # ---- which tensors --------------------------------------------------------------------------

    def _is_movable(self, tensor: torch.Tensor, key: tuple[int, int], choice: Choice) -> bool:
        """Return whether moving the storage could bring anything."""
        if self._facts.place.device_type != CPU or (tensor.is_leaf and tensor.requires_grad):
            return False
        base = tensor._base  # noqa: SLF001
        if base is not None and isinstance(base, torch.nn.Parameter):  # such as of weight.t()
            return False
        if choice.action is Action.AUTO:
            return self.runtime.owns(tensor)
        return not (self._tracker.is_state(key[0]) or _is_cast_weight(tensor))

    def _join(self, group: StorageGroup, storage: int, span: tuple[int, int]) -> bool:
        """Let one more view join a group of its storage, if there is no copy or one of it all."""
        is_away = group.storage is None
        if is_away and not group.revive():
            return False
        if is_away:
            self.register(group)
        return group.is_of(storage) and group.can_cover(span)

    def _add_group(
        self, storage: torch.UntypedStorage, key: tuple[int, int], choice: Choice
    ) -> StorageGroup:
        group = StorageGroup(storage, key, choice)
        group.tag, group.index = self._tracker.site()
        self.register(group)
        if choice.action is Action.AUTO:
            self.rescue.add(group)
        return group

    def register(self, group: StorageGroup) -> None:
        """Make a group whose storage is on the device found: by its storage, and by its age."""
        group.serial = group.serial or next(self._serial) + 1
        group.owner = self
        self.resident[group.serial] = group
        self.index[group.key] = group

    # ---- out ------------------------------------------------------------------------------------

    def _send(self, group: StorageGroup) -> None:
        """Start a planned swap, and end those whose copies are done."""
        if _graph_task() != -1:
            return  # recomputed in backward: it is needed in a moment
        if group.choice.prefetch is not None:
            self.timing.saved(group)
        if group.state == RESIDENT and not group.is_partial:
            self.copy_out(group)
        if group.choice.prefetch is None:
            if not group.is_leaving:
                group.is_leaving = True
                self._leaving.append(weakref.ref(group))
            self._release_done()

    def end_scope(self) -> None:
        """Nothing more is saved in a scope for now: what has waited for neighbours goes."""
        if self._leaving:
            with self._lock:
                self._release_done(is_end=True)

    def _release_done(self, *, is_end: bool = False) -> None:
        """Release the groups at the head of the queue whose copies are done."""
        leaving = self._leaving
        while leaving:
            group = leaving[0]()
            if group is not None and group.is_leaving:
                if group.state == RESIDENT:
                    if group.is_partial and len(leaving) == 1 and not is_end:
                        return  # its neighbours first: they may be of the same storage
                    self.copy_out(group)
                if not self.executor.poll_out(group):
                    return
                group.is_leaving = False
                if group.state == CLEAN:
                    self.release(group)
            leaving.popleft()

    def copy_out(self, group: StorageGroup) -> bool:
        """Start copying a resident group out; return False if there is no room for the copy."""
        if self.executor.copy_out(group):
            return True
        self.host_is_full = True
        return False

    def release(self, group: StorageGroup) -> None:
        """Give up the memory of a clean group."""
        self.resident.discard(group.serial, group)
        self.executor.evict(group)
        group.is_leaving = False
        if not group.weak:
            self._forget(group)
        entry = (group.serial, weakref.ref(group))
        if self._out and self._out[-1][0] > group.serial:
            insort(self._out, entry, key=_serial_of)
        else:
            self._out.append(entry)

    # ---- back -----------------------------------------------------------------------------------

    def _bring_back(self, group: StorageGroup) -> None:
        """Give a group its bytes again, waiting if need be, and start those needed next."""
        if group.state == OUT and not group.revive():
            self.executor.copy_in(group)
            self.register_back(group)
        self.prefetch_before(group.serial)
        if group.state == COPYING_IN:
            self.executor.finish_in(group)

    def register_back(self, group: StorageGroup) -> None:
        """Note that a group has a storage again."""
        storage = group.storage
        assert storage is not None
        self._forget(group)
        group.key = (storage._cdata, group.key[1])  # noqa: SLF001
        group.is_leaving = False
        self.register(group)

    def _forget(self, group: StorageGroup) -> None:
        """Let a group's storage no longer lead to it: another one may get its address."""
        self.index.discard(group.key, group)

    def prefetch_before(self, serial: int) -> None:
        """Start bringing back what was saved before `serial`, as far as there is room."""
        coming = self._coming
        self._count_arrived(serial)
        lowest = coming[-1].serial if coming else serial
        position = bisect_left(self._out, lowest, key=_serial_of)
        while position > 0 and self._may_have_more():
            position -= 1
            group = self._out[position][1]()
            if group is None or group.state != OUT:
                del self._out[position]
            elif group.choice.prefetch is None:
                if not self.bring_early(group):
                    return
                coming.append(Coming(group.serial, group.nbytes))
                self._coming_bytes += group.nbytes

    def _count_arrived(self, serial: int) -> None:
        """Take what backward has reached, at `serial`, off what is on its way."""
        coming = self._coming
        if serial >= self._first_serial:  # another pass: what the last one did not use stays there
            self._first_serial = serial
            self._coming_bytes = 0
            coming.clear()
        while coming and coming[0].serial >= serial:
            self._coming_bytes -= coming.popleft().nbytes

    def _may_have_more(self) -> bool:
        """Return whether more may come ahead of its use."""
        count = len(self._coming)
        return count < AHEAD_GROUPS or (count < AHEAD_MOST and self._coming_bytes < AHEAD_BYTES)

    def bring_early(self, group: StorageGroup) -> bool:
        """Start bringing a group back if there is room for it; return whether there was."""
        if group.revive():
            self.register_back(group)
            return True
        if not self.runtime.has_room(group.nbytes) or not self.executor.copy_in(
            group, tentative=True
        ):
            return False
        self.register_back(group)
        return True

    # ---- for the session ------------------------------------------------------------------------

    def rescue_bytes(self, needed_bytes: int) -> int:
        """Free at least `needed_bytes` of the device if possible; return how many were freed."""
        with self._lock, hidden():
            return self.rescue.free(needed_bytes)

    def end_step(self) -> None:
        """Learn from the step that ended."""
        with self._lock:
            self.host_is_full = False
            self.rescue.end_step()
            self._out = [pair for pair in self._out if pair[1]() is not None]
            self._tracker.end_step()

    def resident_bytes(self) -> int:
        """Return the bytes of saved storages that are on the device."""
        with self._lock:
            return sum(group.nbytes for group in self.resident.values())

    def site(self, group: StorageGroup) -> str:
        """Return the name of the place where a group was saved."""
        shape: Any = next((list(h.alias.shape) for h in group.handles()), [])
        return f"{self._tracker.name(group.tag)}#{group.index} {shape}"


def _is_cast_weight(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is, or views, the copy of a weight that autocast made and keeps."""
    # Autocast hides itself from what runs below it, so it cannot be asked.
    if tensor.dtype not in CAST_TO:
        return False
    source = tensor if tensor._base is None else tensor._base  # noqa: SLF001
    node = source.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    inputs = node.next_functions
    return bool(inputs) and inputs[0][0] is not None and "AccumulateGrad" in inputs[0][0].name()
