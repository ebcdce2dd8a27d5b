"""Pickles that load where swapkit is not installed."""

from __future__ import annotations

import pydoc
from typing import Any


class PickledCall:
    """Pickles as a call, so that loading makes the call instead of this object.

    With functions of the standard library alone this says: import ours if it is there, else do
    without.
    """

    def __init__(self, function: Any, *arguments: Any) -> None:  # noqa: ANN401 - whatever pickles
        self._function = function
        self._arguments = arguments

    def __call__(self) -> None:
        """Not to be called: `pickle` asks of what stands for a function that it could be."""
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._function, self._arguments


def loader(module: str, name: str) -> PickledCall:
    """Return what loads as a function of ours, of a hashable key and a value.

    Where swapkit cannot be imported, it loads as a function that returns the value.
    """
    # `{}.get(key, value)` is the value; `locate` returns None for a module that is not there.
    return PickledCall(
        getattr, PickledCall(pydoc.locate, module), name, PickledCall(getattr, {}, "get")
    )
