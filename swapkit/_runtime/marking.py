"""Choices for single operators inside a module.

While such a module runs, a dispatch mode sees its operators, and marks what the chosen ones make
(`cpp/marks.hpp`): wherever that is saved, it is swapped, or not kept at all but computed again in
backward (`recompute/recipes.py`). The operators of a module are those that its own `forward` runs,
not those of its submodules.
"""

from __future__ import annotations

import contextlib
import re
import threading
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from swapkit._runtime.choice import Action, Choice, choice_of
from swapkit._runtime.effects import effects_of, is_repeatable
from swapkit._runtime.guards import hidden, untraced
from swapkit._runtime.hooks import innermost, is_foreign
from swapkit._runtime.modes import OwnMode, has_foreign_mode
from swapkit._runtime.operators import operator_names
from swapkit._runtime.recompute.leaves import flatten, tensors_made
from swapkit._runtime.recompute.recipes import Call, Recipe, extend, settle_changed
from swapkit._runtime.runtime import get_runtime
from swapkit._runtime.scopes import Scope
from swapkit.registry import Judgement, Row, judge

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from swapkit._runtime.operators import Operator

_graph_task = torch._C._current_graph_task_id  # noqa: SLF001
_PASS = Scope(Choice(Action.PASS))


class OperatorRows:
    """The rows for the operators of one module, and what they come to for each operator."""

    def __init__(self, rows: tuple[Row, ...]) -> None:
        self.rows = rows
        self._patterns = [re.compile(row.meaning or row.operator) for row in rows]
        self._found: dict[object, Judgement | None] = {}
        self.seen: dict[Row, int] = dict.fromkeys(rows, 0)  # operators that ran, by row

    def look_up(self, function: Operator) -> Judgement | None:
        """Return what was chosen for an operator; None: nothing."""
        found = self.judged(function)
        if found is not None:
            for verdict in found.verdicts:
                self.seen[verdict.row] += 1
        return found

    def judged(self, function: Operator) -> Judgement | None:
        """Return the same of one that does not run now."""
        if function not in self._found:
            rows = self._match(operator_names(function))
            self._found[function] = judge(rows) if rows else None
        return self._found[function]

    def look_up_name(self, name: str) -> tuple[Row, ...]:
        """Return the rows for one of autograd's functions by its name."""
        found = self._match((name,))
        for row in found:
            self.seen[row] += 1
        return tuple(replace(row, operator="") for row in found)

    def _match(self, names: tuple[str, ...]) -> list[Row]:
        """Return the rows whose pattern is of one of these names."""
        return [
            row
            for row, pattern in zip(self.rows, self._patterns, strict=True)
            if any(pattern.fullmatch(name) for name in names)
        ]


class _Watched(threading.local):
    """Who sees the operators of modules on this thread, innermost last."""

    def __init__(self) -> None:
        self.stack: list[_Watch] = []

    @property
    def innermost(self) -> _Watch | None:
        """None on a thread of autograd's, too, which has the modes of the one that called it."""
        return self.stack[-1] if self.stack else None


_watched = _Watched()


def rows_for_operator(name: str) -> tuple[Row, ...]:
    """Return the rows for an operator of this name in the module that runs on this thread."""
    watch = _watched.innermost
    return watch.rows.look_up_name(name) if watch is not None and watch.is_on else ()


class _Watch(OwnMode):
    """Sees the operators of one module while it runs."""

    def __init__(self, rows: OperatorRows) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = rows
        self._runtime = get_runtime()
        self._tag = self._runtime.tracker.current()  # of the module, which has just begun

    @untraced
    def __torch_dispatch__(
        self,
        func: Operator,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operator returns
        kwargs = kwargs or {}
        settle_written(func, args, kwargs)
        chosen = self._choice_for(func)
        call = None
        if chosen is not None and chosen.recompute is not None:
            call = self._prepare(func, args, kwargs)
        self._runtime.shim.send_pending()
        results = func(*args, **kwargs)
        if effects_of(func).is_unsafe_view:
            extend(args[0], results)
        if call is not None:
            _mark_recomputed(call, results)
        elif chosen is not None and chosen.swap is not None:
            _mark_swapped(choice_of(chosen.swap, chosen.swap_source), func, (args, kwargs), results)
        return results

    @property
    def is_on(self) -> bool:
        """Whether the module's own operators run, not those of modules inside (or of itself)."""
        return _watched.innermost is self and self._runtime.tracker.current() == self._tag

    def _choice_for(self, func: Operator) -> Judgement | None:
        """Return what holds for an operator that runs now, if anything does."""
        if not self.is_on:
            return None
        chosen = self.rows.look_up(func)
        # In a region somebody else decides what is kept; and in backward all is needed at once.
        return None if chosen is None or not _may_mark() else chosen

    def _prepare(
        self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call | None:
        leaves, _ = flatten(args, kwargs)
        if not is_repeatable(func, args, kwargs) or has_foreign_mode():
            return None
        with hidden():
            # It needs them in backward anyway.
            self._runtime.shim.void_swaps([leaf for leaf in leaves if torch.is_tensor(leaf)])
            return Call(func, args, kwargs)


def settle_written(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Settle the recipes of what an operator is about to change."""
    written = effects_of(func).written(args, kwargs)
    if written:
        settle_changed(written)


def _mark_recomputed(call: Call, results: object) -> None:
    recipe = make_recipe(call, results)
    if recipe is None:
        return
    if _carried.recipes is not None:
        _carried.recipes.append(weakref.ref(recipe))


def make_recipe(call: Call, results: object) -> Recipe | None:
    """Let what an operator made be computed again wherever it is saved, if that can be."""
    shim = get_runtime().shim
    made = tensors_made(results)
    storages = [shim.storage_of(result) for result in made]
    # Some operators give a view of an operand and do not say so.
    if not _are_plain(made, storages) or not call.storages.isdisjoint(storages):
        return None
    recipe = Recipe(call, made)
    for result, storage in zip(made, storages, strict=True):
        if storage:
            shim.mark(result, _PASS.choice, recipe, 0)
    return recipe


def _are_plain(made: Sequence[torch.Tensor], storages: Sequence[int]) -> bool:
    """Whether results have plain memory, as far as any: in evaluation a batch norm's others not."""
    pairs = zip(made, storages, strict=True)
    return any(storages) and all(storage or not result.numel() for result, storage in pairs)


def _mark_swapped(choice: Choice, func: Operator, operands: object, results: object) -> None:
    shim = get_runtime().shim
    # What is changed in place counts it later; a view does not yet have its tensor's count.
    effects = effects_of(func)
    is_view = not effects.can_keep and not effects.declares_writes
    changes = 1 if effects.declares_writes else 0
    marked = tree_leaves(results)
    if is_view:
        storages = {shim.storage_of(result) for result in marked if torch.is_tensor(result)}
        marked = [
            leaf
            for leaf in tree_leaves(operands)
            if torch.is_tensor(leaf) and shim.storage_of(leaf) in storages
        ]
    for result in marked:
        if torch.is_tensor(result):
            shim.mark(result, choice, None, changes)


@contextlib.contextmanager
@untraced
def mark_operators(rows: OperatorRows) -> Iterator[None]:
    """See and mark the operators of a module that begins, unless others decide what is kept."""
    if not _may_mark():
        yield
        return
    shim = get_runtime().shim
    with carrying():
        watch = _Watch(rows)
        shim.watch(True)  # noqa: FBT003 - positional only
        _watched.stack.append(watch)
        try:
            with watch:
                yield
        finally:
            _watched.stack.pop()
            shim.watch(False)  # noqa: FBT003


class _Carried(threading.local):
    """The recipes that were made on this thread since the outermost carrier began."""

    def __init__(self) -> None:
        self.recipes: list[weakref.ref[Recipe]] | None = None


_carried = _Carried()


@contextlib.contextmanager
@untraced
def carrying() -> Iterator[None]:
    """Let what is marked inside be found where it is saved: hooks of ours must be there.

    At the end nothing more is found, and a recipe that nobody relies on lets go of its operands.
    """
    if _carried.recipes is not None:
        with _seeing():
            yield
        return
    _carried.recipes = []
    try:
        with _seeing():
            yield
    finally:
        recipes, _carried.recipes = _carried.recipes, None
        for reference in recipes:
            recipe = reference()
            if recipe is not None:
                recipe.forget()


def _seeing() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if innermost() is not None or is_foreign() else _PASS


def _may_mark() -> bool:
    """Whether what is saved now meets our hooks, and was not saved before: no recomputation."""
    return torch.is_grad_enabled() and _graph_task() == -1 and not is_foreign()
