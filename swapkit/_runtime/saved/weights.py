"""The weights that leave the device between two uses (`shim/cpp/held/held.hpp`).

Nothing leaves before memory runs out. Until then weights are only *watched*, and not even that
while little memory is in use: a watched weight is an ordinary tensor, whose operators are a little
slower. Watched are the parameters and buffers of the session's model, and of all modules that its
thread changes meanwhile: makes, moves, copies, or loads.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import TypeAlias

import torch
from torch.nn.parallel import DistributedDataParallel

from swapkit._native.layout import TAG_OPTIMIZER
from swapkit._runtime.saved.device import Device
from swapkit._runtime.shim.types import Mover, Placement
from swapkit._runtime.torch_compat import wrappers
from swapkit._runtime.torch_compat.internals import (
    buffers_of,
    has_compiled,
    parameters_of,
    storage_id,
)
from swapkit._runtime.torch_compat.isolation import hidden
from swapkit._runtime.torch_compat.reported_calls import (
    WEIGHT_CHANGES,
    ReplacedMethod,
    TrapListener,
    operators_of,
)
from swapkit._runtime.torch_compat.weight_readers import BY_ADDRESS
from swapkit._runtime.torch_compat.wrappers import (
    KINDS,
    is_plain,
    is_wrapper,
    kinds_of_wrappers,
    tensors_inside,
)
from swapkit.ir.plans import Action

# Weights that are mapped from files: their storage, type, and the part of the file.
_Files: TypeAlias = "dict[torch.Tensor, tuple[int, torch.dtype, tuple[str, int] | None]]"
# Weights are watched from when this share of the limit is in use.
WATCHED = 1 / 4
MANY_MORE = 9 / 8  # times the weights that plans know of: plan again


class Weights:
    """The weights that may leave during a session."""

    def __init__(self, mover: Mover, device: Device, min_bytes: int) -> None:
        """Watch nothing yet.

        Args:
            mover: moves them.
            device: they are on it.
            min_bytes: the least size of a storage that leaves.
        """
        self._mover = mover
        self._device = device
        self._min_bytes = min_bytes
        self._least_bytes = 0  # watched from when so many are in use
        self._modules: weakref.WeakValueDictionary[int, torch.nn.Module] = (
            weakref.WeakValueDictionary()  # by address: they may have an equality of their own
        )
        self._is_watching = self._is_adopting = False
        self._known_bytes = 0  # that plans know of
        self.do_leave = False  # whether some weights do
        self._has_rest = False  # whether others may do so now
        self._refusal: RuntimeError | None = None  # why no more weights may leave
        self._lacks_room = False  # whether some could not be brought, to be watched
        self._is_here: Callable[[], bool] = bool
        self._operators: dict[type, ReplacedMethod[TrapListener]] = {}  # of classes of wrappers
        self._is_kept: Callable[[torch.nn.Module], bool] = bool

    # ---- which there are -------------------------------------------------------------------------

    def start(
        self,
        model: torch.nn.Module | None,
        limit_bytes: int,
        is_here: Callable[[], bool],
        is_kept: Callable[[torch.nn.Module], bool],
    ) -> None:
        """Watch the weights of a model, and of modules that this thread changes from now on.

        Args:
            model: the session's; None: it has none.
            limit_bytes: its budget.
            is_here: whether the calling thread is the session's.
            is_kept: whether the user has chosen that a module is kept.
        """
        self._least_bytes = int(limit_bytes * WATCHED)
        self._is_here, self._is_kept = is_here, is_kept
        if not is_distributed():
            for change in WEIGHT_CHANGES:
                change.add(self)
        # The collectives of DDP read weights after their operator has returned.
        modules = [] if model is None else list(model.modules())
        if not any(isinstance(each, DistributedDataParallel) for each in modules):
            self._modules.update((id(each), each) for each in modules)
            self._watch_all(is_needed=self._device.in_use_bytes() > limit_bytes)

    def stop(self) -> None:
        """Bring the weights back, as far as there is room, and watch no more."""
        for change in WEIGHT_CHANGES:
            change.remove(self)
        with self._device.shared.lock, hidden():
            self._mover.end_held()
        self._is_watching = False
        for method in BY_ADDRESS:
            method.remove(self._mover)
        for operators in self._operators.values():
            operators.remove(self)
        self._operators.clear()
        self.unmark()

    def unmark(self) -> None:
        """Take the mark from weights that do not leave any more."""
        for each in self._list_parts():
            self._mover.unhold(each)

    def moving(self, module: torch.nn.Module) -> _Files:
        """Return the files that a module's weights are mapped from (`ChangeListener`)."""
        if not self._is_here():
            return {}
        found = {
            each: (storage_id(each), each.dtype, self._mover.file_of(each))
            for each in _list_of(module)
            if is_plain(each)
        }
        return {each: known for each, known in found.items() if known[-1] is not None}

    def changed(
        self, module: torch.nn.Module, tensor: torch.Tensor | None, before: _Files | None
    ) -> None:
        """Watch a tensor that a module has got; None: any (`reported_calls.ChangeListener`)."""
        if not self._is_here():
            return
        self._note_files(before or {})
        self._modules[id(module)] = module
        if not self._is_watching:
            self._watch_all(is_needed=False)
            return
        changed = _list_of(module) if tensor is None else [tensor]
        self._watch(changed)
        if self.do_leave and not self._is_fixed:
            # Now: while the graph of a step holds them, they could not leave.
            with self._device.shared.lock, hidden():
                self._hold(self._list_leaving([module]))
            self._has_rest = True

    def _note_files(self, before: _Files) -> None:
        for each, (storage, dtype, part) in before.items():
            is_moved = storage_id(each) != storage and each.device == self._device.name
            if is_moved and each.dtype is dtype and part is not None:
                self._mover.note_file(each, *part)

    def captures(self) -> None:
        """Let no more weights leave: a graph that is replayed reads them by their address."""
        self._refusal = RuntimeError("swapkit: a device graph has the addresses of weights")

    def _list(self) -> Iterable[torch.Tensor]:
        return (each for module in list(self._modules.values()) for each in _list_of(module))

    def _list_parts(self) -> Iterator[torch.Tensor]:
        return (part for each in self._list() for part in list_parts(each))

    def _see_operators(self, weight: torch.Tensor) -> None:
        """Let operators inside of those of a wrapper's class bring its weights, too."""
        for kind in kinds_of_wrappers(weight):
            if kind not in self._operators:
                self._operators[kind] = operators_of(kind)
                self._operators[kind].add(self)

    @property
    def exclude_key(self) -> Callable[[bool], bool]:
        """Exclude the key of weights on this thread, or not (`reported_calls.TrapListener`)."""
        return self._mover.exclude_held

    def _watch_all(self, *, is_needed: bool) -> None:
        is_full = self._device.in_use_bytes() >= self._least_bytes
        # Code that was compiled for tensors without the mark would be compiled again.
        if not is_needed and (not is_full or has_compiled()):
            return
        if not self._is_watching:
            for method in BY_ADDRESS:
                method.add(self._mover)
            # As that of optimizers, this memory is not what the program keeps by mistake.
            tracker = self._device.shared.tracker
            self._mover.held_tag = tracker.tag_named("weights") | TAG_OPTIMIZER
            self._is_watching = True
        self._watch(self._list())

    def _watch(self, tensors: Iterable[torch.Tensor]) -> None:
        try:
            with self._device.shared.lock, hidden():
                for each in tensors:
                    self._see_operators(each)
                    for part in list_parts(each):
                        self._watch_part(part)
        except RuntimeError as error:  # which matters if they have to leave
            self._refusal = error

    def _watch_part(self, part: torch.Tensor) -> None:
        try:
            self._mover.watch(part, self._min_bytes)
        except torch.OutOfMemoryError:  # an ended session has left it on the host
            self._lacks_room = True

    def take_rest(self) -> None:
        """Watch weights that an ended session has left on the host, as far as others leave."""
        if self._lacks_room:
            self._lacks_room = False
            for module in list(self._modules.values()):
                self.changed(module, None, None)

    # ---- when they leave -------------------------------------------------------------------------

    def adopt(self) -> bool:
        """Let watched weights leave that nothing else holds; return whether there are more of them.

        Also in the middle of operators: not those that these use. The runtime's lock is held.

        Raises:
            RuntimeError: other libraries use the dispatch keys that this needs.
        """
        if not self._is_watching or self._is_adopting:
            return False
        if self._refusal is not None:
            raise self._refusal
        self._is_adopting = self._has_rest = True
        try:
            before_bytes = self._mover.held[0]
            self._watch(self._list())  # also those that got other memory: `weight.data = other`
            self._hold(self._list_leaving(list(self._modules.values())))
            self.do_leave = self._mover.held[0] > 0
            return self._mover.held[0] > before_bytes
        finally:
            self._is_adopting = False

    def _hold(self, parts: Iterable[torch.Tensor]) -> None:
        if self._device.name.type != "cpu":  # kernels of any stream may use them
            torch.get_device_module(self._device.name).synchronize(self._device.name)
        placement = Placement(Action.AUTO, min_bytes=self._min_bytes)
        for each in parts:
            self._mover.hold(each, placement)
        self._mover.begin_held()

    def _list_leaving(self, modules: list[torch.nn.Module]) -> Iterator[torch.Tensor]:
        """Yield the parts of modules' weights, but those of modules that are kept."""
        kept = filter(self._is_kept, list(self._modules.values()))
        within = (inside for module in kept for inside in module.modules())
        stay = {id(each) for inside in within for each in _list_of(inside)}
        listed = (each for module in modules for each in _list_of(module))
        leaving = (each for each in listed if id(each) not in stay)
        return (part for each in leaving for part in list_parts(each))

    def adopt_more(self) -> bool:
        """Adopt in a step: not if other ranks may plan with this one, or read weights."""
        return not self._is_fixed and self.adopt()

    @property
    def _is_fixed(self) -> bool:
        return is_distributed() or self._refusal is not None

    def have_more_left(self) -> bool:
        """Return whether many more weights leave than plans know of, which then know these."""
        leaving_bytes = self._mover.held[0]
        have_more = leaving_bytes > self._known_bytes * MANY_MORE
        if have_more:
            self._known_bytes = leaving_bytes
        return have_more

    def end_step(self) -> None:
        """Let more weights leave if some do: those that are new, or had views in the step."""
        if self._has_rest:
            self.adopt_more()
            self._has_rest = False

    def staying_bytes(self) -> int:
        """Return the bytes of weights that do not leave, though they are large enough."""
        sizes = {
            storage_id(each): each.untyped_storage().nbytes()
            for each in self._list()
            if is_plain(each) and each.device == self._device.name
        }
        staying = (nbytes for storage, nbytes in sizes.items() if not wrappers.may_leave(storage))
        return sum(nbytes for nbytes in staying if nbytes >= self._min_bytes)


# Objects of quantised weights have others inside, for scales that are quantised themselves.
DEEPEST = 3


def list_parts(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory that a parameter or buffer consists of, and that may leave.

    Torch runs the operators of a DTensor in C++, below the key.
    """
    for each in _list_whole(weight):
        yield from tensors_inside(each)


def _list_whole(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a weight and, if it is frozen and of another library, the tensors that it keeps.

    Such as scales: they are its own attributes, or those of objects there.
    """
    if isinstance(weight, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())):
        return
    yield weight
    if type(weight) in KINDS or is_wrapper(weight) or weight.requires_grad:
        return
    holders: list[object] = [weight]
    for _ in range(DEEPEST):
        values = [value for each in holders for value in getattr(each, "__dict__", {}).values()]
        yield from (each for each in values if isinstance(each, torch.Tensor))
        holders = [each for each in values if not isinstance(each, (torch.nn.Module, ModuleType))]


def list_leaving(model: torch.nn.Module | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a model that may leave, or what is inside them, by all their names."""
    if model is not None:
        for named in (model.named_parameters, model.named_buffers):
            for name, weight in named(remove_duplicate=False):
                for number, part in enumerate(list_parts(weight)):
                    if wrappers.may_leave(storage_id(part)):
                        yield f"{name}#{number}" if number else name, part


def is_distributed() -> bool:
    """Return whether there are process groups: ranks plan together, collectives read weights."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _list_of(module: torch.nn.Module) -> list[torch.Tensor]:
    tables = (parameters_of(module), buffers_of(module))
    return [each for table in tables for each in list(table.values()) if each is not None]
