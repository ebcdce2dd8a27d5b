"""Kinds of calls of parts: each is captured, runs twice, or keeps everything."""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any, NamedTuple, TypeVar

import torch

from swapkit._runtime.recompute.arguments import Template
from swapkit._runtime.torch_compat.internals import submodules_of
from swapkit._runtime.torch_compat.isolation import unseen, untraced_itself
from swapkit.errors import warn
from swapkit.texts import printable

# ---- kinds ---------------------------------------------------------------------------------------
#
# Kinds of region calls: calls of one kind are assumed to do the same.
#
# A kind is a plain hashable value that holds no object of the user's. It consists of the numbers of
# functions and modules, types, and switches. A *switch* is a bool, a string, None or an enum member
# among the function's arguments, its bound values, and the attributes of those. Numbers are no
# switches.

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


# ---- region findings -----------------------------------------------------------------------------
#
# Calls of parts, and whether they are captured, run twice, or keep everything.

_Value = TypeVar("_Value")

_MOST_KNOWN = 4096  # findings: one for each function and kind of arguments
RUN_ONCE = (
    "As far as swapkit sees, nothing outside of it has changed; side effects that swapkit does not "
    "see, such as output, happen twice. To let it run once, keep what it saves: "
    "swapkit.keep(module)"
)
RUN_TWICE = (
    "It does not run a second time, since it changes objects or tensors outside of itself. To save "
    "the memory, make these changes outside of the part, or let it run twice, as torch's "
    "checkpoint would: swapkit.checkpoint(module, check_values=True)"
)


class RegionCall:
    """A call of a function, its tensors, and a key for its kind."""

    __slots__ = ("args", "function", "key", "kwargs", "tensors")

    @unseen
    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        save: tuple[Any, ...],
    ) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.tensors: list[torch.Tensor] = []
        kinds: list[Hashable] = [kind_of(function), save, tuple(kwargs)]
        kinds.append(torch.is_autocast_enabled())
        others: list[object] = [function] if type(function) is functools.partial else []
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor):
                self.tensors.append(value)
                continue
            kinds.append(kind_of(value))
            if not isinstance(value, (torch.nn.Module, int, float, str, type(None))):
                others.append(value)
        if others:
            self.tensors += Template(others).take_tensors()
        kinds += map(kind_of_tensor, self.tensors)
        self.key = tuple(kinds)

    @untraced_itself
    def run(self) -> Any:  # noqa: ANN401 - whatever the function returns
        """Run the call as without a choice."""
        return self.function(*self.args, **self.kwargs)

    @property
    def owner(self) -> object:
        """The module or function that is called."""
        return owner_of(self.function, self.args)


def owner_of(function: Any, args: tuple[Any, ...]) -> object:  # noqa: ANN401
    """Return the module that a function belongs to; the function: there is none."""
    while isinstance(function, functools.partial):
        args = (*function.args, *args)
        function = function.func
    for owner in (function, getattr(function, "__self__", None), *args[:1]):
        if isinstance(owner, torch.nn.Module):
            return owner
    return function


class RegionWay(enum.Enum):
    """How calls of a part run."""

    CAPTURED = enum.auto()
    TWICE = enum.auto()  # as in torch's checkpoint
    KEPT = enum.auto()  # as without a choice: nothing is recomputed


class RegionFinding(NamedTuple):
    """What was found about calls. `is_settled`: it holds whatever they keep."""

    way: RegionWay
    reason: str = ""
    is_settled: bool = False


class Known:
    """The findings about calls. Any thread; single operations on dictionaries need no lock."""

    def __init__(self) -> None:
        self._found: OrderedDict[Hashable, RegionFinding] = OrderedDict()
        self._reasons: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._alike: OrderedDict[Hashable, RegionFinding] = OrderedDict()  # by `_form`
        # Calls that draw from a user's generator: a second run would draw other numbers.
        self._drawing: OrderedDict[Hashable, None] = OrderedDict()
        # Calls that have changed what is outside of them, and those that were warned of.
        self._outside: OrderedDict[Hashable, None] = OrderedDict()
        self._warned: OrderedDict[Hashable, None] = OrderedDict()

    def find(self, call: RegionCall) -> RegionFinding | None:
        """Return how such calls run; None: no finding yet."""
        found = self._found.get(call.key)
        if found is None:
            found = self._alike.get(_form(call.owner)) if _has_plain_state(call.owner) else None
            if found:
                self.note(call, found)
        return found

    def note(self, call: RegionCall, finding: RegionFinding) -> None:
        """Note the finding about a call."""
        _put(self._found, call.key, finding)
        if finding.way is not RegionWay.CAPTURED:  # look at other calls of the function again
            self._doubt_others(call)
        if finding.reason:
            _put(self._alike, _form(call.owner), finding)
            self._note_reason(call.owner, finding.reason)

    def doubt(self, call: RegionCall) -> None:
        """Forget the finding about a call, unless it is settled."""
        found = self._found.get(call.key)
        if found is not None and not found.is_settled:
            self._found.pop(call.key, None)

    def _doubt_others(self, call: RegionCall) -> None:
        for key, found in tuple(self._found.items()):
            is_of_function = isinstance(key, tuple) and key[0] == call.key[0]
            if is_of_function and found.way is RegionWay.CAPTURED:
                self._found.pop(key, None)

    def was_outside(self, call: RegionCall) -> bool:
        """Note that a call has changed what is outside of it; return whether another had."""
        was = call.key in self._outside
        _put(self._outside, call.key, None)
        return was

    def warn(self, call: RegionCall, text: str) -> None:
        """Warn of what recomputation does to a part, once for parts of one form."""
        form = _form(call.owner)
        is_new = form not in self._warned
        _put(self._warned, form, None)
        if is_new:
            owner = call.owner
            name = getattr(owner, "__qualname__", type(owner).__qualname__)
            warn(f"swapkit.checkpoint: {printable(name)} {text}", stacklevel=2)

    def _note_reason(self, owner: Any, reason: str) -> None:  # noqa: ANN401
        with contextlib.suppress(TypeError):  # the owner allows no weak reference
            self._reasons[owner] = reason

    def note_draws(self, call: RegionCall) -> None:
        """Note that a call draws from a generator of the user's."""
        _put(self._drawing, call.key, None)

    def draws(self, call: RegionCall) -> bool:
        """Return whether such calls draw from a generator of the user's."""
        return call.key in self._drawing

    def reason_for(self, owner: object) -> str:
        """Return why calls of a module or function have run twice; no text: none have."""
        try:
            return self._reasons.get(owner, "")
        except TypeError:
            return ""


def _put(found: OrderedDict[Hashable, _Value], key: Hashable, value: _Value) -> None:
    found[key] = value
    with contextlib.suppress(KeyError):  # another thread removed the last entry
        if len(found) > _MOST_KNOWN:
            found.popitem(last=False)


# What torch itself keeps in every module.
_OF_TORCH = frozenset(vars(torch.nn.Module()))
_PLAIN = (bool, int, float, str, type(None), tuple, torch.dtype, torch.device, torch.Tensor)


def _has_plain_state(owner: object) -> bool:
    """Return whether a module's code alone decides what it changes: it holds no other objects."""
    return isinstance(owner, torch.nn.Module) and all(
        name in _OF_TORCH or issubclass(type(value), _PLAIN)
        for each in owner.modules()
        for name, value in vars(each).items()
    )


def _form(owner: object) -> Hashable:
    """Return a key for a module's structure: modules with equal keys share findings."""
    if not isinstance(owner, torch.nn.Module):
        return kind_of(owner)
    return tuple((number_of(type(each)), options_of(each)) for each in owner.modules())
