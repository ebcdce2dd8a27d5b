"""A scope for some of the tensors saved in it: those that a function of the user selects."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.process.scopes import Scope, default_placement
from swapkit._runtime.torch_compat.internals import hooks_disabled_message, top_hooks
from swapkit._runtime.torch_compat.isolation import untraced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from swapkit._runtime.saved.hooks import Pair
    from swapkit._runtime.shim.placement import Placement


@contextlib.contextmanager
def opened_for(placement: Placement, selects: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Open a scope for the saved tensors that `selects` returns True for.

    The hooks around the scope get all others, as if there were no scope. Where hooks are disabled,
    nothing is selected.

    Args:
        placement: for the selected tensors.
        selects: called by the thread that saves a tensor, with no lock held.
    """
    with contextlib.ExitStack() as stack:
        around = _top()
        if around is None:  # the default scope only detects in-place changes, as torch would
            swapper = get_runtime().current_swapper()
            stack.enter_context(Scope(default_placement(swapper)).opened())
            around = _top()
        stack.enter_context(Scope(placement).opened())
        inside = _top()
        if around is not None and inside is not None and hooks_disabled_message() is None:
            stack.enter_context(_selecting(around, inside, selects))
        yield


def _top() -> Pair | None:
    return top_hooks(True)  # noqa: FBT003


def _selecting(
    around: Pair, inside: Pair, selects: Callable[[torch.Tensor], bool]
) -> contextlib.AbstractContextManager[Any]:
    """Return a context with hooks that call one pair or the other."""

    @untraced
    def pack(tensor: torch.Tensor) -> tuple[Callable[[Any], torch.Tensor], Any]:
        pack_with, unpack_with = inside if selects(tensor) else around
        return unpack_with, pack_with(tensor)

    @untraced
    def unpack(packed: tuple[Callable[[Any], torch.Tensor], Any]) -> torch.Tensor:
        unpack_with, content = packed
        return unpack_with(content)

    context: contextlib.AbstractContextManager[Any]
    context = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
    return context
