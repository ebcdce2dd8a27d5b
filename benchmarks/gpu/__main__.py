"""`python -m benchmarks.gpu`: what swapkit promises on an NVIDIA GPU, proven on the one at hand.

Exit status: 0 all is met; 1 a part failed or a promise is broken; 2 the command line is wrong; 3 no
NVIDIA GPU; 4 something that is needed to run is missing; 5 all ran, a target of speed is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu import machine, prepare
from benchmarks.gpu.context import ROOT
from benchmarks.gpu.outcome import (
    FINE,
    NO_GPU,
    NOT_PREPARED,
    Outcome,
    figures_of,
    format_header,
    format_summary,
)
from benchmarks.gpu.part import report_path
from benchmarks.gpu.parts import PARTS, Part, choose, limit_of
from benchmarks.gpu.process import python, run_process
from benchmarks.gpu.report import Report, format_report, read_report

if TYPE_CHECKING:
    from collections.abc import Sequence


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=(__doc__ or "").partition("\n\n")[0],
        epilog=(__doc__ or "").partition("\n\n")[2],
    )
    parser.add_argument("--parts", default="", help="names of parts, separated by commas or spaces")
    parser.add_argument("--list", action="store_true", help="list the parts and exit")
    parser.add_argument("--quick", action="store_true", help="run for a few minutes in total")
    parser.add_argument(
        "--first",
        action="store_true",
        help="the most important parts, for the first five minutes on a GPU",
    )
    parser.add_argument("--seconds", type=float, help="time limit of each part")
    parser.add_argument("--output", type=Path, default=default_output(), metavar="FOLDER")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the figures to FILE (default: FOLDER/gpu.json)",
    )
    parser.add_argument("--wheels", metavar="FOLDER", help="folder of wheels to unpack and use")
    parser.add_argument(
        "--dry",
        action="store_true",
        help="run everything tiny and on the CPU, to check that it runs",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device of a dry run")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.dry:
        parser.error("--device cpu needs --dry")
    options.device = options.device or ("cpu" if options.dry else "cuda")
    try:
        options.chosen = choose(
            options.parts, quick=options.quick, first=options.first, dry=options.dry
        )
    except ValueError as error:
        parser.error(str(error))
    return options


def default_output() -> Path:
    """Return where results go unless told otherwise."""
    return Path(os.environ.get("OUT") or ROOT / "build" / "gpu")


def get_ready(options: argparse.Namespace, output: Path) -> tuple[int, str]:
    """See that there is what is needed; return an exit status and a sentence."""
    device: str = options.device
    on_gpu = device != "cpu"
    reason = machine.missing_gpu() if on_gpu else None
    if reason is not None:
        return NO_GPU, reason
    log = output / "prepare.log"
    log.unlink(missing_ok=True)
    try:
        site = str(output / "site")
        if options.wheels:
            prepare.unpack_wheels(Path(options.wheels), output / "site")
            sys.path.insert(0, site)
        paths = [str(ROOT), *([site] if options.wheels else []), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        reason = machine.missing_torch() if on_gpu else None
        if reason is not None:
            return NOT_PREPARED, reason
        prepare.prepare_core(log, build=on_gpu)
    except prepare.NotPreparedError as error:
        return NOT_PREPARED, str(error)
    trouble = prepare.warm_up(device, log)
    return FINE, "" if trouble is None else f"{trouble} (see {log}); parts that need it will fail"


def run_parts(options: argparse.Namespace, output: Path) -> Outcome:
    """Run the parts one after the other; print each as it ends."""
    outcome = Outcome()
    for part in options.chosen:
        seconds = limit_of(
            part,
            quick=options.quick,
            first=options.first,
            dry=options.dry,
            asked_seconds=options.seconds,
        )
        failure = run_part(part, options, output, seconds)
        path = report_path(output, part.name)
        report = read_report(path) if path.exists() else Report(part=part.name)
        outcome.reports.append(report)
        print(f"== {part.name}: {part.what}\n")
        print(format_report(report) or "measured nothing")
        if failure is not None:
            outcome.failures[part.name] = failure
            print(f"\nFAILED: {failure}; see {output / f'{part.name}.log'}")
        print(flush=True)
    return outcome


def run_part(part: Part, options: argparse.Namespace, output: Path, seconds: float) -> str | None:
    """Run a part in a process of its own; return how it failed, if it did."""
    report_path(output, part.name).unlink(missing_ok=True)
    log = output / f"{part.name}.log"
    log.unlink(missing_ok=True)
    settings = {
        "output": str(output),
        "device": options.device,
        "quick": options.quick,
        "first": options.first,
        "dry": options.dry,
        "seconds": seconds,
    }
    command = python("-m", "benchmarks.gpu.part", part.name, json.dumps(settings))
    done = run_process(command, seconds=seconds, log=log, cwd=ROOT)
    return None if done.ok else done.describe()


def write_results(
    options: argparse.Namespace, output: Path, outcome: Outcome, header: dict[str, str]
) -> None:
    """Write the figures and the tables."""
    figures = figures_of(outcome, header, dry=options.dry)
    path = options.json or output / "gpu.json"
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    texts = [format_header(header, dry=options.dry)]
    texts += [f"== {report.part}\n\n{format_report(report)}" for report in outcome.reports]
    texts.append(format_summary(outcome))
    (output / "gpu.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    print(f"figures: {path}; tables: {output / 'gpu.txt'}; logs beside them")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit status."""
    options = parse(arguments)
    if options.list:
        for part in PARTS:
            print(f"{part.name:14}{part.seconds:5.0f} s  {part.what}")
        return FINE
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    status, sentence = get_ready(options, output)
    if sentence:
        print(f"benchmarks.gpu: {sentence}", file=sys.stderr)
    if status != FINE:
        return status
    header = machine.describe(options.device)
    print(format_header(header, dry=options.dry), end="\n\n", flush=True)
    outcome = run_parts(options, output)
    print(format_summary(outcome))
    write_results(options, output, outcome, header)
    print(f"{time.monotonic() - begin:.0f} s in all")
    return outcome.status


if __name__ == "__main__":
    sys.exit(main())
