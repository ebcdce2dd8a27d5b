"""Targets of choices: modules, module classes, functions, and submodules that match a pattern."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

import torch

from swapkit._runtime.model.tracker import gather_parts, parts_of, runs
from swapkit._runtime.user_choices.wrapping import (
    is_suspended,
    make_function,
    make_operator,
    make_part,
)
from swapkit.errors import InvalidArgument
from swapkit.registry import Choice, Source, What
from swapkit.texts import PATTERN_ERRORS, printable
from swapkit.units import show

NAMES_SHOWN = 8  # module paths in the error when a pattern matches none


def choose(target: Any, what: What) -> Any:  # noqa: ANN401 - typed by the callers
    """Make a choice for a part; return the part, or the function that replaces it.

    Raises:
        InvalidArgument: no choice is possible for `target`, or it never runs itself.
    """
    if isinstance(target, (list, tuple)):
        for part in parts_of(_gather(target)):
            _choose_one(part, what)
        return target
    return _choose_one(target, what)


def _choose_one(target: Any, what: What) -> Any:  # noqa: ANN401 - as `choose`
    choice = Choice(source=Source.DECORATOR, what=what)
    if isinstance(target, torch.nn.Module):
        if not runs(target):
            raise InvalidArgument(f"a {type(target).__name__} has no forward. Pass its elements.")
        make_part(target).add(choice)
        return target
    if isinstance(target, type) and issubclass(target, torch.nn.Module):
        target.forward = _wrap_forward(target, choice)
        return target
    if isinstance(target, type) and issubclass(target, torch.autograd.Function):
        make_operator(target).add(choice)
        return target
    if isinstance(target, _UNBOUND) or (callable(target) and not isinstance(target, type)):
        return _wrap(target, choice)
    raise InvalidArgument(
        f"{target!r}: expected a Module class, a Module, a function, a torch.autograd.Function or, "
        "to swap its states, an optimizer. A list: of a model's parts, or of optimizers"
    )


# Functions in a class body that Python has not bound yet.
_UNBOUND = (classmethod, staticmethod)


def _wrap(function: Any, choice: Choice) -> Any:  # noqa: ANN401 - of the same kind
    if isinstance(function, _UNBOUND):
        return type(function)(_wrap(function.__func__, choice))
    if is_suspended(function):
        raise InvalidArgument(
            f"{show(function)} is a generator or coroutine function: its body runs after the call, "
            "in turns with other code. Choose for the functions that it calls, or use "
            "`with swapkit.offload():` inside, around code that neither yields nor awaits"
        )
    return make_function(function, choice)


def _wrap_forward(kind: type[torch.nn.Module], choice: Choice) -> Any:  # noqa: ANN401 - as in a class
    """Return the `forward` to set on a class: bound to instances exactly as the former one."""
    former = inspect.getattr_static(kind, "forward")
    if isinstance(former, _UNBOUND):
        return _wrap(former, choice)
    if callable(former) and not hasattr(type(former), "__get__"):  # an object that is never bound
        return staticmethod(_wrap(former, choice))
    return _wrap(kind.forward, choice)


def apply(decorator: object, what: What, target: Any, pattern: str | None) -> Any:  # noqa: ANN401
    """Apply `offload`, `keep` or `checkpoint` to a target; without one, return `decorator`.

    Raises:
        InvalidArgument: the target never runs itself, or the pattern matches nothing.
    """
    if target is None:
        if pattern is not None:
            raise InvalidArgument(f"pattern {pattern!r} needs a model whose submodules it matches")
        return decorator
    return choose(target, what) if pattern is None else choose_matching(target, pattern, what)


def choose_matching(model: object, pattern: str, what: What) -> object:
    """Make a choice for the submodules of a model whose whole path matches a pattern.

    Raises:
        InvalidArgument: `model` is not a module, or nothing matches.
    """
    if not isinstance(model, (torch.nn.Module, list, tuple)):
        raise InvalidArgument(f"{model!r}: expected a Module, whose submodules the pattern matches")
    for module in match_modules(_gather(model), pattern):
        make_part(module).add(Choice(source=Source.PATTERN, what=what))
    return model


def _gather(model: torch.nn.Module | Sequence[torch.nn.Module]) -> torch.nn.Module:
    """Return a list of a model's parts as one module."""
    gathered = gather_parts(model)
    assert gathered is not None
    return gathered


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return a compiled regular expression; raises InvalidArgument if the pattern is none."""
    try:
        return re.compile(pattern)
    except PATTERN_ERRORS as error:
        raise InvalidArgument(f"pattern {pattern!r}: {error}") from None


def match_modules(model: torch.nn.Module, pattern: str) -> list[torch.nn.Module]:
    """Return the submodules of a model whose whole path matches a pattern.

    Raises:
        InvalidArgument: the pattern is not a valid regular expression, or matches nothing.
    """
    compiled = compile_pattern(pattern)
    paths = dict(model.named_modules())
    # A `ModuleList` may match, but it never runs, so no choice is made for it.
    matching = {path: module for path, module in paths.items() if path and compiled.fullmatch(path)}
    found = [module for module in matching.values() if runs(module)]
    if matching and not found:
        shown = ", ".join(map(printable, matching))
        raise InvalidArgument(
            f"pattern {pattern!r} matches only {shown}, which have no forward. "
            "Match the modules inside them."
        )
    if not found:
        shown = ", ".join([printable(path) for path in paths if path][:NAMES_SHOWN])
        raise InvalidArgument(
            f"pattern {pattern!r} matches no submodule of {type(model).__name__}; its paths begin "
            f"with: {shown}"
        )
    return found
