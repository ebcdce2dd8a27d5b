"""Computing what one operator made again, from what it was given.

An operator is repeated alone, below autograd: with the operands, the random numbers, the casts and
the settings that it had, so its results have the same bits. `effects.py` decides which operators
can be repeated. What an operator changes without reading it, as a batch norm its running
statistics, is replaced by scratch memory, so that a repetition has no effect.

Operands may change later in ways that plain autograd would not mind, since it keeps the result. So
a recipe is *settled* before an operator that is seen changes one of its tensors: from then on it
keeps the results. A change that nobody sees is noticed in backward by the tensor's version.

A kernel that torch does not run counts no version. One that is announced (`swapkit.op`) is taken as
a change of its operands when it begins, while their bytes are still the old ones. What is named
only afterwards has new bytes: nothing is repeated from that any more.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.utils.weak import WeakIdKeyDictionary

from swapkit._runtime.choice import Action, Choice
from swapkit._runtime.effects import effects_of
from swapkit._runtime.guards import hidden, untraced
from swapkit._runtime.hooks import innermost
from swapkit._runtime.recompute.again import operands_of, refuse_emptied, refuse_overwritten
from swapkit._runtime.recompute.by_storage import ByStorage
from swapkit._runtime.recompute.layouts import Scratch, layout_of
from swapkit._runtime.recompute.leaves import (
    claim,
    copy_statistics,
    flatten,
    is_emptied,
    storage_of,
    tensor_of,
    tensors_made,
    unflatten,
)
from swapkit._runtime.recompute.random_states import RandomState, may_be_random
from swapkit._runtime.recompute.settings import VERSIONS, Settings, below_autograd
from swapkit._runtime.runtime import get_runtime
from swapkit.errors import RecomputeMismatch, SavedTensorModified

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from swapkit._runtime.operators import Operator
    from swapkit._runtime.saved import Version

# Tensors by the addresses of their storages.
Memory: TypeAlias = "Mapping[int, torch.Tensor]"
_NONE: Memory = {}
_NOTHING: Mapping[int, torch.Tensor] = {}  # it is replaced, not changed

_graph_task = torch._C._current_graph_task_id  # noqa: SLF001
NO_TASK = -1
_PASS = Choice(Action.PASS)

# By result: a recipe lives as long as that, or as what stands for it in a graph.
_by_result: WeakIdKeyDictionary = WeakIdKeyDictionary()
_by_storage: ByStorage[Recipe] = ByStorage()


class Call:
    """One run of an operator, to be repeated. Its operands are kept as saved tensors are."""

    def __init__(self, function: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function = function
        leaves, self._form = flatten(args, kwargs)
        for unread in effects_of(function).unread(args, kwargs):
            leaves = [Scratch(leaf) if leaf is unread else leaf for leaf in leaves]
        operands = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.storages = frozenset(filter(None, map(storage_of, operands)))
        self._claims = claim(operands)
        self._settings = Settings.note()
        self._random = RandomState(function, leaves) if may_be_random(function) else None
        self._runtime = get_runtime()
        self._swapper = self._runtime.current_swapper()
        # Below autograd an alias has a version counter of its own, unless torch is told otherwise.
        with torch._C._SetExcludeDispatchKeyGuard(VERSIONS, False):  # noqa: FBT003, SLF001
            pack = self._packer()
            self._is_packed = bytes(isinstance(leaf, torch.Tensor) for leaf in leaves)
            self._leaves = [
                pack(leaf) if is_tensor else leaf
                for leaf, is_tensor in zip(leaves, self._is_packed, strict=True)
            ]

    def has_run(self) -> None:
        """Note that the operator has run, and whether there are random numbers to come again."""
        with hidden():
            if self._random is not None and not self._random.has_moved():
                self._random = None

    def reads(self, storages: Container[int]) -> bool:
        """Return whether an operand is in some of these storages."""
        return any(storage in storages for storage in self.storages)

    @property
    def is_intact(self) -> bool:
        """Whether no operand was changed since."""
        leaves = zip(self._leaves, self._is_packed, strict=True)
        return all(_is_intact(leaf) for leaf, is_packed in leaves if is_packed)

    def repeat(self) -> list[torch.Tensor]:
        """Run the operator again.

        Raises:
            SavedTensorModified: an operand was changed in place, or has no memory.
        """
        unpack = self._runtime.shim.unpack
        with operands_of(self.function):
            kept = zip(self._leaves, self._is_packed, strict=True)
            leaves = [unpack(leaf) if is_packed else leaf for leaf, is_packed in kept]
            leaves = [leaf.make() if isinstance(leaf, Scratch) else leaf for leaf in leaves]
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and is_emptied(leaf):
                refuse_emptied(leaf, self.function)
        args, kwargs = unflatten(leaves, self._form)
        again = contextlib.nullcontext() if self._random is None else self._random.again()
        with below_autograd(), self._settings.again(), again:
            results = self.function(*args, **kwargs)
        with self._runtime.lock:  # backward may run on several threads
            self._swapper.regions_run += 1
        return tensors_made(results)

    def _packer(self) -> Callable[[torch.Tensor], Any]:
        """Return what keeps operands: on the device, as far as a budget's memory lasts."""
        hooks = innermost()
        if hooks is not None and hooks.choice.action is Action.AUTO:
            keep = hooks.swapper.packer(hooks.choice)
        else:
            keep = self._swapper.packer(_PASS)
        saved_tensor = self._runtime.shim.saved_tensor

        def pack(operand: torch.Tensor) -> object:
            if operand.requires_grad and operand.is_leaf:
                # Not the leaf itself, whose data may be replaced meanwhile.
                return saved_tensor(operand.detach(), itself=True)
            copy = copy_statistics(operand)
            return keep(operand) if copy is None else saved_tensor(copy, itself=True)

        return pack


def _is_intact(packed: Any) -> bool:  # noqa: ANN401 - a SavedTensor, or what stands for one
    if isinstance(packed, Recomputed):
        return packed.is_intact
    return packed.alias.is_inference() or bool(packed.alias._version == packed.version)  # noqa: SLF001


class Recipe:
    """How to compute the results of one operator again."""

    def __init__(self, call: Call, results: Sequence[torch.Tensor]) -> None:
        """Begin right after the operator has run: what is drawn later is not its doing."""
        call.has_run()
        self.function = call.function
        self._call: Call | None = call  # None: settled
        self._storages = tuple(storage_of(result) for result in results)
        self._claims = claim(results)
        self._layouts = tuple(layout_of(result) for result in results)
        self._references = [weakref.ref(result) for result in results]  # and to their aliases
        self._stand_ins: list[weakref.ref[Recomputed]] = []
        # By result: what is kept since it was settled; what others will use in this backward pass;
        # and what was used last, with its version.
        self._kept = self._ready = _NOTHING
        self._latest: Mapping[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._lock = threading.RLock()
        for result in results:
            _by_result[result] = self
        _by_storage.add(self, {*filter(None, self._storages), *call.storages})

    @untraced
    def pack(self, tensor: torch.Tensor) -> object:
        """Return what is kept instead of a saved view of a result."""
        with self._lock:
            call = self._call
            index = self._storages.index(storage_of(tensor))
            is_known = index in self._kept if call is None else call.is_intact
            if not is_known or tensor.is_conj() or tensor.is_neg():
                return get_runtime().shim.saved_tensor(tensor)
            stand_in = Recomputed(self, index, tensor)
            present = [each for each in self._stand_ins if each() is not None]
            self._stand_ins = [*present, weakref.ref(stand_in)]
            return stand_in

    def _find_stand_ins(self) -> list[Recomputed]:
        return [one for reference in self._stand_ins if (one := reference()) is not None]

    def add_alias(self, alias: torch.Tensor) -> None:
        """Live as long as another tensor of a result's memory."""
        self._references.append(weakref.ref(alias))
        _by_result[alias] = self

    def touches(self, storages: Container[int]) -> bool:
        """Return whether its results or operands are in some of these storages."""
        call = self._call
        return (call is not None and call.reads(storages)) or any(
            storage in storages for storage in self._storages
        )

    def settle(self, memory: Memory = _NONE, *, is_over: bool = False) -> None:
        """Keep the results that are in use, and let go of the operands: some of it will change.

        Args:
            memory: what will change, unseen by autograd: results in it are kept as they will be.
            is_over: it has changed already, so that nothing can be repeated from it.
        """
        with self._lock, hidden():
            results = self._living(memory)
            self.forget()
            wanted = {one.index for one in self._find_stand_ins()} - self._kept.keys()
            call, is_missing = self._call, any(results[index] is None for index in wanted)
            if is_missing and call is not None and not (is_over and call.reads(memory)):
                repeated = self._repeat()
                results = [
                    again if result is None else result
                    for result, again in zip(results, repeated, strict=True)
                ]
            self._keep({index: results[index] for index in wanted})
            self._call = None

    def _keep(self, results: Mapping[int, torch.Tensor | None]) -> None:
        kept = {index: result.detach() for index, result in results.items() if result is not None}
        self._kept = {**self._kept, **kept}

    def _living(self, memory: Memory) -> list[torch.Tensor | None]:
        """Return the results that are still there, if only as memory that somebody has."""
        results = [tensor_of(each) for each in self._references[: len(self._storages)]]
        for index, storage in enumerate(self._storages):
            if results[index] is None and storage in memory:
                results[index] = self._layouts[index].view_of(memory[storage].untyped_storage())
        return results

    def has(self, index: int) -> bool:
        """Whether a result is kept, or can be computed again."""
        return self._call is not None or index in self._kept

    def forget(self) -> None:
        """Let nothing more be saved as its results; what was saved so stays."""
        for reference in self._references:
            result = tensor_of(reference)
            if result is not None:
                _by_result.pop(result, None)  # type: ignore[no-untyped-call]

    def view(self, stand_in: Recomputed) -> torch.Tensor:
        """Return what a stand-in stands for; its result is computed again unless somebody has it.

        Raises:
            RecomputeMismatch: it does not look as it did.
        """
        with self._lock:
            stand_in.task = task = _graph_task()
            index = stand_in.index
            result = self._result(index)
            view = result.detach()  # a change of one is seen by the other
            if stand_in.layout != layout_of(result):
                view.data = stand_in.layout.view_of(result.untyped_storage())
            latest = weakref.ref(view), view._version  # noqa: SLF001
            self._latest = {**self._latest, index: latest}
            stand_in.watch(view)
            self._drop_used(task)
            return view

    def _result(self, index: int) -> torch.Tensor:
        if index in self._kept:
            return self._kept[index]
        if index in self._latest:
            reference, version = self._latest[index]
            latest = tensor_of(reference)
            if latest is not None and latest._version == version:  # noqa: SLF001
                return latest
        ready = self._ready.get(index)
        if ready is None or ready._version != 0:  # noqa: SLF001 - as it was made
            self._ready = dict(enumerate(self._repeat()))
            ready = self._ready[index]
        return ready

    def _repeat(self) -> list[torch.Tensor]:
        if self._call is None:
            refuse_overwritten(self.function)
        results = self._call.repeat()
        layouts = tuple(layout_of(result) for result in results)
        if layouts != self._layouts:
            raise RecomputeMismatch(
                f"{self.function} was recomputed to {list(layouts)}; in forward it made "
                f"{list(self._layouts)}"
            )
        return results

    def _drop_used(self, task: int) -> None:
        """Let go of what nobody else will use in this backward pass, and of the rest at its end."""
        stand_ins = self._find_stand_ins()
        wanted = {one.index for one in stand_ins if task not in {one.task, NO_TASK}}
        self._ready = {index: self._ready[index] for index in wanted & self._ready.keys()}
        if self._ready:
            recipe = weakref.ref(self)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: _end_pass(recipe))  # noqa: SLF001


def _end_pass(reference: weakref.ref[Recipe]) -> None:
    recipe = reference()
    if recipe is not None:
        recipe._ready = _NOTHING  # noqa: SLF001 - its own kind


def extend(result: torch.Tensor, aliases: object) -> None:
    """Let a recipe live as long as other tensors of its result's memory, too."""
    recipe = _by_result.get(result)  # type: ignore[no-untyped-call]
    if recipe is not None:
        for alias in tensors_made(aliases):
            recipe.add_alias(alias)


def settle_changed(changed: Sequence[torch.Tensor]) -> None:
    """Settle the recipes of tensors that an operator is about to change, and of what needs them."""
    get_runtime().shim.settle(changed, False)  # noqa: FBT003 - positional only
    storages = set(filter(None, map(storage_of, changed)))
    for recipe in _by_storage.find(storages):
        if recipe.touches(storages):  # a settled one needs its operands no more
            recipe.settle()


def settle_announced(operands: Sequence[torch.Tensor]) -> None:
    """Settle what was chosen by hand before a kernel runs that torch does not: it may write to any.

    Not what a session captures: its plan knows by their bytes what kernels change.
    """
    if not get_runtime().active:
        get_runtime().shim.settle(operands, False)  # noqa: FBT003 - positional only
    memory = _memory_of(operands)
    for recipe in _by_storage.find(memory):
        if recipe.touches(memory):
            recipe.settle(memory)


def settle_overwritten(changed: Sequence[torch.Tensor]) -> None:
    """Keep the results in memory that such a kernel has changed; repeat nothing from it."""
    get_runtime().shim.settle(changed, True)  # noqa: FBT003 - positional only
    memory = _memory_of(changed)
    for recipe in _by_storage.find(memory):
        if recipe.touches(memory):
            recipe.settle(memory, is_over=True)


def _memory_of(tensors: Sequence[torch.Tensor]) -> Memory:
    return {storage: each for each in tensors if (storage := storage_of(each))}


class Recomputed:
    """What a graph keeps instead of a saved view of what is computed again."""

    __slots__ = ("__weakref__", "_given", "_recipe", "_saved", "index", "layout", "task")

    def __init__(self, recipe: Recipe, index: int, tensor: torch.Tensor) -> None:
        self.index = index
        self.layout = layout_of(tensor)
        self.task = NO_TASK  # the backward pass that used it last
        self._recipe = recipe
        self._saved = get_runtime().shim.version(tensor)
        self._given: Version | None = None  # of what was given out last

    @property
    def is_intact(self) -> bool:
        """Whether nothing was changed in place: neither what was saved, nor what was given out."""
        return self._changed() is None and self._recipe.has(self.index)

    def _changed(self) -> Version | None:
        for version in (self._saved, self._given):
            if version is not None and version.now != version.then:
                return version
        return None

    def watch(self, view: torch.Tensor) -> None:
        """Note what is given out: a change of that is one of the saved tensor."""
        self._given = get_runtime().shim.version(view)

    @untraced
    def unpack(self) -> torch.Tensor:
        """Return the saved tensor.

        Raises:
            SavedTensorModified: the result was changed in place after it was saved.
            RecomputeMismatch: it was recomputed to something else.
        """
        changed = self._changed()
        if changed is not None:
            raise SavedTensorModified(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {self.layout}, made by {self._recipe.function}, is at "
                f"version {changed.now}; expected version {changed.then} instead."
            )
        with hidden():
            return self._recipe.view(self)
