"""Runs the demo, and prints and keeps its result."""

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from swapkit.demo.children import RunFailedError
from swapkit.demo.options import DemoOptions, OptionError

if TYPE_CHECKING:
    from rich.console import Console

EXIT_OK, EXIT_BROKEN, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
_NEEDED = ("matplotlib",)
_FILE_COLUMNS = 110


def missing_packages() -> tuple[str, ...]:
    """Return the packages of the `demo` extra that are not installed."""
    return tuple(name for name in _NEEDED if importlib.util.find_spec(name) is None)


def run_demo(options: DemoOptions) -> int:
    """Run the demo and print its result.

    Args:
        options: options of the demo.

    Returns:
        0 if there are no problems, 1 if there are, 2 for invalid options, 130 if interrupted.
    """
    if missing := missing_packages():
        sys.stderr.write(f"The demo needs {' and '.join(missing)}: pip install 'swapkit[demo]'\n")
        return EXIT_BROKEN
    try:
        return _run(options)
    except OptionError as error:
        sys.stderr.write(f"swapkit demo: {error}\n")
        return EXIT_USAGE
    except RunFailedError as error:
        sys.stderr.write(f"The demo failed: {error}\n")
        return EXIT_BROKEN
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted; ended all runs.\n")
        return EXIT_INTERRUPTED


def _run(options: DemoOptions) -> int:
    """Run everything; print the tables, draw the chart, write the JSON."""
    from swapkit.demo.chart import draw_chart
    from swapkit.demo.export import as_record
    from swapkit.demo.progress import show_progress
    from swapkit.demo.race import race
    from swapkit.demo.race import unit_count as race_unit_count
    from swapkit.demo.results import race_problems
    from swapkit.demo.sweep import sweep
    from swapkit.demo.sweep import unit_count as sweep_unit_count
    from swapkit.demo.sweep_table import point_problems, show_sweep
    from swapkit.demo.table import show_race

    start = time.monotonic()
    total = race_unit_count(options) + sweep_unit_count(options)
    with show_progress(_console(stderr=True), total=total) as progress:
        result = race(options, progress)
        points = sweep(options, progress)
    problems = [
        *race_problems(result),
        *(each for point in points for each in point_problems(point)),
    ]
    console = _console(stderr=options.json == "-")
    show_race(console, result, problems)
    show_sweep(console, points)
    options.output.mkdir(parents=True, exist_ok=True)
    chart, result_file = options.output / "chart.png", options.output / "result.json"
    draw_chart(result, chart)
    seconds = time.monotonic() - start
    text = json.dumps(as_record(result, points, problems, options, seconds=seconds), indent=1)
    result_file.write_text(text, encoding="utf-8")
    if options.json == "-":
        sys.stdout.write(text + "\n")
    elif options.json is not None:
        Path(options.json).write_text(text, encoding="utf-8")
    console.print(f"{seconds:.0f} s. Memory over a step: {chart}. All figures: {result_file}.")
    return EXIT_BROKEN if problems else EXIT_OK


def _console(*, stderr: bool) -> "Console":
    """Return the output console, with a minimum width if it is not a terminal."""
    from rich.console import Console

    console = Console(stderr=stderr)
    if not console.is_terminal:
        console.width = max(console.width, _FILE_COLUMNS)
    return console
