"""MindSpeed's patterns for paths of modules.

`*` matches any text, dots included; `?` one character; `{*}` a number; `{a-b}` a number from a to
b. All other characters match themselves, and a pattern matches whole paths only.

Source:
    MindSpeed, `fsdp/utils/str_match.py`: the meaning of the patterns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from swapkit.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

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
