"""Pickles that load where swapkit is not installed."""

from __future__ import annotations

import pydoc
from typing import Any


class PickledCall:
    """Pickles as a call, so that loading makes the call instead of this object.

    Built from functions of the standard library alone, the pickle uses swapkit if it is installed,
    and loads without it otherwise.
    """

    def __init__(self, function: Any, *arguments: Any) -> None:  # noqa: ANN401 - whatever pickles
        self._function = function
        self._arguments = arguments

    def __call__(self) -> None:
        """Raise; exists because `pickle` requires a callable in place of a function."""
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._function, self._arguments


def loader(module: str, name: str) -> PickledCall:
    """Return an object that loads as a function of ours, which takes a hashable key and a value.

    If swapkit cannot be imported, the object loads as a function that returns the value.
    """
    # `{}.get(key, value)` is the value; `locate` returns None for a missing module.
    return PickledCall(
        getattr, PickledCall(pydoc.locate, module), name, PickledCall(getattr, {}, "get")
    )
