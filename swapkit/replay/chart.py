"""The chart of a replay: which addresses are in use over time, one panel for each allocator."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from swapkit.ir.allocations import spans_of
from swapkit.simulation.allocators.rounding import ROUNDING_BYTES
from swapkit.units import round_up

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from swapkit.ir.allocations import AllocationTrace, Spans
    from swapkit.reporting.replays import AllocatorReport
    from swapkit.simulation.allocators.replaying import ReplayOutcome

_GIB = 1 << 30
_MOST_GAP_BYTES = 20 << 20  # a larger gap between used addresses is drawn as one of this size
_INCHES = (9.0, 2.6)  # of one panel
_DOTS_PER_INCH = 130
# By the share of the trace that a block lives for: transients to what stays.
_SHARES = (0.005, 0.05, 0.5)
_COLOURS = ("#fdae61", "#74add1", "#3b6fb6", "#313131")
_NAMES = ("lives for < 0.5 %", "< 5 %", "< 50 %", "longer")


def draw_replay(trace: AllocationTrace, reports: Sequence[AllocatorReport], path: Path) -> None:
    """Write the chart, of the replay within the budget where there is one.

    Args:
        trace: what was replayed.
        reports: at least one.
        path: the PNG file to write.
    """
    mpl.use("Agg")
    height = _INCHES[1] * len(reports)
    figure = Figure(figsize=(_INCHES[0], height), layout="constrained")
    panels = figure.subplots(len(reports), 1, sharex=True, squeeze=False)[:, 0]
    spans = spans_of(trace)
    tops = [
        _draw_panel(panel, report, spans, len(trace.events))
        for panel, report in zip(panels, reports, strict=True)
    ]
    for panel in panels:  # one scale: a higher panel needs more memory
        panel.set_ylim(0, max(tops) / _GIB * 1.02)
    figure.suptitle("Addresses in use over time")
    panels[-1].set_xlabel("events: takes and gives of blocks")
    panels[-1].set_xlim(0, len(trace.events))
    handles = [mpl.patches.Patch(color=colour, label=name) for colour, name in zip(
        _COLOURS, _NAMES, strict=True)]  # fmt: skip
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(_NAMES), fontsize="small",
        title="colour: share of the trace", title_fontsize="small",
    )  # fmt: skip
    figure.savefig(path, dpi=_DOTS_PER_INCH, format="png")


def squeeze_addresses(ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Return where to draw each range of addresses.

    Addresses from a device, or from several reservations, are far apart. Gaps in which no range
    ever lies are cut down, so that the drawing begins at 0 and shows free memory near used memory.

    Args:
        ranges: `(address, bytes)` of each.
    """
    starts: list[int] = []  # of each island of used addresses
    shifts: list[int] = []  # what its addresses are drawn lower by
    end = 0
    shift = 0
    for address, nbytes in sorted(ranges):
        gap = address - end
        if not starts or gap > _MOST_GAP_BYTES:
            shift += gap if not starts else gap - _MOST_GAP_BYTES
            starts.append(address)
            shifts.append(shift)
        end = max(end, address + nbytes)
    return [address - shifts[bisect_right(starts, address) - 1] for address, _ in ranges]


def _draw_panel(panel: Axes, report: AllocatorReport, spans: Spans, events: int) -> int:
    """Draw one allocator's blocks; return the highest address drawn."""
    outcome = report.free if report.within is None else report.within
    last = events if outcome.failure is None else outcome.failure.event
    sizes = [round_up(nbytes, ROUNDING_BYTES) for nbytes in spans.nbytes]
    taken = [block for block, address in enumerate(outcome.addresses) if address is not None]
    drawn = squeeze_addresses([(outcome.addresses[block] or 0, sizes[block]) for block in taken])
    shapes: list[list[tuple[float, float]]] = []
    colours: list[str] = []
    for block, bottom in zip(taken, drawn, strict=True):
        start, end = spans.starts[block], min(spans.ends[block], last)
        low, high = bottom / _GIB, (bottom + sizes[block]) / _GIB
        shapes.append([(start, low), (start, high), (end, high), (end, low)])
        colours.append(_colour_of((spans.ends[block] - spans.starts[block]) / events))
    panel.add_collection(PolyCollection(shapes, facecolors=colours, linewidths=0))
    panel.set_ylabel("GiB")
    panel.set_title(_title_of(report.name, outcome), loc="left", fontsize="medium")
    if outcome.failure is not None:
        panel.axvline(last, color="#d62728", linewidth=1.2)
    return max((at + sizes[block] for block, at in zip(taken, drawn, strict=True)), default=1)


def _title_of(name: str, outcome: ReplayOutcome) -> str:
    title = f"{name}: {outcome.peak_reserved_bytes / _GIB:.2f} GiB reserved"
    return title if outcome.failure is None else f"{title}, then out of memory"


def _colour_of(share: float) -> str:
    return _COLOURS[bisect_right(_SHARES, share)]
