"""Memory that planned addresses save, for the models of the seed document on fragmentation (S4).

1. The document's configurations of Llama 2 7B, 13B and 70B, of one of their devices, without and
   with recomputing every layer, recorded on the meta device (`replay/steps.py`). Their requests
   go through a model of torch's allocator with its default settings, the same with expandable
   segments, and swapkit's pool without and with planned addresses: what each reserves without a
   limit, and the least memory that it needs (`fits from`). The document claims 0.31 to 2.19 GB.
2. A step of varying lengths, within a budget that only planned addresses fit into. Torch's
   allocator fails with more than 1 GiB reserved and not allocated.

`python -m benchmarks.replay` prints the same; with `--snapshot FILE`, the figures of a memory
snapshot.

`split blocks`: requests of a step that a part of a cached block serves, without and with planned
addresses.

`--json FILE` writes one flat object: `7b_4k_batch4_live_gib`, and for each of `torch_native`,
`torch_expandable`, `pool` and `planned` `7b_4k_batch4_planned_reserved_gib` and `_least_gib`, ...;
`_saved_gib` is what planned addresses save against torch's allocator, `_saved_of_pool_gib` against
the pool without them; `saved_gib_most`, `saved_gib_least` and `saved_gib_median` are the first over
all configurations. `example_...` is of the second part, in which `example_torch_native_unused_gib`
is what was reserved and not allocated when it failed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.replay.comparing import compare_allocators, measure_demand
from benchmarks.replay.steps import (
    EXAMPLE,
    QUICK_EXAMPLE,
    list_configurations,
    list_quick_configurations,
)
from benchmarks.replay.texts import format_replay
from swapkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.replay.steps import Configuration, VaryingLengths
    from benchmarks.replay.texts import AllocatorReport

GIB = 1 << 30
NATIVE, EXPANDABLE, POOL, PLANNED = KEYS = ("torch_native", "torch_expandable", "pool", "planned")
Figures = dict[str, float]


def show_heads() -> str:
    """Return the heads of the table, whose columns are GiB."""
    names = "".join(f" {name:>8}" for name in ("torch", "expand.", "pool", "planned"))
    groups = (f"{'reserved, GiB':>36}", f"{'saved against':>17}", f"{'fits from, GiB':>36}")
    return (
        f"{'':<25} {'most':>8} {'   '.join(groups)}    {'split blocks':>17}\n"
        f"{'step':<25} {'live':>8}{names}    {'torch':>8} {'pool':>8}   {names}"
        f"    {'pool':>8} {'planned':>8}"
    )


def show_row(name: str, figures: Figures, key: str) -> str:
    """Return the row of a configuration."""

    def of(allocator: str, amount: str) -> float:
        return figures[f"{key}_{allocator}_{amount}_gib"]

    reserved = "".join(f" {of(each, 'reserved'):>8.2f}" for each in KEYS)
    least = "".join(f" {of(each, 'least'):>8.2f}" for each in KEYS)
    saved = [figures[f"{key}_saved_gib"], figures[f"{key}_saved_of_pool_gib"]]
    splits = "".join(f" {figures.get(f'{key}_{each}_splits', 0):>8}" for each in (POOL, PLANNED))
    return (
        f"{name:<25} {figures[f'{key}_live_gib']:>8.2f}{reserved}    {saved[0]:>8.2f} "
        f"{saved[1]:>8.2f}   {least}   {splits}"
    )


def measure(configuration: Configuration) -> Figures:
    """Return the figures of a configuration."""
    trace = configuration.trace()
    demand = measure_demand(trace)
    figures: Figures = {f"{configuration.key}_live_gib": demand.max_live_rounded_bytes / GIB}
    for report in compare_allocators(trace, search_least=True):
        name = f"{configuration.key}_{report.key}"
        figures[f"{name}_reserved_gib"] = report.free.peak_reserved_bytes / GIB
        figures[f"{name}_least_gib"] = (report.least_bytes or 0) / GIB
        if report.layout is not None:
            figures[f"{name}_hit_share"] = report.layout.hit_share
            figures[f"{name}_splits"] = report.layout.splits
            figures[f"{configuration.key}_{POOL}_splits"] = report.layout.former_splits
    for name, other in (("saved", NATIVE), ("saved_of_pool", POOL)):
        reserved, planned = (
            figures[f"{configuration.key}_{each}_reserved_gib"] for each in (other, PLANNED)
        )
        figures[f"{configuration.key}_{name}_gib"] = reserved - planned
    return figures


def measure_all(configurations: Iterable[Configuration]) -> Figures:
    """Measure each configuration, and print its row."""
    print(show_heads())
    figures: Figures = {}
    saved = []
    for each in configurations:
        row = measure(each)
        print(show_row(each.name, row, each.key), flush=True)
        saved.append(row[f"{each.key}_saved_gib"])
        figures |= row
    return figures | {
        "configurations": len(saved),
        "saved_gib_least": min(saved),
        "saved_gib_median": statistics.median(saved),
        "saved_gib_most": max(saved),
    }


def choose_budget(reports: Sequence[AllocatorReport]) -> int:
    """Return a budget between what planned addresses need and what the next best needs."""
    least = {each.key: each.least_bytes or 0 for each in reports}
    others = min(least[key] for key in KEYS if key != PLANNED)
    return (least[PLANNED] + others) // 2


def measure_example(example: VaryingLengths) -> Figures:
    """Print how the example of varying lengths ends, and return its figures."""
    trace = example.trace()
    searched = compare_allocators(trace, search_least=True)
    budget_bytes = choose_budget(searched)
    reports = [
        replace(within, least_bytes=each.least_bytes)
        for within, each in zip(
            compare_allocators(trace, budget_bytes=budget_bytes), searched, strict=True
        )
    ]
    print(f"\nvarying lengths, within {format_bytes(budget_bytes)}")
    print(format_replay(trace, measure_demand(trace), reports, budget_bytes=budget_bytes))
    figures: Figures = {"example_budget_gib": budget_bytes / GIB}
    for report in reports:
        assert report.within is not None
        failure = report.within.failure
        name = f"example_{report.key}"
        figures[f"{name}_reserved_gib"] = report.free.peak_reserved_bytes / GIB
        figures[f"{name}_least_gib"] = (report.least_bytes or 0) / GIB
        figures[f"{name}_fits"] = failure is None
        figures[f"{name}_unused_gib"] = (
            0.0 if failure is None else (failure.reserved_bytes - failure.allocated_bytes) / GIB
        )
    return figures


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of `run`."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few tiny steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    return parser


def run(options: argparse.Namespace) -> None:
    """Measure, print, and write the figures."""
    figures = measure_all(list_quick_configurations() if options.quick else list_configurations())
    figures |= measure_example(QUICK_EXAMPLE if options.quick else EXAMPLE)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the figures."""
    run(make_parser(__doc__).parse_args(arguments))


if __name__ == "__main__":
    main()
