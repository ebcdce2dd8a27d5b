"""The tiers below the device: overhead of host memory, speed of the disk, saving of a process.

1. Host memory: a scheduler takes copies of 1,000 odd sizes. `host_ratio` is the memory that it
   reserves over the requested bytes (goal: 1.01 at most). With a limit below that, the limit is
   checked after every copy and is never exceeded. With a disk, copies take whole granules of
   64 KiB, so that free memory can always be used: `host_ratio_with_disk`.
2. The disk: large copies restricted to the disk go out, all of them, and come back in reverse
   order, with host memory for eight of them. For comparison: `dd` with `oflag=direct` and
   `iflag=direct` (one request at a time), and fio if installed (16 requests), on a file in the same
   folder, in turns; all reuse their space in every round. Medians, and medians of a round's ratios.
3. The saving on a CPU, where host copies take the same memory: the demo's training in separate
   processes, with the pool alone and within a budget with a disk and little host memory.
   `saving_share` is the fall of the process's peak resident memory, as the kernel reports it
   (VmHWM), over the fall of the pool's peak (goal: 0.80 at least).

`--json FILE` writes one flat object of all figures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BENCHMARKS = Path(__file__).resolve().parent
MIB = 1 << 20
GOAL_RATIO = 1.01
GOAL_SAVING = 0.80
BUDGET_SHARE = 0.45  # of the pool's peak without a budget

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The extent of the measurement."""

    rounds: int
    copies: int
    copy_bytes: int
    model: str
    steps: int


FULL = Effort(rounds=7, copies=64, copy_bytes=16 * MIB, model="small", steps=4)
QUICK = Effort(rounds=3, copies=32, copy_bytes=8 * MIB, model="tiny", steps=3)


def run_script(name: str, *arguments: str) -> Figures:
    """Run one of this folder's scripts in its own process; return the JSON that it prints."""
    environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ
    environment |= {"PYTHONPATH": str(BENCHMARKS.parent)}
    command = [sys.executable, str(BENCHMARKS / name), *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    figures: Figures = json.loads(done.stdout)
    return figures


def measure_host(folder: Path, _effort: Effort) -> Figures:
    return run_script("_tier_scheduler.py", "host", str(folder))


def measure_disk(folder: Path, effort: Effort) -> Figures:
    return run_script(
        "_tier_scheduler.py",
        "disk",
        str(folder),
        f"--rounds={effort.rounds}",
        f"--copies={effort.copies}",
        f"--copy-bytes={effort.copy_bytes}",
    )


def train(effort: Effort, **options: object) -> Figures:
    """Train with the pool alone, or, given options, within a budget."""
    given = [json.dumps(options)] if options else []
    return run_script("_tier_training.py", effort.model, str(effort.steps), *given)


def measure_saving(folder: Path, effort: Effort) -> Figures:
    plain = train(effort)
    limit_bytes = int(plain["pool_peak_bytes"] * BUDGET_SHARE)
    host_bytes = limit_bytes // 8
    budget = train(effort, limit=limit_bytes, disk=str(folder), host_limit=host_bytes)
    assert budget["digest"] == plain["digest"], "the numbers changed"
    assert budget["host_peak_bytes"] <= host_bytes
    given_bytes = plain["pool_peak_bytes"] - budget["pool_peak_bytes"]
    saved_bytes = plain["resident_peak_bytes"] - budget["resident_peak_bytes"]
    names = ("pool_peak_bytes", "resident_peak_bytes", "step_seconds")
    return {
        **{f"saving_plain_{name}": plain[name] for name in names},
        **{f"saving_budget_{name}": budget[name] for name in names},
        "saving_host_peak_bytes": budget["host_peak_bytes"],
        "saving_disk_peak_bytes": budget["disk_peak_bytes"],
        "saving_pool_bytes": given_bytes,
        "saving_resident_bytes": saved_bytes,
        "saving_share": saved_bytes / given_bytes,
        "saving_setting": f"{effort.model} model, {plain['threads']} threads",
    }


# ---- tables --------------------------------------------------------------------------------------


def print_host(figures: Figures) -> None:
    requested = show(figures["host_requested_bytes"])
    print(f"Host memory: {figures['host_copies']} copies of odd sizes, {requested}")
    print(f"  taken of the machine / asked for   {figures['host_ratio']:.4f}")
    print(f"  the same in a session with a disk  {figures['host_ratio_with_disk']:.4f}")
    print(
        f"  limit {show(figures['host_limit_bytes'])}: at most "
        f"{show(figures['host_limited_peak_bytes'])} taken, "
        f"{figures['host_limited_refused']} copies refused"
    )


def print_disk(figures: Figures) -> None:
    print(
        f"\nDisk: {show(figures['disk_bytes'])} in copies of {show(figures['disk_copy_bytes'])}, "
        "GB/s; a ratio above 1: swapkit is faster"
    )
    print(f"{'':8}{'swapkit':>10}{'dd':>10}{'fio':>15}{'/ dd':>10}{'/ fio':>10}")
    for way in ("write", "read"):
        speeds = [figures[f"{name}_{way}_bytes_per_s"] for name in ("disk", "dd", "fio")]
        ratios = [figures[f"{way}_ratio_to_{name}"] for name in ("dd", "fio")]
        shown = [f"{each / 1e9:.3f}" if each else "not installed" for each in speeds]
        shown += [f"{each:.3f}" if each else "-" for each in ratios]
        print(f"{way:8}{shown[0]:>10}{shown[1]:>10}{shown[2]:>15}{shown[3]:>10}{shown[4]:>10}")


def print_saving(figures: Figures) -> None:
    print(f"\nA training run on the CPU ({figures['saving_setting']}), peaks")
    print(f"{'':28}{'pool':>14}{'process':>14}{'step, s':>10}")
    for kind in ("plain", "budget"):
        name = {"plain": "no budget", "budget": "budget, disk, small host"}[kind]
        pool, process, seconds = (
            figures[f"saving_{kind}_{item}"]
            for item in ("pool_peak_bytes", "resident_peak_bytes", "step_seconds")
        )
        print(f"{name:28}{show(pool):>14}{show(process):>14}{seconds:10.3f}")
    print(
        f"  host copies {show(figures['saving_host_peak_bytes'])}, disk "
        f"{show(figures['saving_disk_peak_bytes'])}; the pool freed "
        f"{show(figures['saving_pool_bytes'])}, of which the process saved "
        f"{show(figures['saving_resident_bytes'])}: {figures['saving_share']:.3f}"
    )


def show(nbytes: float) -> str:
    return f"{nbytes / MIB:,.1f} MiB"


def goal_misses(figures: Figures) -> list[str]:
    misses = []
    if figures.get("host_ratio", 0) > GOAL_RATIO:
        misses.append(f"host_ratio is {figures['host_ratio']:.4f}")
    if figures.get("host_limited_peak_bytes", 0) > figures.get("host_limit_bytes", 0):
        misses.append("the host limit was exceeded")
    if figures.get("saving_share", 1) < GOAL_SAVING:
        misses.append(f"saving_share is {figures['saving_share']:.3f}")
    return misses


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="shorter and less exact")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--only", choices=("host", "disk", "saving"), help="run one part")
    parser.add_argument(
        "--folder", type=Path, help="folder of the disk's files (default: temporary)"
    )
    options = parser.parse_args(arguments)
    effort = QUICK if options.quick else FULL
    figures: Figures = {}
    with tempfile.TemporaryDirectory(prefix="swapkit-bench-", dir=options.folder) as name:
        folder = Path(name)
        parts: dict[str, tuple[Callable[[Path, Effort], Figures], Callable[[Figures], None]]] = {
            "host": (measure_host, print_host),
            "disk": (measure_disk, print_disk),
            "saving": (measure_saving, print_saving),
        }
        for part, (measure, report) in parts.items():
            if options.only in {None, part}:
                figures |= measure(folder, effort)
                report(figures)
    misses = goal_misses(figures)
    print("\nGoals (host ratio <= 1.01, limit kept, saving share >= 0.80): ", end="")
    print("missed: " + "; ".join(misses) if misses else "reached")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
