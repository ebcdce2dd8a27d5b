"""Unwrapping of the `optimizer` argument: one, several, or a library's wrapper of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeGuard

import torch

from swapkit.errors import InvalidArgument
from swapkit.units import show

# Attributes with the wrapped optimizer: accelerate, Lightning, DeepSpeed, apex, fairscale, and
# torch's ZeroRedundancyOptimizer.
_INNER = ("optimizer", "_optimizer", "optim")
# Attributes with a list of optimizers: torchtitan's containers, Megatron's chained optimizer.
_MEMBERS = ("optimizers", "chained_optimizers")
_MOST_WRAPPERS = 8
_EXPECTED = (
    "expected a torch.optim.Optimizer, a wrapper that holds one as `optimizer`, or a list of these"
)


def list_optimizers(given: object) -> tuple[torch.optim.Optimizer, ...]:
    """Return the innermost optimizers in `given`: torch calls the hooks of these.

    Args:
        given: None, an optimizer, something that wraps one or contains several, or a list or tuple
            of these.

    Raises:
        InvalidArgument: `given` contains no optimizer.
    """
    if given is None:
        return ()
    each = given if isinstance(given, (list, tuple)) else (given,)
    found = [inner for one in each for inner in _innermost(one)]
    if not found:
        raise InvalidArgument(f"optimizer={show(given)}: {_EXPECTED}")
    return tuple(dict.fromkeys(found))


def is_optimizer(given: object) -> bool:
    """Return whether `given` is an optimizer, wraps or contains some, or is a list of these."""
    if isinstance(given, (torch.nn.Module, type)) or callable(given):
        return isinstance(given, torch.optim.Optimizer)
    each = given if isinstance(given, (list, tuple)) else (given,)
    return any(isinstance(one, torch.optim.Optimizer) or _innermost(one) for one in each)


def find_wrappers(given: object, inner: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers in `given` that wrap another one and keep groups of their own."""
    each = given if isinstance(given, (list, tuple)) else (given,)
    chains = [[one for one in unwrap(outer) if _is_usable(one)] for outer in each]
    return [one for chain in chains if inner in chain for one in chain[: chain.index(inner)]]


def unwrap(optimizer: object) -> Iterator[object]:
    """Yield an optimizer and the objects it wraps, outermost first."""
    current: object | None = optimizer
    for _ in range(_MOST_WRAPPERS):
        if current is None:
            return
        yield current
        held = (vars(current).get(name) for name in _INNER) if hasattr(current, "__dict__") else ()
        current = next((each for each in held if each is not None), None)


def _innermost(one: object) -> list[torch.optim.Optimizer]:
    """Return the innermost optimizer in a wrapper, or those of all members of a container."""
    chain = list(unwrap(one))
    for each in chain:
        members = _members_of(each)
        if members:
            return [inner for member in members for inner in _innermost(member)]
    usable = [each for each in chain if _is_usable(each)]
    return usable[-1:]


def _members_of(container: object) -> list[object]:
    if not hasattr(container, "__dict__"):
        return []
    held = (vars(container).get(name) for name in _MEMBERS)
    listed = next((each for each in held if isinstance(each, (list, tuple)) and each), ())
    return [each for each in listed if each is not container]


def _is_usable(one: object) -> TypeGuard[torch.optim.Optimizer]:
    # A wrapper may subclass Optimizer without calling its `__init__`, and then has no hooks.
    return isinstance(one, torch.optim.Optimizer) and "param_groups" in vars(one)
