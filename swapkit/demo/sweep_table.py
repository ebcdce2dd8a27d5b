"""The sweep in the terminal, and what is wrong with it."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from swapkit.demo.sweep import FULL_RECOMPUTE, NO_LIMIT, POLICIES, SLOWDOWN, UNTIMED, Point
from swapkit.units import format_bytes

_MS = 1000.0
_NONE = "-"
_NAMES = (NO_LIMIT, FULL_RECOMPUTE, *POLICIES)


def sweep_table(points: Sequence[Point]) -> Table:
    """One row for every budget and link.

    Args:
        points: of the sweep.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("link", no_wrap=True, vertical="bottom")
    table.add_column("budget\n[5]", justify="right", no_wrap=True)
    for name in _NAMES:
        table.add_column(f"{name}\nms", justify="right", no_wrap=True)
    for heading in ("auto\nrecovers", "bound\n[6]", "bit-\nequal"):
        table.add_column(heading, justify="right", no_wrap=True)
    for point in points:
        found = tuple(point_problems(point))
        table.add_row(
            _link(point),
            f"{point.share:.0%}",
            *(_milliseconds(point, name) for name in _NAMES),
            _share(point.recovered("auto")),
            _share(point.possible()),
            Text("no", "red") if found else Text("yes", "green"),
        )
    return table


def point_problems(point: Point) -> Iterator[str]:
    """Say everything that is not as it should be at one budget.

    Args:
        point: of the sweep.
    """
    reference = point.results[NO_LIMIT]
    for policy in POLICIES:
        result = point.results[policy]
        where = f"sweep, {policy} at {point.share:.0%} over a link of {_link(point)}"
        if result.out_of_memory is not None:
            continue  # the step does not fit: the table says so
        if not result.equals(reference):
            yield f"{where} is not bit-equal to the run without a limit"
        limit = result.spec.budget_bytes
        if limit is not None and result.peak_bytes > limit:
            yield f"{where} reserved {format_bytes(result.peak_bytes)} of {format_bytes(limit)}"
        if result.finished.stage not in {"stable", ""}:
            yield f"{where} was still at its {result.finished.stage} after {UNTIMED} steps"


def show_sweep(console: Console, points: Sequence[Point]) -> None:
    """Print the table and its footnotes.

    Args:
        console: where to.
        points: of the sweep.
    """
    if not points:
        return
    console.print(sweep_table(points))
    console.print()
    for note in (
        "none: no limit, swapkit's pool. full: every block recomputed by torch.utils.checkpoint. "
        "The others: swapkit.budget with that policy.",
        "[5] Share of the activations that fits beside parameters, gradients and optimizer states. "
        "OOM: the step does not fit.",
        "auto recovers: share of the time that full recompute costs over no limit which auto does "
        "not lose. [6] The most that any plan could, by the lower bound of auto's plan.",
        f"The slow link is one over which swapping everything would cost {SLOWDOWN:.0%} of the "
        "step. Steps take turns as above; each run's first "
        f"{UNTIMED} steps are not timed, in which it learns. Half of the processors compute, the "
        "others are for copies.",
    ):
        console.print(note, style="dim", markup=False, highlight=False)
    console.print()


def _link(point: Point) -> str:
    return f"{format_bytes(int(point.bytes_per_s))}/s" if point.bytes_per_s else "as memory"


def _milliseconds(point: Point, name: str) -> str:
    result = point.results[name]
    if result.out_of_memory is not None:
        return "OOM"
    seconds = point.seconds(name)
    return _NONE if seconds is None else f"{seconds * _MS:.0f}"


def _share(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2f}"
