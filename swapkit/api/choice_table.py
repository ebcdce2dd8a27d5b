"""`choices`: the choices for a model, their sources, and whether they hold."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from swapkit._runtime.execution.planned_recomputation import PlannedRepetition, repetition_of
from swapkit._runtime.model.tracker import gather_parts
from swapkit._runtime.recompute.captured import why_twice
from swapkit._runtime.user_choices.operator_choices import OperatorRuns
from swapkit._runtime.user_choices.part import Part
from swapkit._runtime.user_choices.wrapping import (
    carry_marks,
    chosen_functions,
    end_part,
    make_part,
    operator_part,
    part_of,
)
from swapkit.api.targets import compile_pattern
from swapkit.errors import InvalidArgument
from swapkit.registry import Choice, Recompute, Source, Verdict, judge
from swapkit.reporting.text import format_table

HEADINGS = ("where", "what", "by", "holds")
MODEL = "(model)"  # shown for the model itself


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRow:
    """One choice for one part of a model."""

    where: str  # path of the module, plus the operator inside it if any
    what: str
    by: str  # "decorator", "pattern", "configuration", "flags", "planner"
    holds: bool
    reason: str = ""  # why it does not hold
    twice: str = ""  # why a recomputed part runs twice, as in torch's checkpoint
    operators: int | None = None  # operators it applied to so far; None: it is for a module


class Choices(Sequence[ChosenRow]):
    """A snapshot of the choices for a model or for functions. Prints as a table."""

    def __init__(self, model: torch.nn.Module | None, functions: Iterable[Any] = ()) -> None:
        self._model = model
        self._title = "functions" if model is None else type(model).__name__
        self._rows: list[tuple[ChosenRow, Any, Choice]] = []  # row, its module or function, choice
        if model is not None:
            self._add_modules(model)
        wanted = {id(function) for function in functions}
        for function, part in chosen_functions():
            if id(function) in wanted:
                name = getattr(function, "__qualname__", repr(function))
                rows = _rows_of(name, part, None, None, inspect.unwrap(function))
                self._rows += [(row, function, choice) for row, choice in rows]

    def _add_modules(self, model: torch.nn.Module) -> None:
        recomputed: list[str] = []  # paths of the enclosing regions, outermost first
        for path, module in model.named_modules():
            recomputed = [other for other in recomputed if _is_inside(path, other)]
            part, repetition = part_of(module), repetition_of(module)
            around = recomputed[-1] if recomputed else None
            rows = _rows_of(path, part, repetition, around, module)
            self._rows += [(row, module, choice) for row, choice in rows]
            if part is not None and part.judgement.recompute is not None:
                recomputed.append(path)

    @overload
    def __getitem__(self, index: int) -> ChosenRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[ChosenRow]: ...
    def __getitem__(self, index: int | slice) -> ChosenRow | list[ChosenRow]:
        rows = [row for row, _, _ in self._rows]
        return rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def remove(self, pattern: str = ".*", *, by: str | None = None) -> int:
        """Remove choices; their parts run as if the choices had never been made.

        Autograd graphs recorded under them keep working.

        Args:
            pattern: a regular expression that must match the row's whole `where`.
            by: remove only choices of this source, such as `"configuration"`.

        Returns:
            The number of removed choices.

        Raises:
            InvalidArgument: the pattern is not a valid regular expression, or `by` is not a source.
        """
        sources = [source.value for source in Source]
        if by is not None and by not in sources:
            raise InvalidArgument(f"by={by!r}: expected one of {', '.join(sources)}")
        compiled = compile_pattern(pattern)
        kept, removed = [], 0
        for entry in self._rows:
            row, module, choice = entry
            if not compiled.fullmatch(row.where) or by not in (None, row.by):
                kept.append(entry)
                continue
            _take_back(module, choice)
            removed += 1
        self._rows = kept
        if self._model is not None:
            carry_marks(self._model)
        return removed

    def __str__(self) -> str:
        if not self._rows:
            return f"no choices for {self._title}"
        cells = [(row.where, row.what, row.by, _holding(row)) for row in self]
        return format_table(HEADINGS, cells)

    __repr__ = __str__


def choices(target: Any = None) -> Choices:  # noqa: ANN401 - a module or a function
    """Return the choices for a model and its submodules, their sources, and whether they hold.

    Args:
        target: a module or module class, or a function or `autograd.Function` that has choices; a
            list of a model's parts: their paths begin with the part's number (`0.layers.1`); None:
            all functions that have choices, including the `forward` of module classes.

    Returns:
        A sequence of rows with `where`, `what`, `by`, `holds`, `reason`, `twice`. It prints as a
        table; its `remove()` removes choices.

    Raises:
        InvalidArgument: `target` is none of these.

    Example:
        >>> import swapkit, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
        >>> model = swapkit.offload(model, r"0", prefetch=2)
        >>> print(swapkit.choices(model))
        where  what                      by       holds
        0      swap to host, prefetch 2  pattern  yes
    """
    if isinstance(target, (torch.nn.Module, list, tuple)):
        return Choices(gather_parts(target))
    if target is None:
        return Choices(None, [function for function, _ in chosen_functions()])
    if isinstance(target, type) and issubclass(target, torch.nn.Module):
        return Choices(None, [target.forward])
    is_function = isinstance(target, type) and issubclass(target, torch.autograd.Function)
    if not is_function and (isinstance(target, type) or not callable(target)):
        raise InvalidArgument(
            "choices: expected a torch.nn.Module, function or torch.autograd.Function, got "
            f"{target!r}"
        )
    return Choices(None, [target])


def _take_back(owner: Any, choice: Choice) -> None:  # noqa: ANN401 - a module or a function
    """Remove a choice from its module or function."""
    if not isinstance(owner, torch.nn.Module):
        part = operator_part(owner)
        if part is not None:
            part.remove(choice)
    elif choice.source is Source.PLANNER:
        repetition = repetition_of(owner)
        if repetition is not None:
            repetition.remove(choice)
    else:
        make_part(owner).remove(choice)
        end_part(owner)


def _rows_of(
    path: str,
    part: Part | None,
    repetition: PlannedRepetition | None,
    around: str | None,
    owner: object,
) -> Iterator[tuple[ChosenRow, Choice]]:
    """Yield the rows for the choices of a module or function (`owner`), each with its choice.

    `around`: path of the recomputed region that encloses it, if any.
    """
    counted = _count_operators(part, repetition)
    verdicts = _judge_each([choice for choice, _ in counted])
    inside = around if part is None or part.judgement.recompute is None else path
    for choice, count in counted:
        region = inside if choice.operator else around
        reason = verdicts[id(choice)].reason or _why_void(choice, region, count)
        shown = ChosenRow(
            where=".".join(filter(None, (path, choice.operator))) or MODEL,
            what=str(choice.what),
            by=choice.source.value,
            holds=not reason,
            reason=reason,
            twice="" if reason else _why_twice(choice, owner),
            operators=_count_held(count),
        )
        yield shown, choice


def _count_operators(
    part: Part | None, repetition: PlannedRepetition | None
) -> list[tuple[Choice, OperatorRuns | int | None]]:
    """Return the choices of users and of a plan, each with its count of operators so far."""
    counted: list[tuple[Choice, OperatorRuns | int | None]] = []
    if part is not None:
        counted += [(choice, part.count_of(choice)) for choice in part.choices]
    if repetition is not None:
        counted += [(choice, repetition.count_of(choice)) for choice in repetition.choices]
    return counted


def _why_twice(choice: Choice, owner: object) -> str:
    """Return why a recomputed part runs twice; empty: it does not, as far as is known."""
    if not isinstance(choice.what, Recompute) or choice.operator:
        return ""
    return why_twice(choice.what, owner)


def _why_void(choice: Choice, region: str | None, count: OperatorRuns | int | None) -> str:
    """Return why a choice has no effect in its region, or for any run; empty: it has one."""
    is_of_region = choice.what.kind == "swap" or (
        choice.operator and choice.what.kind == "recompute"
    )
    if region is not None and is_of_region:
        return f"{region or MODEL} is recomputed"
    is_void = isinstance(count, OperatorRuns) and count.all > 0 and count.held == 0
    return "a recomputed operator needs its results" if is_void else ""


def _count_held(count: OperatorRuns | int | None) -> int | None:
    return count.held if isinstance(count, OperatorRuns) else count


def _judge_each(choices: Sequence[Choice]) -> dict[int, Verdict]:
    """Return the verdict on each choice, by its id; each operator's choices are judged apart."""
    groups: dict[str, list[Choice]] = {}
    for choice in choices:
        groups.setdefault(choice.operator, []).append(choice)
    return {
        id(verdict.choice): verdict
        for group in groups.values()
        for verdict in judge(group).verdicts
    }


def _is_inside(path: str, region: str) -> bool:
    return region == "" or path.startswith(region + ".")


def _holding(row: ChosenRow) -> str:
    if not row.holds:
        return f"no: {row.reason}"
    if row.twice:
        return f"yes, by running twice: {row.twice}"
    return "yes" if row.operators is None else f"yes, {row.operators} operators so far"
