"""`offload` and `keep`: what is to become of what a part of a program saves for backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch

from swapkit._runtime.optimizer.chunked_step import attach
from swapkit._runtime.optimizer.host_copies import HostCopies
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.process.scopes import Scope
from swapkit._runtime.saved.device import TYPES
from swapkit._runtime.shim.placement import TIERS, Placement, choice_of
from swapkit.api.targets import apply, choose
from swapkit.config.environment import MIN_SWAP_BYTES, read_environment
from swapkit.errors import InvalidArgument
from swapkit.ir.plans import Action
from swapkit.registry import Keep, Swap
from swapkit.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._runtime.saved.swapper import Swapper

_T = TypeVar("_T", bound="Callable[..., Any] | torch.nn.Module | torch.optim.Optimizer")
_Model = TypeVar("_Model", bound=torch.nn.Module)


class Chosen(Scope):
    """A choice for saved tensors: a decorator and a context manager. Made by `offload`, `keep`.

    As a decorator of a `Module` class, a `Module`, or a function it returns the same class or
    module, or a function in place of the function.
    """

    def __init__(self, what: Keep | Swap, choice: Placement) -> None:
        super().__init__(choice)
        self.what = what

    def __call__(self, target: _T) -> _T:
        """Make the choice for what `target` saves.

        Raises:
            InvalidArgument: it is nothing that runs.
        """
        result: _T = choose(target, self.what)
        return result


@overload
def offload(
    *,
    to: str = ...,
    prefetch: int | None = ...,
    min_bytes: int | str = ...,
) -> Chosen: ...
@overload
def offload(
    target: _T,
    /,
    *,
    to: str = ...,
    prefetch: int | None = ...,
    min_bytes: int | str = ...,
) -> _T: ...
@overload
def offload(
    target: _Model,
    pattern: str,
    /,
    *,
    to: str = ...,
    prefetch: int | None = ...,
    min_bytes: int | str = ...,
) -> _Model: ...
def offload(
    target: Any = None,
    pattern: str | None = None,
    /,
    *,
    to: str = "host",
    prefetch: int | None = None,
    min_bytes: int | str = MIN_SWAP_BYTES,
) -> Any:
    r"""Swap what a part of a program saves for backward to the host, and back ahead of its use.

    A decorator of a `Module` class, a `Module` or a function; with `target` left out, a decorator
    with options or a context manager; with a pattern, applied to the submodules of a model whose
    dotted path it matches as a whole. Of an optimizer: its states live on the host between steps.

    Results are bit for bit the same. Parameters, buffers and their views stay where they are, and
    so do small tensors; views of one storage move once. What is saved while a backward pass runs
    (recomputation) is needed at once and stays, too. In a scope inside `swapkit.checkpoint` or
    torch's own, recomputation wins.

    Args:
        target: what to apply it to.
        pattern: a regular expression for paths of submodules, such as `r"layers\.\d+\.mlp"`.
        to: `"host"`, or `"disk"` in a session that has one.
        prefetch: None: memory is given up as soon as the copy is done, and copies come back as
            early as memory allows. Otherwise a number n >= 1 of operators, counted in nodes of the
            graph: memory is given up 3n operators after it was saved, waiting for the copy if need
            be, or as soon as nobody but the graph has it; and the copy back begins n operators
            before the first use.
        min_bytes: smaller storages stay. Less than what the environment variable
            MIN_SWAP_TENSOR_SIZE says, or 1024 bytes, means that; so 0 moves all that can be moved.

    Returns:
        What it was applied to (for a function: one in its place); without `target`, something to
        decorate with or to enter.

    Raises:
        InvalidArgument: an argument is not understood, or no submodule matches the pattern.

    Example:
        >>> import swapkit, torch
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
        >>> mlp = swapkit.offload(mlp, prefetch=2)
        >>> with swapkit.offload(min_bytes="4KiB"):
        ...     loss = mlp(torch.ones(64, 64)).sum()
        >>> loss.backward()
    """
    what = _parse(to, prefetch, min_bytes)
    if isinstance(target, torch.optim.Optimizer):
        return _offload_optimizer(target, to)
    return apply(Chosen(what, choice_of(what, None)), what, target, pattern)


@overload
def keep() -> Chosen: ...
@overload
def keep(target: _T, /) -> _T: ...
@overload
def keep(target: _Model, pattern: str, /) -> _Model: ...
def keep(target: Any = None, pattern: str | None = None, /) -> Any:
    """Never move what a part of a program saves for backward, whatever a budget would do.

    Args:
        target: as of `offload`: a `Module` class, a `Module`, a function; None: a decorator or
            context manager.
        pattern: a regular expression for paths of submodules of a model.

    Returns:
        As `offload`.

    Raises:
        InvalidArgument: as of `offload`.

    Example:
        >>> import swapkit, torch
        >>> with swapkit.keep():
        ...     loss = torch.ones(1024, requires_grad=True).exp().sum()
    """
    chosen = Chosen(Keep(), Placement(Action.KEEP))
    return apply(chosen, chosen.what, target, pattern)


def _parse(to: str, prefetch: int | None, min_bytes: int | str) -> Swap:
    if to not in TIERS:
        raise InvalidArgument(f"to={to!r}: expected 'host' or 'disk'")
    is_count = isinstance(prefetch, int) and not isinstance(prefetch, bool) and prefetch >= 1
    if prefetch is not None and not is_count:
        raise InvalidArgument(f"prefetch={prefetch!r}: expected None or a whole number from 1 on")
    least = parse_bytes(min_bytes, name="min_bytes", least=0)
    least = max(least, read_environment().min_swap_bytes)
    return Swap(to=to, prefetch=prefetch, min_bytes=least)


def _offload_optimizer(optimizer: torch.optim.Optimizer, to: str) -> torch.optim.Optimizer:
    if to == "disk":
        raise InvalidArgument('offload(optimizer, to="disk"): states can only live on the host')
    swapper = _swapper_for(optimizer)
    executor = HostCopies(swapper.scheduler, swapper.device)
    attach(optimizer, executor, device=swapper.device.name)
    return optimizer


def _swapper_for(optimizer: torch.optim.Optimizer) -> Swapper:
    """Return who moves things where an optimizer's parameters are."""
    runtime = get_runtime()
    here = runtime.current_swapper()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    device = params[0].device if params else here.device.name
    if device == here.device.name or device.type not in TYPES:
        return here
    there = runtime.device(device)
    return runtime.other_swapper(there.type, there.index) or runtime.default_swapper(there)
