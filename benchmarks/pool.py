"""Speed of the pool: against glibc and mimalloc in C, and in a training step of torch.

1. Nanoseconds per allocate + free for blocks of 512 B to 256 MiB in 1 and 4 threads, each allocator
   called from C through the same table of functions (native/allocators.c). Blocks are not touched,
   so that only the allocator is measured, not the clearing of pages. Rounds are interleaved;
   figures are medians.
2. The demo's training step on swapkit's pool (b) and on torch's own allocator (a): two processes
   that take turns step by step, so that machine noise affects both equally. `step_ratio` is the
   median ratio of neighbouring steps, which a temporary slowdown of the machine hardly changes.

mimalloc is loaded as libmimalloc.so.2 (Debian: libmimalloc2.0). Without it its columns are empty.
`--json FILE` writes one flat object: `pool_ns_1MiB_1t`, `glibc_ns_1MiB_1t`, `mimalloc_ns_1MiB_1t`
(null where missing), ..., `step_seconds_plain`, `step_seconds_pool`, `step_ratio`,
`step_ratio_lower_quartile`, `step_ratio_upper_quartile`, `step_ratio_of_medians`,
`step_ratio_of_minima`. On a busy machine the quartiles are far apart, and only the last one is
meaningful.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

BENCHMARKS = Path(__file__).resolve().parent
ROOT = BENCHMARKS.parent
CORE = ROOT / "swapkit" / "_native"
ALLOCATORS = ("pool", "mimalloc", "glibc")
SIZES = {
    "512B": 512,
    "4KiB": 4 << 10,
    "32KiB": 32 << 10,
    "256KiB": 256 << 10,
    "1MiB": 1 << 20,
    "8MiB": 8 << 20,
    "64MiB": 64 << 20,
    "256MiB": 256 << 20,
}
THREADS = (1, 4)
GOAL_FROM_BYTES = 1 << 20

Figures = dict[str, float | str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The extent of the measurement."""

    rounds: int
    milliseconds: int
    model: str
    untimed_steps: int
    timed_steps: int


FULL = Effort(rounds=21, milliseconds=20, model="small", untimed_steps=3, timed_steps=21)
QUICK = Effort(rounds=5, milliseconds=3, model="tiny", untimed_steps=2, timed_steps=9)


def compile_driver(folder: Path) -> Path:
    """Compile the C driver together with the core, as a release build does."""
    driver = folder / "allocators"
    flags = re.findall(r'"(-O\d)"', (ROOT / "build_native.py").read_text())[:1] or ["-O2"]
    command = [
        os.environ.get("CC", "gcc"),
        *flags,
        "-std=c11",
        "-D_GNU_SOURCE",
        "-fvisibility=hidden",
        "-pthread",
        f"-I{CORE / 'include'}",
        f"-I{CORE / 'src'}",
        *sorted(map(str, (CORE / "src").rglob("*.c"))),
        str(BENCHMARKS / "native" / "allocators.c"),
        "-ldl",
        "-o",
        str(driver),
    ]
    subprocess.run(command, check=True)
    return driver


def measure_allocators(effort: Effort) -> Figures:
    """Run the driver and reduce its lines to medians."""
    with tempfile.TemporaryDirectory(prefix="swapkit-bench-") as folder:
        driver = compile_driver(Path(folder))
        command = [str(driver), str(effort.rounds), str(effort.milliseconds)]
        done = subprocess.run(
            [*command, *map(str, SIZES.values())], check=True, stdout=subprocess.PIPE, text=True
        )
    samples: dict[str, list[float]] = defaultdict(list)
    names = {nbytes: name for name, nbytes in SIZES.items()}
    for line in done.stdout.splitlines():
        allocator, nbytes, threads, ns = line.split()
        samples[f"{allocator}_ns_{names[int(nbytes)]}_{threads}t"].append(float(ns))
    keys = [f"{each}_ns_{size}_{n}t" for n in THREADS for size in SIZES for each in ALLOCATORS]
    return {key: statistics.median(samples[key]) if samples[key] else None for key in keys}


class Trainer:
    """One of the two processes of the training benchmark."""

    def __init__(self, kind: str, model: str) -> None:
        """Start the process and wait until it is ready."""
        self._process = subprocess.Popen(
            [sys.executable, str(BENCHMARKS / "_training_step.py"), kind, model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        self.setting = self._read()
        self.seconds: list[float] = []

    def step(self) -> None:
        """Train one step and store its seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        self.seconds.append(float(self._read()))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a training process ended with status {self._process.wait()}")
        return line.strip()


def measure_step(effort: Effort) -> Figures:
    """Run both processes in turns, in reverse order every other round."""
    plain, pool = (Trainer(kind, effort.model) for kind in ("plain", "pool"))
    try:
        for index in range(effort.untimed_steps + effort.timed_steps):
            for trainer in (plain, pool) if index % 2 == 0 else (pool, plain):
                trainer.step()
    finally:
        plain.close()
        pool.close()
    timed = slice(effort.untimed_steps, None)
    medians = [statistics.median(each.seconds[timed]) for each in (plain, pool)]
    pairs = zip(plain.seconds[timed], pool.seconds[timed], strict=True)
    lower, middle, upper = statistics.quantiles((b / a for a, b in pairs), n=4)
    return {
        "step_seconds_plain": medians[0],
        "step_seconds_pool": medians[1],
        "step_ratio": middle,
        "step_ratio_lower_quartile": lower,
        "step_ratio_upper_quartile": upper,
        "step_ratio_of_medians": medians[1] / medians[0],
        "step_ratio_of_minima": min(pool.seconds[timed]) / min(plain.seconds[timed]),
        "step_setting": f"{effort.model} model, {plain.setting}",
    }


def show_ns(value: float | str | None) -> str:
    return f"{value:12,.1f}" if isinstance(value, float) else f"{'missing':>12}"


def show_ratio(numerator: float | str | None, denominator: float | str | None) -> str:
    if isinstance(numerator, float) and isinstance(denominator, float):
        return f"{numerator / denominator:13.3f}"
    return f"{'-':>13}"


def print_allocators(figures: Figures) -> None:
    print("Nanoseconds per allocate + free, blocks untouched; a ratio below 1: the pool is faster")
    heads = "".join(f"{name:>12}" for name in ALLOCATORS)
    print(f"{'bytes':>8} {'threads':>7}{heads}{'pool/mimalloc':>15}{'pool/glibc':>14}")
    for threads in THREADS:
        for size in SIZES:
            pool, mimalloc, glibc = (figures[f"{a}_ns_{size}_{threads}t"] for a in ALLOCATORS)
            shown = show_ns(pool) + show_ns(mimalloc) + show_ns(glibc)
            ratios = f"  {show_ratio(pool, mimalloc)} {show_ratio(pool, glibc)}"
            print(f"{size:>8} {threads:>7}{shown}{ratios}")
    if figures["mimalloc_ns_1MiB_1t"] is None:
        print("mimalloc is missing: libmimalloc.so.2 was not found (Debian: libmimalloc2.0)")


def print_step(figures: Figures) -> None:
    print(f"\nTraining step, plain torch in turns ({figures['step_setting']})")
    print(f"  (a) torch's own allocator  {figures['step_seconds_plain']:.4f} s")
    print(f"  (b) swapkit's pool         {figures['step_seconds_pool']:.4f} s")
    print(
        f"  (b)/(a)                    {figures['step_ratio']:.4f}, median over pairs of steps;"
        f" half of them lie between {figures['step_ratio_lower_quartile']:.4f}"
        f" and {figures['step_ratio_upper_quartile']:.4f};"
        f" of the medians {figures['step_ratio_of_medians']:.4f},"
        f" of the shortest steps {figures['step_ratio_of_minima']:.4f}"
    )


def goal_misses(figures: Figures) -> list[str]:
    """Return the figures above their goals: pool <= mimalloc from 1 MiB, step ratio <= 1.00."""
    misses = []
    for key, mine in figures.items():
        other = figures.get(key.replace("pool_", "mimalloc_", 1))
        if not key.startswith("pool_ns") or not isinstance(mine, float):
            continue
        if SIZES[key.split("_")[2]] >= GOAL_FROM_BYTES and isinstance(other, float):
            misses += [f"{key} is {mine / other:.2f} of mimalloc's"] if mine > other else []
    ratio = figures.get("step_ratio")
    if isinstance(ratio, float) and ratio > 1.0:
        misses.append(f"step_ratio is {ratio:.4f}")
    return misses


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="shorter and less exact")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--only", choices=("allocators", "step"), help="run one half")
    options = parser.parse_args(arguments)
    effort = QUICK if options.quick else FULL
    figures: Figures = {}
    if options.only != "step":
        figures |= measure_allocators(effort)
        print_allocators(figures)
    if options.only != "allocators":
        figures |= measure_step(effort)
        print_step(figures)
    misses = goal_misses(figures)
    print("\nGoals (pool <= mimalloc from 1 MiB up, (b)/(a) <= 1.00): ", end="")
    print("missed: " + "; ".join(misses) if misses else "reached")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
