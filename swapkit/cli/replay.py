"""`swapkit replay`: sends recorded allocations through several allocators."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click

from swapkit.cli.base import DONE, FAILED, CliCommand
from swapkit.errors import InvalidArgument
from swapkit.replay.command import ReplayOptions, replay_trace
from swapkit.units import parse_bytes


@click.command(cls=CliCommand)
@click.argument("trace")
@click.option(
    "--device",
    type=int,
    metavar="N",
    help="Of a snapshot: the device whose history to replay.",
)
@click.option("--budget", metavar="SIZE", help='Also replay within this memory, e.g. "60GiB".')
@click.option(
    "--least",
    is_flag=True,
    help="Also find the least budget within which each allocator serves the trace.",
)
@click.option("--json", metavar="FILE", help="Also write the figures as JSON.")
@click.option(
    "--plot",
    metavar="FILE.png",
    help="Draw which addresses are in use over time (matplotlib).",
)
def replay(
    *,
    trace: str,
    device: int | None,
    budget: str | None,
    least: bool,
    json: str | None,
    plot: str | None,
) -> int:
    """Send recorded allocations through several allocators, and compare them.

    TRACE is a snapshot of torch.cuda.memory._dump_snapshot, a step recorded by swapkit.record, a
    document of allocations, or a table (CSV) with the columns lower, upper, size. Its allocations
    go through torch's allocator, with and without expandable segments, through swapkit's pool, and
    to planned addresses. The output shows how much memory each reserves and why.
    """
    options = ReplayOptions(
        trace=trace,
        device=device,
        budget_bytes=None if budget is None else parse_bytes(budget, name="--budget"),
        search_least=least,
        json=json,
        plot=_read_plot(plot),
    )
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        click.echo("--plot needs matplotlib: pip install 'swapkit[demo]'", err=True)
        return FAILED
    click.echo(replay_trace(options))
    return DONE


def _read_plot(plot: str | None) -> Path | None:
    """Return the file to draw.

    Raises:
        InvalidArgument: it is no PNG, or its folder does not exist.
    """
    if plot is None:
        return None
    path = Path(plot)
    if path.suffix.lower() != ".png":
        raise InvalidArgument(f"--plot {plot!r}: expected a file whose name ends in .png")
    if not path.parent.is_dir():
        raise InvalidArgument(f"--plot {plot!r}: there is no folder {str(path.parent)!r}")
    return path
