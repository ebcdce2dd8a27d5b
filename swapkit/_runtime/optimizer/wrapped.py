"""Unwrapping of the `optimizer` argument: one, several, or a library's wrapper of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from swapkit.errors import InvalidArgument
from swapkit.units import show

if TYPE_CHECKING:
    from collections.abc import Iterator

# Attributes with the wrapped optimizer: accelerate, Lightning, DeepSpeed, apex, fairscale.
_INNER = ("optimizer", "_optimizer", "optim")
_MOST_WRAPPERS = 8


def list_optimizers(given: object) -> tuple[torch.optim.Optimizer, ...]:
    """Return the innermost optimizers in `given`: torch calls the hooks of these.

    Args:
        given: None, an optimizer, something that wraps one, or a list or tuple of these.

    Raises:
        InvalidArgument: `given` contains no optimizer.
    """
    if given is None:
        return ()
    each = given if isinstance(given, (list, tuple)) else (given,)
    found = [_innermost(one, given) for one in each]
    return tuple(dict.fromkeys(found))


def unwrap(optimizer: object) -> Iterator[object]:
    """Yield an optimizer and the objects it wraps, outermost first."""
    current: object | None = optimizer
    for _ in range(_MOST_WRAPPERS):
        if current is None:
            return
        yield current
        held = (vars(current).get(name) for name in _INNER) if hasattr(current, "__dict__") else ()
        current = next((each for each in held if each is not None), None)


def _innermost(one: object, given: object) -> torch.optim.Optimizer:
    found = [each for each in unwrap(one) if isinstance(each, torch.optim.Optimizer)]
    # A wrapper may subclass Optimizer without calling its `__init__`, and then has no hooks.
    usable = [each for each in found if "param_groups" in vars(each)]
    if not usable:
        raise InvalidArgument(
            f"optimizer={show(given)}: expected a torch.optim.Optimizer, a wrapper that holds one "
            "as `optimizer`, or a list of these"
        )
    return usable[-1]
