"""Saved tensors that wrap others, such as `DTensor`: each tensor inside is saved by itself.

The tensors inside are saved like plain ones: they share groups with plain tensors of the same
memory, and each is an event of a session's step. The wrapper is made again when it is used. Torch
counts changes in place of the wrapper only, so the saved tensors inside watch its version.

A collective may still be writing to a tensor inside (`AsyncCollectiveTensor`). No copy may begin
then, and waiting here would end the overlap with what the program does next. Such a tensor stays
on the device until the program has waited for it; an event after that packs it.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from swapkit._runtime.shim.library import Shim
from swapkit._runtime.shim.types import Packer, SavedTensor
from swapkit._runtime.torch_compat.isolation import hidden, outside_inference, untraced
from swapkit._runtime.torch_compat.wrappers import (
    Flattened,
    WrapperForm,
    finish,
    flatten,
    has_waited,
    is_awaited,
    is_leaf,
    note_results,
)

# By class of wrappers: whether a wrapper is like the one that it was taken apart from.
_come_back: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


class TakenApart:
    """Autograd's stand-in for a saved wrapper."""

    __slots__ = ("__weakref__", "_form", "_leaf", "_packer", "_results", "_shim", "parts")

    def __init__(
        self,
        form: WrapperForm,
        parts: list[SavedTensor],
        packer: Packer,
        shim: Shim,
        leaf: torch.Tensor | None,
    ) -> None:
        self._form = form
        self._leaf = None if leaf is None else TensorWeakRef(leaf)
        self.parts = parts
        self._packer = packer
        self._shim = shim
        self._results: tuple[weakref.ref[Any], ...] = ()

    @untraced
    def unpack(self) -> torch.Tensor:
        """Return the wrapper.

        Raises:
            SavedTensorModified: it was changed in place since it was saved.
        """
        parts = self.parts  # read once: another thread may pack them meanwhile
        inside = [self._packer.unpack(part) for part in parts]
        leaf: torch.Tensor | None = None if self._leaf is None else self._leaf()
        if leaf is not None:  # the program still holds it
            return leaf
        with outside_inference(), torch.no_grad():  # an inference tensor has no version
            made = self._form.make(inside)
        self._shim.count_with(made, parts[0])
        return made

    @property
    def is_awaited(self) -> bool:
        """Whether a collective may still be writing to a tensor inside."""
        return is_awaited(self._results)

    def wait_for(self, results: tuple[weakref.ref[Any], ...]) -> None:
        """Pack the tensors inside only once the program has waited for these collectives."""
        self._results = results
        self._packer.awaited.append(weakref.ref(self))

    def pack(self) -> None:
        """Save the tensors inside like plain ones."""
        results, self._results = self._results, ()
        if not has_waited(results):  # nobody can wait any more, unless somebody did
            # Torch declares that a wait writes: recipes that read the tensor would end.
            with hidden():
                for part in self.parts:
                    finish(part.alias)
        self.parts = [self._packer.pack_inside(part) for part in self.parts]


def take_apart(tensor: torch.Tensor, packer: Packer, shim: Shim) -> TakenApart | None:
    """Return the stand-in for a saved wrapper. None: the tensor is none, or stays whole."""
    if isinstance(tensor, torch.nn.Parameter) or not _come_back.get(type(tensor), True):
        return None
    found = flatten(tensor, functools.partial(_has_memory, shim))
    if found is None or not _comes_back(tensor, found):
        return None
    parts = [shim.keep_inside(each, tensor) for each in found.inside]
    apart = TakenApart(found.form, parts, packer, shim, tensor if is_leaf(tensor) else None)
    if found.results:
        apart.wait_for(note_results(found))
    else:
        apart.pack()
    return apart


def pack_awaited(packer: Packer) -> None:
    """Pack the wrappers whose collectives the program has waited for."""
    awaited: list[weakref.ref[TakenApart]] = packer.awaited
    for _ in range(len(awaited)):
        try:
            apart = awaited.pop(0)()
        except IndexError:  # another thread was here, or packing, which comes back here
            break
        if apart is not None and apart.is_awaited:
            awaited.append(weakref.ref(apart))
        elif apart is not None:
            apart.pack()


def _has_memory(shim: Shim, tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and shim.has_plain_memory(tensor, 1)


def _comes_back(tensor: torch.Tensor, found: Flattened) -> bool:
    """Return whether a wrapper can be made again; its class is asked once."""
    kind = type(tensor)
    if kind not in _come_back:
        try:
            made = found.form.make(found.inside)
        except Exception:  # noqa: BLE001 - of a class of the user's, made for the compiler
            _come_back[kind] = False
        else:
            _come_back[kind] = _form_of(made) == _form_of(tensor)
    return _come_back[kind]


def _form_of(tensor: torch.Tensor) -> tuple[object, ...]:
    size, stride = tensor.size(), tensor.stride()
    return type(tensor), tensor.dtype, tensor.device, tensor.layout, size, stride
