"""`offload` and `keep`: swap or keep the saved tensors of a part of a program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from swapkit._runtime.optimizer.chunked_step import attach
from swapkit._runtime.optimizer.state_slots import HostCopies
from swapkit._runtime.optimizer.wrapped import find_wrappers, is_optimizer, list_optimizers
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.process.scopes import Scope
from swapkit._runtime.saved.device import TYPES
from swapkit._runtime.saved.swapper import Swapper
from swapkit._runtime.shim.types import TIERS, Placement, placement_of
from swapkit.api.targets import apply, choose
from swapkit.config.environment import MIN_SWAP_BYTES, read_environment
from swapkit.errors import InvalidArgument
from swapkit.ir.plans import Action
from swapkit.registry import Keep, Swap
from swapkit.units import parse_bytes

if TYPE_CHECKING:
    import torch

Target = TypeVar(
    "Target",
    bound="Callable[..., Any] | torch.nn.Module | torch.optim.Optimizer"
    " | Sequence[torch.nn.Module] | Sequence[torch.optim.Optimizer]",
)
Parts = TypeVar("Parts", bound="torch.nn.Module | Sequence[torch.nn.Module]")


class Chosen(Scope):
    """A choice for saved tensors: a decorator and a context manager. Made by `offload`, `keep`.

    Decorating a `Module` class or a `Module` returns the same class or module; decorating a
    function returns a replacement.
    """

    def __init__(self, what: Keep | Swap, choice: Placement) -> None:
        super().__init__(choice)
        self.what = what

    def __call__(self, target: Target) -> Target:
        """Make the choice for the tensors that `target` saves.

        Raises:
            InvalidArgument: no choice is possible for `target`, or it never runs itself.
        """
        result: Target = choose(target, self.what)
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
    target: Target,
    /,
    *,
    to: str = ...,
    prefetch: int | None = ...,
    min_bytes: int | str = ...,
) -> Target: ...
@overload
def offload(
    target: Parts,
    pattern: str,
    /,
    *,
    to: str = ...,
    prefetch: int | None = ...,
    min_bytes: int | str = ...,
) -> Parts: ...
def offload(
    target: Any = None,
    pattern: str | None = None,
    /,
    *,
    to: str = "host",
    prefetch: int | None = None,
    min_bytes: int | str = MIN_SWAP_BYTES,
) -> Any:
    r"""Swap the saved tensors of a part of a program to the host, and back before their use.

    Decorates a `Module` class, a `Module` or a function. Without `target`, it returns a decorator
    that is also a context manager. With a pattern, it applies to the submodules of a model whose
    whole dotted path matches. For an optimizer, its states live on the host between steps. So they
    do for the optimizer in a wrapper, such as torch's `ZeroRedundancyOptimizer` or accelerate's,
    for those in a container, such as torchtitan's, and for each in a list. States that cannot be
    moved are named in a warning after the first step.

    Results are bitwise identical. Parameters, buffers, their views and small tensors are not moved;
    views of one storage move once. Tensors saved while a backward pass runs (recomputation) are
    needed at once and are not moved either. In a scope inside `swapkit.checkpoint` or torch's
    checkpoint, recomputation wins.

    Args:
        target: the part, or the model to search for `pattern`. A list of a model's parts: each;
            paths then begin with the part's number, as in `r"\d+\.layers\.\d+\.mlp"`.
        pattern: a regular expression for paths of submodules, such as `r"layers\.\d+\.mlp"`.
        to: `"host"`, or `"disk"` in a session that has a disk.
        prefetch: None: free the memory as soon as the copy is done, and copy back as early as
            memory allows. Otherwise a number n >= 1 of operators, counted in nodes of the graph:
            free the memory 3n operators after the save (waiting for the copy if necessary), or as
            soon as only the graph refers to it, and start the copy back n operators before the
            first use.
        min_bytes: smaller storages are not moved. Raised to the environment variable
            MIN_SWAP_TENSOR_SIZE, or to 1024 bytes, so 0 moves every storage that can be moved.

    Returns:
        The target (for a function: a replacement); without `target`, a decorator and context
        manager.

    Raises:
        InvalidArgument: an argument is invalid, or no submodule matches the pattern.
        SessionError: the states of an optimizer are already offloaded.

    Example:
        >>> import swapkit, torch
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
        >>> mlp = swapkit.offload(mlp, prefetch=2)
        >>> with swapkit.offload(min_bytes="4KiB"):
        ...     loss = mlp(torch.ones(64, 64)).sum()
        >>> loss.backward()
    """
    what = _parse(to, prefetch, min_bytes)
    if is_optimizer(target):
        _offload_optimizers(target, pattern, to)
        return target
    return apply(Chosen(what, placement_of(what, None)), what, target, pattern)


@overload
def keep() -> Chosen: ...
@overload
def keep(target: Target, /) -> Target: ...
@overload
def keep(target: Parts, pattern: str, /) -> Parts: ...
def keep(target: Any = None, pattern: str | None = None, /) -> Any:
    """Never move the saved tensors of a part of a program, nor its weights, even under a budget.

    Args:
        target: as for `offload`: a `Module` class, a `Module` or a function; None: return a
            decorator and context manager.
        pattern: a regular expression for paths of submodules of a model.

    Returns:
        See `offload`.

    Raises:
        InvalidArgument: see `offload`.

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
        raise InvalidArgument(
            f"prefetch={prefetch!r}: expected None or a whole number of at least 1"
        )
    least = parse_bytes(min_bytes, name="min_bytes", least=0)
    least = max(least, read_environment().min_swap_bytes)
    return Swap(to=to, prefetch=prefetch, min_bytes=least)


def _offload_optimizers(given: Any, pattern: str | None, to: str) -> None:  # noqa: ANN401
    """Offload the states of an optimizer, of what it wraps or contains, or of each in a list."""
    if to == "disk":
        raise InvalidArgument('offload(optimizer, to="disk"): states can only be kept on the host')
    if pattern is not None:
        raise InvalidArgument(f"pattern {pattern!r} needs a model whose submodules it matches")
    with contextlib.ExitStack() as on_failure:
        for optimizer in list_optimizers(given):
            swapper = _swapper_for(optimizer)
            executor = HostCopies(swapper.scheduler, swapper.device)
            wrappers = find_wrappers(given, optimizer)
            states = attach(optimizer, executor, device=swapper.device.name, wrappers=wrappers)
            on_failure.callback(states.detach)
        on_failure.pop_all()


def _swapper_for(optimizer: torch.optim.Optimizer) -> Swapper:
    """Return the swapper of the device that holds an optimizer's parameters."""
    runtime = get_runtime()
    here = runtime.current_swapper()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    device = params[0].device if params else here.device.name
    if device == here.device.name or device.type not in TYPES:
        return here
    there = runtime.device(device)
    return runtime.other_swapper(there.type, there.index) or runtime.default_swapper(there)
