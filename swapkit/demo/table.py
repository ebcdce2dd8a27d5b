"""The demo's result in the terminal."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from swapkit.demo.messages import RunKind
from swapkit.demo.results import RaceResult, RunResult, verdict

_MIB = 1 << 20
_MS = 1000.0
_NONE = "-"
_ERROR_LINES = 8


def make_table() -> Table:
    """Return an empty table in the demo's style."""
    return Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)


def race_table(race: RaceResult) -> Table:
    """Return a table with one row for every run, and one for plain training in each budget.

    Args:
        race: all runs.
    """
    table = make_table()
    table.add_column("run", no_wrap=True, vertical="bottom")
    for heading in (
        "limit\nMiB",
        "peak\nMiB",
        "resident\nMiB",
        "host copies\nMiB",
        "step\nms",
        "vs.\nplain",
        "same\nbits",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in race.runs:
        table.add_row(*_cells(result, race))
    for trial in race.trials:
        died = trial.out_of_memory is not None
        outcome = Text("out of memory", "red") if died else Text("fits", "red")
        table.add_row(trial.label, _mib(trial.budget_bytes), outcome)
    return table


def _cells(result: RunResult, race: RaceResult) -> Iterator[str | Text]:
    yield result.spec.label
    yield _mib(result.budget_bytes)
    if result.out_of_memory is not None:
        yield Text("out of memory", "red")
        return
    yield _mib(result.peak_bytes or None)
    yield _mib(result.witness_peak_bytes)
    has_copies = result.spec.kind == RunKind.SWAPKIT
    yield _mib(result.finished.host_peak_bytes) if has_copies else _NONE
    seconds = result.median_seconds
    yield _number(None if seconds is None else seconds * _MS, 0)
    yield _number(result.ratio_to(race.plain), 2)
    if result is race.reference:
        yield _NONE
    else:
        yield Text("yes", "green") if result.equals(race.reference) else Text("no", "red")


def race_notes(race: RaceResult) -> Iterator[str]:
    """Yield explanations of the table's columns.

    Args:
        race: all runs.
    """
    plain, alone = race.plain, race.reference.spec.label
    timed, steps, threads = len(plain.seconds), len(plain.losses), plain.spec.threads
    yield (
        "limit, peak: device memory as the pool counts it. resident: the most of it that the "
        "kernel reported (/proc/<pid>/smaps). Host copies are outside the limit: on a CPU they "
        "use the same RAM, next to a GPU they use the host's."
    )
    yield (
        f"step: median of {timed} steps, timed after all plans were stable. The runs take turns; "
        f"each is a process with {threads} compute {'thread' if threads == 1 else 'threads'}. All "
        f'but "{alone}" use swapkit\'s pool.'
    )
    yield (
        f"same bits: the losses of all {steps} steps, and the parameters, buffers and optimizer "
        f'states after them, equal those of "{alone}".'
    )


def show_race(console: Console, race: RaceResult, problems: Sequence[str]) -> None:
    """Print the conclusion, the table and an explanation of its columns.

    Args:
        console: output console.
        race: all runs.
        problems: all problems found.
    """
    console.print()
    for problem in problems:
        console.print(f"BROKEN: {problem}", style="bold red", markup=False, highlight=False)
    if not problems:
        console.print(verdict(race), style="bold green", highlight=False)
    console.print()
    console.print(race_table(race))
    console.print()
    for note in race_notes(race):
        console.print(note, style="dim", markup=False, highlight=False)
    for trial in race.trials[-1:]:
        if trial.out_of_memory is not None:
            _show_failure(console, trial.label, trial.out_of_memory.text)
    console.print()


def _show_failure(console: Console, label: str, text: str) -> None:
    """Print the first lines of torch's error."""
    console.print(f"\n{label} fails with", highlight=False)
    lines = text.splitlines()
    for line in (f"torch.OutOfMemoryError: {lines[0]}", *lines[1:_ERROR_LINES]):
        console.print(f"    {line}", style="dim", markup=False, highlight=False)
    if len(lines) > _ERROR_LINES:
        console.print(f"    ({len(lines) - _ERROR_LINES} more lines in result.json)", style="dim")


def _mib(nbytes: int | None) -> str:
    return _number(None if nbytes is None else nbytes / _MIB, 1)


def _number(value: float | None, digits: int) -> str:
    return _NONE if value is None else f"{value:.{digits}f}"
