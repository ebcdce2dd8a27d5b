"""Running a recorded operator, and the mode that shows operators to a recorder."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from swapkit._runtime.compiled import NAMESPACE
from swapkit._runtime.operators.effects import effects_of
from swapkit._runtime.operators.names import Operator
from swapkit._runtime.operators.settings import may_be_random
from swapkit._runtime.recording.notes import Notes, Setting
from swapkit._runtime.recording.tables.blocks import NO_WORKSPACE
from swapkit._runtime.torch_compat.dispatch_modes import SeeingMode, mode_stack
from swapkit._runtime.torch_compat.internals import (
    FakeTensor,
    HigherOrderOperator,
    disabled_dispatch,
)
from swapkit._runtime.torch_compat.isolation import untraced
from swapkit._runtime.torch_compat.reported_calls import run_with_key

# ---- operator runs -------------------------------------------------------------------------------
#
# Running a recorded operator: its fixed properties, its time, and memory for it.


class _OperatorForm:
    """The properties that all runs of an operator share."""

    __slots__ = ("effects", "is_view", "name")

    def __init__(self, function: Operator) -> None:
        self.effects = effects_of(function)
        self.is_view = False
        if isinstance(function, HigherOrderOperator):
            self.name: str = f"higher_order.{function.name()}"  # type: ignore[no-untyped-call]
            return
        self.name = str(function)
        # `prim` operators only query properties of a fake tensor.
        self.is_view = function.is_view or function.namespace == "prim"


form_of = functools.cache(_OperatorForm)


_Result = TypeVar("_Result")


def run_timed(
    notes: Notes, function: Operator, run: Callable[[], _Result], *, is_same: bool
) -> tuple[_Result, Any, int]:
    """Run an operator; return its result and handles to its time and its workspace.

    Args:
        notes: hold the timer, which times the run that succeeds.
        function: the operator.
        run: runs the operator.
        is_same: whether a repeated run has the same effect, except for random numbers.
    """
    workspaces, workspace = notes.workspaces, NO_WORKSPACE
    if workspaces.is_on:
        workspaces.begin()
    notes.running += 1
    try:
        result, taken = _run_until_it_fits(notes, function, run, is_same=is_same)
    finally:
        notes.running -= 1
        if workspaces.is_on:
            workspace = workspaces.end()
    return result, taken, workspace


def _run_until_it_fits(
    notes: Notes, function: Operator, run: Callable[[], _Result], *, is_same: bool
) -> tuple[_Result, Any]:
    """Run an operator; after an out-of-memory error, retry while the recorder can free memory."""
    timer = notes.timer
    make_room = notes.setting.make_room if is_same and not may_be_random(function) else None
    while True:
        timer.expect(function)
        begun = timer.begin()
        try:
            result = run()
        except torch.OutOfMemoryError:
            timer.abandon()
            if make_room is None or make_room() == 0:
                raise
        except BaseException:
            timer.abandon()
            raise
        else:
            return result, timer.end(begun, function)


# ---- dispatch mode -------------------------------------------------------------------------------
#
# The dispatch mode that shows operators to a recorder.

_DISPATCH = "__torch_dispatch__"


@functools.cache
def _are_plain(types: tuple[type, ...]) -> bool:
    """Return whether no type is a wrapper subclass, whose inner operators get recorded instead."""
    return all(
        issubclass(each, FakeTensor) or getattr(each, _DISPATCH, None) is disabled_dispatch
        for each in types
    )


class Runs(Protocol):
    """The recorder's interface for the mode. Called on every recorded thread."""

    is_paused: bool
    setting: Setting

    def run(self, function: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Run an operator and note it; return its result."""

    def run_hook(self, function: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Run an operator that calls the hooks; return its result."""

    def repeat(
        self, function: Operator, given: list[torch.Tensor], run: Callable[[], list[torch.Tensor]]
    ) -> None:
        """Run an operator again for a region of the user's, and note it."""


def run_trapped(
    exclude_key: Callable[[bool], bool] | None, function: Operator, run: Callable[[], _Result]
) -> _Result:
    """Run an operator. That of a library may use weights that it is not given.

    Torch excludes their key in a mode, and so in operators that a body of Python runs.
    """
    if exclude_key is None or function.namespace in {"aten", "prims"}:
        return run()
    return run_with_key(exclude_key, run)


class RecordingMode(SeeingMode):  # type: ignore[no-untyped-call]
    """Shows operators to a recorder, on the thread that enters it and on its backward threads."""

    def __init__(self, recorder: Runs) -> None:
        super().__init__()
        self._recorder: Runs | None = recorder
        self._exclude_key = recorder.setting.exclude_key

    @untraced
    def __torch_dispatch__(
        self,
        func: Operator,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operator returns
        recorder, given = self._recorder, kwargs or {}
        if recorder is None or recorder.is_paused:
            return run_trapped(self._exclude_key, func, functools.partial(func, *args, **given))
        if func.namespace == NAMESPACE:
            return recorder.run_hook(func, args, given)
        if types and not _are_plain(tuple(types)):
            if not mode_stack():
                return NotImplemented  # the operators on the inner tensors arrive here next
            return func(*args, **given)  # to another mode, which may know the type
        return recorder.run(func, args, given)

    @property
    def sees(self) -> bool:
        """Whether the mode has not been left and its recorder is not paused."""
        return self._recorder is not None and not self._recorder.is_paused

    def repeat(
        self,
        function: Operator,
        operands: list[torch.Tensor],
        run: Callable[[], list[torch.Tensor]],
    ) -> None:
        """Note an operator of a region that `run` runs again, as part of the step."""
        recorder = self._recorder
        if recorder is None:  # another thread called `leave` meanwhile
            run()
        else:
            recorder.repeat(function, operands, run)

    def leave(self) -> None:
        """Stop seeing operators; leave this thread's mode stack, whatever modes are inside."""
        self._recorder = None
        super().leave()
