"""Computing what one operator made again, from what it was given.

An operator is repeated alone, below autograd: with the operands, the random numbers, the casts and
the settings that it had, so its results have the same bits. `effects.py` decides which operators
can be repeated. What an operator changes without reading it, as a batch norm its running
statistics, is replaced by scratch memory, so that a repetition has no effect.

Operands may change later in ways that plain autograd would not mind, since it keeps the result. So
a recipe is *settled* before an operator that is seen changes one of its tensors: from then on it
keeps the results. A change that nobody sees is noticed in backward by the tensor's version.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from swapkit._runtime.choice import Action, Choice
from swapkit._runtime.effects import effects_of
from swapkit._runtime.guards import hidden, untraced
from swapkit._runtime.hooks import innermost
from swapkit._runtime.recompute.by_storage import ByStorage
from swapkit._runtime.recompute.leaves import (
    claim,
    copy_statistics,
    flatten,
    storage_of,
    tensors_made,
    unflatten,
)
from swapkit._runtime.recompute.random_states import RandomState, may_be_random
from swapkit._runtime.recompute.settings import Settings
from swapkit._runtime.runtime import get_runtime
from swapkit.errors import RecomputeMismatch, SavedTensorModified

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from swapkit._runtime.operators import Operator

_graph_task = torch._C._current_graph_task_id  # noqa: SLF001
NO_TASK = -1
_PASS = Choice(Action.PASS)
# Who counts versions and views.
_VERSIONS = torch._C.DispatchKey.ADInplaceOrView  # noqa: SLF001

# By result: a recipe lives as long as that, or as what stands for it in a graph.
_by_result: WeakIdKeyDictionary = WeakIdKeyDictionary()
_by_storage: ByStorage[Recipe] = ByStorage()


class _Scratch:
    """Stands for an operand that an operator changes, and of which its results do not depend."""

    __slots__ = ("_device", "_dtype", "_size", "_stride")

    def __init__(self, operand: torch.Tensor) -> None:
        self._size, self._stride = operand.size(), operand.stride()
        self._dtype, self._device = operand.dtype, operand.device

    def make(self) -> torch.Tensor:
        """Return memory of the same form."""
        return torch.empty_strided(self._size, self._stride, dtype=self._dtype, device=self._device)


class Call:
    """One run of an operator, to be repeated. Its operands are kept as saved tensors are."""

    def __init__(self, function: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function = function
        leaves, self._spec = flatten(args, kwargs)
        for unread in effects_of(function).unread(args, kwargs):
            leaves = [_Scratch(leaf) if leaf is unread else leaf for leaf in leaves]
        operands = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.storages = frozenset(filter(None, map(storage_of, operands)))
        self._claims = claim(operands)
        self._settings = Settings()
        self._random = RandomState(function, leaves) if may_be_random(function) else None
        self._runtime = get_runtime()
        self._swapper = self._runtime.current_swapper()
        # Below autograd an alias has a version counter of its own, unless torch is told otherwise.
        with torch._C._SetExcludeDispatchKeyGuard(_VERSIONS, False):  # noqa: FBT003, SLF001
            pack = self._packer()
            self._leaves = [
                (True, pack(leaf)) if isinstance(leaf, torch.Tensor) else (False, leaf)
                for leaf in leaves
            ]

    @property
    def is_intact(self) -> bool:
        """Whether no operand was changed since."""
        return all(_is_intact(leaf) for is_packed, leaf in self._leaves if is_packed)

    def repeat(self) -> list[torch.Tensor]:
        """Run the operator again.

        Raises:
            SavedTensorModified: an operand was changed in place.
        """
        unpack = self._runtime.shim.unpack
        try:
            leaves = [unpack(leaf) if is_packed else leaf for is_packed, leaf in self._leaves]
            leaves = [leaf.make() if isinstance(leaf, _Scratch) else leaf for leaf in leaves]
        except SavedTensorModified as error:
            raise SavedTensorModified(
                f"{error} It is an operand of {self.function}, which was chosen to be computed "
                "again: choose another operator, or do not change it in place."
            ) from None
        args, kwargs = unflatten(leaves, self._spec)
        again = contextlib.nullcontext() if self._random is None else self._random.again()
        with _below_autograd(), self._settings.again(), again:
            results = self.function(*args, **kwargs)
        with self._runtime.lock:  # backward may run on several threads
            self._swapper.recomputed_regions += 1
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


@contextlib.contextmanager
def _below_autograd() -> Iterator[None]:
    """Let operators run as they did in forward below autograd, which wanted gradients.

    What some of them make depends on whether gradients are wanted.
    """
    with (
        torch.enable_grad(),
        torch._C._AutoDispatchBelowAutograd(),  # noqa: SLF001
        torch._C._SetExcludeDispatchKeyGuard(_VERSIONS, True),  # noqa: FBT003, SLF001
        torch._C._DisableAutocast(),  # noqa: SLF001
    ):
        yield


def _is_intact(packed: Any) -> bool:  # noqa: ANN401 - a SavedTensor, or what stands for one
    if isinstance(packed, Recomputed):
        return packed.is_intact
    return packed.alias.is_inference() or bool(packed.alias._version == packed.version)  # noqa: SLF001


class Recipe:
    """How to compute the results of one operator again."""

    def __init__(self, call: Call, results: Sequence[torch.Tensor]) -> None:
        self.function = call.function
        self._call: Call | None = call  # None: settled
        self._storages = [storage_of(result) for result in results]
        self._claims = claim(results)
        self._layouts = [Layout(result) for result in results]
        self._results = [TensorWeakRef(result) for result in results]
        self._aliases: list[TensorWeakRef] = []
        self._stand_ins: weakref.WeakSet[Recomputed] = weakref.WeakSet()
        # By result: what is kept since it was settled; what others will use in this backward pass;
        # and what was used last, with its version.
        self._kept: dict[int, torch.Tensor] = {}
        self._ready: dict[int, torch.Tensor] = {}
        self._latest: dict[int, tuple[TensorWeakRef, int]] = {}
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
            self._stand_ins.add(stand_in)
            return stand_in

    def add_alias(self, alias: torch.Tensor) -> None:
        """Live as long as another tensor of a result's memory."""
        self._aliases.append(TensorWeakRef(alias))
        _by_result[alias] = self

    def touches(self, storages: Collection[int]) -> bool:
        """Return whether its results or operands are in some of these storages."""
        call = self._call
        is_operand = call is not None and not call.storages.isdisjoint(storages)
        return is_operand or any(storage in storages for storage in self._storages)

    def settle(self) -> None:
        """Keep the results that are in use, and let go of the operands: some of it will change."""
        with self._lock, hidden():
            results = [reference() for reference in self._results]
            self.forget()
            wanted = {one.index for one in self._stand_ins} - self._kept.keys()
            if self._call is not None and any(results[index] is None for index in wanted):
                repeated = self._repeat()
                results = [
                    again if result is None else result
                    for result, again in zip(results, repeated, strict=True)
                ]
            for index in wanted:
                result = results[index]
                if result is not None:
                    self._kept[index] = result.detach()
            self._call = None

    def forget(self) -> None:
        """Let nothing more be saved as its results; what was saved so stays."""
        for reference in (*self._results, *self._aliases):
            result = reference()
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
            if stand_in.layout != Layout(result):
                view.data = stand_in.layout.view_of(result.untyped_storage())
            self._latest[index] = TensorWeakRef(view), view._version  # noqa: SLF001
            stand_in.watch(view)
            self._drop_used(task)
            return view

    def _result(self, index: int) -> torch.Tensor:
        if index in self._kept:
            return self._kept[index]
        if index in self._latest:
            reference, version = self._latest[index]
            latest = reference()
            if latest is not None and latest._version == version:  # noqa: SLF001
                return latest  # type: ignore[no-any-return]
        ready = self._ready.get(index)
        if ready is None or ready._version != 0:  # noqa: SLF001 - as it was made
            self._ready = dict(enumerate(self._repeat()))
            ready = self._ready[index]
        return ready

    def _repeat(self) -> list[torch.Tensor]:
        assert self._call is not None
        results = self._call.repeat()
        layouts = [Layout(result) for result in results]
        if layouts != self._layouts:
            raise RecomputeMismatch(
                f"{self.function} was recomputed to {layouts}; in forward it made {self._layouts}"
            )
        return results

    def _drop_used(self, task: int) -> None:
        """Let go of what nobody else will use in this backward pass, and of the rest at its end."""
        wanted = {one.index for one in self._stand_ins if task not in {one.task, NO_TASK}}
        self._ready = {index: self._ready[index] for index in wanted & self._ready.keys()}
        if self._ready:
            recipe = weakref.ref(self)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: _end_pass(recipe))  # noqa: SLF001


def _end_pass(reference: weakref.ref[Recipe]) -> None:
    recipe = reference()
    if recipe is not None:
        recipe._ready = {}  # noqa: SLF001 - its own kind


def extend(result: torch.Tensor, aliases: object) -> None:
    """Let a recipe live as long as other tensors of its result's memory, too."""
    recipe = _by_result.get(result)  # type: ignore[no-untyped-call]
    if recipe is not None:
        for alias in tensors_made(aliases):
            recipe.add_alias(alias)


def settle_changed(changed: Sequence[torch.Tensor]) -> None:
    """Settle the recipes of tensors that an operator is about to change, and of what needs them."""
    storages = set(filter(None, map(storage_of, changed)))
    for recipe in _by_storage.find(storages):
        if recipe.touches(storages):  # a settled one needs its operands no more
            recipe.settle()


class Recomputed:
    """What a graph keeps instead of a saved view of what is computed again."""

    __slots__ = ("__weakref__", "_given", "_recipe", "_saved", "index", "layout", "task")

    def __init__(self, recipe: Recipe, index: int, tensor: torch.Tensor) -> None:
        self.index = index
        self.layout = Layout(tensor)
        self.task = NO_TASK  # the backward pass that used it last
        self._recipe = recipe
        self._saved = _Version(tensor)
        self._given: _Version | None = None  # of what was given out last

    @property
    def is_intact(self) -> bool:
        """Whether nothing was changed in place: neither what was saved, nor what was given out."""
        return self._changed() is None

    def _changed(self) -> _Version | None:
        for version in (self._saved, self._given):
            if version is not None and version.now != version.then:
                return version
        return None

    def watch(self, view: torch.Tensor) -> None:
        """Note what is given out: a change of that is one of the saved tensor."""
        self._given = _Version(view)

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


@functools.cache
def _empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor without memory, whose data anybody may have."""
    return torch.empty(0, dtype=dtype, device=device)


class _Version:
    """The version of a tensor, whose memory it does not keep."""

    __slots__ = ("_tracker", "then")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tracker = tensor.detach()  # shares the counter
        self._tracker.data = _empty(tensor.dtype, tensor.device)
        self.then = self.now

    @property
    def now(self) -> int:
        return self._tracker._version  # noqa: SLF001


class Layout:
    """How a tensor views its storage."""

    __slots__ = ("_dtype", "_offset", "_size", "_stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._size, self._stride = tensor.size(), tensor.stride()
        self._offset, self._dtype = tensor.storage_offset(), tensor.dtype

    def view_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor that views a storage in this way."""
        empty = torch.empty(0, dtype=self._dtype, device=storage.device)
        return empty.set_(storage, self._offset, self._size, self._stride)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._parts == other._parts

    @property
    def _parts(self) -> tuple[object, ...]:
        return self._size, self._stride, self._offset, self._dtype

    def __hash__(self) -> int:
        return hash(self._parts)

    def __repr__(self) -> str:
        return f"{self._dtype} {list(self._size)}"
