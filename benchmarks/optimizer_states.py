"""Device memory that offloaded optimizer states save, and their cost.

For each optimizer two processes train the same model on swapkit's pool, one with its states on the
host between steps. They take turns step by step, so that machine noise affects both equally; ratios
are medians over the ratios of neighbouring steps. Peaks are the pool's, of whole steps, including
the first one. `saved` is the fall of the peak over the states' bytes: the goal is 1.00, within 2 %.
It is larger where the peak consists of the optimizer's temporaries, which chunking makes smaller.

`--json FILE` writes one flat object: for each of `adamw`, `adamw_fused`, `sgd_momentum` and
`adafactor` the keys `_states_bytes`, `_peak_bytes_plain`, `_peak_bytes_offloaded`,
`_reserved_bytes_plain`, `_reserved_bytes_offloaded`, `_saved_share`, `_step_seconds_plain`,
`_step_seconds_offloaded`, `_step_ratio`, `_optimizer_seconds_plain`,
`_optimizer_seconds_offloaded`, `_optimizer_ratio`, such as `adamw_step_ratio`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

BENCHMARKS = Path(__file__).resolve().parent
ROOT = BENCHMARKS.parent
OPTIMIZERS = ("adamw", "adamw_fused", "sgd_momentum", "adafactor")
MIB = 1 << 20
TOLERANCE = 0.02

Figures = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The extent of the measurement."""

    width: int
    layers: int
    untimed_steps: int
    timed_steps: int


FULL = Effort(width=768, layers=96, untimed_steps=2, timed_steps=15)
QUICK = Effort(width=512, layers=96, untimed_steps=1, timed_steps=5)


class Trainer:
    """One of the two processes."""

    def __init__(self, kind: str, name: str, effort: Effort) -> None:
        """Start the process."""
        script = str(BENCHMARKS / "_optimizer_step.py")
        self._process = subprocess.Popen(
            [sys.executable, script, kind, name, str(effort.width), str(effort.layers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        self.steps: list[Figures] = []

    def step(self) -> None:
        """Train one step and store its figures."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a training process ended with status {self._process.wait()}")
        self.steps.append(json.loads(line))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def measure(name: str, effort: Effort) -> Figures:
    """Run both processes in turns, in reverse order every other round."""
    plain, offloaded = (Trainer(kind, name, effort) for kind in ("plain", "offloaded"))
    try:
        for index in range(effort.untimed_steps + effort.timed_steps):
            for trainer in (plain, offloaded) if index % 2 == 0 else (offloaded, plain):
                trainer.step()
    finally:
        plain.close()
        offloaded.close()
    figures: Figures = {"states_bytes": plain.steps[-1]["states_bytes"]}
    for key in ("peak_bytes", "reserved_bytes"):
        for kind, trainer in (("plain", plain), ("offloaded", offloaded)):
            figures[f"{key}_{kind}"] = max(step[key] for step in trainer.steps)
    difference = figures["peak_bytes_plain"] - figures["peak_bytes_offloaded"]
    figures["saved_share"] = difference / figures["states_bytes"]
    for key in ("step", "optimizer"):
        figures |= compare_seconds(key, plain, offloaded, effort.untimed_steps)
    return {f"{name}_{key}": value for key, value in figures.items()}


def compare_seconds(key: str, plain: Trainer, offloaded: Trainer, untimed_steps: int) -> Figures:
    before, after = (
        [step[f"{key}_seconds"] for step in trainer.steps[untimed_steps:]]
        for trainer in (plain, offloaded)
    )
    return {
        f"{key}_seconds_plain": statistics.median(before),
        f"{key}_seconds_offloaded": statistics.median(after),
        f"{key}_ratio": statistics.median(b / a for a, b in zip(before, after, strict=True)),
    }


def print_table(figures: Figures, names: Sequence[str]) -> None:
    print("Optimizer states on the device (plain) and on the host between steps (offloaded)")
    heads = ("states", "peak", "peak", "saved", "step", "step", "ratio", "optimizer", "ratio")
    units = ("MiB", "plain", "offl.", "/states", "plain s", "offl. s", "", "offl. s", "")
    for words in (heads, units):
        print(f"{'':14}" + "".join(f"{word:>11}" for word in words))
    for name in names:
        cells = [
            f"{figures[f'{name}_{key}'] / MIB:11.1f}"
            for key in ("states_bytes", "peak_bytes_plain", "peak_bytes_offloaded")
        ]
        cells += [
            f"{figures[f'{name}_{key}']:11.3f}"
            for key in (
                "saved_share",
                "step_seconds_plain",
                "step_seconds_offloaded",
                "step_ratio",
                "optimizer_seconds_offloaded",
                "optimizer_ratio",
            )
        ]
        print(f"{name:14}" + "".join(cells))


def find_misses(figures: Figures, names: Sequence[str]) -> list[str]:
    """Return the optimizers whose peak falls by less than their states, within 2 %."""
    shares = {name: figures[f"{name}_saved_share"] for name in names}
    return [f"{name} saves {share:.3f}" for name, share in shares.items() if share < 1 - TOLERANCE]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="shorter and less exact")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--only", choices=OPTIMIZERS, help="measure one optimizer")
    options = parser.parse_args(arguments)
    names = OPTIMIZERS if options.only is None else (options.only,)
    figures: Figures = {}
    for name in names:
        figures |= measure(name, QUICK if options.quick else FULL)
    print_table(figures, names)
    misses = find_misses(figures, names)
    print("\nGoal (the peak falls by the states' bytes, within 2 %): ", end="")
    print("missed: " + "; ".join(misses) if misses else "reached")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
