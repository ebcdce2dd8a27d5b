"""Pipelines planned as a whole, against plans that each stage makes for itself: simulated.

Models are recorded on the meta device for an Ascend 910B. Every device has the same budget.

- S3's pipelines, planned and simulated in full. The budget is the largest peak of a device when
  every layer is recomputed, with 30 % of it free. "gain" is throughput over that full recompute;
  "at most": of the pipeline without a limit. Plans made together ("joint") are never slower than
  separate ones, and take less memory.
- Torch's schedules on 8 to 1,024 ranks, a 70B-shaped model of 4 layers per chunk. Curves of time
  and memory are estimated from one microbatch of each kind of chunk
  (`periodic.py`); the memory is an upper bound, the mean of all ranks.
  Percentages: how much slower the step is than without a limit. The link is slower, as where
  several devices share it; at full speed all copies are hidden, and there is nothing to decide.
- S2's gain from fewer tensor-parallel ranks: eight devices as tp8, and as tp1 with dp8 and a plan,
  at equal memory per device. Collectives are computed from their bytes.

`--json FILE` writes one flat object: `s3_1f1b_joint_gain`, `1F1B_1024_joint_bytes`,
`fewer_ranks_gain`, ...
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.pipelines import claim_stages
from benchmarks.pipelines.rows import (
    Figures,
    Scale,
    measure_fewer_ranks,
    measure_scale,
    measure_seed,
)
from benchmarks.pipelines.schedules import SCHEDULES
from swapkit.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SPARE = 0.3
CLAIMS = {"s3_1f1b": ("S3_PIPELINE", 0.1417), "s3_interleaved": ("S3_INTERLEAVED", 0.1465)}
FEWER_RANKS_CLAIM = 0.25
# Microbatches by ranks; the longest ones in 1F1B only.
RANKS = {8: 16, 64: 128, 256: 512, 1024: 1024}
ALL_SCHEDULES_UP_TO = 64


def list_scales(most_ranks: int) -> Iterator[Scale]:
    """Yield the pipelines to plan."""
    for ranks, microbatches in RANKS.items():
        for name in SCHEDULES if ranks <= ALL_SCHEDULES_UP_TO else ("1F1B",):
            if ranks <= most_ranks:
                yield Scale(name=name, ranks=ranks, microbatches=microbatches)


def prefix(name: str, found: Figures) -> Figures:
    return {f"{name}_{key}": value for key, value in found.items()}


def run_seeds(options: argparse.Namespace) -> Figures:
    """Measure and print the rows of S3's pipelines."""
    print("S3's pipelines, 30 % of the memory free under full recompute")
    print(f"{'':<16}{'claim':>8}{'joint':>8}{'separate':>10}{'at most':>9}{'memory':>20}{'s':>7}")
    figures: Figures = {}
    for name, (stage, claim) in CLAIMS.items():
        found = measure_seed(
            getattr(claim_stages, stage), spare=SPARE, link_bytes_per_s=options.link
        )
        figures |= prefix(name, {**found, "claim": claim, "reached": found["joint_gain"] >= claim})
        memory = found["joint_bytes"] / found["separate_bytes"] - 1
        print(
            f"{name:<16}{claim:>+8.1%}{found['joint_gain']:>+8.1%}{found['separate_gain']:>+10.1%}"
            f"{found['most']:>+9.1%}{memory:>+13.1%} joint{found['planning_seconds']:>8.0f}",
            flush=True,
        )
    return figures


def run_scales(options: argparse.Namespace) -> Figures:
    """Measure and print the rows of torch's schedules."""
    print(f"\nTorch's schedules, 70B-shaped, link {options.shared_link / 1e9:g} GB/s each way")
    print(
        f"{'':<22}{'ranks':>6}{'jobs':>9}{'no limit':>11}{'separate':>20}{'joint':>20}{'s':>7}"
        f"  {'memory of a rank':>16}"
    )
    figures: Figures = {}
    for scale in list_scales(options.ranks):
        found = measure_scale(scale, share=options.share, link_bytes_per_s=options.shared_link)
        figures |= prefix(f"{scale.name}_{scale.ranks}", found)
        cells = "".join(
            f"{format_bytes(found[f'{way}_bytes'] // scale.ranks):>11}"
            f"{max(0.0, found[f'{way}_slower']):>+9.3%}"
            for way in ("separate", "joint")
        )
        memory = found["joint_bytes"] / found["separate_bytes"] - 1
        print(
            f"{scale.name:<22}{scale.ranks:>6}{found['jobs']:>9}"
            f"{format_bytes(found['free_bytes'] // scale.ranks):>11}{cells}"
            f"{found['planning_seconds']:>7.1f}  {memory:>+16.1%}",
            flush=True,
        )
    return figures


def run_fewer_ranks(options: argparse.Namespace) -> Figures:
    """Measure and print the row of fewer tensor-parallel ranks."""
    found = measure_fewer_ranks(
        memory_bytes=options.memory,
        link_bytes_per_s=options.link,
        network_bytes_per_s=options.network,
    )
    gain = found["gain"]
    shown = "no plan fits" if gain is None else f"{gain:+.1%}"
    tp8, tp1 = format_bytes(found["tp8_peak_bytes"]), format_bytes(found["tp1_peak_bytes"])
    print(
        f"\nS2: LLaMA2-7B 8K, tp8 -> tp1, dp8 and a plan, {format_bytes(options.memory)} per device"
    )
    print(
        f"claim {FEWER_RANKS_CLAIM:+.0%}, swapkit {shown}, at most {found['most']:+.1%}", end="; "
    )
    print(f"peaks without a limit {tp8} and {tp1}")
    figures = {**found, "claim": FEWER_RANKS_CLAIM}
    return prefix("fewer_ranks", {**figures, "reached": (gain or 0.0) >= FEWER_RANKS_CLAIM})


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1024, help="most ranks (default: 1024)")
    parser.add_argument(
        "--share",
        type=float,
        default=0.3,
        help="budget of torch's schedules, between the least and the most memory (0.3)",
    )
    parser.add_argument(
        "--link", type=float, default=24e9, metavar="BYTES", help="bytes per second each way (24e9)"
    )
    parser.add_argument(
        "--shared-link", type=float, default=8e9, metavar="BYTES",
        help="the same for torch's schedules (8e9)",
    )  # fmt: skip
    parser.add_argument(
        "--network", type=float, default=150e9, metavar="BYTES",
        help="bytes per second of a device for collectives (150e9)",
    )  # fmt: skip
    parser.add_argument(
        "--memory",
        type=lambda text: parse_bytes(text, name="--memory"),
        default=54 << 30,
        help="of a device, without optimizer states (54GiB: of 64 GiB)",
    )
    parser.add_argument(
        "--only", choices=("seeds", "schedules", "ranks"), help="run only these rows"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    print(f"{claim_stages.HARDWARE}, link {options.link / 1e9:g} GB/s each way\n")
    runs = {"seeds": run_seeds, "schedules": run_scales, "ranks": run_fewer_ranks}
    figures: Figures = {
        "link_bytes_per_s": options.link,
        "shared_link_bytes_per_s": options.shared_link,
    }
    for name, each in runs.items():
        if options.only in {None, name}:
            figures |= each(options)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
