"""Saved tensors and the storages under them.

A *handle* stands for one saved tensor in autograd's graph; its *group* stands for the storage, at
one version, that all saved views of it share: one copy, one transfer, whatever the number of views.
The handle keeps an alias of the tensor (`detach()`: same storage, same version counter, not the
tensor itself, which would tie the graph into a cycle). When the group's memory is given up the
alias gets an empty storage and stays as a tracker of the version, so that a change in place is
noticed in every state; when the bytes are back it gets the new one.

A group whose saved views cover less than half of their storage moves only the part that they
cover: a slice of a large tensor then gives up the whole tensor for the price of the slice.

Nothing here locks: a group belongs to one swapper, which does. Autograd owns the handles, handles
own their group, and nothing else owns either: when a graph node runs or a graph is dropped, device
and host memory go with it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch

from swapkit._native.sched import RESIDENT_AT, Group
from swapkit._runtime.guards import untraced
from swapkit.errors import SavedTensorModified

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._native.sched import Scheduler, Tier
    from swapkit._runtime.choice import Choice
    from swapkit._runtime.shim import Shim

# Saved views that cover at least this share of their storage move all of it.
COVERAGE = 0.5
# A part begins where vector instructions see the same alignment as in the whole.
PART_ALIGNMENT = 64

_Key = TypeVar("_Key")

_use_count = torch._C._storage_Use_Count  # noqa: SLF001
# References that let a storage's memory go, but nobody else have the address of the object.
_make_weak: Callable[[torch.UntypedStorage], int] = torch.UntypedStorage._weak_ref  # type: ignore[assignment]  # noqa: SLF001
_free_weak: Callable[[int], None] = torch.UntypedStorage._free_weak_ref  # noqa: SLF001


class Owner(Protocol):
    """Who finds groups: by the order in which they were saved, and by their storage and version."""

    resident: GroupIndex[int]
    index: GroupIndex[tuple[int, int]]


class StorageGroup:
    """One storage at one version, with all saved tensors that view it."""

    __slots__ = (
        "__weakref__",
        "_handles",
        "begin_bytes",
        "choice",
        "device",
        "end_bytes",
        "index",
        "is_leaving",
        "key",
        "native",
        "nbytes",
        "operator",
        "owner",
        "part_bytes",
        "serial",
        "shift_bytes",
        "state_at",
        "storage",
        "tag",
        "weak",
    )

    def __init__(self, storage: torch.UntypedStorage, key: tuple[int, int], choice: Choice) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.key = key  # address of the storage object, version
        self.nbytes = storage.nbytes()
        self.device = storage.device
        self.choice = choice
        self.begin_bytes, self.end_bytes = self.nbytes, 0  # what the saved views cover
        self.part_bytes = 0  # where in the first storage what is copied begins
        self.shift_bytes = 0  # where in it the present storage begins
        self.tag = self.index = 0  # the site: module, and number within its call
        self.serial = 0  # the swapper's
        self.operator = 0  # the last one that saved it
        self.is_leaving = False  # it is to be released when its copy is done
        self.owner: Owner | None = None  # who has it in its indices
        self.native: Group | None = None  # from its first copy on
        self.state_at = RESIDENT_AT
        # The storage that was given up, while others may still hold it: no other object can get its
        # address then.
        self.weak = 0
        self._handles: list[weakref.ref[SavedTensor]] = []

    def __del__(self) -> None:
        try:
            weak, owner, serial, key = self.weak, self.owner, self.serial, self.key
        except AttributeError:  # interrupted while it was made
            return
        if weak:
            _free_weak(weak)
        if owner is not None:
            owner.resident.discard(serial, self)
            owner.index.discard(key, self)

    @property
    def state(self) -> int:
        """Where the bytes are: one of `State`."""
        return self.state_at[0]  # type: ignore[no-any-return]

    @property
    def is_partial(self) -> bool:
        """Whether the saved views cover too little of the storage for all of it to move."""
        return self.end_bytes - self.begin_bytes < self.nbytes * COVERAGE

    def is_of(self, storage: int) -> bool:
        """Return whether the group is on the device, in this storage object."""
        return self.storage is not None and self.storage._cdata == storage  # noqa: SLF001

    def can_cover(self, span: tuple[int, int]) -> bool:
        """Return whether the copy, if there is one, has these bytes of the present storage."""
        if self.native is None:
            return True
        first = self.part_bytes - self.shift_bytes
        return first <= span[0] and span[1] <= first + self.nbytes

    def cover(self, span: tuple[int, int]) -> None:
        """Note that a saved tensor views these bytes of the present storage."""
        self.begin_bytes = min(self.begin_bytes, span[0] + self.shift_bytes)
        self.end_bytes = max(self.end_bytes, span[1] + self.shift_bytes)

    def begin(self, scheduler: Scheduler, tier: Tier) -> tuple[Group, int]:
        """Return the native group to copy out with, and the address of what it copies."""
        storage = self.storage
        assert storage is not None
        if self.native is None:
            if self.is_partial:
                self.part_bytes = self.begin_bytes // PART_ALIGNMENT * PART_ALIGNMENT
                self.nbytes = self.end_bytes - self.part_bytes
            self.native = Group(scheduler, self.nbytes, tier)
            self.state_at = self.native.state_at
        return self.native, storage.data_ptr() + self.part_bytes - self.shift_bytes

    # ---- handles --------------------------------------------------------------------------------

    def add(self, handle: SavedTensor) -> None:
        """Let `handle` view this group."""
        self._handles.append(weakref.ref(handle))

    def handles(self) -> list[SavedTensor]:
        """Return the handles that are still alive."""
        alive = [handle for ref in self._handles if (handle := ref()) is not None]
        if len(alive) < len(self._handles):
            self._handles = [weakref.ref(handle) for handle in alive]
        return alive

    def is_exclusive(self) -> bool:
        """Return whether the storage can be dropped, and frees its memory then.

        Nobody else may hold it; and it must still have its size, which those who manage storages
        themselves (FSDP) change behind autograd's back.
        """
        storage = self.storage
        if storage is None or storage.nbytes() < self.end_bytes - self.shift_bytes:
            return False
        holders = _use_count(storage._cdata)  # noqa: SLF001
        if holders > 1 + len(self._handles):
            return False  # whichever of the handles live; a weight may have thousands
        return bool(holders == 1 + sum(not handle.is_stripped for handle in self.handles()))

    def strip(self, shim: Shim) -> None:
        """Let go of the storage; the copy takes its place, unless others keep the storage alive."""
        storage = self.storage
        if storage is None:
            return
        if not self.weak and not self.is_exclusive():
            self.weak = _make_weak(storage)
        for handle in self.handles():
            handle.strip(shim)
        self.storage = None

    def revive(self) -> bool:
        """Take the storage back if somebody else kept it alive; return whether it is there."""
        if self.storage is None and self.weak:
            self.storage = torch.UntypedStorage._new_with_weak_ptr(self.weak)  # noqa: SLF001
            if self.storage is not None:
                assert self.native is not None
                self.native.unevict()
        return self.storage is not None

    def restore(self, storage: torch.UntypedStorage) -> None:
        """Take a storage that holds the bytes again; handles are filled as they are needed."""
        self.storage = storage
        self.shift_bytes = self.part_bytes
        weak, self.weak = self.weak, 0  # first: nobody follows it once it is free
        if weak:
            _free_weak(weak)


class GroupIndex(Generic[_Key]):
    """Groups by a key. They are not kept alive, and leave when they go.

    A `WeakValueDictionary` for a few hundred nanoseconds less a step: the groups report their end
    themselves.
    """

    __slots__ = ("refs",)

    def __init__(self) -> None:
        self.refs: dict[_Key, weakref.ref[StorageGroup]] = {}

    def __len__(self) -> int:
        return len(self.refs)

    def __setitem__(self, key: _Key, group: StorageGroup) -> None:
        self.refs[key] = weakref.ref(group)

    def get(self, key: _Key) -> StorageGroup | None:
        """Return the group with this key, if there is one."""
        ref = self.refs.get(key)
        return None if ref is None else ref()

    def values(self) -> list[StorageGroup]:
        """Return all groups, in the order in which they came."""
        return [group for ref in list(self.refs.values()) if (group := ref()) is not None]

    def discard(self, key: _Key, group: StorageGroup) -> None:
        """Forget `group` if it is the one with this key."""
        ref = self.refs.get(key)
        if ref is not None and ref() is group:
            self.refs.pop(key, None)


class SavedTensor:
    """What autograd keeps instead of a saved tensor. Without a group it only checks the version."""

    __slots__ = ("__weakref__", "alias", "group", "is_stripped", "shift", "version")

    @untraced
    def __init__(
        self, tensor: torch.Tensor, group: StorageGroup | None = None, *, itself: bool = False
    ) -> None:
        # A leaf that gathers gradients is held by its owner anyway, and who replaces its `.data`
        # means what is saved, too: as in plain autograd it is kept itself.
        itself = itself or (group is None and tensor.is_leaf and tensor.requires_grad)
        self.alias = tensor if itself else tensor.detach()
        self.version = 0 if tensor.is_inference() else tensor._version  # noqa: SLF001
        self.group = group
        self.is_stripped = False
        self.shift = 0  # of the alias's offset, in elements
        if group is not None:
            self.shift = group.shift_bytes // tensor.element_size()
            group.add(self)

    def check_version(self, name: str) -> None:
        """Refuse a tensor that was changed in place after it was saved, as autograd does.

        Raises:
            SavedTensorModified: it was.
        """
        alias = self.alias
        if alias.is_inference() or alias._version == self.version:  # noqa: SLF001
            return
        where = f", saved in {name}," if name else ""
        raise SavedTensorModified(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {alias.dtype} {list(alias.size())}{where} is at version {alias._version}; "  # noqa: SLF001
            f"expected version {self.version} instead."
        )

    def strip(self, shim: Shim) -> None:
        """Let go of the storage; the alias stays as a tracker of the version."""
        if not self.is_stripped:
            shim.exchange(self.alias._cdata, 0, 0)  # noqa: SLF001
            self.is_stripped = True

    def fill(self, shim: Shim) -> None:
        """View the group's storage as the saved tensor did the one it was saved from."""
        group = self.group
        if not self.is_stripped or group is None or group.storage is None:
            return
        alias = self.alias
        shift = group.shift_bytes // alias.element_size()
        shim.exchange(alias._cdata, group.storage._cdata, shift - self.shift)  # noqa: SLF001
        self.shift = shift
        self.is_stripped = False
