"""`swapkit demo`: trains a small model with and without a budget, and compares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from swapkit.cli.base import CliCommand
from swapkit.demo.options import (
    DEFAULT_BUDGETS,
    DEFAULT_SHARES,
    DEFAULT_SIZE,
    SWEEP_STEPS,
    GivenOptions,
    OptionError,
    read_options,
)
from swapkit.demo.sizes import SIZES


@click.command(cls=CliCommand)
@click.option(
    "--budget",
    "budgets",
    multiple=True,
    metavar="BUDGET",
    help='Share of the peak without a limit, "60%", or bytes, "300MiB"; repeat, or separate '
    f"several with commas (default: {','.join(DEFAULT_BUDGETS)}).",
)
@click.option(
    "--size",
    default=DEFAULT_SIZE,
    show_default=True,
    help=f"Size of the model: {', '.join(SIZES)}.",
)
@click.option("--steps", type=int, help="Timed steps of every run.")
@click.option(
    "--sweep",
    is_flag=False,
    flag_value=DEFAULT_SHARES,
    metavar="[SHARES]",
    help="Also compare all policies at these budgets over a fast and a slow link: shares of the "
    f"activations (without a value: {DEFAULT_SHARES}); takes ten minutes.",
)
@click.option(
    "--sweep-steps",
    type=int,
    default=SWEEP_STEPS,
    show_default=True,
    help="Timed steps of every run of the sweep.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("swapkit-demo"),
    show_default=True,
    help="Folder for chart.png and result.json.",
)
@click.option("--json", metavar="FILE", help="Also write the result to FILE; - for stdout.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of model and batches.")
@click.option(
    "--threads",
    type=int,
    help="Torch's threads in every run (default: half of the processors; the others copy).",
)
def demo(**given: Any) -> int:
    """Train a small language model with and without a budget, and compare.

    The model learns the sources of Python's standard library. Each run has its own process. The
    command fails if a run exceeds its budget, or differs from plain training in one bit.
    """
    from swapkit.demo.command import run_demo

    try:
        asked = read_options(GivenOptions(**given))
    except OptionError as error:
        raise click.UsageError(str(error)) from None
    return run_demo(asked)
