"""Single operators that are captured because somebody chose them, and what stands for these."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.shim.types import Placement
from swapkit._runtime.user_choices.operator_choices import ChosenOperators, carrying, mark_operators
from swapkit.ir.plans import Action
from swapkit.registry import Recompute
from tests.support.operators import rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swapkit._runtime.shim.types import SavedTensor
    from swapkit.registry import What

PASS = Placement(Action.PASS, min_bytes=0)


@contextmanager
def choosing(pattern: str = ".*", what: What | None = None) -> Iterator[ChosenOperators]:
    """Let a choice hold for operators outside of modules, and be found where they are saved."""
    rows = ChosenOperators(rows_of({pattern: what or Recompute()}))
    tracker = get_runtime().tracker
    tracker.start("test")
    try:
        with carrying(), mark_operators(rows):
            yield rows
    finally:
        tracker.stop("test")


def pack(tensor: torch.Tensor) -> SavedTensor:
    """Return what a graph keeps of a tensor that nobody else holds (but its memory)."""
    with torch.no_grad():
        return get_runtime().current_swapper().packer(PASS)(tensor.detach())


def unpack(packed: SavedTensor) -> torch.Tensor:
    """Return what a graph gets back."""
    return get_runtime().current_swapper().unpack(packed)


def is_captured(packed: SavedTensor) -> bool:
    """Return whether the tensor is computed again: nothing keeps its bytes."""
    return packed.is_stripped


def capture(function: Any, *args: Any, **kwargs: Any) -> tuple[list[Any], list[torch.Tensor]]:
    """Return what graphs keep of an operator's results, and these."""
    with choosing():
        results = function(*args, **kwargs)
        made = list(results) if isinstance(results, (tuple, list)) else [results]
        packed = [pack(each) for each in made]
    assert all(map(is_captured, packed))
    return packed, made
