"""Recomputed regions: backward recomputes the tensors that a function would have saved.

Where possible, the operators are captured and run again one by one (`captured.py`). Otherwise the
function itself runs again, on top of torch's non-reentrant checkpoint. Torch's checkpoint restores
random numbers, autocast and the device; `operators/settings.py` restores other settings. It stops
early, unless modules inside have hooks: those after a call would be skipped. The region passes all
tensors of the call to torch by position, wherever the user put them. So they are ordinary saved
tensors, which scopes and budgets move, and nothing else holds them. The first run gets the objects
of the user's call; a recomputation gets copies of the containers that held tensors.

The second kind of region runs its code twice. As with torch's checkpoint, a batch norm counts its
batch twice, and any other side effect happens twice. Without gradients, and inside of function
transforms and tracers, a region is a plain call; with forward-mode derivatives, only a captured one
is recomputed.

A kept operator runs once (`watchers/selection.py`); `watchers/digests.py` checks that operators
give the same results in the second run; `watchers/operator_modes.py` and `arguments.py` handle
several ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from swapkit._runtime.operators.settings import ThreadSettings
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.recompute.arguments import Slices, Template, find_caches
from swapkit._runtime.recompute.captured import Fills, capture
from swapkit._runtime.recompute.region_findings import owner_of
from swapkit._runtime.recompute.watchers.watcher import make_watcher
from swapkit._runtime.torch_compat.internals import (
    ModeKind,
    has_forward_hooks,
    hooks_disabled_message,
    innermost_transform,
    is_dual_level_open,
    mode_of_kind,
)
from swapkit._runtime.torch_compat.isolation import uncompiled_itself, untraced, untraced_itself
from swapkit.registry import Recompute


# Not recursive: the function inside may be compiled.
@uncompiled_itself
def run_region(
    terms: Recompute,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:  # noqa: ANN401 - whatever the function returns
    """Call a function, and let backward recompute the tensors that it would have saved.

    Args:
        terms: the results to keep nevertheless, and how to run again.
        function: the function; may be a `functools.partial` or a bound method of a module.
        args: its positional arguments.
        kwargs: its keyword arguments. Tensors among the arguments are kept as saved tensors.

    Returns:
        The result of the function.

    Raises:
        InvalidArgument: `save` or `offload` names no operator, or one that cannot be kept.
        RecomputeMismatch: in backward: the recomputation differs from forward.
    """
    if not torch.is_grad_enabled() or _is_transformed():
        return function(*args, **kwargs)
    captured = capture(terms, function, args, kwargs)
    if captured is not None:
        return captured.run()
    if is_dual_level_open():  # backward may run outside of it, where operators save less
        return function(*args, **kwargs)
    region = Region(terms, function, args, kwargs)
    return checkpoint(
        region,
        *region.take_tensors(),
        use_reentrant=False,
        preserve_rng_state=terms.preserve_rng_state,
        early_stop=not _has_hooks(_module_of(function, args)),
    )


@untraced
def _has_hooks(module: torch.nn.Module | None) -> bool:
    """Return whether a module inside may have hooks: an early stop would skip those after its call.

    None: which modules a function calls is not known.
    """
    return module is None or has_forward_hooks(module)


@untraced
def _is_transformed() -> bool:
    """Return whether torch would refuse a region here, or could not run it again."""
    return (
        hooks_disabled_message() is not None
        or innermost_transform() is not None
        or mode_of_kind(ModeKind.PROXY) is not None
    )


class _UserCall(NamedTuple):
    """The user's function and arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Region:
    """One call of a region: its first run and its recomputations."""

    @untraced
    def __init__(
        self,
        terms: Recompute,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Separate the tensors of a call from the rest."""
        self._swapper = get_runtime().current_swapper()
        self._first: _UserCall | None = _UserCall(function, args, kwargs)
        self._caches = find_caches(args, kwargs)
        self._template = Template((function, args, kwargs))
        self._watcher = make_watcher(terms, self._swapper, _module_of(function, args))
        self._slices: Slices | None = None
        self._group = terms.slice_group
        self._settings = ThreadSettings.note()
        self._fills = Fills()

    @untraced
    def take_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that recomputation needs, and drop the references to them."""
        tensors = self._template.take_tensors()
        if self._group is not None:
            from swapkit._runtime.recompute.arguments import Slices

            self._slices = Slices(self._group, tensors)
        return tensors

    @untraced_itself
    def __call__(self, *tensors: torch.Tensor) -> Any:  # noqa: ANN401 - of the user's function
        """Run first with the user's own objects, and later with these tensors."""
        first, self._first = self._first, None
        with self._fills.ending():
            return self._run_again(tensors) if first is None else self._run_first(first)

    @untraced_itself
    def _run_first(self, first: _UserCall) -> Any:  # noqa: ANN401 - of the user's function
        watched = contextlib.nullcontext() if self._watcher is None else self._watcher.watching()
        with watched, self._fills.noting():
            result = first.function(*first.args, **first.kwargs)
        if self._caches is not None:
            self._caches.end()
        return result

    @untraced_itself
    def _run_again(self, tensors: tuple[torch.Tensor, ...]) -> None:
        with self._swapper.shared.lock:  # backward may run on several threads
            self._swapper.regions_run += 1
        whole = tensors if self._slices is None else self._slices.gather(tensors)
        function, args, kwargs = self._template.rebuild(whole)
        del tensors, whole
        if self._caches is not None:
            args, kwargs = self._caches.replace(args, kwargs)
        watched = contextlib.nullcontext() if self._watcher is None else self._watcher.replaying()
        with self._settings.again(), watched:
            function(*args, **kwargs)


def _module_of(function: Callable[..., Any], args: tuple[Any, ...]) -> torch.nn.Module | None:
    """Return the module that a function belongs to; None: there is none."""
    owner = owner_of(function, args)
    return owner if isinstance(owner, torch.nn.Module) else None
