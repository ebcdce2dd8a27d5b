"""`python -m benchmarks.virtual`: ways to train, compared on a virtual GPU; no GPU is needed.

Exit status: 0 all that is aimed at is met; 1 a way of swapkit failed; 2 the command line is wrong;
4 something that is needed to run is missing; 5 all ran, a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.configurations import Setup
from benchmarks.gpu.context import ROOT
from benchmarks.gpu.llama import SHAPES
from benchmarks.gpu.outcome import FINE, NOT_PREPARED, Outcome, figures_of, format_summary
from benchmarks.gpu.part import end
from benchmarks.gpu.report import NOT_RUN, Report, align, format_report, show
from benchmarks.gpu.trainer import FINISHED
from benchmarks.virtual import launch
from benchmarks.virtual.launch import MACHINES, SLOWNESS, Machine
from benchmarks.virtual.runs import Runner, share_of_memory
from benchmarks.virtual.table import checks_of, counts_of, times_of
from benchmarks.virtual.ways import choose, list_lora_ways, list_ways

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.gpu.comparison import Results, Way

SHAPES_HERE = {
    "1b_4k": "1b_4k",
    "1b_8k": "1b_8k",
    "8b_32k": "8b_32k",
    "transformers": "hf_1b_4k",
    "7b_lora": "7b_lora",
    "32b_lora": "32b_lora",
}
WARMUP_STEPS, STEPS = 3, 10
LEAST_STEPS = 2
TIMES, COUNTS = "times of a stable step; ratios: to plain", "what a stable step does"
MISSING = "not installed"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.virtual",
        description=(__doc__ or "").partition("\n\n")[0],
        epilog=(__doc__ or "").partition("\n\n")[2],
    )
    add = parser.add_argument
    add("--ways", default="", help="names of ways, separated by commas or spaces")
    add("--all", action="store_true", help="every way (default: the most important ones)")
    add("--list", action="store_true", help="list the ways and exit")
    add("--shapes", default="1b_4k", help=f"any of {', '.join(SHAPES_HERE)}")
    add("--machines", default="H100", help=f"any of {', '.join(MACHINES)}")
    add(
        "--slowness",
        type=float,
        default=SLOWNESS,
        help="slowness of the GPU's host; 0: the host takes no time",
    )
    add("--steps", type=int, default=STEPS, help="stable steps to measure")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="number of processes")
    add("--output", type=Path, default=ROOT / "build" / "virtual", metavar="FOLDER")
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the figures to FILE (default: FOLDER/virtual.json)",
    )
    options = parser.parse_args(arguments)
    try:
        options.shapes = words_of(options.shapes, "shape", SHAPES_HERE)
        options.machines = words_of(options.machines, "machine", MACHINES)
        machine = Machine(name=options.machines[0])
        known = [way.name for way in ways_of(machine, options.shapes[0], options.steps)]
        options.chosen = choose(options.ways, known, everything=options.all)
    except ValueError as error:
        parser.error(str(error))
    if options.steps < LEAST_STEPS or options.jobs < 1 or options.slowness < 0:
        parser.error(f"--steps: {LEAST_STEPS} or more; --jobs: 1 or more; --slowness: 0 or more")
    return options


def words_of(text: str, what: str, known: Iterable[str]) -> list[str]:
    """Return the words of an option, each of which must be known.

    Raises:
        ValueError: one is not, or there is none.
    """
    words = text.replace(",", " ").split()
    wrong = [word for word in words if word not in known]
    if wrong or not words:
        name = repr(wrong[0]) if wrong else "at all"
        raise ValueError(f"no {what} {name}; expected some of {', '.join(known)}")
    return words


def ways_of(machine: Machine, shape: str, steps: int) -> list[Way]:
    """Return every way to train a shape on a machine."""
    base = Setup(
        shape=SHAPES_HERE[shape],
        method="plain",
        device="cuda",
        digest_steps=0,
        warmup_steps=WARMUP_STEPS,
        timed_steps=steps,
    )
    if SHAPES[base.shape].rank:
        return list_lora_ways(base, machine.card_bytes)
    is_library = SHAPES[base.shape].library == "transformers"
    return list_ways(base, of_library=is_library)


def run_shape(options: argparse.Namespace, machine: Machine, shape: str) -> Report:
    """Train one shape on one machine in the ways that are asked for."""
    part = f"{machine.name}_{shape}"
    folder = options.output / part
    folder.mkdir(parents=True, exist_ok=True)
    report = Report(part=part, path=folder / "report.json")
    ways = ways_of(machine, shape, options.steps)
    asked = [way for way in ways if way.name in options.chosen]
    jobs = min(options.jobs, len(asked))
    runner = Runner(machine=machine, folder=folder, jobs=jobs, most_bytes=share_of_memory(jobs))
    results = runner.run(asked, progress)
    for way in ways:  # every one, so that the keys stay the same
        report.row(TIMES, way.name, times_of(results, way.name))
        report.row(COUNTS, way.name, counts_of(results, way.name))
    names = [way.name for way in asked]
    for check in checks_of(results, names, has_host=machine.slowness > 0, shape=SHAPES_HERE[shape]):
        report.check(check)
    absent_for = {MISSING: "their libraries missing", NOT_RUN: "their limits unknown or too large"}
    for outcome, why in absent_for.items():
        absent = [name for name in names if outcome in results.outcome(name)]
        if absent:
            report.note(f"did not run {len(absent)} ways, {why}: {', '.join(absent)}")
    return report


def progress(name: str, results: Results) -> None:
    """Say how a way ended."""
    outcome = results.outcome(name)
    text = show("step_ms", results.step_ms(name)) + " ms" if outcome == FINISHED else outcome
    print(f"{name:24}{results.runs[name][0]['seconds']:5.0f} s  {text}", flush=True)


def header_of(options: argparse.Namespace) -> dict[str, str]:
    """Return what the figures depend on."""
    return {"slowness": f"{options.slowness:g}", "steps": str(options.steps)}


def list_names() -> str:
    """Return the names of all ways; those of the usual choice have a mark."""
    rows = []
    for shape in ("1b_4k", "7b_lora"):
        known = [way.name for way in ways_of(Machine(name="H100"), shape, STEPS)]
        usual = choose("", known, everything=False)
        rows += [[shape, name, "usual" if name in usual else ""] for name in known]
    return "\n".join(align(rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit status."""
    options = parse(arguments)
    if options.list:
        print(list_names())
        return FINE
    signal.signal(signal.SIGTERM, end)  # what was started ends, too
    begin = time.monotonic()
    options.output = options.output.resolve()
    options.output.mkdir(parents=True, exist_ok=True)
    machines = [Machine(name=name, slowness=options.slowness) for name in options.machines]
    try:
        launch.check_interpreter()
        launch.prepare(machines[0], options.output / "prepare.log")
    except launch.NotPreparedError as error:
        print(f"benchmarks.virtual: {error}", file=sys.stderr)
        return NOT_PREPARED
    outcome = Outcome()
    header = header_of(options)
    texts = [", ".join(f"{key} {value}" for key, value in header.items())]
    for machine in machines:
        for shape in options.shapes:
            report = run_shape(options, machine, shape)
            outcome.reports.append(report)
            texts.append(f"== {report.part}\n\n{format_report(report)}")
            print(f"\n{texts[-1]}\n", flush=True)
    texts.append(format_summary(outcome))
    print(texts[-1])
    (options.output / "virtual.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    path = options.json or options.output / "virtual.json"
    figures = figures_of(outcome, header, dry=False)
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(f"figures: {path}; tables: {options.output / 'virtual.txt'}")
    print(f"{time.monotonic() - begin:.0f} s in all")
    return outcome.status


if __name__ == "__main__":
    sys.exit(main())
