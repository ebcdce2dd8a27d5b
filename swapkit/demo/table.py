"""The demo's result in the terminal."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from swapkit.demo.messages import RunKind
from swapkit.demo.results import RunResult

_MIB = 1 << 20
_NONE = "-"
_ERROR_LINES = 12
_LEGEND = (
    "a: no limit, torch's own allocator. b: no limit, swapkit's pool. c: the same pool, every "
    "block recomputed by torch.utils.checkpoint.",
    "d: plain torch on a pool of the budget's size. e: swapkit.budget of that size. All train the "
    "same model on the same text, each in a process of its own.",
)


def results_table(results: Sequence[RunResult]) -> Table:
    """One row for every run.

    Args:
        results: of all runs, the one on torch's own allocator first.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading in ("run", "outcome"):
        table.add_column(heading, no_wrap=True, vertical="bottom")
    for heading in (
        "budget\n\nMiB",
        "peak\n[1]\nMiB",
        "pool\n[2]\nMiB",
        "process\n[3]\nMiB",
        "\nstep\ns",
        "\nratio\nto a",
        "\n\nrescues",
        "swapped\nout / in\nMiB",
        "host\n[4]\nMiB",
        "\nfinal\nloss",
        "bit-\nequal\nto a",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        table.add_row(*_cells(result, results[0]))
    return table


def _cells(result: RunResult, reference: RunResult) -> list[str | Text]:
    finished, kind = result.finished, result.spec.kind
    budgeted = kind == RunKind.BUDGETED
    equal = result.equals(reference)
    failed = result.out_of_memory is not None
    return [
        result.spec.label,
        Text("OOM error", "red") if failed else Text("finished", "green"),
        _mib(result.spec.budget_bytes),
        _mib(result.peak_bytes),
        _mib(result.witness_peak_bytes),
        _mib(result.process_peak_bytes),
        _number(result.median_seconds, 2),
        _number(result.ratio_to(reference), 3),
        str(finished.rescues) if budgeted else _NONE,
        f"{_mib(finished.swapped_out_bytes, 0)} / {_mib(finished.swapped_in_bytes, 0)}"
        if budgeted
        else _NONE,
        _mib(finished.host_peak_bytes) if budgeted else _NONE,
        _number(result.final_loss, 4),
        _NONE if failed else Text("yes", "green") if equal else Text("no", "red"),
    ]


def footnotes(results: Sequence[RunResult], *, steps: int) -> tuple[str, ...]:
    """What the columns are.

    Args:
        results: of all runs, the one on torch's own allocator first.
        steps: timed steps of every run.
    """
    counted = results[0].peak_bytes
    pooled = next(
        each.finished.allocated_peak_bytes for each in results if each.spec.kind == RunKind.POOL
    )
    witness = (
        "most resident bytes of the pool's own mapping, read from outside the process, which is "
        f"stopped for it, in /proc/<pid>/smaps ({sum(each.witness_looks for each in results)} "
        "times in all)."
        if any(each.witness_peak_bytes is not None for each in results)
        else "not available: only Linux tells."
    )
    return (
        *_LEGEND,
        "[1] a: tensor bytes alive at once, counted by torch.profiler over the first two steps. "
        f"Others: bytes that the pool reserved. Check: a {_mib(counted)} MiB, blocks in use at "
        f"b's peak {_mib(pooled)} MiB, {pooled / counted - 1:+.2%}.",
        f"[2] {witness}",
        "[3] VmHWM: code, libraries, host copies and all; of a, torch's profiler too.",
        "[4] On the CPU device the host copies live in the same RAM, outside the pool: they count "
        "in [3], not in [1] and [2].",
        f"Step: median of {steps} timed steps, less the time stopped for [2]. Ratio: median over "
        "the rounds; in each round every run trains the same step, one run after another.",
    )


def show(console: Console, results: Sequence[RunResult], *, steps: int) -> None:
    """Print the failures' texts, the table and its footnotes.

    Args:
        console: where to.
        results: of all runs, the one on torch's own allocator first.
        steps: timed steps of every run.
    """
    for result in results:
        if result.out_of_memory is not None:
            _show_failure(console, result)
    console.print()
    console.print(results_table(results))
    console.print()
    for note in footnotes(results, steps=steps):
        console.print(note, style="dim", markup=False, highlight=False)
    console.print()


def show_verdict(console: Console, found: Sequence[str]) -> None:
    """Print whether all is as it should be.

    Args:
        console: where to.
        found: what is not.
    """
    for problem in found:
        console.print(f"BROKEN: {problem}", style="bold red", markup=False, highlight=False)
    if not found:
        console.print(
            "Every budget held. Plain torch ran out of memory; swapkit trained on, bit for bit.",
            style="bold green",
        )


def _show_failure(console: Console, result: RunResult) -> None:
    """What torch raised, its first lines."""
    failure = result.out_of_memory
    if failure is None:
        return
    lines = failure.text.splitlines()
    console.print(
        f"{result.spec.label}: torch.OutOfMemoryError in step {failure.step + 1}", style="red"
    )
    for line in lines[:_ERROR_LINES]:
        console.print(f"    {line}", style="dim", markup=False, highlight=False)
    if len(lines) > _ERROR_LINES:
        console.print(f"    ({len(lines) - _ERROR_LINES} more lines in result.json)", style="dim")


def _mib(nbytes: int | None, digits: int = 1) -> str:
    return _number(None if nbytes is None else nbytes / _MIB, digits)


def _number(value: float | None, digits: int) -> str:
    return _NONE if value is None else f"{value:.{digits}f}"
