"""Hiding our own operations from modes and from the compiler; locks for forked children."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any, Protocol, TypeVar, cast

import torch

from swapkit._runtime.torch_compat.internals import (
    FrameAction,
    FrameStrategy,
    InferenceMode,
    NoDispatchModes,
    NoFunctionModes,
    NoTransforms,
    set_code_exec_strategy,
)

# ---- compiled code -------------------------------------------------------------------------------
#
# Whether the program has compiled code, or may have: read from the compiler, if it is loaded.


_NEAR = 6  # frames between a dispatch mode and the code that calls the operator
_GRAPH = "<eval_with_key>"  # the beginning of the names of torch.fx's code; inductor's is a file


def has_compiled() -> bool:
    """Return whether the compiler ran; always before torch 2.13: 2.10 fails at our hook tables."""
    return torch.__version__ < "2.13" or _count_frames() > 0


def may_compile() -> bool:
    """Return whether the compiler ran, or `torch.compile` was called."""
    loaded = sys.modules.get("torch._dynamo.eval_frame")
    return loaded is not None and (
        _count_frames() > 0 or any(map(callable, list(loaded.cached_backends.values())))
    )


def is_in_compiled_call() -> bool:
    """Return whether a compiled call is on this thread's stack.

    At its end, it restores the dispatch keys of its begin.
    """
    loaded = sys.modules.get("torch._dynamo.eval_frame")
    frame = None if loaded is None else sys._getframe(1)  # noqa: SLF001
    while frame is not None and (
        frame.f_code.co_name != "compile_wrapper" or frame.f_globals is not vars(loaded)
    ):
        frame = frame.f_back
    return frame is not None


def is_compiled_code() -> bool:
    """Return whether an operator that runs on this thread was called by code of a compiler."""
    frame = sys._getframe(1)  # noqa: SLF001
    for _ in range(_NEAR):
        if "extern_kernels" in frame.f_globals or frame.f_code.co_filename.startswith(_GRAPH):
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False


def _count_frames() -> int:
    loaded = sys.modules.get("torch._dynamo.convert_frame")
    return 0 if loaded is None else int(loaded.FRAME_COUNTER)


# ---- fork locks ----------------------------------------------------------------------------------
#
# Locks that are free in a forked child, whichever thread held them before.


class _Lock(Protocol):
    def acquire(self) -> object: ...

    def release(self) -> object: ...


def make_fork_lock() -> AbstractContextManager[Any]:
    """Return a reentrant lock that a fork waits for.

    If a thread holds several at once, make the outer one last: a fork takes the newest lock first.
    """
    lock = threading.RLock()
    hold_over_forks(lock)
    return lock


def hold_over_forks(lock: _Lock) -> None:
    """Acquire a lock before each fork, and release it in parent and child."""
    release = lock.release
    os.register_at_fork(before=lock.acquire, after_in_parent=release, after_in_child=release)


# ---- isolation -----------------------------------------------------------------------------------
#
# Hiding our own operations from the user's modes, and from the compiler.
#
# Saved-tensor hooks run wherever autograd does: below function and dispatch modes, tensor
# subclasses and function transforms, and inside compiled blocks. None of these may see swapkit's
# operators.

_Function = TypeVar("_Function", bound="Callable[..., object]")
_Result = TypeVar("_Result")


def untraced(function: _Function) -> _Function:
    """Exclude a function that compiled blocks may call, and its callees, from compilation.

    Like `torch.compiler.disable`, but without the cost of a wrapper at each call, and without
    loading the compiler.
    """
    return _leave_alone(function, FrameAction.SKIP)


def untraced_itself(function: _Function) -> _Function:
    """Exclude a function that calls user code from compilation; its callees may be compiled."""
    return _leave_alone(function, FrameAction.DEFAULT)


def uncompiled(function: _Function) -> _Function:
    """Exclude a function and its callees from compilation, also where compiled code calls it.

    The compiler would inline a function that is only `untraced` into a compiled caller; at this one
    it breaks the caller's graph, as at one of `torch.compiler.disable`, which loads the compiler.
    """
    return _break_graph(untraced(function))


def uncompiled_itself(function: _Function) -> _Function:
    """Exclude a function as `uncompiled` does; its callees may be compiled."""
    return _break_graph(untraced_itself(function))


def _break_graph(function: _Function) -> _Function:
    cast("Any", function)._torchdynamo_disable = True  # noqa: SLF001 - `torch.compiler.disable` sets it
    return function


def _leave_alone(function: _Function, callees: FrameAction) -> _Function:
    skip = FrameAction.SKIP
    set_code_exec_strategy(
        cast("FunctionType", function).__code__,
        FrameStrategy(skip, callees),
    )
    return function


def unseen(function: _Function) -> _Function:
    """Hide a function's calls of torch from the user's function modes. It calls no user code."""

    @untraced
    @functools.wraps(function)
    def run(*args: object, **kwargs: object) -> object:
        with NoFunctionModes():
            return function(*args, **kwargs)

    return cast("_Function", run)


def hidden() -> contextlib.AbstractContextManager[object]:
    """Return a context manager that hides operators from user modes, subclasses and transforms."""
    return _make_hidden()


@contextlib.contextmanager
def _hidden_by_a_frame() -> Iterator[None]:
    with NoFunctionModes(), NoDispatchModes(), NoTransforms():
        yield


# Used until the shim is loaded; signal handlers cannot interrupt the shim's context manager
# (`shim/cpp/running/hidden_operators.cpp`).
_make_hidden: Callable[[], contextlib.AbstractContextManager[object]] = _hidden_by_a_frame


def hide_by(make: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
    """Set the factory of the context managers that `hidden` returns."""
    global _make_hidden  # noqa: PLW0603 - the process has one shim
    _make_hidden = make


# Used as `with hidden(), outside_inference():`. After Ctrl-C, a generator with both would restore
# the grad mode only when its frame is freed.
outside_inference = functools.partial(InferenceMode, False)  # noqa: FBT003 - torch's


@untraced
def hide(function: Callable[..., _Result], *arguments: object) -> _Result:
    """Call a function and hide its operators."""
    with hidden():
        return function(*arguments)
