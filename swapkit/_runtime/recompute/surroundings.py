"""What a part changes outside of itself: a second run of its function would change that twice.

The objects that a function can reach are noted before its first run and compared after it: the
module and its submodules, the arguments, and the variables and global names that the function and
the Python functions it names use. For tensors, the version counts. What is written elsewhere, such
as a file, is not seen.
"""

from __future__ import annotations

import collections
import functools
import pickle
import random
import sys
import types
from typing import TYPE_CHECKING, Any

import torch

from swapkit._runtime.torch_compat.internals import version_of
from swapkit._runtime.torch_compat.isolation import untraced

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MOST_OBJECTS = 20_000  # of one part; what lies behind them is not compared
_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
_VALUES = (int, float, complex, str, bytes, type(None), type)
# Their state is their own: code that only calls functions of these does not change it.
_LIBRARIES = ("torch", "swapkit", "numpy")


class Surroundings:
    """The state of what a function can reach, before it runs."""

    @untraced
    def __init__(self, roots: Sequence[object]) -> None:
        self._roots = roots
        self._before = list(_walk(roots))
        self._numbers = _generators()

    @untraced
    def have_changed(self) -> bool:
        """Return whether something has changed since; holds no tensor any more afterwards."""
        roots, before, numbers = self._roots, self._before, self._numbers
        self._roots, self._before = (), []
        return numbers != _generators() or not _are_same(before, list(_walk(roots)))


def _are_same(before: list[tuple[Any, object]], now: list[tuple[Any, object]]) -> bool:
    return len(before) == len(now) and all(
        one[1] == other[1] and (one[0] is other[0] or _is_equal(one[0], other[0]))
        for one, other in zip(before, now, strict=True)
    )


def _is_equal(one: object, other: object) -> bool:
    return type(one) is type(other) and isinstance(one, _VALUES) and one == other


def _walk(roots: Sequence[object]) -> Iterator[tuple[Any, object]]:
    """Yield what is reachable: each object once, with its version or size."""
    seen: set[int] = set()
    waiting: collections.deque[object] = collections.deque(roots)
    while waiting and len(seen) < _MOST_OBJECTS:
        thing = waiting.popleft()
        if isinstance(thing, _VALUES):
            yield thing, None
            continue
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            yield thing, 0 if thing.is_inference() else version_of(thing)
            continue
        inside = _inside(thing)
        yield thing, len(inside)
        waiting.extend(inside)


def _inside(thing: Any) -> list[object]:  # noqa: ANN401 - anything
    """Return what an object holds."""
    if isinstance(thing, dict):
        return [each for item in list(thing.items()) for each in item]
    if isinstance(thing, _CONTAINERS):
        return list(thing)
    if isinstance(thing, (functools.partial, types.MethodType, types.FunctionType)):
        return _inside_callable(thing)
    if isinstance(thing, torch.nn.Module):
        return [*vars(thing).values(), type(thing).forward]
    if type(thing) is not types.SimpleNamespace and _is_of_library(type(thing).__module__):
        return []
    return list(getattr(thing, "__dict__", {}).values())


def _inside_callable(
    function: functools.partial[Any] | types.MethodType | types.FunctionType,
) -> list[object]:
    if isinstance(function, functools.partial):
        return [function.func, function.args, function.keywords]
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


def _is_of_library(module: str | None) -> bool:
    package = (module or "").partition(".")[0]
    return package in _LIBRARIES or package in sys.stdlib_module_names - {"__main__"}


def _generators() -> tuple[object, ...]:
    """Return the states of random numbers that a second run of a function does not restore."""
    numpy: Any = sys.modules.get("numpy.random")
    return random.getstate(), None if numpy is None else pickle.dumps(numpy.get_state(legacy=False))
