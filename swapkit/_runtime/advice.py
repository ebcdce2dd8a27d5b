"""What to try when memory is out, by what the failing thread does and how the pool lies."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch.utils.checkpoint

from swapkit.units import format_bytes

if TYPE_CHECKING:
    from types import FrameType

# Of free memory that is reserved: more is worth a setting.
SCATTERED_BYTES = 1 << 30


def advise_here(stats: dict[str, int]) -> list[str]:
    """Return hints for an allocation that failed on this thread. `stats`: the pool's."""
    hints = []
    if _is_in_checkpoint():
        hints.append(
            "this is inside a checkpointed region (torch.utils.checkpoint): what is saved while it "
            "is computed again stays on the device until its backward has run. Make the regions "
            "smaller, or leave them out and let the budget choose what to recompute"
        )
    return [*hints, *advise_layout(stats)]


def _is_in_checkpoint() -> bool:
    """Return whether this thread runs a region of torch's checkpoint, or computes one again."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the documented way to see callers
    while frame is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


def advise_layout(stats: dict[str, int]) -> list[str]:
    """Return what to set where much free memory lies in pieces."""
    free_bytes = stats["reserved_bytes.all.current"] - stats["allocated_bytes.all.current"]
    if free_bytes <= SCATTERED_BYTES or stats.get("expandable_segments", 0):
        return []
    return [
        f"{format_bytes(free_bytes)} are reserved and not in use: with "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True free memory serves any request"
    ]
