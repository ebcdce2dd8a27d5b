"""The operator runs that the shim captures (`shim/cpp/recompute/capturing.hpp`).

The shim sees an operator from the first plan, region or choice that names it. It also sees all
operators that change tensors in place: before a tensor changes, results that would be recomputed
from it are kept.
"""

from __future__ import annotations

import contextlib
import functools
import re
from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from swapkit._runtime.operators.effects import effects_of
from swapkit._runtime.operators.names import matches, names_known
from swapkit._runtime.operators.settings import may_be_random
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.torch_compat.internals import (
    OpOverload,
    all_operator_names,
    has_kernel,
    has_kernel_for,
    schema_of,
)
from swapkit.errors import PlanMismatch

_MOST_RESULTS = 31  # of one operator; if it has more, all of them are recomputed


class Capture(NamedTuple):
    """One run of an operator in forward that a plan repeats in backward."""

    position: int  # the number of events before the run
    name: str
    run: int  # its index among the runs of this name since the latest event
    wanted: tuple[bool, ...]  # for each result, whether it is recomputed
    module: str  # the path of the module that ran it


def capture_table(captures: Iterable[Capture], operators: tuple[str, ...]) -> bytes:
    """Return rows of 64-bit numbers for runs, and see the step's operators from now on.

    Args:
        captures: the runs, in order.
        operators: the names of all operators that run in the step.
    """
    _see_all(operators)
    rows = array("q")
    for each in captures:
        wanted = each.wanted if len(each.wanted) <= _MOST_RESULTS else ()
        results = sum(1 << place for place, is_wanted in enumerate(wanted) if is_wanted)
        rows.extend((each.position, see(each.name), each.run, results, len(wanted)))
    return rows.tobytes()


@functools.lru_cache(maxsize=64)
def _see_all(names: tuple[str, ...]) -> None:
    """See the operators of a step, and all torch operators that change a tensor.

    This includes operators that are not captured: operators that their kernels call must not
    count as runs.
    """
    _see_changes()
    for name in names:
        with contextlib.suppress(PlanMismatch):  # the recorder adds names of its own
            see(name)


@functools.lru_cache(maxsize=1)
def see_everything() -> None:
    """See all operators that can be repeated, and all torch operators that change a tensor."""
    _see_changes()
    for function in _kernels():
        if effects_of(function).may_be_repeatable:
            _see(function)


@functools.lru_cache(maxsize=64)
def numbers_of(names: tuple[object, ...]) -> tuple[int, ...]:
    """See everything; return the numbers of the named operators.

    Raises:
        InvalidArgument: no operator has one of the names.
    """
    see_everything()
    is_named = matches(names)
    return tuple(_see(function) for function in _kernels() if is_named(function))


@functools.lru_cache(maxsize=256)
def places_of(pattern: str, known: int) -> tuple[int, ...]:
    """Return the numbers of the operators whose names match a pattern, and see them.

    Also see all operators that change a tensor. `known`: the shim's number for the current set of
    operators; it changes when an operator is defined.
    """
    _see_changes_of_all(known)
    is_meant = re.compile(pattern).fullmatch
    meant = {each for name, found in names_known(known).items() if is_meant(name) for each in found}
    return tuple(
        _see(function)
        for qualified, overload in sorted(meant)
        if overload  # else it is a higher-order operator
        and _has_kernel(qualified, overload)
        and (function := _find(qualified, overload)) is not None
    )


_BACKENDS = ("CPU", "CUDA", "PrivateUse1")


def _has_kernel(qualified: str, overload: str) -> bool:
    """Return whether an operator has its own kernel and is not just composed of other operators.

    Some operators have both; then the backend's kernel runs.
    """
    name = f"{qualified}.{overload}".removesuffix(".default")
    if not has_kernel(name):
        return False
    is_composite = has_kernel_for(name, "CompositeImplicitAutograd")
    return not is_composite or any(has_kernel_for(name, each) for each in _BACKENDS)


def _find(qualified: str, overload: str) -> OpOverload | None:
    """Return an operator; None: Python cannot call it."""
    namespace, _, base = qualified.partition("::")
    try:
        found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), base), overload)
    except (AttributeError, RuntimeError):
        return None
    return found


def _kernels() -> Iterator[OpOverload]:
    """Yield the operators with their own kernels that are not composed of other operators."""
    for qualified in all_operator_names():
        if not has_kernel(qualified):
            continue
        if not has_kernel_for(qualified, "CompositeImplicitAutograd"):
            namespace, _, name = qualified.partition("::")
            base, _, overload = name.partition(".")
            function = _find(f"{namespace}::{base}", overload or "default")
            if function is not None:
                yield function


@functools.cache
def _see_changes() -> None:
    for qualified in all_operator_names():
        if qualified.startswith("aten::") and has_kernel(qualified):
            name, _, overload = qualified.partition(".")
            function = _find(name, overload or "default")  # torch_npu has kernels without a schema
            if function is not None and effects_of(function).declares_writes:
                _see(function)


@functools.lru_cache(maxsize=1)
def _see_changes_of_all(known: int) -> None:
    """See all operators that change a tensor, custom ones too. `known`: as in `places_of`."""
    _see_changes()
    for qualified, overload in {each for found in names_known(known).values() for each in found}:
        if overload and not qualified.startswith("aten::"):
            function = _find(qualified, overload) if _has_kernel(qualified, overload) else None
            if function is not None and effects_of(function).declares_writes:
                _see(function)


@functools.lru_cache(maxsize=1)
def see_fills(known: int) -> None:
    """See all operators that fill tensors autograd has already saved. `known`: see `places_of`."""
    del known
    for function in _kernels():
        if effects_of(function).fills_saved:
            _see(function)


def see(name: str) -> int:
    """See the runs of an operator from now on; return its number.

    Raises:
        PlanMismatch: torch has no operator of this name.
    """
    return _see(find_operator(name))


@functools.cache
def _see(function: OpOverload) -> int:
    """See an operator. Cached by object, not by name: a custom operator may be redefined."""
    effects = effects_of(function)
    schema = schema_of(function)
    return get_runtime().shim.name_operator(
        function,
        (schema.name, schema.overload_name),
        (
            *(effects.may_be_repeatable, may_be_random(function), effects.fills_saved),
            *(effects.gives_written, effects.reads_written),
        ),
        effects.places(),
    )


def find_operator(name: str) -> OpOverload:
    """Return the operator that a trace names.

    Raises:
        PlanMismatch: torch has no operator of this name.
    """
    namespace, _, rest = name.partition(".")
    base, _, overload = rest.rpartition(".")
    try:
        found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), base), overload)
    except AttributeError:
        raise PlanMismatch(
            f"the plan recomputes with {name}, an operator that this torch does not have"
        ) from None
    return found
