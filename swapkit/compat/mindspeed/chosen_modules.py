"""`swap_activation_modules`, `recompute_modules`, and MindSpeed's patterns for modules."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from swapkit._runtime.model.tracker import runs
from swapkit._runtime.user_choices.wrapping import make_part
from swapkit.config.environment import read_environment
from swapkit.errors import InvalidArgument
from swapkit.registry import Choice, Recompute, Source, Swap
from swapkit.texts import get_logger

if TYPE_CHECKING:
    import torch

    from swapkit._runtime.user_choices.part import Part

# ---- module patterns -----------------------------------------------------------------------------
#
# MindSpeed's patterns for paths of modules.
#
# `*` matches any text, dots included; `?` one character; `{*}` a number; `{a-b}` a number from a to
# b. All other characters match themselves, and a pattern matches whole paths only.
#
# Source:
#   MindSpeed, `fsdp/utils/str_match.py`: the meaning of the patterns.

_PARTS = re.compile(r"(?P<any>\*)|(?P<one>\?)|\{(?P<braces>[^}]*)\}|(?P<text>.)", re.DOTALL)
_RANGE = re.compile(r"(\d{1,18})-(\d{1,18})")  # no digits that `int` would refuse


class ModulePattern(NamedTuple):
    """A compiled pattern, with the range of each number in it; None: any number."""

    expression: re.Pattern[str]
    ranges: tuple[tuple[int, int] | None, ...]

    def matches(self, path: str) -> bool:
        """Return whether the whole path matches."""
        match = self.expression.fullmatch(path)
        return match is not None and all(
            limits is None or limits[0] <= int(number) <= limits[1]
            for number, limits in zip(match.groups(), self.ranges, strict=True)
        )


def compile_pattern(pattern: str) -> ModulePattern:
    """Return a compiled pattern.

    Raises:
        InvalidArgument: braces hold neither `*` nor a range such as `0-3`.

    Example:
        >>> compile_pattern("model.layers.{0-3}.mlp").matches("model.layers.2.mlp")
        True
    """
    expression, ranges = [], []
    for part in _PARTS.finditer(pattern):
        if part["any"]:
            expression.append(".*")
        elif part["one"]:
            expression.append(".")
        elif part["braces"] is not None:
            expression.append(r"(\d{1,18})")
            ranges.append(_parse_range(pattern, part["braces"]))
        else:
            expression.append(re.escape(part["text"]))
    return ModulePattern(re.compile("".join(expression), re.DOTALL), tuple(ranges))


def _parse_range(pattern: str, text: str) -> tuple[int, int] | None:
    if text == "*":
        return None
    match = _RANGE.fullmatch(text)
    if match is None or int(match[1]) > int(match[2]):
        raise InvalidArgument(
            f"pattern {pattern!r}: {{{text}}} is neither {{*}} nor a range such as {{0-3}}"
        )
    return int(match[1]), int(match[2])


def find_modules(
    model: torch.nn.Module, plan: Iterable[str]
) -> tuple[dict[str, torch.nn.Module], list[str]]:
    """Return the modules that a plan names, by path, and the patterns that match none.

    Args:
        model: the model; its own path is empty.
        plan: patterns of paths.

    Raises:
        InvalidArgument: `plan` is not a list of patterns, or a pattern is malformed.
    """
    if isinstance(plan, str) or not isinstance(plan, Iterable):
        raise InvalidArgument(f"plan={plan!r}: expected a list of patterns, e.g. ['layers.{{*}}']")
    patterns = {str(each): compile_pattern(str(each)) for each in plan}
    paths = dict(model.named_modules())
    found = {path: module for path, module in paths.items() if
             any(each.matches(path) for each in patterns.values())}  # fmt: skip
    unmatched = [
        text for text, each in patterns.items() if not any(each.matches(path) for path in paths)
    ]
    return found, unmatched


# ---- chosen modules ------------------------------------------------------------------------------
#
# `swap_activation_modules`, `recompute_modules`: choices for the modules that a plan names.
#
# Source:
#   MindSpeed, `fsdp/memory`: names, arguments and patterns.

_log = get_logger(__name__)
_Model = TypeVar("_Model", bound="torch.nn.Module")


def swap_activation_modules(model: _Model, plan: Iterable[str]) -> _Model:
    """Swap the activations of the modules that a plan names.

    Same as `swapkit.offload` for each module: the tensors that it saves for backward move to the
    host and back. (In MindSpeed only the first input moves.) If a module is recomputed, its inputs
    are all that it saves, so these move: see `swap_inputs` of `swapkit.checkpoint`.

    Args:
        model: the model.
        plan: patterns of module paths: `*` is any text, `?` a character, `{*}` a number, `{a-b}` a
            number from a to b. A pattern that matches nothing is logged.

    Returns:
        The model.

    Raises:
        InvalidArgument: `plan` is not a list of patterns, or a pattern is malformed.
    """
    found, unmatched = find_modules(model, plan)
    for pattern in unmatched:
        _log.warning(
            "no module of %s matches %r: nothing is swapped", type(model).__name__, pattern
        )
    for part in _parts_of(found):
        recompute = part.judgement.recompute
        swap = Swap(min_bytes=read_environment().min_swap_bytes)
        what = swap if recompute is None else replace(recompute, swap_inputs=True)
        part.add(Choice(source=Source.PATTERN, what=what))
    return model


def recompute_modules(model: _Model, plan: Iterable[str]) -> _Model:
    """Recompute the modules that a plan names in backward.

    Same as `swapkit.checkpoint` for each module. If a module's activations are swapped, too, its
    inputs move to the host. Unlike in MindSpeed, `past_key_values` is passed on unchanged.

    Args:
        model: the model.
        plan: patterns of module paths; see `swap_activation_modules`.

    Returns:
        The model.

    Raises:
        InvalidArgument: nothing matches, `plan` is not a list of patterns, or a pattern is
            malformed.
    """
    found, _ = find_modules(model, plan)
    parts = _parts_of(found)
    if not parts:
        raise InvalidArgument(
            f"plan={list(plan)!r} matches no module of {type(model).__name__} that has a forward"
        )
    for part in parts:
        what = Recompute(swap_inputs=part.judgement.swap is not None)
        part.add(Choice(source=Source.PATTERN, what=what))
    return model


def _parts_of(modules: dict[str, torch.nn.Module]) -> list[Part]:
    """Return the parts of modules; a list of modules never runs, so it has none."""
    for path in modules:
        _log.info("choosing for module %r", path)
    return [make_part(module) for module in modules.values() if runs(module)]
