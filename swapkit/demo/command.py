"""`python -m swapkit demo`: from the options to the exit status."""

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from swapkit.demo.children import RunFailedError
from swapkit.demo.export import as_record
from swapkit.demo.options import DemoOptions, OptionError
from swapkit.demo.race import race, unit_count
from swapkit.demo.results import RunResult, problems
from swapkit.demo.sweep import Point, sweep
from swapkit.demo.sweep import unit_count as sweep_unit_count

if TYPE_CHECKING:
    from rich.console import Console

EXIT_OK, EXIT_BROKEN, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
_NEEDED = ("rich", "matplotlib")
_FILE_COLUMNS = 110


def missing_packages() -> tuple[str, ...]:
    """Which of the packages of the `demo` extra are not installed."""
    return tuple(name for name in _NEEDED if importlib.util.find_spec(name) is None)


def run_demo(options: DemoOptions) -> int:
    """Run the demo and say what came out.

    Args:
        options: as the user gave them.

    Returns:
        0 if everything is as it should be, 1 if not, 2 if the options make no sense.
    """
    if missing := missing_packages():
        sys.stderr.write(f"The demo needs {' and '.join(missing)}: pip install 'swapkit[demo]'\n")
        return EXIT_BROKEN
    console = _console(options)
    start = time.monotonic()
    try:
        results, points = _run_with_bar(console, options)
    except OptionError as error:
        console.print(f"python -m swapkit demo: {error}", style="red", markup=False)
        return EXIT_USAGE
    except RunFailedError as error:
        console.print(f"The demo failed: {error}", style="red", markup=False, highlight=False)
        return EXIT_BROKEN
    except KeyboardInterrupt:
        console.print("Interrupted; all runs were ended.", style="red")
        return EXIT_INTERRUPTED
    return _tell(console, results, points, options, seconds=time.monotonic() - start)


def _console(options: DemoOptions) -> "Console":
    """Where to print: stderr if stdout is to hold JSON; wide enough where nobody watches."""
    from rich.console import Console

    console = Console(stderr=options.json == "-")
    if not console.is_terminal:
        console.width = max(console.width, _FILE_COLUMNS)
    return console


def _run_with_bar(
    console: "Console", options: DemoOptions
) -> tuple[tuple[RunResult, ...], tuple[Point, ...]]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<28}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        total = unit_count(options) + sweep_unit_count(options)
        task = bar.add_task("starting", total=total)

        def progress(what: str, units: int) -> None:
            bar.update(task, description=what, advance=units)

        results = race(options, progress)
        points = sweep(options, progress)
        bar.update(task, description="done", completed=total)
    return results, points


def _tell(
    console: "Console",
    results: tuple[RunResult, ...],
    points: tuple[Point, ...],
    options: DemoOptions,
    *,
    seconds: float,
) -> int:
    """Print the tables, draw the chart, write the JSON."""
    from swapkit.demo.chart import draw_chart
    from swapkit.demo.sweep_table import point_problems, show_sweep
    from swapkit.demo.table import show, show_verdict

    found = (*problems(results), *(each for point in points for each in point_problems(point)))
    show(console, results, steps=options.steps)
    show_sweep(console, points)
    show_verdict(console, found)
    options.output.mkdir(parents=True, exist_ok=True)
    chart, result_file = options.output / "chart.png", options.output / "result.json"
    draw_chart(results, chart)
    record = as_record(results, points, found, options, seconds=seconds)
    text = json.dumps(record, indent=1)
    result_file.write_text(text, encoding="utf-8")
    if options.json == "-":
        sys.stdout.write(text + "\n")
    elif options.json is not None:
        Path(options.json).write_text(text, encoding="utf-8")
    console.print(f"{seconds:.0f} s. Chart: {chart}. Everything else: {result_file}.")
    return EXIT_BROKEN if found else EXIT_OK
