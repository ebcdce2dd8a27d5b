"""The tensors that autograd saves and uses while a step is recorded.

In a session, the session's packer reports them (`saved`, `used`); the group of the packed tensor
says whether the tensor can be moved. Outside of a session, the recorder installs its own pair of
hooks, which moves nothing.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from swapkit._runtime.operators.settings import VERSIONS
from swapkit._runtime.recording.notes import Notes
from swapkit._runtime.saved.swapper import _is_cast_weight
from swapkit._runtime.shim.types import Placement, modified_error
from swapkit._runtime.torch_compat.internals import (
    ExcludeKey,
    FakeTensor,
    base_of,
    graph_task,
    version_of,
)
from swapkit._runtime.torch_compat.isolation import hidden, untraced
from swapkit._runtime.torch_compat.wrappers import (
    KINDS,
    Flattened,
    flatten,
    is_awaited,
    is_leaf,
    is_wrapper,
    note_results,
)
from swapkit.ir.plans import Action
from swapkit.ir.traces import EventKind, Kind


class SavedEvent(NamedTuple):
    """One call of a hook. `save`: for a use, the index of its save event; -1: none."""

    kind: EventKind
    number: int | None
    operator: int
    save: int


class Savings:
    """The save and use events of a recorded step; marks the storages that can be moved."""

    def __init__(self, notes: Notes) -> None:
        """Start empty."""
        self.events: list[SavedEvent] = []
        self._notes: Notes | None = notes
        self._saves: dict[int, int] = {}  # by packed tensor: its save event
        self._used: list[int] = []  # storages used since the last operator

    @untraced
    def saved(self, tensor: torch.Tensor, packed: object) -> None:
        """Note that autograd saved a tensor; the graph keeps `packed` in its place."""
        notes = self._notes  # read once: another thread may call `stop`
        if notes is None:
            return
        group = getattr(packed, "group", None)
        site = None
        if group is not None and group.placement.action is Action.AUTO:
            site = notes.setting.tracker.name(group.tag), group.index
        self._note_saved(notes, tensor, packed, site)

    def note_saved(
        self, tensor: torch.Tensor, packed: object, site: tuple[str, int] | None
    ) -> None:
        """Note a saved tensor as `saved` does; `site`: where; None: it cannot be moved."""
        notes = self._notes
        if notes is not None:
            self._note_saved(notes, tensor, packed, site)

    def _note_saved(
        self,
        notes: Notes,
        tensor: torch.Tensor,
        packed: object,
        site: tuple[str, int] | None,
    ) -> None:
        with notes.lock:
            number = notes.storages.known(tensor)
            if number is None:
                number = notes.add_unseen(tensor)
            is_planned = number is not None and site is not None and not _is_cast_weight(tensor)
            if is_planned:
                assert number is not None
                assert site is not None
                is_planned = _mark(notes, number, tensor, site)
            if is_planned:
                assert number is not None
                notes.holds.add(number, packed, graph_task())
            self._saves[id(packed)] = len(self.events)
            self._add(notes, EventKind.SAVE, number if is_planned else None, -1)
        if number is not None:
            notes.bytes.saved(number, tensor)

    @untraced
    def used(self, packed: object, tensor: torch.Tensor) -> None:
        """Note that autograd got a saved tensor back."""
        notes = self._notes  # read once: another thread may call `stop`
        if notes is None:
            return
        with notes.lock:
            save = self._saves.get(id(packed), -1)
            number = self.events[save].number if save >= 0 else None
            is_itself = getattr(packed, "leaf", None) is tensor
            # The program may have assigned the `.data` of a leaf: then other bytes are used.
            is_elsewhere = is_itself and notes.storages.known(tensor) != number
            if number is not None and not is_elsewhere:
                notes.storages.move(number, tensor)
                self._used.append(number)
            self._add(notes, EventKind.USE, number, save)
        if number is not None and not is_elsewhere:
            notes.bytes.used(number, tensor)

    def stop(self) -> None:
        """Stop recording: graphs may outlive the step."""
        self._notes = None  # break the cycle

    def take_used(self, reads: tuple[int, ...]) -> tuple[int, ...]:
        """Return the storages used before this operator that the operator does not read itself."""
        if not self._used:
            return ()
        used, self._used = self._used, []
        return tuple(number for number in dict.fromkeys(used) if number not in reads)

    def _add(self, notes: Notes, kind: EventKind, number: int | None, save: int) -> None:
        self.events.append(SavedEvent(kind, number, notes.operator_count, save))


def _mark(notes: Notes, number: int, tensor: torch.Tensor, site: tuple[str, int]) -> bool:
    """Mark a storage as movable and return True, unless no plan moves such a storage."""
    life = notes.storages.lives[number]
    if life.kind in {Kind.STATE, Kind.GRADIENT, Kind.OPTIMIZER_STATE}:
        return False
    if not notes.storages.owns(tensor):
        return False
    if not life.is_saved:
        life.is_saved = True
        life.module, life.index = site
    return True


class _SavedAlias:
    """An alias that a graph keeps in place of a saved tensor, outside of a session."""

    __slots__ = ("__weakref__", "_leaf", "_savings", "alias", "version")

    @property
    def leaf(self) -> torch.Tensor:
        """What `unpack` returns."""
        leaf = None if self._leaf is None else self._leaf()
        return self.alias if leaf is None else leaf

    def __init__(self, tensor: torch.Tensor, notes: Notes, savings: Savings) -> None:
        self._savings = savings
        # An alias, since an output itself would keep alive the graph that keeps this object. A leaf
        # is given back itself, as by autograd, while the program has it: its data may be replaced.
        self._leaf = weakref.ref(tensor) if is_leaf(tensor) else None
        if type(tensor) in KINDS:
            # An operand of a region is packed below autograd: share the version counter there, too.
            counted = ExcludeKey(VERSIONS, False)  # noqa: FBT003
            with hidden(), counted:
                self.alias = tensor.detach()
        elif self._leaf is not None and type(tensor) is not FakeTensor:
            self.alias = tensor
        else:  # a wrapper subclass or fake tensor: its own dispatch must see the `detach`
            with notes.paused():
                self.alias = tensor.detach()
        self.version = _version_of(tensor)

    def unpack(self) -> torch.Tensor:
        """Return the saved tensor and note its use; a region's hooks may call this, too."""
        tensor = self.leaf
        if _version_of(tensor) != self.version:
            raise modified_error(tensor, self.version)
        self._note_use()
        return tensor

    def _note_use(self) -> None:
        self._savings.used(self, self.leaf)


class _PartOfWrapper:
    """Stands for a tensor inside a saved wrapper."""

    __slots__ = ("__weakref__", "alias")

    def __init__(self, alias: torch.Tensor) -> None:
        self.alias = alias


class _SavedWrapper(_SavedAlias):
    """The same for a wrapper: each tensor inside is an event of its own, as in a session."""

    __slots__ = ("is_noted", "parts", "results")

    def __init__(self, tensor: torch.Tensor, notes: Notes, savings: Savings) -> None:
        super().__init__(tensor, notes, savings)
        self.is_noted = False
        self.results: tuple[weakref.ref[Any], ...] = ()
        found = flatten(self.alias, _has_memory)
        self.parts = [] if found is None else [_PartOfWrapper(inside) for inside in found.inside]

    def _note_use(self) -> None:
        for part in self.parts if self.is_noted else ():
            self._savings.used(part, part.alias)


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


class EventWatcher:
    """A pair of hooks that moves nothing, in place of the swapper of `hooks.Hooks`."""

    skips_backward = False  # stays on in backward passes
    awaited = None  # it moves nothing, so nothing has to wait
    is_inert = False

    def __init__(self, notes: Notes, savings: Savings, min_bytes: int) -> None:
        """Rule out moving storages smaller than `min_bytes`."""
        self._notes = notes
        self._savings = savings
        self._min_bytes = min_bytes
        self._sites: dict[tuple[int, int], tuple[str, int]] = {}  # by storage and version
        self._unnoted: list[weakref.ref[_SavedWrapper]] = []

    def stop(self) -> None:
        """Stop recording; from now on the pair only returns saved tensors."""
        self._unnoted.clear()
        del self._notes, self._savings

    @property
    def mover(self) -> EventWatcher:
        """Return itself: nothing is moved."""
        return self

    @property
    def events(self) -> EventWatcher:
        """Return itself: its calls are the events of the step."""
        return self

    def packer(self, _choice: Placement) -> EventWatcher:
        """Return the pair of hooks."""
        return self

    @untraced
    def unpack(self, packed: _SavedAlias) -> torch.Tensor:
        """Return a saved tensor.

        Raises:
            SavedTensorModified: the tensor was changed in place since it was saved.
        """
        self._note_wrappers()
        return packed.unpack()

    @untraced
    def pack(self, tensor: torch.Tensor) -> _SavedAlias:
        """Return the alias that the graph keeps in place of a tensor."""
        self._note_wrappers()
        if is_wrapper(tensor) and not _is_weight(tensor):
            found = flatten(tensor, _has_memory)
            if found is not None:
                return self._pack_wrapper(tensor, found)
        packed = _SavedAlias(tensor, self._notes, self._savings)
        self._savings.note_saved(tensor, packed, self._site(tensor))
        return packed

    def _pack_wrapper(self, tensor: torch.Tensor, found: Flattened) -> _SavedWrapper:
        packed = _SavedWrapper(tensor, self._notes, self._savings)
        packed.results = note_results(found)
        self._unnoted.append(weakref.ref(packed))
        self._note_wrappers()
        return packed

    def _note_wrappers(self) -> None:
        """Note what is inside saved wrappers, when a session would (`saved/taken_apart.py`)."""
        unnoted, self._unnoted = self._unnoted, []
        for reference in unnoted:
            packed = reference()
            if packed is not None and is_awaited(packed.results):
                self._unnoted.append(reference)
            elif packed is not None:
                packed.is_noted = True
                for part in packed.parts:
                    self._savings.note_saved(part.alias, part, self._site(part.alias))

    def _site(self, tensor: torch.Tensor) -> tuple[str, int] | None:
        """Return where a storage was first saved at this version; None: it is not moved."""
        if not _may_move(tensor) or tensor.untyped_storage().nbytes() < self._min_bytes:
            return None
        notes = self._notes
        with notes.lock:
            number = notes.storages.known(tensor)
            if number is None:
                number = notes.add_unseen(tensor)
            if number is None or notes.storages.lives[number].kind is Kind.STATE:
                return None
            key = number, _version_of(tensor)
            if key not in self._sites:
                self._sites[key] = notes.calls.site()
            return self._sites[key]


def _may_move(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is plain memory and not, as far as it shows, a weight's."""
    is_plain = type(tensor) in (*KINDS, FakeTensor) and tensor.layout is torch.strided
    return is_plain and tensor.numel() > 0 and not _is_weight(tensor)


def _is_weight(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter, or views one, such as `weight.t()`."""
    parameter = torch.nn.Parameter
    return isinstance(tensor, parameter) or isinstance(base_of(tensor), parameter)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor inside a wrapper is saved like a plain one."""
    is_plain = type(tensor) in {torch.Tensor, FakeTensor} and tensor.layout is torch.strided
    return is_plain and tensor.numel() > 0
