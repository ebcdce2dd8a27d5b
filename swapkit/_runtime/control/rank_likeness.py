"""What ranks have in common: texts that are equal on ranks that do the same."""

from __future__ import annotations

import hashlib
import weakref
from typing import TYPE_CHECKING

from torch.nn.parameter import is_lazy

from swapkit._runtime.model.weak_models import find_weakly

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch

    from swapkit.ir.traces import Trace


def describe_parts(
    model: torch.nn.Module | None, optimizers: Iterable[torch.optim.Optimizer]
) -> str:
    """Return a digest of what a session trains: classes, names and shapes of parameters.

    It is equal on replicas, and on ranks with shards of the same parameters, whatever other
    sessions each rank has.
    """
    return _digest(_list_parts(model, optimizers))


def describe_weakly(
    model: torch.nn.Module | None, optimizers: Iterable[torch.optim.Optimizer]
) -> Callable[[], str]:
    """Return a function that does `describe_parts` for those that still exist then."""
    find_model, known = find_weakly(model), [weakref.ref(each) for each in optimizers]

    def describe() -> str:
        return describe_parts(find_model(), [each for find in known if (each := find())])

    return describe


def _list_parts(
    model: torch.nn.Module | None, optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[str]:
    if model is not None:
        yield type(model).__qualname__
        for name, parameter in model.named_parameters():
            yield f"{name} {_describe(parameter)}"
    for optimizer in optimizers:
        yield type(optimizer).__qualname__
        for group in optimizer.param_groups:
            yield " ".join(map(_describe, group["params"]))


def _describe(parameter: torch.Tensor) -> str:
    shape = "" if is_lazy(parameter) else str(tuple(parameter.shape))
    return f"{parameter.dtype} {shape}"


def describe_step(trace: Trace) -> str:
    """Return a digest of what autograd saves and uses in a recorded step, in order.

    A plan decides about that. Operators do not count: those of the first steps differ, in which
    optimizers make their states and DDP sorts its buckets.
    """
    storages = trace.storages
    events = (
        f"{event.kind.value} "
        + ("" if event.storage is None else f"{storages[event.storage].nbytes}")
        for event in trace.events
    )
    return _digest(events)


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
