"""Running a recorded operator: its fixed properties, its time, and memory for it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from swapkit._runtime.operators.effects import effects_of
from swapkit._runtime.operators.random_states import may_be_random
from swapkit._runtime.recording.tables.workspaces import NO_WORKSPACE
from swapkit._runtime.torch_compat.internals import HigherOrderOperator

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._runtime.operators.names import Operator
    from swapkit._runtime.recording.notes import Notes


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
    notes: Notes,
    call: tuple[Operator, tuple[Any, ...], dict[str, Any]],
    run: Callable[[], _Result],
    *,
    is_same: bool,
) -> tuple[_Result, Any, int]:
    """Run an operator; return its result and handles to its time and its workspace.

    Args:
        notes: hold the timer, which times the run that succeeds.
        call: the operator and its arguments, for the timer.
        run: runs the operator.
        is_same: whether a repeated run has the same effect, except for random numbers.
    """
    workspaces, workspace = notes.workspaces, NO_WORKSPACE
    if workspaces.is_on:
        workspaces.begin()
    notes.running += 1
    try:
        result, taken = _run_until_it_fits(notes, call, run, is_same=is_same)
    finally:
        notes.running -= 1
        if workspaces.is_on:
            workspace = workspaces.end()
    return result, taken, workspace


def _run_until_it_fits(
    notes: Notes,
    call: tuple[Operator, tuple[Any, ...], dict[str, Any]],
    run: Callable[[], _Result],
    *,
    is_same: bool,
) -> tuple[_Result, Any]:
    """Run an operator; after an out-of-memory error, retry while the recorder can free memory."""
    function, timer = call[0], notes.timer
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
            return result, timer.end(begun, call, result)
