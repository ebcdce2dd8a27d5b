"""Operators that a plan computes again in backward.

As `marking.py` does for a user's choices, a dispatch mode sees the operators of a module, here only
of modules of which a plan has chosen one, and only their own: it steps aside for modules inside.
Operators that nothing was chosen for cost what torch asks for a mode, and one look into a table.

Calls of modules are seen by torch's global hooks (`global_hooks.py`). A hook of a module itself, or
another `forward` in its place, would be copied and pickled with it, and be seen by compilers.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from swapkit._runtime.effects import effects_of, is_repeatable
from swapkit._runtime.guards import hidden, untraced
from swapkit._runtime.hooks import innermost
from swapkit._runtime.marking import (
    is_alone,
    make_recipe,
    settle_written,
)
from swapkit._runtime.modes import OwnMode
from swapkit._runtime.parts import part_of
from swapkit._runtime.recompute.recipes import Call, extend
from swapkit._runtime.runtime import get_runtime

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from swapkit._runtime.marking import OperatorRows
    from swapkit._runtime.operators import Operator
    from swapkit._runtime.recompute.recipes import Recipe
    from swapkit._runtime.saved import Packer
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

    def __init__(self, module: torch.nn.Module, rows: Sequence[Row], gate: Gate) -> None:
        """Let a gate decide, but for operators that a user has spoken of."""
        self.find_module = weakref.ref(module)
        self.gate = gate
        self._by_name = {row.operator: row for row in rows}
        self._spoken: OperatorRows | None = None
        self._found: dict[Operator, Row | None] = {}
        self.seen: dict[Row, int] = dict.fromkeys(rows, 0)  # operators that ran, by row

    @property
    def rows(self) -> tuple[Row, ...]:
        """One for each operator."""
        return tuple(self._by_name.values())

    def remove(self, row: Row) -> None:
        """Repeat an operator no more."""
        self._by_name = {name: each for name, each in self._by_name.items() if each is not row}
        self._found = {}

    def heed(self, spoken: OperatorRows | None) -> None:
        """Leave the operators alone that a user has chosen something for."""
        if spoken is not self._spoken:
            self._spoken, self._found = spoken, {}

    def row_of(self, function: Operator) -> Row | None:
        """Return the row for an operator, whichever of its runs it is for."""
        if function not in self._found:
            row = self._by_name.get(str(function))
            is_free = self._spoken is None or self._spoken.judged(function) is None
            self._found[function] = row if is_free else None
        return self._found[function]


# The plan's rows by module, for whoever asks what is chosen; a plan that begins replaces another's.
_repetitions: weakref.WeakKeyDictionary[torch.nn.Module, Repetition] = weakref.WeakKeyDictionary()


def repetition_of(module: torch.nn.Module) -> Repetition | None:
    """Return what a plan that is followed repeats of a module's own operators, if anything."""
    return _repetitions.get(module)


class _Call(NamedTuple):
    """One call of a module of which a plan repeats operators."""

    owner: Repeated
    module: torch.nn.Module
    watch: _Repeating | None  # None: not here


class _Calls(threading.local):
    """Such calls that run on a thread, innermost last."""

    def __init__(self) -> None:
        self.stack: list[_Call] = []


_calls = _Calls()


def leave_repeated(module: torch.nn.Module) -> None:
    """Note that a module has ended on this thread, which may be none that is repeated."""
    stack = _calls.stack
    if stack and stack[-1].module is module:
        _end(stack.pop())


def _end(call: _Call) -> None:
    if call.watch is not None:
        call.watch.end()


class Repeated:
    """The modules of which one plan repeats operators."""

    def __init__(self, repetitions: Iterable[Repetition], packer: Packer) -> None:
        """Let a plan's rows hold from now on. `packer`: of the session that follows the plan."""
        self._packer = packer
        # By identity: a module of the user's may compare, and hash, as it likes.
        self._by_module: dict[int, Repetition] = {}
        for each in repetitions:
            module = each.find_module()
            if module is not None:
                self._by_module[id(module)] = _repetitions[module] = each

    def end(self) -> None:
        """Watch nothing more, in the middle of a module of this thread too."""
        repetitions, self._by_module = self._by_module, {}
        for each in repetitions.values():
            module = each.find_module()
            if module is not None and _repetitions.get(module) is each:
                del _repetitions[module]
        self.settle()

    def settle(self) -> None:
        """End the calls of this thread: those left have ended unseen, such as by an interruption.

        Torch calls no hooks after an exception that is no `Exception`.
        """
        for call in reversed(_calls.stack):
            if call.owner is self:
                _end(call)
        _calls.stack = [call for call in _calls.stack if call.owner is not self]

    def enter(self, module: torch.nn.Module) -> None:
        """See the operators of a module that begins, if the plan is followed on this thread.

        On any thread, with no lock held; `leave_repeated` undoes it.
        """
        repetition = self._by_module.get(id(module))
        if repetition is None or repetition.find_module() is not module:
            return
        watch: _Repeating | None = None
        part = part_of(module)
        # Where a user has chosen for all of it, a plan has no say.
        if (part is None or not part.is_whole) and _may_repeat(self._packer):
            repetition.heed(None if part is None else part.operators)
            watch = _Repeating(repetition, self._packer)
        _calls.stack.append(_Call(self, module, watch))
        if watch is not None:
            watch.begin()


def _may_repeat(packer: Packer) -> bool:
    return torch.is_grad_enabled() and _graph_task() == _NO_TASK and _is_followed(packer)


@untraced
def _is_followed(packer: Packer) -> bool:
    """Whether what is saved now is an event of the plan, and no scope of the user's decides."""
    hooks = innermost()
    return hooks is not None and hooks.packer is packer and packer.follows


class _Repeating(OwnMode):  # type: ignore[no-untyped-call]
    """Sees the operators of one call of a module. On the thread that runs it."""

    def __init__(self, repetition: Repetition, packer: Packer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._repetition = repetition
        self._packer = packer
        self._counts: dict[Operator, int] = {}
        self._depth = 0  # of modules inside
        self._is_on = False
        self._tracker = get_runtime().tracker

    @untraced
    def begin(self) -> None:
        """See operators from here on, instead of the module around."""
        self._outer = self._tracker.exchange_watch(self)
        self.__enter__()  # type: ignore[no-untyped-call]
        self._is_on = True

    @untraced
    def end(self) -> None:
        """Undo `begin`."""
        self._tracker.exchange_watch(self._outer)
        self._is_on = False
        self.leave()  # whichever modes a hook of the module has entered and not left yet

    @untraced
    def pause(self) -> None:
        """See nothing of a module inside, unless somebody's mode is above this one."""
        self._depth += 1
        if self._is_on and _mode_at(_length() - 1) is self:
            self.__exit__(None, None, None)
            self._is_on = False

    @untraced
    def go_on(self) -> None:
        """See this module's operators again."""
        self._depth -= 1
        if not self._is_on and self._depth == 0:
            self.__enter__()  # type: ignore[no-untyped-call]
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
        if which is None or not self._can_repeat(func, args, kwargs):
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

    def _can_repeat(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return is_repeatable(func, args, kwargs) and is_alone() and _is_followed(self._packer)
