"""The registry of parts, and the replacements for their functions.

A module gets its own `forward` that runs as its part says: a `wrapt` proxy of the method, so that
what Python and torch ask of a method, the method answers. Module classes and functions get a
wrapper that is a function.
"""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import sys
import weakref
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, cast

import torch
import wrapt

from swapkit._runtime.thread_state import thread_state
from swapkit._runtime.torch_compat.internals import is_tracing, module_hooks
from swapkit._runtime.torch_compat.isolation import uncompiled_itself, untraced
from swapkit._runtime.torch_compat.pickling import PickledCall, loader
from swapkit._runtime.user_choices.part import Part
from swapkit.errors import SessionError
from swapkit.registry import Choice

# ---- the replacement for a module's `forward` ---------------------------------------------------


class PartForward(wrapt.ObjectProxy):  # type: ignore[type-arg] # wrapt 1 takes none
    """A module's `forward` as a part; copied and pickled with the module.

    It is not in the class: the compiler would run the code of a module without choices for another
    one with choices. It refers to the module weakly. Otherwise each module with choices would be in
    a cycle, and a copy's memory would wait for the garbage collector (as an unpickled module's
    memory still does). A shallow copy of the module shares this `forward` until it is called: see
    `rebound`. Where swapkit is not installed, a pickle loads with the former `forward`.
    """

    # A proxy keeps what its class declares, and passes other attributes on to the method.
    part = Part()
    class_choices: tuple[Choice, ...] = ()
    former: Callable[..., Any] | None = None
    keeper: torch.nn.Module | None = None

    def __init__(
        self,
        module: torch.nn.Module,
        former: Callable[..., Any] | None = None,
        part: Part | None = None,
    ) -> None:
        """Replace a module's `forward`. `former`: a replacement that the user had set before."""
        forward, by_class = _find_inner(module, former)
        is_method = type(forward) is MethodType and forward.__self__ is module
        function = forward.__func__ if is_method else None
        super().__init__(
            forward if function is None else MethodType(function, weakref.proxy(module))
        )
        self._self_module = weakref.ref(module)
        self._self_function = function  # bound anew for each call
        self.former = former
        self.class_choices = () if by_class is None else by_class.choices
        self.part = Part(self.class_choices) if part is None else part

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """`MethodType`, or its own: the compiler takes a proxy of a function for that function."""
        return PartForward if self._self_function is None else MethodType

    @property
    def __self__(self) -> object:
        """The module, as of any method: the method inside has a proxy."""
        return self.bound().__self__  # type: ignore[attr-defined]

    def __call__(self, *args: object, **kwargs: object) -> object:
        if torch.compiler.is_exporting():  # nothing is saved
            return self.bound()(*args, **kwargs)
        return _run(None, self, args, kwargs)  # the compiler would seek `part` in the method

    def bound(self) -> Callable[..., Any]:
        """Return what runs as a part, bound to the module."""
        bound: Any = self.__wrapped__
        if self._self_function is not None:  # not by `MethodType`: `torch.export` does not trace it
            module = self._get_module()
            bound = self._self_function.__get__(module, type(module))
        return bound  # type: ignore[no-any-return]

    @untraced
    def rebound(self) -> PartForward:
        """Return the `forward` of the module that torch calls; a shallow copy gets its own.

        `copy.copy` and `DataParallel` copy a module's attributes without calling any method of
        them. Called by `_run`.
        """
        if self.former is not None:  # the user's replacement is already bound
            return self
        around = sys._getframe(3)  # noqa: SLF001 - `_run` and `__call__`
        frames = (around, around.f_back)  # torch's; or a `_call_impl` of the user's, then torch's
        callers = (each for each in frames if each and each.f_globals is vars(module_hooks))
        module: Any = next((each.f_locals.get("self") for each in callers), None)
        has_this = isinstance(module, torch.nn.Module) and vars(module).get("forward") is self
        if not has_this or module is self._self_module():  # not has_this: called directly
            return self
        twin = PartForward(module, part=self.part)
        module.forward = twin
        return twin

    def _get_module(self) -> torch.nn.Module:
        module: torch.nn.Module | None = self._self_module()
        if module is None:
            raise SessionError(
                "the module of this `forward` was deleted: keep the module, not only its `forward`"
            )
        return module

    # ---- copies ---------------------------------------------------------------------------------

    def __copy__(self) -> PartForward:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PartForward:
        module = self._get_module()
        is_alone = id(module) not in memo
        twin = copy.deepcopy(module, memo)
        made = PartForward(twin, copy.deepcopy(self.former, memo), copy.deepcopy(self.part, memo))
        if is_alone:  # copied without its module
            made.keeper = twin
        return made

    def __reduce_ex__(self, protocol: object) -> tuple[Any, tuple[Any, ...]]:
        module = self._get_module()
        # Bound methods are looked up when a pickle is loaded, and can be hashed for any module.
        owner = PickledCall(getattr, module, "__init__")
        plain = PickledCall(getattr, module, "forward") if self.former is None else self.former
        return loader(__name__, load_forward.__name__), ((_dump(self.part), owner), plain)


def _find_inner(module: torch.nn.Module, former: object) -> tuple[Any, Part | None]:
    """Return what runs as a part for a module, and the part of its class, if there is one."""
    forward: Any = _bind_by_class(module) if former is None else former
    owner = getattr(forward, "__self__", None)
    if former is None and owner is module and type(forward) is not MethodType:
        forward = MethodType(type(module).forward, module)  # a decorator's descriptor
    function = getattr(forward, "__func__", forward)
    by_class = _find_part(function)
    if by_class is not None:  # a choice for its class also counts for it: judge them together
        function = function.__wrapped__
        forward = function if owner is None else MethodType(function, owner)
    return forward, by_class


def _bind_by_class(module: torch.nn.Module) -> Any:  # noqa: ANN401 - whatever a class has there
    """Return the `forward` of a module without one among its own attributes."""
    found = inspect.getattr_static(type(module), "forward")
    return found.__get__(module, type(module)) if hasattr(found, "__get__") else found


def _dump(part: Part) -> bytes:
    """Pickle a part by itself, so that the pickle around it loads without swapkit."""
    if thread_state.is_pickling:
        return b""  # a user's policy refers to the model, whose choices are being pickled already
    thread_state.is_pickling = True
    try:
        return pickle.dumps(part)
    finally:
        thread_state.is_pickling = False


def load_forward(key: tuple[bytes, Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return the `forward` of an unpickled module. `plain`: the one without choices."""
    dumped, owner = key
    module = owner.__self__
    if isinstance(plain, PartForward) or not dumped:
        return plain
    former = None if plain == _bind_by_class(module) else plain
    forward = PartForward(module, former, pickle.loads(dumped))
    forward.keeper = module  # it may have been pickled without its module
    return forward


# Functions that run as parts, including the `forward` of classes, and `autograd.Function` classes.
_parts: weakref.WeakKeyDictionary[Any, Part] = weakref.WeakKeyDictionary()


def part_of(module: torch.nn.Module) -> Part | None:
    """Return a module's part, from choices for the module or for its class."""
    forward = module.forward
    if isinstance(forward, PartForward):
        return forward.part
    return _find_part(getattr(forward, "__func__", forward))


def _find_part(function: object) -> Part | None:
    # A proxy around a part has its hash, and does more than the part.
    return _parts.get(function) if type(function) is FunctionType else None


def make_part(module: torch.nn.Module) -> Part:
    """Return the module's own part; create it if needed."""
    forward = module.__dict__.get("forward")
    if not isinstance(forward, PartForward):
        forward = PartForward(module, forward)
        module.forward = forward
    return forward.part


def end_part(module: torch.nn.Module) -> None:
    """Restore the former `forward` of a module without choices of its own."""
    forward = module.__dict__.get("forward")
    if not isinstance(forward, PartForward):
        return
    part = forward.part
    if not part.is_carrier and part.choices == forward.class_choices:
        if forward.former is None:
            del module.forward
        else:
            module.forward = forward.former


def carry_marks(model: torch.nn.Module) -> None:
    """Make the model a carrier if it has choices for operators, else undo that.

    Inside a carrier, marked results of operators are found wherever the model saves them.
    """
    parts = [part for module in model.modules() if (part := part_of(module)) is not None]
    if any(part.operators is not None for part in parts):
        make_part(model).is_carrier = True
    elif part_of(model) is not None:
        make_part(model).is_carrier = False
        end_part(model)


def is_suspended(function: object) -> bool:
    """Return whether a function's body runs after its call: a generator or coroutine function."""
    is_asynchronous = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    return is_asynchronous or inspect.isgeneratorfunction(function)


def make_function(function: Callable[..., Any], choice: Choice) -> Callable[..., Any]:
    """Return a wrapper that runs a function as a part; if it is one already, add the choice.

    The wrapper is a plain function: it is pickled by its name, copied as itself, bound as a method.
    A `wrapt.FunctionWrapper` passes for the function inside: compiled callers, and pickles by value
    of local functions, would have that instead, without its choices.
    """
    former = _find_part(function)
    inner = function if former is None else function.__wrapped__  # type: ignore[attr-defined]
    part = Part((choice,) if former is None else (*former.choices, choice))

    @functools.wraps(inner)
    def run(*args: object, **kwargs: object) -> object:
        return _run(part, inner, args, kwargs)

    _parts[run] = part
    return run


def make_operator(function: type[torch.autograd.Function]) -> Part:
    """Return the part of an `autograd.Function` class; create it if needed."""
    return _parts.setdefault(function, Part())


def operator_part(function: type[torch.autograd.Function]) -> Part | None:
    """Return the part of an `autograd.Function` class, if there is one."""
    return _parts.get(function)


def chosen_functions() -> list[tuple[Any, Part]]:
    """Return functions with choices, including `autograd.Function`s and `forward`s of classes."""
    return [(function, part) for function, part in list(_parts.items()) if part.choices]


# Not recursive: the function inside may be compiled.
@uncompiled_itself
def _run(
    part: Part | None,
    function: Callable[..., Any],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    if part is None:
        forward = cast("PartForward", function).rebound()
        part, function = forward.part, forward.bound()
    if is_tracing():
        return function(*args, **kwargs)
    return part.run(function, args, kwargs)
