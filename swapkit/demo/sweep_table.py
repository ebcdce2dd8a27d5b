"""The table of the sweep in the terminal, and its problems."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from swapkit.demo.results import run_problems
from swapkit.demo.sweep import FULL_RECOMPUTE, NO_LIMIT, POLICIES, SLOWDOWN, Point, link_name
from swapkit.demo.table import make_table

_MS = 1000.0
_NONE = "-"
_HEADINGS = {NO_LIMIT: "no limit", FULL_RECOMPUTE: "recompute\nall"}


def sweep_table(points: Sequence[Point]) -> Table:
    """Return a table with one row for every budget and link.

    Args:
        points: points of the sweep.
    """
    names = (NO_LIMIT, FULL_RECOMPUTE, *POLICIES)
    table = make_table()
    table.add_column("link", no_wrap=True, vertical="bottom")
    table.add_column("budget", justify="right", no_wrap=True, vertical="bottom")
    for name in names:
        heading = f"{_HEADINGS.get(name, name)}\nms"
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    for heading in ("auto\nrecovers", "possible", "same\nbits"):
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    for point in points:
        broken = any(point_problems(point))
        table.add_row(
            link_name(point.bytes_per_s),
            f"{point.share:.0%}",
            *(_milliseconds(point, name) for name in names),
            _share(point.recovered("auto")),
            _share(point.possible()),
            Text("no", "red") if broken else Text("yes", "green"),
        )
    return table


def point_problems(point: Point) -> Iterator[str]:
    """Yield every deviation from the demo's claims at one budget.

    Args:
        point: a point of the sweep.
    """
    for result in point.results.values():
        if result.out_of_memory is None:  # else the step does not fit, and the table shows it
            for what in run_problems(result, point.free):
                yield f"{result.spec.label} {what}"


def show_sweep(console: Console, points: Sequence[Point]) -> None:
    """Print the table and an explanation of its columns.

    Args:
        console: output console.
        points: points of the sweep.
    """
    if not points:
        return
    console.print(sweep_table(points))
    console.print()
    for note in (
        "budget: the share of the activations that fits beside parameters, gradients and optimizer "
        'states. OOM: the step does not fit. "recompute all" is torch.utils.checkpoint around '
        "every block, without a limit; the columns after it are swapkit.budget's policies.",
        "auto recovers: the share of the time lost by recomputing all that policy auto does not "
        "lose. possible: the most that any plan could, by a lower bound.",
        "The slow link is one over which swapping everything would cost "
        f"{SLOWDOWN:.0%} of the step.",
    ):
        console.print(note, style="dim", markup=False, highlight=False)
    console.print()


def _milliseconds(point: Point, name: str) -> str:
    result = point.results[name]
    if result.out_of_memory is not None:
        return "OOM"
    seconds = result.median_seconds
    return _NONE if seconds is None else f"{seconds * _MS:.0f}"


def _share(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2f}"
