"""Hints for out-of-memory errors, from the failing thread's stack and the pool's layout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.utils.checkpoint

from swapkit.units import format_bytes

if TYPE_CHECKING:
    from types import FrameType

# Files of torch that run checkpointed regions, and that call compiled graphs.
_CHECKPOINT = torch.utils.checkpoint.__file__
_COMPILED = str(
    Path(torch.__file__).parent / "_functorch" / "_aot_autograd" / "runtime_wrappers.py"
)
# With more reserved memory free than this, suggest a setting.
SCATTERED_BYTES = 1 << 30


def advise_here(stats: dict[str, int], asked_bytes: int, *, separates: bool) -> list[str]:
    """Return hints for an allocation that failed on this thread.

    Args:
        stats: of the pool.
        asked_bytes: the size of the allocation.
        separates: whether the pool keeps memory that lives unequally long apart.
    """
    hints = []
    if _is_in(_CHECKPOINT):
        hints.append(
            "this is inside a checkpointed region (torch.utils.checkpoint): tensors saved during "
            "its recomputation stay on the device until its backward has run. Make the regions "
            "smaller, or remove them and let the budget choose what to recompute"
        )
    if _is_in(_COMPILED):
        hints.append(
            "this is inside a compiled graph (torch.compile), which is a single autograd node: its "
            "backward needs all its saved tensors at once, and the budget recomputes nothing "
            "inside. Compile the blocks of the model instead of the whole model (`for block in "
            "model.layers: block.compile()`), or let torch recompute inside the graph "
            "(torch._functorch.config.activation_memory_budget = 0.5)"
        )
    in_use_bytes, budget_bytes = stats["allocated_bytes.all.current"], stats["budget_bytes"]
    if budget_bytes == 0 or in_use_bytes + asked_bytes <= budget_bytes:  # it would fit in one piece
        hints += advise_layout(stats, separates=separates)
    return hints


def _is_in(code: str) -> bool:
    """Return whether a function of the file `code` is on this thread's Python stack."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the documented way to see callers
    while frame is not None:
        if frame.f_code.co_filename == code:
            return True
        frame = frame.f_back
    return False


def advise_layout(stats: dict[str, int], *, separates: bool, at_peak: bool = False) -> list[str]:
    """Suggest a setting if much reserved memory is free but scattered.

    Args:
        stats: of the pool.
        separates: whether the pool keeps memory that lives unequally long apart.
        at_peak: compare the peaks. Between steps most reserved memory is free, scattered or not.
    """
    moment = "peak" if at_peak else "current"
    free_bytes = stats[f"reserved_bytes.all.{moment}"] - stats[f"allocated_bytes.all.{moment}"]
    is_movable = bool(stats.get("expandable_segments", 0))
    if free_bytes <= SCATTERED_BYTES or (is_movable and separates):
        return []
    advice = "set PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation"
    if is_movable:
        advice = (
            "call swapkit.install(lifetimes=True), or set MEMORY_FRAGMENTATION=1, to keep memory "
            "that lives unequally long apart"
        )
    at = " at the peak" if at_peak else ""
    return [f"{format_bytes(free_bytes)} are reserved but unallocated{at}: {advice}"]
