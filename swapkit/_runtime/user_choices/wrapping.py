"""The registry of parts, and the replacements for their functions.

A module gets its own `forward` that runs as its part says. Module classes and functions get a
wrapper.
"""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import sys
import weakref
from collections.abc import Callable
from types import FrameType, MethodType
from typing import Any

import torch

from swapkit._runtime.thread_state import thread_state
from swapkit._runtime.torch_compat.internals import AROUND_MODULE_CALL, is_tracing
from swapkit._runtime.torch_compat.isolation import uncompiled_itself
from swapkit._runtime.torch_compat.pickling import PickledCall, loader
from swapkit._runtime.user_choices.part import Part
from swapkit.errors import SessionError
from swapkit.registry import Choice

# Torch's frames between the call of a module and its `forward`, with hooks or while tracing.
_MOST_BETWEEN = 4

# ---- the replacement for a module's `forward` ---------------------------------------------------


class PartForward:
    """A module's `forward` as a part; copied and pickled with the module.

    It refers to the module weakly. Otherwise each module with choices would be in a cycle, and a
    copy's memory would wait for the garbage collector (as an unpickled module's memory still does).
    A shallow copy of the module shares this `forward` until it is called: see `_rebound`. Where
    swapkit is not installed, a pickle loads with the former `forward`.
    """

    def __init__(self, module: torch.nn.Module, former: Callable[..., Any] | None = None) -> None:
        """Replace a module's `forward`. `former`: a replacement that the user had set before."""
        self.former = former
        self._module = weakref.ref(module)
        self.keeper: torch.nn.Module | None = None
        forward: Any = module.forward if former is None else former
        function, owner = getattr(forward, "__func__", forward), getattr(forward, "__self__", None)
        by_class = _find_part(function)
        if by_class is not None:  # a choice for its class also counts for it: judge them together
            function = function.__wrapped__
            forward = function if owner is None else MethodType(function, owner)
        is_method = owner is module and hasattr(forward, "__func__")
        self._function = function if is_method else None  # bound anew for each call
        # A `forward` that is not a method of it.
        self._other: Callable[..., Any] | None = None if is_method else forward
        for name in functools.WRAPPER_ASSIGNMENTS:
            if hasattr(forward, name):
                setattr(self, name, getattr(forward, name))
        self.part = Part(() if by_class is None else by_class.choices)
        self.class_choices = self.part.choices

    def __call__(self, *args: object, **kwargs: object) -> object:
        if torch.compiler.is_exporting():  # nothing is saved
            return self.__wrapped__(*args, **kwargs)
        # Bound inside `_run`: a compiler would replace a bound `forward` by this attribute.
        return _run(self.part, self, args, kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The function that runs as a part; also read by tools for its signature or source."""
        if self._other is not None:
            return self._other
        assert self._function is not None
        bound: Callable[..., Any] = self._function.__get__(self._get_module())
        return bound

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """`MethodType`, so that `inspect` and others see a method."""
        return MethodType if self._other is None else PartForward

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever a method has
        """Return an attribute of the method, for `torch.export` and `torch.jit.script`."""
        if name in _OWN:  # not set yet: this object is being constructed
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def _rebound(self) -> PartForward:
        """Return the `forward` of the module that torch calls; a shallow copy gets its own.

        `copy.copy` and `DataParallel` copy a module's attributes without calling any method of
        them. Called from `_run`.
        """
        if self.former is not None:  # the user's replacement is already bound
            return self
        module = _find_called()
        if module is None or module is self._module() or vars(module).get("forward") is not self:
            return self
        twin: PartForward = object.__new__(PartForward)
        vars(twin).update(vars(self), _module=weakref.ref(module), keeper=None)
        module.forward = twin
        return twin

    def _get_module(self) -> torch.nn.Module:
        module = self._module()
        if module is None:
            raise SessionError(
                "the module of this `forward` was deleted: keep the module, not only its `forward`"
            )
        return module

    # ---- copies ---------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> object:
        module = self._get_module()
        copied = memo.get(id(module))
        if copied is None:  # copied without its module
            return MethodType(_call_forward, copy.deepcopy(module, memo))
        twin = PartForward(copied, copy.deepcopy(self.former, memo))
        twin.part = copy.deepcopy(self.part, memo)
        return twin

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        module = self._get_module()
        # Bound methods are looked up when a pickle is loaded, and can be hashed for any module.
        owner = PickledCall(getattr, module, "__init__")
        plain = PickledCall(getattr, module, "forward") if self.former is None else self.former
        return loader(__name__, load_forward.__name__), ((_dump(self.part), owner), plain)


_BEGIN = PartForward.__call__.__code__


def _find_called() -> torch.nn.Module | None:
    """Return the module whose call has just begun this `forward`; None: called directly."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None and frame.f_code is not _BEGIN:
        frame = frame.f_back
    for _ in range(_MOST_BETWEEN):
        frame = frame and frame.f_back
        if frame is not None and frame.f_code is AROUND_MODULE_CALL:
            module: torch.nn.Module = frame.f_locals["self"]
            return module
    return None


_OWN = frozenset({"former", "keeper", "part", "class_choices", "_module", "_function", "_other"})


def _call_forward(module: torch.nn.Module, *args: object, **kwargs: object) -> object:
    """Run a module's `forward`. Bound to the module, it is a `forward` that keeps it alive."""
    result: object = module.forward(*args, **kwargs)
    return result


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
    is_former = getattr(plain, "__func__", None) is not type(module).forward
    forward = PartForward(module, plain if is_former else None)
    forward.keeper = module  # it may have been pickled without its module
    forward.part = pickle.loads(dumped)
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
    try:
        return _parts.get(function)
    except TypeError:  # cannot be hashed or weakly referenced, so it is not a part
        return None


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


_SUSPENDED = (
    inspect.iscoroutinefunction,
    inspect.isgeneratorfunction,
    inspect.isasyncgenfunction,
)


def is_suspended(function: object) -> bool:
    """Return whether a function's body runs after its call: a generator or coroutine function."""
    return any(is_kind(function) for is_kind in _SUSPENDED)


def make_function(function: Callable[..., Any], choice: Choice) -> Callable[..., Any]:
    """Return a wrapper that runs a function as a part; if it is one already, add the choice.

    The wrapper is a plain function: it is pickled by its name, copied as itself, bound as a method,
    and the compiler traces callers through it. A `wrapt.FunctionWrapper` can be neither copied nor
    pickled, and torch.compile fails on a function that calls one.
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
    part: Part, function: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    if isinstance(function, PartForward):
        function = function._rebound().__wrapped__  # noqa: SLF001
    if is_tracing():
        return function(*args, **kwargs)
    return part.run(function, args, kwargs)
