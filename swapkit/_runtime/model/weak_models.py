"""Weak references to a model that may not have been given."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def find_weakly(model: torch.nn.Module | None) -> Callable[[], torch.nn.Module | None]:
    """Return a function that returns the model, or None once the model is gone."""
    return _find_none if model is None else weakref.ref(model)


def _find_none() -> None:
    """Return None: no model was given."""
