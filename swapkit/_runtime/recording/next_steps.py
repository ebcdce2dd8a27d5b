"""Whether the next steps need the memory that a recorded step needed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from swapkit._runtime.recording.tables.blocks import ALIVE
from swapkit.ir.traces import BEFORE, Kind, Phase

if TYPE_CHECKING:
    from swapkit._runtime.recording.tables.storages import Storages
    from swapkit.ir.traces import Trace

_LEFTOVERS = 0.01  # of the peak


def has_leftovers(trace: Trace, storages: Storages) -> bool:
    """Return whether the trace's peak has memory that the step before may have left once.

    Such as that of objects in cycles, which the garbage collector frees at some time.

    Args:
        trace: of the step.
        storages: what its recorder noted; the recorder has stopped.
    """
    leftovers = storages.leftovers
    own = tuple(each for i, each in enumerate(trace.storages) if i not in leftovers)
    return replace(trace, storages=own).peak_bytes < (1 - _LEFTOVERS) * trace.peak_bytes


def count_growth(trace: Trace, storages: Storages) -> int:
    """Return the bytes that the optimizer left behind, less those from before that it freed.

    Only the optimizer's: outputs that the caller still holds when the step ends are from forward,
    and the caller drops them. Gradients do not count: `zero_grad` frees them, now or later. The
    trace alone does not tell: temporaries that outlive the last operator die at its end, too.

    Args:
        trace: of the step.
        storages: what its recorder noted; the recorder has stopped.
    """
    growth = 0
    for life in storages.lives:
        was_there, is_there = life.birth == BEFORE, life.death == ALIVE
        if was_there == is_there or life.kind is Kind.GRADIENT:
            continue
        if _is_optimizers(trace, life.birth if is_there else life.death - 1):
            growth += life.nbytes if is_there else -life.nbytes
    return growth


def _is_optimizers(trace: Trace, operator: int) -> bool:
    """Return whether an operator is the optimizer's. After the last one, others count as that."""
    last = len(trace.operators) - 1
    return operator >= 0 and trace.operators[min(operator, last)].phase is Phase.OPTIMIZER
