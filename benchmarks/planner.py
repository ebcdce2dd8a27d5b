"""Distance of plans from the optimum, and planning time.

1. Steps recorded on the meta device (7B, 13B, 70B; 4k to 128k tokens; single, 1F1B, interleaved,
   experts, varying lengths), each under several budgets and links: the simulated time of the plan
   over a lower bound for all plans (`gap`). The validator checks every plan. For comparison: the
   time of full recompute (every layer again from its input), and the share of its cost that the
   plan recovers: (full - plan) / (full - no limit), and the same for the bound.
2. Random problems of at most 64 items: the plan's time over that of the exact optimum, where it can
   be proven in a second (about ten items; `exact_proven` counts them), else over the best result of
   the same search or of planning with eight times the effort.
3. Planning time, at about 500 slots and 256 items, and at about 2,500 and 1,280.

A budget is the fixed memory (parameters, gradients) plus a share of the memory that a step without
a limit uses above that. Where such a budget is infeasible (`*`), it is replaced by the smallest
feasible budget plus 2 % of the activations.

`--json FILE` writes one flat object: `instances`, `gap_median`, `gap_worst`, `gap_min`,
`violations`, `recovered_median`, `exact_instances`, `exact_proven`, `exact_gap_median`,
`exact_gap_worst`, `exact_gap_min`, `planning_seconds_small`, `planning_seconds_large`, ...
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._planner_instances import list_instances, list_quick_instances, list_timed
from benchmarks._planner_measures import (
    Figures,
    Row,
    measure_exact,
    measure_instances,
    measure_planning,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

GOALS = {
    "gap_median": 0.0025,
    "gap_worst": 0.015,
    "exact_gap_median": 0.003,
    "exact_gap_worst": 0.02,
    "planning_seconds_small": 1.0,
    "planning_seconds_large": 6.0,
    "violations": 0,
}
LEAST_GAP = -1e-6  # a smaller gap is more than rounding: the bound is wrong
HEADER = (
    f"{'step':<28} {'link':>4} {'share':>6} {'slots':>6} {'items':>6} {'budget':>9} {'bound':>8}"
    f" {'gap':>8} {'full':>7} {'recovered':>13} {'swapped':>8} {'planned':>8}"
)


def show_row(row: Row) -> str:
    """Return the line of one instance; `+`: time added to the step without a limit."""
    workload = row.instance.workload.name
    share = f"{row.share:.0%}" + ("" if row.is_as_asked else "*")
    over_bound = "-" if math.isnan(row.gap) else f"{row.gap:.3%}"
    return (
        f"{workload:<28} {row.instance.link_gb_per_s:>4} {share:>6} {row.slots:>6} {row.items:>6}"
        f" {row.budget_bytes / 2**30:>5.1f} GiB {row.bound_seconds / row.free_seconds - 1:>+8.2%}"
        f" {over_bound:>8} {row.full_seconds / row.free_seconds - 1:>+7.1%}"
        f" {row.recovered:>5.3f} of {row.recoverable:>4.3f} {row.swapped_share:>8.1%}"
        f" {row.planning_seconds:>6.2f} s" + "".join(f"\n    {each}" for each in row.violations[:3])
    )


def summarise(rows: Sequence[Row]) -> Figures:
    gaps = [row.gap for row in rows]
    worst = max(rows, key=lambda row: row.gap)
    return {
        "instances": len(rows),
        "gap_median": statistics.median(gaps),
        "gap_worst": worst.gap,
        "gap_worst_instance": worst.instance.name,
        "gap_min": min(gaps),
        "violations": sum(len(row.violations) for row in rows),
        "instances_with_least_budget": sum(not row.is_as_asked for row in rows),
        "recovered_median": statistics.median(row.recovered for row in rows),
        "recoverable_median": statistics.median(row.recoverable for row in rows),
        "planning_seconds_median": statistics.median(row.planning_seconds for row in rows),
        "planning_seconds_most": max(row.planning_seconds for row in rows),
    }


def measure_all(options: argparse.Namespace) -> Figures:
    figures: Figures = {}
    begin = time.perf_counter()
    if options.only in (None, "instances"):
        print(HEADER)
        rows = []
        instances = list_quick_instances() if options.quick else list_instances()
        for row in measure_instances(each for each in instances if options.match in each.name):
            print(show_row(row), flush=True)
            rows.append(row)
        figures |= summarise(rows)
    if options.only in (None, "exact"):
        figures |= measure_exact(5 if options.quick else 100, 12 if options.quick else 64)
    if options.only in (None, "planning"):
        figures |= measure_planning(list_timed(quick=options.quick))
    figures["seconds"] = time.perf_counter() - begin
    return figures


def find_misses(figures: Figures) -> list[str]:
    """Return the figures above their goals or below a bound."""
    misses = [
        f"{key} is {value:.4g}, not {goal:g}"
        for key, goal in GOALS.items()
        if isinstance(value := figures.get(key), (int, float)) and value > goal
    ]
    for key in ("gap_min", "exact_gap_min"):
        value = figures.get(key)
        if isinstance(value, float) and value < LEAST_GAP:
            misses.append(f"{key} is {value:.2g}: below the bound")
    return misses


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few tiny instances")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--only", choices=("instances", "exact", "planning"), help="run one part")
    parser.add_argument(
        "--match", default="", metavar="TEXT", help="only instances with TEXT in the name"
    )
    options = parser.parse_args(arguments)
    figures = measure_all(options)
    print()
    for key, value in figures.items():
        print(f"{key:<28} {value:.6g}" if isinstance(value, float) else f"{key:<28} {value}")
    misses = find_misses(figures)
    print("\nGoals: " + ("missed: " + "; ".join(misses) if misses else "reached"))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
