"""Hiding our own operations from the user's modes, and from the compiler.

Saved-tensor hooks run wherever autograd does: below function and dispatch modes, tensor subclasses
and function transforms, and inside compiled blocks. None of these must see what swapkit does there.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch._C._dynamo import eval_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FunctionType

_Function = TypeVar("_Function", bound="Callable[..., object]")
_Result = TypeVar("_Result")

NoFunctionModes = torch._C.DisableTorchFunction  # noqa: SLF001
NoDispatchModes = torch._C._DisableTorchDispatch  # noqa: SLF001
NoTransforms = torch._C._DisableFuncTorch  # noqa: SLF001


def untraced(function: _Function) -> _Function:
    """Decorate what compiled blocks may call back: the compiler leaves it and its callees alone.

    As `torch.compiler.disable`, but without a wrapper's cost at each call, and without loading the
    compiler.
    """
    return _leave_alone(function, eval_frame._FrameAction.SKIP)  # noqa: SLF001


def untraced_itself(function: _Function) -> _Function:
    """Decorate what calls the user's code: as `untraced`, but callees may be compiled."""
    return _leave_alone(function, eval_frame._FrameAction.DEFAULT)  # noqa: SLF001


def _leave_alone(function: _Function, callees: eval_frame._FrameAction) -> _Function:
    skip = eval_frame._FrameAction.SKIP  # noqa: SLF001
    eval_frame.set_code_exec_strategy(
        cast("FunctionType", function).__code__,
        eval_frame._FrameExecStrategy(skip, callees),  # noqa: SLF001
    )
    return function


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Run operators that no mode, subclass or transform of the user's sees."""
    with NoFunctionModes(), NoDispatchModes(), NoTransforms():
        yield


@untraced
def hide(function: Callable[..., _Result], *arguments: object) -> _Result:
    """Call a function where nobody sees its operators."""
    with hidden():
        return function(*arguments)
