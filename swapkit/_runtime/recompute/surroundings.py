"""What a part changes outside of itself: a second run of its function would change that twice.

The objects that a function can reach are noted before its first run and compared after it: the
module and its submodules, the arguments, and the variables and global names that the function and
the Python functions it names use. For tensors, the version counts. What is written elsewhere, such
as a file, is not seen.
"""

from __future__ import annotations

import collections
import collections.abc
import functools
import pickle
import random
import sys
import types
from typing import TYPE_CHECKING, Any

import torch

from swapkit._runtime.torch_compat.internals import NoFunctionModes, version_of
from swapkit._runtime.torch_compat.isolation import untraced

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_OBJECTS = 20_000  # of one part; if there are more, they may have changed
_MOST_ITEMS = 1_000  # of one container; of a larger one, the size alone is compared
_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
_CALLABLES = (
    functools.partial,
    types.BuiltinFunctionType,  # methods of compiled classes, too
    types.FunctionType,
    types.MethodType,
)
_VALUES = frozenset({bool, int, float, complex, str, bytes, type(None), type})
# Their state is their own: code that only calls functions of these does not change it.
_LIBRARIES = ("torch", "swapkit", "numpy")


class Surroundings:
    """The state of what a function can reach, before it runs. The objects' own code never runs."""

    @untraced
    def __init__(self, roots: Sequence[object]) -> None:
        self._roots = roots
        self._before = _walk(roots)
        self._numbers = _generators()

    @untraced
    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that the function can reach."""
        return [each for each, _ in self._before or () if issubclass(type(each), torch.Tensor)]

    @untraced
    def have_changed(self) -> bool:
        """Return whether something may have changed since; holds no tensor any more afterwards."""
        roots, before, numbers = self._roots, self._before, self._numbers
        self._roots, self._before = (), None
        now = _walk(roots)
        if before is None or now is None or numbers != _generators():
            return True
        return len(before) != len(now) or not all(map(_is_same, before, now))


def _is_same(one: tuple[Any, object], other: tuple[Any, object]) -> bool:
    if one[1] != other[1]:
        return False
    is_value = type(one[0]) in _VALUES and type(one[0]) is type(other[0])
    return one[0] is other[0] or (is_value and one[0] == other[0])


def _walk(roots: Sequence[object]) -> list[tuple[Any, object]] | None:
    """Return what is reachable: each object once, with its state. None: it cannot be compared."""
    found: list[tuple[Any, object]] = []
    seen: set[int] = set()
    waiting: collections.deque[object] = collections.deque(roots)
    while waiting:
        thing = waiting.popleft()
        if type(thing) in _VALUES:
            found.append((thing, None))
        elif id(thing) not in seen:
            seen.add(id(thing))
            try:
                state, inside = _look(thing)
            except Exception:  # noqa: BLE001 - of a class of the user's
                return None
            found.append((thing, state))
            waiting.extend(inside)
        if len(found) > _MOST_OBJECTS:
            return None
    return found


def _look(thing: Any) -> tuple[object, list[object]]:  # noqa: ANN401 - anything
    """Return an object's own state, and what it holds."""
    kind = type(thing)
    if issubclass(kind, torch.Tensor):
        with NoFunctionModes():
            return (0 if thing.is_inference() else version_of(thing)), []
    if issubclass(kind, random.Random):
        return thing.getstate(), []
    if kind.__module__.partition(".")[0] == "numpy":
        return pickle.dumps(thing), []  # arrays and generators
    if issubclass(kind, collections.abc.Iterator):
        return object(), []  # a run may have advanced it
    inside = _inside(thing, kind)
    return len(inside), inside if len(inside) <= _MOST_ITEMS else []


def _inside(thing: Any, kind: type) -> list[object]:  # noqa: ANN401 - anything
    """Return what an object holds."""
    if issubclass(kind, dict):
        return [each for item in dict.items(thing) for each in item]
    for container in _CONTAINERS:
        if issubclass(kind, container):
            return list(container.__iter__(thing))
    if issubclass(kind, _CALLABLES):
        return _inside_callable(thing)
    if issubclass(kind, torch.nn.Module):
        return [*vars(thing).values(), kind.forward]
    is_own = kind is types.SimpleNamespace or not _is_of_library(kind.__module__)
    return _attributes(thing) if is_own else []


def _attributes(thing: object) -> list[object]:
    try:
        attributes = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return []
    return list(attributes.values()) if type(attributes) is dict else []


def _inside_callable(
    function: functools.partial[Any]
    | types.BuiltinFunctionType
    | types.FunctionType
    | types.MethodType,
) -> list[object]:
    if isinstance(function, functools.partial):
        return [function.func, function.args, function.keywords]
    if isinstance(function, types.BuiltinFunctionType):
        return [function.__self__]
    if isinstance(function, types.MethodType):
        return [function.__self__, function.__func__]
    if _is_of_library(function.__module__):
        return []
    names = function.__code__.co_names
    cells = [each.cell_contents for each in function.__closure__ or () if _is_filled(each)]
    found = [function.__globals__[name] for name in names if name in function.__globals__]
    return [*cells, *found, function.__defaults__, function.__kwdefaults__]


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises while its variable has no value
    except ValueError:
        return False
    return True


def _is_of_library(module: object) -> bool:
    package = module.partition(".")[0] if isinstance(module, str) else ""
    return package in _LIBRARIES or package in sys.stdlib_module_names - {"__main__"}


def _generators() -> tuple[object, ...]:
    """Return the states of random numbers that a second run of a function does not restore."""
    numpy: Any = sys.modules.get("numpy.random")
    return random.getstate(), None if numpy is None else pickle.dumps(numpy.get_state(legacy=False))
