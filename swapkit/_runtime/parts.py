"""Parts of a model that choices were made for, and how they run.

A *part* is a module, a class of modules or a function with its rows of the registry. Its `forward`
runs as these say: in a scope, as a recomputed region, with its operators watched. The rows live on
the part itself, so they are copied and pickled with it, and go with it.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from swapkit._runtime.choice import Action, Choice, choice_of
from swapkit._runtime.guards import untraced, untraced_itself
from swapkit._runtime.marking import OperatorRows, carrying, mark_operators
from swapkit._runtime.recompute.exclusions import KeepInside
from swapkit._runtime.recompute.regions import run_region
from swapkit._runtime.repeating import Repetition, run_repeating
from swapkit._runtime.runtime import get_runtime
from swapkit._runtime.scopes import Scope, innermost_choice, resting_choice
from swapkit.config.environment import read_environment
from swapkit.registry import Row, Source, judge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from swapkit._runtime.repeating import Gate

_KEEP = Scope(Choice(Action.KEEP))
_NOTHING = contextlib.nullcontext()


class Part:
    """Rows for one part, and what they come to."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._gate: Gate | None = None  # of rows that a plan has made
        self._set(tuple(rows))
        self.is_carrier = False  # what operators inside make is to be found wherever it is saved

    def _set(self, rows: tuple[Row, ...]) -> None:
        self.rows = rows
        own = tuple(row for row in rows if not row.operator)
        inside = tuple(row for row in self._spoken() if row.operator)
        self.judgement = judge(own)
        self.operators = OperatorRows(inside) if inside else None
        # Where a user has chosen for all of it, a plan has no say.
        self._repetition = None if own else self._planned()
        self._terms = self.judgement.recompute
        if self._terms is not None and self._terms.excluded and self._terms.is_full:
            self._terms = replace(self._terms, policy=KeepInside(operators=self._terms.excluded))
        self._scope: Scope | None = None
        if self.judgement.swap is not None:
            self._scope = Scope(choice_of(self.judgement.swap, self.judgement.swap_source))
        elif self.judgement.keep:
            self._scope = _KEEP

    def add(self, *rows: Row) -> None:
        """Make more choices; they hold from the part's next run on."""
        self._set((*self.rows, *rows))

    def remove(self, row: Row) -> None:
        """Take a choice back."""
        self._set(tuple(other for other in self.rows if other is not row))

    def follow(self, rows: Iterable[Row], gate: Gate | None) -> None:
        """Let a plan's rows hold, instead of those of the plan before, when the gate says so."""
        self._gate = gate
        self._set((*self._spoken(), *rows))

    def _planned(self) -> Repetition | None:
        """Return what a plan has chosen for operators inside."""
        if self._gate is None:
            return None
        rows = [row for row in self.rows if row.operator and row.source is Source.PLANNER]
        return Repetition(rows, self._gate, self.operators)

    def _spoken(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.source is not Source.PLANNER)

    def __getstate__(self) -> tuple[tuple[Row, ...], bool]:
        return self._spoken(), self.is_carrier  # a copy follows no plan

    def __setstate__(self, state: tuple[tuple[Row, ...], bool]) -> None:
        self._gate = None
        rows, self.is_carrier = state
        self._set(rows)

    # ---- running --------------------------------------------------------------------------------

    @untraced_itself
    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # noqa: ANN401
        """Run the part's function as its rows say."""
        if self._terms is not None:
            _void_swaps((args, kwargs))
            with self._inputs_scope():
                return run_region(self._terms, function, args, kwargs)
        if self._repetition is not None:
            around = self._marking() if self.operators or self.is_carrier else _NOTHING
            with around:
                return run_repeating(self._repetition, function, args, kwargs)
        with contextlib.ExitStack() as stack:
            if self._scope is not None:
                stack.enter_context(self._scope)
            stack.enter_context(self._marking())
            return function(*args, **kwargs)

    def _marking(self) -> contextlib.AbstractContextManager[None]:
        """Return what lets the operators inside be found that a user has chosen."""
        if self.operators is not None:
            return mark_operators(self.operators)
        return carrying() if self.is_carrier else _NOTHING

    def count_of(self, row: Row) -> int | None:
        """Return how many operators ran that a row is for; None: it is not for operators."""
        for rows in (self.operators, self._repetition):
            if rows is not None and row in rows.seen:
                return rows.seen[row]
        return None

    @untraced
    def _inputs_scope(self) -> contextlib.AbstractContextManager[None]:
        """Return where a recomputed part's inputs are saved: in the scope around, if it may."""
        around = innermost_choice()
        if self.judgement.keep:
            return _KEEP
        if self._terms is not None and self._terms.swap_inputs:
            return Scope(Choice(Action.SWAP, min_bytes=read_environment().min_swap_bytes))
        is_spared = around is not None and around.spares_regions
        if is_spared:
            return Scope(resting_choice(get_runtime().current_swapper()))
        return contextlib.nullcontext()


@untraced
def _void_swaps(inputs: object) -> None:
    """Leave what a recomputed part is handed where it is, if only its maker was to be swapped."""
    shim = get_runtime().shim
    if shim.has_marks():
        shim.void_swaps([leaf for leaf in tree_leaves(inputs) if torch.is_tensor(leaf)])


# ---- what a part's function is replaced with ----------------------------------------------------


class PartForward:
    """A module's `forward` as a part; copied and pickled with the module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.former = module.__dict__.get("forward")
        function = getattr(module.forward, "__func__", None)
        by_class = None if function is None else _find_part(function)
        inner: Callable[..., Any] = module.forward
        if by_class is not None:  # a choice for its class is one for it: they are judged together
            inner = function.__wrapped__.__get__(module)  # type: ignore[union-attr]
        functools.update_wrapper(self, inner)
        self.inner = inner
        self.part = Part(() if by_class is None else by_class.rows)
        self.class_rows = self.part.rows

    def __call__(self, *args: object, **kwargs: object) -> object:
        return _run(self.part, self.inner, args, kwargs)


# Functions that run as parts, the `forward` of classes among them; and autograd's, by their class.
_parts: weakref.WeakKeyDictionary[Any, Part] = weakref.WeakKeyDictionary()


def part_of(module: torch.nn.Module) -> Part | None:
    """Return the part that a module is, by choices for it or for its class."""
    forward = module.forward
    if isinstance(forward, PartForward):
        return forward.part
    return _find_part(getattr(forward, "__func__", forward))


def _find_part(function: object) -> Part | None:
    try:
        return _parts.get(function)
    except TypeError:  # an object that cannot be hashed or referred to weakly: none of ours
        return None


def make_part(module: torch.nn.Module) -> Part:
    """Return the part that a module is by itself from now on."""
    forward = module.__dict__.get("forward")
    if not isinstance(forward, PartForward):
        forward = PartForward(module)
        module.forward = forward
    return forward.part


def end_part(module: torch.nn.Module) -> None:
    """Give a module that has no rows of its own left its former `forward` again."""
    forward = module.__dict__.get("forward")
    if not isinstance(forward, PartForward):
        return
    part = forward.part
    if not part.is_carrier and part.rows == forward.class_rows:
        if forward.former is None:
            del module.forward
        else:
            module.forward = forward.former


def carry_marks(model: torch.nn.Module) -> None:
    """Let what a model's chosen operators make be found wherever the model saves it."""
    parts = [part for module in model.modules() if (part := part_of(module)) is not None]
    if any(part.operators is not None for part in parts):
        make_part(model).is_carrier = True
    elif part_of(model) is not None:
        make_part(model).is_carrier = False
        end_part(model)


def make_function(function: Callable[..., Any], row: Row) -> Callable[..., Any]:
    """Return a function that runs as a part; what is one already gets a row more."""
    former = _find_part(function)
    inner = function if former is None else function.__wrapped__  # type: ignore[attr-defined]
    part = Part((row,) if former is None else (*former.rows, row))

    @functools.wraps(inner)
    def run(*args: object, **kwargs: object) -> object:
        return _run(part, inner, args, kwargs)

    _parts[run] = part
    return run


def make_operator(function: type[torch.autograd.Function]) -> Part:
    """Return the part that one of autograd's functions is, where it is applied through us."""
    return _parts.setdefault(function, Part())


def operator_part(function: type[torch.autograd.Function]) -> Part | None:
    """Return the part that was chosen for one of autograd's functions, if there is one."""
    return _parts.get(function)


def chosen_functions() -> list[tuple[Any, Part]]:
    """Return the functions, autograd's and the `forward` of classes too, that have choices."""
    return [(function, part) for function, part in list(_parts.items()) if part.rows]


# Not the function inside: it may well be compiled.
@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator, no-untyped-call]
def _run(
    part: Part, function: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    return part.run(function, args, kwargs)
