"""Runs one part, in a process of its own: `python -m benchmarks.gpu.part NAME OPTIONS`.

OPTIONS is JSON: `output`, `device`, `quick`, `first`, `dry`, `seconds`.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.context import Context
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.report import Report

if TYPE_CHECKING:
    from types import FrameType

MARGIN = 0.04  # of the time is left for ending well


def report_path(output: Path, name: str) -> Path:
    """Return where a part's report is."""
    return output / f"part-{name}.json"


def end(_number: int, _frame: FrameType | None) -> None:
    """End what was started, too, instead of leaving it behind."""
    sys.exit(128 + signal.SIGTERM)


def run(name: str, options: dict[str, Any]) -> None:
    """Run a part."""
    part = next(part for part in PARTS if part.name == name)
    output = Path(options["output"])
    report = Report(part=name, path=report_path(output, name))
    report.save()
    context = Context(
        report=report,
        device=options["device"],
        quick=options["quick"] or options["first"],
        first=options["first"],
        dry=options["dry"],
        output=output,
        deadline=time.monotonic() + options["seconds"] * (1 - MARGIN),
    )
    part.load(dry=context.dry)(context)


def main() -> None:
    signal.signal(signal.SIGTERM, end)
    name, options = sys.argv[1:]
    run(name, json.loads(options))


if __name__ == "__main__":
    main()
