"""The command `python -m swapkit replay`."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swapkit.errors import InvalidArgument, SwapkitError
from swapkit.units import parse_bytes

if TYPE_CHECKING:
    import argparse

EXIT_OK, EXIT_BROKEN, EXIT_USAGE = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """The options of the command."""

    trace: str
    device: int | None
    budget_bytes: int | None
    search_least: bool
    json: str | None
    plot: Path | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.add_argument(
        "trace",
        metavar="TRACE",
        help="a snapshot of torch.cuda.memory._dump_snapshot, a step recorded by swapkit.record, a "
        "document of allocations, or a table (CSV) with the columns lower, upper, size",
    )
    parser.add_argument(
        "--device", type=int, metavar="N", help="of a snapshot: the device whose history to replay"
    )
    parser.add_argument(
        "--budget", metavar="SIZE", help='also replay within this much memory, e.g. "60GiB"'
    )
    parser.add_argument(
        "--least",
        action="store_true",
        help="also find the least budget within which each allocator serves the trace",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the figures as JSON")
    parser.add_argument(
        "--plot", metavar="FILE.png", help="draw which addresses are in use over time (matplotlib)"
    )


def run_replay(arguments: argparse.Namespace) -> int:
    """Replay a trace and print the figures.

    Returns:
        0; 1 if a package is missing; 2 if an option or the file makes no sense, or a file cannot be
        read or written.
    """
    try:
        options = _read_options(arguments)
        if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
            sys.stderr.write("--plot needs matplotlib: pip install 'swapkit[demo]'\n")
            return EXIT_BROKEN
        sys.stdout.write(_replay(options) + "\n")
    except (SwapkitError, OSError) as error:
        sys.stderr.write(f"python -m swapkit replay: {error}\n")
        return EXIT_USAGE
    return EXIT_OK


def _read_options(arguments: argparse.Namespace) -> ReplayOptions:
    budget_bytes = None
    if arguments.budget is not None:
        budget_bytes = parse_bytes(arguments.budget, name="--budget")
    plot = None if arguments.plot is None else Path(arguments.plot)
    if plot is not None and plot.suffix.lower() != ".png":
        raise InvalidArgument(f"--plot {arguments.plot!r}: expected a file whose name ends in .png")
    if plot is not None and not plot.parent.is_dir():
        raise InvalidArgument(f"--plot {arguments.plot!r}: there is no folder {str(plot.parent)!r}")
    return ReplayOptions(
        trace=arguments.trace,
        device=arguments.device,
        budget_bytes=budget_bytes,
        search_least=arguments.least,
        json=arguments.json,
        plot=plot,
    )


def _replay(options: ReplayOptions) -> str:
    """Replay, write the files, and return the text."""
    from swapkit.ir.documents import write_document
    from swapkit.replay.comparing import compare_allocators, measure_demand
    from swapkit.replay.export import encode_replay
    from swapkit.replay.reading import read_replayable
    from swapkit.reporting.replays import format_replay

    trace = read_replayable(options.trace, device=options.device)
    demand = measure_demand(trace)
    if demand.requests == 0:
        raise InvalidArgument(f"{options.trace}: the trace has no allocation to replay")
    budget_bytes = options.budget_bytes
    reports = compare_allocators(
        trace, budget_bytes=budget_bytes, search_least=options.search_least
    )
    if options.json is not None:
        write_document(
            options.json, encode_replay(trace, demand, reports, budget_bytes=budget_bytes)
        )
    if options.plot is not None:
        from swapkit.replay.chart import draw_replay

        draw_replay(trace, reports, options.plot)
    return format_replay(trace, demand, reports, budget_bytes=budget_bytes)
