"""Plain tensors, tensors that wrap others, and tensors in graphs."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.autograd.function import BackwardCFunction

from swapkit._runtime.torch_compat.internals import (
    base_of,
    innermost_transform,
    storage_id,
    version_of,
)
from swapkit._runtime.torch_compat.isolation import hidden, untraced

# ---- plain tensors -------------------------------------------------------------------------------
#
# Plain tensors: their bytes are those of their storage, and no subclass code runs for them.

KINDS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a strided tensor of one of torch's own classes."""
    return isinstance(value, KINDS) and type(value) in KINDS and value.layout is torch.strided


# Returns whether a storage, by its address, leaves the device between two uses. None does until the
# shim is loaded.
may_leave: Callable[[int], bool] = frozenset[int]().__contains__


def leave_by(ask: Callable[[int], bool]) -> None:
    """Set `may_leave`."""
    global may_leave  # noqa: PLW0603 - the process has one shim
    may_leave = ask


def address_of(storage: torch.UntypedStorage) -> int:
    """Return where a storage's memory is; 0: a wrapper has none, a weight that leaves no place."""
    try:
        return storage.data_ptr()
    except RuntimeError:
        return 0


def has_bytes(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a plain tensor whose storage has memory, which may be read."""
    if not is_plain(value) or value.device.type == "meta":
        return False
    try:
        if may_leave(storage_id(value)):
            return False
        storage = value.untyped_storage()
        return storage.nbytes() > 0 and storage.data_ptr() != 0
    except RuntimeError:  # raised by a function transform's tensor
        return False


# ---- graphs --------------------------------------------------------------------------------------
#
# Properties of tensors in graphs, read without a change to any graph.
#
# A view whose base was changed in place gets a new graph node when `grad_fn` or `is_leaf` is read.
# Backward runs nodes in the order of their making, so gradients would be added up in another order
# than without this read, and have other bits.


def graph_of(tensor: torch.Tensor) -> torch.autograd.graph.Node | None:
    """Return a tensor's `grad_fn`; that of its base if the tensor's own may be outdated."""
    base = _changed_base(tensor)
    return (tensor if base is None else base).grad_fn


def is_leaf(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a leaf, with or without gradients. Autograd saves it itself."""
    return not tensor.requires_grad or gathers_gradients(tensor)


def gathers_gradients(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a leaf that requires gradients."""
    return tensor.requires_grad and _changed_base(tensor) is None and tensor.is_leaf


def _changed_base(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a view's base that has a graph or gradient and may have changed since the view."""
    if not tensor.requires_grad:  # inference tensors, too, which have no version
        return None
    base = base_of(tensor)
    return base if base is not None and base.requires_grad and version_of(base) > 0 else None


# ---- wrappers ------------------------------------------------------------------------------------
#
# Tensors that wrap other tensors, such as `DTensor`: taking them apart, and making them again.
#
# This is torch's own protocol (`torch.utils._python_dispatch.TraceableWrapperSubclass`). A wrapper
# has no memory of its own.

_FLATTEN, _UNFLATTEN = "__tensor_flatten__", "__tensor_unflatten__"
# The result of a functional collective, until it is first used.
_ASYNC = ("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
# What the two methods of a class may raise that were not written for such a tensor.
_REFUSALS = (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError)


class _Inside(NamedTuple):
    """The place of a tensor among those that were found inside."""

    place: int


class WrapperForm(NamedTuple):
    """A wrapper without the tensors inside it."""

    kind: Any  # its class
    names: tuple[str, ...]
    parts: tuple[Any, ...]  # by name: `_Inside`, the form of a wrapper inside, or what stays
    context: Any  # the class's own
    size: torch.Size
    stride: tuple[int, ...]

    def make(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a wrapper of this form around other tensors; it requires no gradient."""
        parts = {
            name: _fill(part, tensors) for name, part in zip(self.names, self.parts, strict=True)
        }
        made: torch.Tensor = self.kind.__tensor_unflatten__(
            parts, self.context, self.size, self.stride
        )
        return made.requires_grad_(False) if made.requires_grad else made  # noqa: FBT003


def _fill(part: Any, tensors: Sequence[torch.Tensor]) -> Any:  # noqa: ANN401 - see `parts`
    if isinstance(part, _Inside):
        return tensors[part.place]
    return part.make(tensors) if isinstance(part, WrapperForm) else part


class Flattened(NamedTuple):
    """A wrapper, taken apart."""

    form: WrapperForm
    inside: tuple[torch.Tensor, ...]
    results: tuple[Any, ...]  # of collectives, that nobody has waited for yet, at any depth


def is_wrapper(value: object) -> bool:
    """Return whether a tensor follows the protocol."""
    kind = type(value)
    return (
        isinstance(value, torch.Tensor)
        and kind is not torch.Tensor
        and hasattr(kind, _FLATTEN)
        and hasattr(kind, _UNFLATTEN)
    )


def flatten(tensor: torch.Tensor, moves: Callable[[torch.Tensor], bool]) -> Flattened | None:
    """Take a wrapper apart.

    Args:
        tensor: any tensor.
        moves: whether a tensor inside counts as such. Others stay in the form, as they are.

    Returns:
        None if the tensor is no such wrapper, or not one whose parts may be exchanged: those of a
        nested tensor know each other by identity, and what stays may hold a graph.
    """
    if not is_wrapper(tensor) or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    inside: list[torch.Tensor] = []
    results: list[Any] = []
    try:
        form = _flatten(tensor, moves, inside, results)
    except _REFUSALS:
        return None
    if form is None or not inside:
        return None
    return Flattened(form, tuple(inside), tuple(results))


def _flatten(
    tensor: Any,  # noqa: ANN401 - a class of the user's
    moves: Callable[[torch.Tensor], bool],
    inside: list[torch.Tensor],
    results: list[Any],
) -> WrapperForm | None:
    names, context = tensor.__tensor_flatten__()
    parts: list[Any] = []
    for name in names:
        part = getattr(tensor, name)
        if is_wrapper(part):
            part = _flatten(part, moves, inside, results)
            if part is None:
                return None
        elif isinstance(part, torch.Tensor):
            if moves(part):
                inside.append(part)
                part = _Inside(len(inside) - 1)
            elif part.requires_grad:
                return None
        parts.append(part)
    if is_unfinished(tensor):
        results.append(tensor)
    return WrapperForm(
        type(tensor), tuple(names), tuple(parts), context, tensor.size(), tensor.stride()
    )


def is_unfinished(tensor: object) -> bool:
    """Return whether a tensor is a collective's result that nobody has waited for."""
    module = sys.modules.get(_ASYNC[0])
    kind = getattr(module, _ASYNC[1], None)
    return kind is not None and isinstance(tensor, kind) and not getattr(tensor, "completed", True)


def note_results(found: Flattened) -> tuple[weakref.ref[Any], ...]:
    """Return what `is_awaited` needs.

    A result of the operator that saves it would keep the graph alive that keeps it.
    """
    return tuple(map(weakref.ref, found.results))


def is_awaited(results: tuple[weakref.ref[Any], ...]) -> bool:
    """Return whether somebody may still wait for one of these collectives."""
    alive = (each() for each in results)
    return any(each is not None and not each.completed for each in alive)


def has_waited(results: tuple[weakref.ref[Any], ...]) -> bool:
    """Return whether the program is known to have waited for all of these collectives."""
    alive = [each() for each in results]
    return all(each is not None and each.completed for each in alive)


def finish(tensor: torch.Tensor) -> None:
    """Wait for the functional collective that writes to a tensor's memory, if there is one."""
    sys.modules[_ASYNC[0]].wait_tensor(tensor)


def tensors_inside(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory that a wrapper consists of; of other tensors, the tensor."""
    parts = _list_parts(tensor)
    if parts is None:
        yield tensor
    else:
        for part in parts:
            yield from tensors_inside(part)


def kinds_of_wrappers(tensor: torch.Tensor) -> Iterator[type]:
    """Yield the class of a wrapper, and those of wrappers inside it; of other tensors, nothing."""
    parts = _list_parts(tensor)
    if parts is not None:
        yield type(tensor)
        for part in parts:
            yield from kinds_of_wrappers(part)


def _list_parts(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """Return the tensors that a wrapper names; None: it is none."""
    if not is_wrapper(tensor):
        return None
    try:
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    except _REFUSALS:
        return None
    parts = [getattr(tensor, name) for name in names]
    return [each for each in parts if isinstance(each, torch.Tensor)]  # a DTensor names its mesh


# ---- saved leaves --------------------------------------------------------------------------------
#
# Weights that a function written in Python saves for its backward: it gets them back themselves.
#
# Under saved-tensor hooks, whatever they return, torch makes a new tensor for a saved leaf that
# requires grad. The new tensor has the leaf's memory and gradient accumulator, but neither its
# identity nor its attributes (`weight.main_grad`), which functions of large-model libraries read.
# Torch returns leaves without gradients as the hooks return them.

_NODE: Any = BackwardCFunction
_plain = _NODE.saved_tensors


@untraced
def _saved_tensors(node: Any) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401 - of any class
    """Return a node's saved tensors. Backward calls this on its thread; no lock is held."""
    found: tuple[torch.Tensor, ...] = _plain.__get__(node)  # None: not a tensor
    return tuple(_itself(each) if _is_copy(each) else each for each in found)


def _is_copy(tensor: torch.Tensor | None) -> bool:
    """Return whether a saved tensor is a leaf that requires grad, and may be a new tensor."""
    return (
        type(tensor) is torch.Tensor
        and tensor.requires_grad
        and tensor.grad_fn is None
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and innermost_transform() is None
    )


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    """Return the leaf whose gradient accumulator a saved tensor has."""
    with hidden(), torch.enable_grad():
        node = tensor.view_as(tensor).grad_fn
    accumulator = None if node is None else node.next_functions[0][0]
    leaf: torch.Tensor = getattr(accumulator, "variable", tensor)
    return leaf


def give_leaves_back() -> None:
    """Let functions written in Python get saved leaves themselves, from now on.

    Graphs outlive sessions and scopes, so this is never undone.
    """
    _NODE.saved_tensors = property(_saved_tensors)
