"""Kinds of region calls: calls of one kind are assumed to do the same.

A kind is a plain hashable value that holds no object of the user's. It consists of the numbers of
functions and modules, types, and switches. A *switch* is a bool, a string, None or an enum member
among the function's arguments, its bound values, and the attributes of those. Numbers are no
switches.
"""

from __future__ import annotations

import enum
import functools
import itertools
import weakref
from types import BuiltinMethodType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch

from swapkit._runtime.torch_compat.internals import submodules_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

_DEPTH = 4  # of nested functions and containers to look into
_MOST_ITEMS = 64  # of a container to look at
_SWITCHES = (bool, str, type(None))

_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_counter = itertools.count()


def kind_of(thing: Any, depth: int = _DEPTH) -> Hashable:  # noqa: ANN401 - anything
    """Return the kind of a function or of an argument.

    Functions made anew for each call from the same code have the same kind.
    """
    if type(thing) in _SWITCHES:
        found: Hashable = thing
    elif isinstance(thing, torch.Tensor):
        found = type(thing).__qualname__
    elif isinstance(thing, torch.nn.Module):
        found = (number_of(thing), _modes(thing), options_of(thing))
    elif depth == 0:
        found = _type_of(thing)
    elif callable(thing):
        found = _kind_of_callable(thing, depth)
    elif isinstance(thing, enum.Enum):
        found = (_type_of(thing), thing.name)
    else:
        found = _kind_of_object(thing, depth)
    return found


def kind_of_tensor(tensor: torch.Tensor) -> Hashable:
    """Return the kind of a tensor argument: dtype, device type, dimensions, rough size."""
    count = tensor.numel().bit_length()
    return tensor.dtype, tensor.device.type, tensor.requires_grad, tensor.dim(), count


def _kind_of_callable(thing: Any, depth: int) -> Hashable:  # noqa: ANN401
    if type(thing) is functools.partial:
        return _kinds_of((thing.func, *thing.args, *thing.keywords.items()), depth)
    if isinstance(thing, (MethodType, BuiltinMethodType)):
        owner = thing.__self__
        is_module = isinstance(owner, torch.nn.Module)
        own = kind_of(owner) if is_module else (number_of(owner), options_of(owner))
        return own, kind_of(getattr(thing, "__func__", None), depth - 1), thing.__name__
    if isinstance(thing, FunctionType):
        return _kind_of_function(thing, depth)
    return (number_of(thing),) if isinstance(thing, type) else (number_of(thing), options_of(thing))


def _kind_of_function(function: FunctionType, depth: int) -> Hashable:
    # Code objects compare equal across files if their text is equal, so add the place.
    place = function.__module__, function.__code__.co_filename
    bound = (
        *map(_content, function.__closure__ or ()),
        *(function.__defaults__ or ()),
        *(function.__kwdefaults__ or {}).values(),
    )
    return (number_of(function.__code__), place, _kinds_of(bound, depth))


def _content(cell: Any) -> object:  # noqa: ANN401 - of a closure
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def _kind_of_object(thing: Any, depth: int) -> Hashable:  # noqa: ANN401
    if isinstance(thing, (list, tuple)):
        return _type_of(thing), len(thing), _kinds_of(itertools.islice(thing, _MOST_ITEMS), depth)
    if isinstance(thing, dict):
        items = itertools.islice(list(thing.items()), _MOST_ITEMS)
        return _type_of(thing), len(thing), _kinds_of(items, depth)
    return _type_of(thing), options_of(thing)


def _kinds_of(things: Iterable[object], depth: int) -> tuple[Hashable, ...]:
    return tuple(kind_of(each, depth - 1) for each in things)


def _type_of(thing: object) -> Hashable:
    return type(thing).__module__, type(thing).__qualname__


def number_of(thing: Any) -> Hashable:  # noqa: ANN401
    """Return an object's unique number; a new one each time if a weak dict cannot hold it."""
    try:
        found = _numbers.get(thing)
        if found is None:
            found = _numbers[thing] = next(_counter)
    except TypeError:
        return next(_counter)
    return found


def options_of(thing: object) -> Hashable:
    """Return the switches among an object's attributes."""
    values = getattr(thing, "__dict__", None)
    if not isinstance(values, dict):
        return ()
    return tuple(
        (name, value.name if issubclass(type(value), enum.Enum) else value)
        for name, value in list(values.items())  # copied: threads may add items
        if type(value) in _SWITCHES or issubclass(type(value), enum.Enum)
    )


def _modes(module: torch.nn.Module) -> Hashable:
    """Return the training flags of a module and its submodules; one flag if all are equal."""
    modules, seen, modes = [module], {id(module)}, []
    for each in modules:
        modes.append(each.training)
        for child in list(submodules_of(each).values()):
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                modules.append(child)
    return modes[0] if len(set(modes)) == 1 else tuple(modes)
