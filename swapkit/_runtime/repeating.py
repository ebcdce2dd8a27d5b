"""Operators that a plan computes again in backward.

As `marking.py` does for a user's choices, a dispatch mode sees the operators of a module, here only
of modules of which a plan has chosen one, and only their own: it steps aside for modules inside.
Operators that nothing was chosen for cost what torch asks for a mode, and one look into a table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from swapkit._runtime.effects import effects_of, is_repeatable
from swapkit._runtime.guards import hidden, untraced, untraced_itself
from swapkit._runtime.hooks import innermost
from swapkit._runtime.marking import (
    is_alone,
    make_recipe,
    settle_written,
)
from swapkit._runtime.modes import OwnMode
from swapkit._runtime.recompute.recipes import Call, extend
from swapkit._runtime.runtime import get_runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from swapkit._runtime.marking import OperatorRows
    from swapkit._runtime.operators import Operator
    from swapkit._runtime.recompute.recipes import Recipe
    from swapkit.registry import Row

_graph_task = torch._C._current_graph_task_id  # noqa: SLF001
_NO_TASK = -1
_length = torch._C._len_torch_dispatch_stack  # noqa: SLF001
_mode_at = torch._C._get_dispatch_stack_at  # noqa: SLF001


class Gate(Protocol):
    """The plan that chose operators of one module: it knows where in a step they run."""

    def results(self, name: str, occurrence: int) -> Sequence[bool] | None:
        """Return of each result of an operator that runs now whether it is computed again.

        None: the operator is not repeated.

        `occurrence`: how many of this name ran before in this call of the module.
        """

    def note(self, recipe: Recipe) -> None:
        """Note how something is computed again: the plan ends what may be saved so."""


class Repetition:
    """The rows that a plan has made for the operators of one module."""

    def __init__(self, rows: Sequence[Row], gate: Gate, spoken: OperatorRows | None) -> None:
        """Let a gate decide, but for operators that a user has `spoken` of."""
        self.gate = gate
        self._by_name = {row.operator: row for row in rows}
        self._spoken = spoken
        self._found: dict[Operator, Row | None] = {}
        self.seen: dict[Row, int] = dict.fromkeys(rows, 0)  # operators that ran, by row

    def row_of(self, function: Operator) -> Row | None:
        """Return the row for an operator, whichever of its runs it is for."""
        if function not in self._found:
            row = self._by_name.get(str(function))
            is_free = self._spoken is None or self._spoken.judged(function) is None
            self._found[function] = row if is_free else None
        return self._found[function]


@untraced_itself
def run_repeating(
    repetition: Repetition,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:  # noqa: ANN401 - whatever the function returns
    """Run a module's function, whose operators are seen if a plan is followed here."""
    if not _is_followed() or not torch.is_grad_enabled() or _graph_task() != _NO_TASK:
        return function(*args, **kwargs)
    with _Repeating(repetition):
        return function(*args, **kwargs)


@untraced
def _is_followed() -> bool:
    """Whether what is saved now is an event of a plan, and no scope of the user's decides."""
    hooks = innermost()
    return hooks is not None and hooks.packer.follows


class _Repeating(OwnMode):
    """Sees the operators of one call of a module."""

    def __init__(self, repetition: Repetition) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._repetition = repetition
        self._counts: dict[Operator, int] = {}
        self._depth = 0  # of modules inside
        self._is_on = False
        self._tracker = get_runtime().tracker

    @untraced
    def __enter__(self) -> _Repeating:
        self._outer = self._tracker.exchange_watch(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        self._is_on = True
        return self

    @untraced
    def __exit__(self, *error: object) -> None:
        self._tracker.exchange_watch(self._outer)
        if self._is_on:
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    @untraced
    def pause(self) -> None:
        """See nothing of a module inside, unless somebody's mode is above this one."""
        self._depth += 1
        if self._is_on and _mode_at(_length() - 1) is self:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._is_on = False

    @untraced
    def go_on(self) -> None:
        """See this module's operators again."""
        self._depth -= 1
        if not self._is_on and self._depth == 0:
            super().__enter__()  # type: ignore[no-untyped-call]
            self._is_on = True

    @untraced
    def __torch_dispatch__(
        self,
        func: Operator,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operator returns
        kwargs = kwargs or {}
        row = self._repetition.row_of(func)
        if row is not None and self._depth == 0:
            return self._run(row, func, args, kwargs)
        settle_written(func, args, kwargs)
        results = func(*args, **kwargs)
        if effects_of(func).is_unsafe_view:
            extend(args[0], results)
        return results

    def _run(self, row: Row, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Run an operator, and keep what it is given if this run of it is to be repeated."""
        occurrence = self._counts.get(func, 0)
        self._counts[func] = occurrence + 1
        gate = self._repetition.gate
        which = gate.results(row.operator, occurrence)
        if which is None or not _can_repeat(func, args, kwargs):
            settle_written(func, args, kwargs)
            return func(*args, **kwargs)
        self._repetition.seen[row] += 1
        settle_written(func, args, kwargs)
        with hidden():
            call = Call(func, args, kwargs)
        results = func(*args, **kwargs)
        recipe = make_recipe(call, results, which)
        if recipe is not None:
            gate.note(recipe)
        return results


def _can_repeat(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return is_repeatable(func, args, kwargs) and is_alone() and _is_followed()
