r"""Finding the modules and operators of a layer that match a pattern.

A pattern is split into components at each backslash that is followed by a dot; a bare dot is not a
separator. Doubled backslashes count once, since no name has a backslash: MindFormers' documents
print them doubled. Each component is a regular expression that must match a whole name. All but the
last one match modules, one level each, starting at the layer. The last one matches operators of the
module reached, in alphabetical order, and then its direct submodules, in the order of declaration.
A pattern that matches nothing is not an error.

Source:
    MindFormers, `LayerSetting`: `set_pattern_recompute`. It also tries the last component on all
    attributes of the Python object, which makes `.*` fail.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from swapkit.errors import InvalidPattern
from swapkit.texts import PATTERN_ERRORS

SEPARATOR = r"\."


class LayerModule(Protocol):
    """A layer, or a module inside it. Parts that stand for one module are equal and hash alike."""

    @property
    def operators(self) -> Sequence[str]:
        """The names of the operators that the module itself calls, in any order."""

    @property
    def children(self) -> Sequence[tuple[str, LayerModule]]:
        """The names of the direct submodules and the submodules, in the order of declaration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A module that a pattern matches, or an operator inside a module."""

    path: tuple[str, ...]  # from the layer, including the operator
    part: LayerModule  # the module, or the module that calls the operator
    operator: str | None = None

    def __str__(self) -> str:
        return ".".join(self.path)


def find(pattern: str, layer: LayerModule) -> list[Match]:
    r"""Return the matches of a pattern inside a layer, each module and operator once.

    Args:
        pattern: such as `feed_forward\.w[13]\.matmul`.
        layer: the layer in which the first component is looked up.

    Returns:
        The matches; a module with several matching names has the path of the first.

    Raises:
        InvalidPattern: a component is not a valid regular expression.
    """
    components = [_compile(pattern, component) for component in _split(pattern)]
    return distinct(_walk(components, layer, ()))


def distinct(matches: Iterable[Match]) -> list[Match]:
    """Return the first match of each module and of each operator."""
    first: dict[tuple[LayerModule, str | None], Match] = {}
    for match in matches:
        first.setdefault((match.part, match.operator), match)
    return list(first.values())


def name_last(matches: Iterable[Match]) -> list[str]:
    """Return the paths of matches as MindFormers logs them: per parent, only the last."""
    parents = itertools.groupby(matches, key=lambda match: match.path[:-1])
    return [str(list(group)[-1]) for _, group in parents]


def is_alike(pattern: str, other: str) -> bool:
    """Return whether each pair of components matches, in either direction, at equal length.

    Raises:
        InvalidPattern: a component is not a valid regular expression.
    """
    ours, theirs = _split(pattern), _split(other)
    return len(ours) == len(theirs) and all(
        _compile(pattern, mine).fullmatch(yours) or _compile(other, yours).fullmatch(mine)
        for mine, yours in zip(ours, theirs, strict=True)
    )


def _split(pattern: str) -> list[str]:
    return pattern.replace(r"\\", "\\").split(SEPARATOR)


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


def _compile(pattern: str, component: str) -> re.Pattern[str]:
    try:
        return re.compile(component)
    except PATTERN_ERRORS as error:
        raise InvalidPattern(
            f"The pattern {pattern!r}: {component!r} is not a valid regular expression "
            rf"({error}); give one for each level of the module, separated by {SEPARATOR!r}"
        ) from error
