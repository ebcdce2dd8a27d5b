"""A part of a model with the user's choices for it, and how it runs.

A *part* is a module, a module class or a function, together with its choices. Its `forward`
runs as the choices say: in a scope, as a recomputed region, or with its operators seen. The choices
live on the part itself, so they are copied, pickled and freed with it.

The choices of a plan are not here: a session does not change the user's objects
(`execution/planned_recomputation.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from swapkit._runtime.model.global_hooks import AnnouncedCall
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.process.scopes import Scope, default_placement, innermost_placement
from swapkit._runtime.recompute.regions import run_region
from swapkit._runtime.recompute.watchers.exclusions import KeepInside
from swapkit._runtime.shim.types import Placement, placement_of
from swapkit._runtime.torch_compat.internals import pytree
from swapkit._runtime.torch_compat.isolation import untraced, untraced_itself
from swapkit._runtime.user_choices.operator_choices import (
    ChosenOperators,
    OperatorRuns,
    carrying,
    mark_operators,
)
from swapkit.config.environment import read_environment
from swapkit.ir.plans import Action
from swapkit.registry import Choice, judge

_KEEP = Scope(Placement(Action.KEEP))
_NOTHING = contextlib.nullcontext()


class _Changes:
    """Counts added and removed choices, for code that caches a result of all choices."""

    count = 0


def changes() -> int:
    """Return a number that differs after each change of a choice."""
    return _Changes.count


class Part:
    """The choices of one part, and how it runs because of them."""

    def __init__(self, choices: Iterable[Choice] = ()) -> None:
        self._set(tuple(choices))
        self.is_carrier = False  # marked results of operators inside are found wherever saved

    def _set(self, choices: tuple[Choice, ...]) -> None:
        _Changes.count += 1
        self.choices = choices
        own = tuple(choice for choice in choices if not choice.operator)
        inside = tuple(choice for choice in choices if choice.operator)
        self.is_whole = bool(own)  # a choice for the whole part, which excludes it from plans
        self.judgement = judge(own)
        self.operators = ChosenOperators(inside) if inside else None
        self._terms = self.judgement.recompute
        if self._terms is not None and self._terms.excluded and self._terms.is_full:
            self._terms = replace(self._terms, policy=KeepInside(operators=self._terms.excluded))
        self._scope: Scope | None = None
        if self.judgement.swap is not None:
            self._scope = Scope(placement_of(self.judgement.swap, self.judgement.swap_source))
        elif self.judgement.keep:
            self._scope = _KEEP

    def add(self, *choices: Choice) -> None:
        """Add choices; they hold from the part's next run on."""
        self._set((*self.choices, *choices))

    def remove(self, choice: Choice) -> None:
        """Remove a choice."""
        self._set(tuple(other for other in self.choices if other is not choice))

    def __getstate__(self) -> tuple[tuple[Choice, ...], bool]:
        return self.choices, self.is_carrier

    def __setstate__(self, state: tuple[tuple[Choice, ...], bool]) -> None:
        choices, self.is_carrier = state
        self._set(choices)

    # ---- running --------------------------------------------------------------------------------

    @untraced_itself
    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # noqa: ANN401
        """Run the part's function as its choices say."""
        if self._terms is not None:
            _void_swaps((args, kwargs))
            with self._inputs_scope():
                return run_region(self._terms, function, args, kwargs)
        # Not an `ExitStack`: a signal handler may raise after a context was entered and before the
        # stack has recorded it.
        scope = _NOTHING if self._scope is None else self._scope.opened()
        with scope, self._running(function), self._marking():
            return function(*args, **kwargs)

    def _running(self, function: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
        """Return a context that reports this call to the scope, if it is a call of a module."""
        module = None if self._scope is None else getattr(function, "__self__", None)
        return AnnouncedCall(module) if isinstance(module, torch.nn.Module) else _NOTHING

    def _marking(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the user's choices for operators inside hold."""
        if self.operators is not None:
            return mark_operators(self.operators)
        return carrying() if self.is_carrier else _NOTHING

    def count_of(self, choice: Choice) -> OperatorRuns | None:
        """Return how many operators ran that a choice is for; None: it is not for operators."""
        return None if self.operators is None else self.operators.runs().get(choice)

    @untraced
    def _inputs_scope(self) -> contextlib.AbstractContextManager[None]:
        """Return the scope for saving a recomputed part's inputs; usually the one around it."""
        around = innermost_placement()
        if self.judgement.keep:
            return _KEEP.opened()
        if self._terms is not None and self._terms.swap_inputs:
            placement = Placement(Action.SWAP, min_bytes=read_environment().min_swap_bytes)
            return Scope(placement).opened()
        is_spared = around is not None and around.spares_regions
        if is_spared:
            return Scope(default_placement(get_runtime().current_swapper())).opened()
        return _NOTHING


@untraced
def _void_swaps(inputs: object) -> None:
    """Keep a recomputed part's inputs on the device if only a choice for an operator moves them."""
    shim = get_runtime().shim
    if shim.has_marks():
        shim.void_swaps([leaf for leaf in pytree.tree_leaves(inputs) if torch.is_tensor(leaf)])
