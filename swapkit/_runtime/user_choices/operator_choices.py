"""Choices for single operators inside a module.

While such a module runs, its thread has a table of the choices per operator
(`shim/cpp/recompute/operator_choices.hpp`), which the operators' kernels look up. The result of a
chosen operator is either marked, so that it is swapped wherever it is saved, or captured, so that
it is recomputed in backward. The operators of a module are those that its own `forward` runs, not
those of its submodules.
"""

from __future__ import annotations

import contextlib
import re
from array import array
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from swapkit._runtime.operators.names import Operator, operator_names
from swapkit._runtime.process.captures import places_of
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.process.scopes import OpenScope, Scope
from swapkit._runtime.saved.hooks import innermost, is_foreign
from swapkit._runtime.shim.types import OperatorChoices, Placement, placement_of
from swapkit._runtime.thread_state import thread_state
from swapkit._runtime.torch_compat.dispatch_modes import has_foreign_mode
from swapkit._runtime.torch_compat.internals import graph_task
from swapkit._runtime.torch_compat.isolation import make_fork_lock, untraced
from swapkit.ir.plans import Action
from swapkit.registry import Choice, Judgement, judge

_PASS = Scope(Placement(Action.PASS))
_lock = make_fork_lock()  # held while a table is made


class OperatorRuns(NamedTuple):
    """Numbers of operators that ran."""

    all: int
    held: int  # those whose choice is not void because a recomputed operator needs their results

    def add(self, other: OperatorRuns) -> OperatorRuns:
        """Return the sums."""
        return OperatorRuns(self.all + other.all, self.held + other.held)


_NO_RUNS = OperatorRuns(0, 0)


class ChosenOperators:
    """The choices for the operators of one module, and the judgement for each operator."""

    def __init__(self, choices: tuple[Choice, ...]) -> None:
        self.choices = choices
        self._patterns = tuple(choice.meaning or choice.operator for choice in choices)
        self._compiled = [re.compile(pattern) for pattern in self._patterns]
        self._table: _OperatorTable | None = None
        self._counts = dict.fromkeys(choices, _NO_RUNS)  # without those of the current table

    @property
    def seen(self) -> dict[Choice, int]:
        """How many operators ran, by choice."""
        return {choice: runs.all for choice, runs in self.runs().items()}

    def runs(self) -> dict[Choice, OperatorRuns]:
        """Return how many operators ran, by choice."""
        counts = dict(self._counts)
        if self._table is not None:
            self._table.add_counts(counts)
        return counts

    def table(self) -> OperatorChoices:
        """Return the shim's table for all operators known now. The shim sees these from now on."""
        known = get_runtime().shim.operators_known()
        with _lock:
            if self._table is None or self._table.known != known:
                self._counts = self.runs()
                self._table = _OperatorTable(self.choices, self._patterns, known)
            return self._table.made

    def judged(self, function: Operator) -> Judgement | None:
        """Return the judgement for an operator; None: no choice is for it."""
        choices = self._match(operator_names(function))
        return judge(choices) if choices else None

    def find_name(self, name: str) -> tuple[Choice, ...]:
        """Return and count the choices for an `autograd.Function` that runs now, by its name."""
        found = self._match((name,))
        for choice in found:
            self._counts[choice] = self._counts[choice].add(OperatorRuns(1, 1))
        return tuple(replace(choice, operator="") for choice in found)

    def _match(self, names: tuple[str, ...]) -> list[Choice]:
        """Return the choices whose pattern matches one of these names."""
        return [
            choice
            for choice, pattern in zip(self.choices, self._compiled, strict=True)
            if any(pattern.fullmatch(name) for name in names)
        ]


class _OperatorTable:
    """The shim's table of one module's choices, for the operators known at one time."""

    def __init__(self, choices: tuple[Choice, ...], patterns: tuple[str, ...], known: int) -> None:
        self.known = known
        # Operators with the same set of choices are judged together: there are few sets (kinds).
        kinds, places = _kinds_of(patterns, known)
        self._choices = [[choices[index] for index in kind] for kind in kinds]
        self.made = get_runtime().shim.choices(
            tuple(_terms_of(judge(each)) for each in self._choices), places
        )

    def add_counts(self, counts: dict[Choice, OperatorRuns]) -> None:
        """Add the number of operators that ran to the counts by choice."""
        for choices, runs in zip(self._choices, self.made.seen(), strict=True):
            for choice in choices:
                counts[choice] = counts[choice].add(OperatorRuns(*runs))


def _kinds_of(patterns: tuple[str, ...], known: int) -> tuple[list[tuple[int, ...]], bytes]:
    """Return the sets of patterns that operators match, and a table of pairs (operator, set)."""
    indices: dict[int, tuple[int, ...]] = {}
    for index, pattern in enumerate(patterns):
        for number in places_of(pattern, known):
            indices[number] = (*indices.get(number, ()), index)
    kinds = list(dict.fromkeys(indices.values()))
    numbers = {kind: number for number, kind in enumerate(kinds)}
    table = array("q")
    for operator, kind in indices.items():
        table.extend((operator, numbers[kind]))
    return kinds, table.tobytes()


def _terms_of(judgement: Judgement) -> tuple[bool, Placement | None]:
    """Return whether operators are recomputed, and how their results move, if they do."""
    swap = judgement.swap
    placement = None if swap is None else placement_of(swap, judgement.swap_source)
    return judgement.recompute is not None, placement


def choices_for_operator(name: str) -> tuple[Choice, ...]:
    """Return the choices for an operator's name in the module that runs on this thread."""
    choices, choosing = (
        thread_state.operator_choices[-1] if thread_state.operator_choices else (None, None)
    )
    is_on = choices is not None and choosing is not None and choosing.runs()
    return choices.find_name(name) if is_on and choices is not None else ()


@contextlib.contextmanager
@untraced
def mark_operators(choices: ChosenOperators) -> Iterator[None]:
    """Apply the choices to a module that begins, unless foreign hooks decide what is saved."""
    if not _may_mark():
        yield
        return
    with carrying():
        runtime = get_runtime()
        choosing = runtime.shim.choosing(choices.table(), runtime.tracker, not has_foreign_mode())
        entry = choices, choosing
        stack = thread_state.operator_choices  # another thread may close this generator
        stack.append(entry)
        try:
            with choosing:
                yield
        finally:
            stack.remove(entry)


@contextlib.contextmanager
@untraced
def carrying() -> Iterator[None]:
    """Make chosen results found where they are saved; our hooks are entered if needed.

    At the end of the outermost context nothing is found any more, and captured results that were
    not saved release their operands.
    """
    runtime = get_runtime()
    with runtime.shim.choosing(None, runtime.tracker, False), _seeing():  # noqa: FBT003
        yield


def _seeing() -> contextlib.AbstractContextManager[object]:
    if innermost() is not None or is_foreign():
        return contextlib.nullcontext()
    return OpenScope(_PASS)  # it may end on another thread, as the generator may


def _may_mark() -> bool:
    """Return whether saved tensors meet our hooks here, and this is no recomputation."""
    return torch.is_grad_enabled() and graph_task() == -1 and not is_foreign()
