"""Heights of layouts over the most bytes alive, and the time to make them.

1. Steps recorded on the meta device (7B, 13B, 70B, experts; single, 1F1B, interleaved,
   accumulation, varying lengths), without a plan and under swapkit's own plans: the height of the
   layout over a lower bound for all layouts (`excess`). What stays throughout the step is not part
   of the layout. For comparison: one placement with the largest item first, the best of all
   placements without improvement, and what torch's native allocator and its expandable segments
   would reserve (simulated).
2. `--minimalloc FILE... --capacity N`: instances of MiniMalloc (id, lower, upper, size; upper is
   exclusive). Exit status 1 if one does not fit into the capacity.

Recorded lifetimes are kept in build/layout_traces.

`--json FILE` writes one flat object: `instances`, `excess_median`, `excess_p90`, `excess_worst`,
`seconds_worst_20k` (of at most 20,000 items), `seconds_worst_82k`, `processor_seconds_worst_20k`,
`processor_seconds_worst_82k` (of all threads), ...
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._layout_traces import list_cases, list_quick_cases
from benchmarks.replay.allocations import allocations_of_intervals
from benchmarks.replay.expandable import ExpandableAllocator
from benchmarks.replay.native import NativeAllocator
from benchmarks.replay.replaying import replay
from swapkit._native.layout import NativeItems
from swapkit.planning.layout.lifetimes import Lifetimes
from swapkit.planning.layout.placing import PLACEMENTS, SIZE_FIRST, Measures, place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.replay.caching import CachingAllocator
    from swapkit.planning.layout.lifetimes import MemoryLayout

SMALL, LARGE = 20_000, 82_000  # items
GOALS = {
    "excess_p90": 0.01,
    "excess_worst": 0.025,
    "seconds_worst_20k": 0.5,
    "seconds_worst_82k": 4.0,
}
HEADER = (
    f"{'step':<34} {'items':>6} {'bound':>10} {'native':>8} {'expand.':>8} {'size':>8} {'best':>8}"
    f" {'final':>8} {'time':>7} {'CPU':>7}  method"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The figures of one step; shares over the bound."""

    name: str
    items: int
    bound_bytes: int
    native: float
    expandable: float
    size_first: float
    portfolio: float
    final: float
    seconds: float
    processor_seconds: float
    method: str

    def show(self) -> str:
        return (
            f"{self.name:<34} {self.items:>6} {self.bound_bytes / 2**30:>6.2f} GiB"
            f" {self.native:>8.2%} {self.expandable:>8.2%}"
            f" {self.size_first:>8.3%} {self.portfolio:>8.3%} {self.final:>8.3%}"
            f" {self.seconds:>5.2f} s {self.processor_seconds:>5.2f} s  {self.method}"
        )


def measure(name: str, lifetimes: Lifetimes) -> Row:
    items = NativeItems(lifetimes.starts, lifetimes.ends, lifetimes.nbytes, None)
    loads = np.empty(len(lifetimes), np.int64)
    bound = items.measure(loads)
    measures = Measures.of(lifetimes, bound, loads)
    heights = {}
    for rule in PLACEMENTS:
        offsets = np.empty(len(lifetimes), np.int64)
        items.place(rule.order(measures), rule.fit, offsets)
        heights[rule.name] = items.verify(offsets)
    layout, processor_seconds = time_layout(lifetimes)
    return Row(
        name=name,
        items=len(lifetimes),
        bound_bytes=bound,
        native=measure_online(NativeAllocator(), lifetimes, bound),
        expandable=measure_online(ExpandableAllocator(), lifetimes, bound),
        size_first=heights[SIZE_FIRST.name] / bound - 1,
        portfolio=min(heights.values()) / bound - 1,
        final=layout.excess,
        seconds=layout.seconds,
        processor_seconds=processor_seconds,
        method=layout.method,
    )


def time_layout(lifetimes: Lifetimes) -> tuple[MemoryLayout, float]:
    """Return the layout, and the processor time of all threads."""
    begin = time.process_time()
    layout = place(lifetimes)
    return layout, time.process_time() - begin


def measure_online(allocator: CachingAllocator, lifetimes: Lifetimes, bound: int) -> float:
    """Return the excess of an allocator that does not know the future."""
    columns = (lifetimes.starts, lifetimes.ends, lifetimes.nbytes)
    trace = allocations_of_intervals(zip(*(each.tolist() for each in columns), strict=True))
    return replay(trace, allocator).peak_reserved_bytes / bound - 1


def summarise(rows: Sequence[Row]) -> dict[str, float | int | str]:
    excesses = [row.final for row in rows]
    worst = max(rows, key=lambda row: row.final)
    figures: dict[str, float | int | str] = {
        "instances": len(rows),
        "excess_median": statistics.median(excesses),
        "excess_p90": float(np.quantile(excesses, 0.9, method="higher")),
        "excess_worst": worst.final,
        "excess_worst_instance": worst.name,
        "size_first_worst": max(row.size_first for row in rows),
        "portfolio_worst": max(row.portfolio for row in rows),
    }
    for name, most in (("20k", SMALL), ("82k", LARGE)):
        some = [row for row in rows if row.items <= most]
        figures[f"seconds_worst_{name}"] = max(row.seconds for row in some)
        figures[f"processor_seconds_worst_{name}"] = max(row.processor_seconds for row in some)
    figures["items_most"] = max(row.items for row in rows)
    return figures


def measure_all(*, quick: bool, match: str) -> list[Row]:
    print(HEADER)
    rows = []
    for case in list_quick_cases() if quick else list_cases():
        if match in case.name:
            rows.append(measure(case.name, case.lifetimes()))
            print(rows[-1].show(), flush=True)
    return rows


def read_minimalloc(path: Path) -> Lifetimes:
    """Return the items of an instance; columns in any order."""
    lines = path.read_text().split()
    names = lines[0].split(",")
    values = np.array([line.split(",") for line in lines[1:]], dtype=object)
    columns = {name: values[:, place].astype(np.int64) for place, name in enumerate(names)
               if name in {"lower", "upper", "size"}}  # fmt: skip
    return Lifetimes(columns["lower"], columns["upper"], columns["size"])


def fit_minimalloc(paths: Sequence[Path], capacity: int, seconds: float) -> bool:
    """Print the layout of each instance; return whether all fit."""
    all_fit = True
    for path in paths:
        layout = place(read_minimalloc(path), capacity=capacity, seconds=seconds)
        is_fitting = layout.height <= capacity
        all_fit = all_fit and is_fitting
        print(
            f"{path.name:<24} {len(layout.offsets):>5} items  bound {layout.lower_bound:>9}  "
            f"height {layout.height:>9}  {layout.seconds:>6.2f} s  {layout.method}: "
            f"{'fits' if is_fitting else 'does not fit'}",
            flush=True,
        )
    return all_fit


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few tiny steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--match", default="", metavar="TEXT", help="only steps with TEXT in them")
    parser.add_argument("--minimalloc", type=Path, nargs="+", metavar="FILE", help="CSV files")
    parser.add_argument("--capacity", type=int, help="of the instances of --minimalloc")
    parser.add_argument("--seconds", type=float, default=60.0, help="most for one of these")
    options = parser.parse_args(arguments)
    if options.minimalloc:
        if options.capacity is None:
            parser.error("--minimalloc needs --capacity")
        return 0 if fit_minimalloc(options.minimalloc, options.capacity, options.seconds) else 1
    figures = summarise(measure_all(quick=options.quick, match=options.match))
    print()
    for key, value in figures.items():
        print(f"{key:<28} {value:.6g}" if isinstance(value, float) else f"{key:<28} {value}")
    misses = [
        f"{key} is {figures[key]:.4g}, not {goal:g}"
        for key, goal in GOALS.items()
        if float(figures[key]) > goal
    ]
    print("\nGoals: " + ("missed: " + "; ".join(misses) if misses else "reached"))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
