"""The recipes of `examples/recipes`, estimated for devices that are not here.

Each row is one command of a recipe with `--estimate`: the step is recorded from tensors without
memory, its times and links are modelled (`swapkit/planning/hardware.py`), and the plan is that of a
session with the device's memory, less 4 %. Nothing is trained.

How good such times are, the last table says: steps of which `benchmarks/results` has a record,
estimated in the same way.

`--json FILE` writes one flat object of all figures.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "recipes")]

import swapkit  # noqa: E402
from benchmarks.gpu import llama  # noqa: E402
from swapkit.planning.hardware import hardware_named  # noqa: E402
from swapkit.reporting.text import format_table  # noqa: E402
from swapkit.units import format_bytes  # noqa: E402

if TYPE_CHECKING:
    from swapkit.reporting.estimates import Estimate

RESULTS = ROOT / "benchmarks" / "results"
HEADS = (
    "recipe",
    "device",
    "without a limit",
    "smallest",
    "limit",
    "step",
    "of plain",
    "on the host",
)


class Recipe(NamedTuple):
    """One command of a recipe, and the device it is estimated for."""

    script: str
    options: str
    device: str


RECIPES = (
    Recipe("finetune", "--size 1b --tokens 4096 --rows 4", "RTX 4090"),
    Recipe("finetune", "--size 1b --tokens 4096 --rows 16", "RTX 4090"),
    Recipe("finetune", "--size 3b --tokens 4096", "RTX 4090"),
    Recipe("finetune", "--size 7b --method lora --tokens 4096", "RTX 4090"),
    Recipe("finetune", "--size 7b --method lora --tokens 4096 --rows 4", "RTX 4090"),
    Recipe("finetune", "--size 7b --method lora --tokens 32768", "H100"),
    Recipe("finetune", "--size 13b --method lora --tokens 4096 --rows 8", "H100"),
    Recipe("finetune", "--size 32b --method lora --tokens 8192", "H100"),
    Recipe("finetune", "--size 3b --tokens 131072", "H100"),
    Recipe("fsdp", "--size 7b --ranks 8 --tokens 4096", "RTX 4090"),
    Recipe("fsdp", "--size 13b --ranks 8 --tokens 4096", "RTX 4090"),
    Recipe("fsdp", "--size 32b --ranks 8 --tokens 8192", "H100"),
    Recipe("vision", "--size large --rows 256", "RTX 4090"),
    Recipe("vision", "--size huge --rows 256", "RTX 4090"),
    Recipe("diffusion", "--size sd15 --rows 32", "RTX 4090"),
)
# Steps with a record: the part of `make gpu`, and its file and key of the plain step.
RECORDS = (
    ("8b_8k", "H100", "h100/train_8b_8k.json", "train_8b_8k_plain"),
    ("1b_4k", "H100", "h100/train_1b_4k.json", "train_1b_4k_plain"),
)


def estimate_recipe(recipe: Recipe) -> Estimate:
    """Return the estimate that the recipe's own command prints."""
    module = importlib.import_module(recipe.script)
    options = module.make_options([*recipe.options.split(), "--estimate", recipe.device])
    if recipe.script == "fsdp":
        sharded: Estimate = module.estimate(options, recipe.device)
        return sharded
    common = importlib.import_module("common")
    found: Estimate = common.estimate(options, module.make_training, recipe.device)
    return found


def estimate_record(shape_name: str, device: str) -> Estimate:
    """Return the estimate of a step of `make gpu`."""
    shape = llama.SHAPES[shape_name]
    model = llama.build_model(shape, "meta")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens = torch.zeros(1, shape.tokens, dtype=torch.long, device="meta")

    def step() -> None:
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return swapkit.estimate(step, model, optimizer, hardware=device)


def name_figures(recipe: Recipe, found: Estimate) -> dict[str, Any]:
    """Return the figures of a row by the names of `--json`."""
    machine = hardware_named(recipe.device).machine
    assert machine is not None
    limit_bytes = machine.budget_bytes
    fitting = [each for each in found.times if each.budget_bytes <= limit_bytes]
    at = max(fitting, key=lambda each: each.budget_bytes, default=None)
    return {
        "plain_bytes": found.plain_bytes,
        "smallest_bytes": found.smallest_budget_bytes,
        "limit_bytes": limit_bytes,
        "plain_step_ms": found.step_seconds * 1e3,
        "step_ms": None if at is None else at.seconds * 1e3,
        "host_bytes": None if at is None else at.host_peak_bytes,
    }


def show(recipe: Recipe, figures: dict[str, Any]) -> tuple[str, ...]:
    step_ms = figures["step_ms"]
    times = ("does not fit", "", "")
    if step_ms is not None:
        ratio = f"{step_ms / figures['plain_step_ms']:.2f}"
        times = (f"{step_ms / 1e3:.2f} s", ratio, format_bytes(figures["host_bytes"]))
    memory = (format_bytes(figures[f"{each}_bytes"]) for each in ("plain", "smallest", "limit"))
    return (f"{recipe.script} {recipe.options}", recipe.device, *memory, *times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--only", default="", help="rows with this text")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    rows = []
    for recipe in RECIPES:
        row = f"{recipe.script} {recipe.options} {recipe.device}"
        if options.only in row:
            print(f"estimating {row} ...", file=sys.stderr)
            found = name_figures(recipe, estimate_recipe(recipe))
            figures |= {f"{row}: {name}": value for name, value in found.items()}
            rows.append(show(recipe, found))
    print(format_table(HEADS, rows))
    checks = []
    for shape, device, file, key in RECORDS:
        record = json.loads((RESULTS / file).read_text(encoding="utf-8"))
        step_ms = estimate_record(shape, device).step_seconds * 1e3
        measured_ms = record[f"{key}_step_ms"]
        figures |= {f"{shape}: estimated_ms": step_ms, f"{shape}: measured_ms": measured_ms}
        ratio = f"{step_ms / measured_ms:.2f}"
        checks.append((shape, device, f"{step_ms:.1f} ms", f"{measured_ms:.1f} ms", ratio))
    print()
    print(format_table(("recorded step", "device", "estimated", "measured", "ratio"), checks))
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
