"""What a trace says of memory against what the pool had in use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swapkit._runtime.recording.tables.blocks import NO_WORKSPACE

if TYPE_CHECKING:
    from swapkit._runtime.recording.recorder import Recorder
    from swapkit.ir.traces import Trace

ROUNDING = 512  # of blocks


def count_present(trace: Trace) -> list[int]:
    """Return how many storages there are while each operator runs."""
    changes = [0] * (len(trace.operators) + 1)
    for each in trace.storages:
        changes[max(each.birth, 0)] += 1
        changes[each.death] -= 1
    counts, now = [], 0
    for change in changes[:-1]:
        now += change
        counts.append(now)
    return counts


def assert_memory_is_the_pools(recorder: Recorder, trace: Trace) -> None:
    """Assert that a trace has what the pool had in use at most while each operator ran.

    The pool rounds its blocks up, and what goes while an operator runs may go before it takes more.
    Not for a step in which a session moved tensors: its trace has them where they would be without
    a budget.
    """
    peaks, dropped = recorder.workspaces.peaks, recorder.workspaces.dropped
    rows, former = recorder.rows[: len(trace.operators)], NO_WORKSPACE
    for row, said, count in zip(rows, trace.memory(), count_present(trace), strict=True):
        if row.workspace != NO_WORKSPACE:
            real = peaks[row.workspace]
            about = f"{row.name}: {real} bytes were in use, the trace has {said}"
            # Also while operators ran that are not in the trace, as they only return views.
            least = -ROUNDING - sum(dropped[former + 1 : row.workspace + 1])
            former = row.workspace
            assert least <= real - said <= (count + 1) * ROUNDING, about
