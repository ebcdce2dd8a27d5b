r"""Finding the modules and operators of a layer that a pattern names.

A pattern is split into components at each backslash that is followed by a dot; a bare dot separates
nothing. Each component is a regular expression that must match a whole name. All but the last one
match modules, from the layer downwards, one level each. The last one matches operators of the
module reached, in alphabetical order, and then its direct submodules, in the order of their
declaration. A pattern that matches nothing is no error.

Source:
    MindFormers, `LayerSetting`: `set_pattern_recompute`. There the last component is also tried on
    all attributes of the Python object, which makes `.*` fail.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from swapkit.errors import InvalidPattern

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

SEPARATOR = r"\."


class LayerModule(Protocol):
    """A layer, or a module inside it. Parts that stand for one module are equal and hash alike."""

    @property
    def operators(self) -> Sequence[str]:
        """The names of the operators that the module itself calls, in any order."""
        ...

    @property
    def children(self) -> Sequence[tuple[str, LayerModule]]:
        """Its direct submodules and their names, in the order of their declaration."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A module that a pattern names, or an operator inside a module."""

    path: tuple[str, ...]  # from the layer, the operator included
    part: LayerModule  # the module, or the module that calls the operator
    operator: str | None = None

    def __str__(self) -> str:
        return ".".join(self.path)


def find(pattern: str, layer: LayerModule) -> list[Match]:
    r"""Return what a pattern names inside a layer, each module and operator once.

    Args:
        pattern: such as `feed_forward\.w[13]\.matmul`.
        layer: where the first component looks.

    Returns:
        The matches; of several names of one module the first one that matches counts.

    Raises:
        InvalidPattern: a component is no regular expression.
    """
    components = []
    for component in pattern.split(SEPARATOR):
        try:
            components.append(re.compile(component))
        except re.error as error:
            raise _no_expression(pattern, component, error) from error
    return distinct(_walk(components, layer, ()))


def distinct(matches: Iterable[Match]) -> list[Match]:
    """Return the first match of each module and of each operator."""
    first: dict[tuple[LayerModule, str | None], Match] = {}
    for match in matches:
        first.setdefault((match.part, match.operator), match)
    return list(first.values())


def name_last(matches: Iterable[Match]) -> list[str]:
    """Return the paths of matches as the original logs them: of one parent's only the last."""
    parents = itertools.groupby(matches, key=lambda match: match.path[:-1])
    return [str(list(group)[-1]) for _, group in parents]


def is_alike(pattern: str, other: str) -> bool:
    """Say whether two patterns of one length match each other, component by component, either way.

    Raises:
        InvalidPattern: a component is no regular expression.
    """
    ours, theirs = pattern.split(SEPARATOR), other.split(SEPARATOR)
    return len(ours) == len(theirs) and all(
        _matches(pattern, mine, yours) or _matches(other, yours, mine)
        for mine, yours in zip(ours, theirs, strict=True)
    )


def _walk(
    components: Sequence[re.Pattern[str]], part: LayerModule, path: tuple[str, ...]
) -> Iterator[Match]:
    first, *others = components
    children = [(name, child) for name, child in part.children if first.fullmatch(name)]
    if others:
        for name, child in children:
            yield from _walk(others, child, (*path, name))
        return
    for operator in sorted(part.operators):
        if first.fullmatch(operator):
            yield Match(path=(*path, operator), part=part, operator=operator)
    for name, child in children:
        yield Match(path=(*path, name), part=child)


def _matches(pattern: str, component: str, text: str) -> bool:
    try:
        return re.fullmatch(component, text) is not None
    except re.error as error:
        raise _no_expression(pattern, component, error) from error


def _no_expression(pattern: str, component: str, error: re.error) -> InvalidPattern:
    return InvalidPattern(
        f"The pattern {pattern!r}: {component!r} is no regular expression ({error}); "
        rf"give one for each level of the module, separated by {SEPARATOR!r}"
    )
