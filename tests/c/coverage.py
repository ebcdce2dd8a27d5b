"""Sum up what gcov measured over the native core: lines and branches per file and folder.

Run by ``make coverage``. Branches that only an assertion or the compiler made are not in the build.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDERS = ("pool", "disk", "sched", "backend", "entry", "base")
GATED = ("pool", "disk", "sched")


@dataclass(slots=True)
class Coverage:
    """Hits per line and per (line, branch) of one source file."""

    lines: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    branches: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))

    def add(self, line: dict[str, Any]) -> None:
        """Add the record that gcov made for one line."""
        number = line["line_number"]
        self.lines[number] += line["count"]
        for index, branch in enumerate(line["branches"]):
            self.branches[number, index] += branch["count"]

    def missed(self) -> list[int]:
        """Return the lines with a branch never taken, or never reached at all."""
        lines = {number for number, count in self.lines.items() if count == 0}
        return sorted(lines | {number for (number, _), count in self.branches.items() if not count})


def percent(counts: list[int]) -> float:
    """Return how many of `counts` are not zero, in per cent."""
    return 100.0 * sum(count > 0 for count in counts) / len(counts) if counts else 100.0


def read_coverage(objects: Path, root: Path) -> dict[str, Coverage]:
    """Run gcov over every object below `objects`.

    Args:
        objects: folder with the ``.gcda`` files.
        root: the repository; only sources of the core below it are kept.

    Returns:
        Coverage by path relative to ``swapkit/_native/src``.
    """
    core = root / "swapkit" / "_native" / "src"
    data = sorted(str(path) for path in objects.rglob("*.gcda") if "_native" in path.parts)
    found: dict[str, Coverage] = defaultdict(Coverage)
    with tempfile.TemporaryDirectory() as folder:
        command = ["gcov", "--json-format", "--branch-probabilities", *data]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        for path in Path(folder).glob("*.gcov.json.gz"):
            for file in json.loads(gzip.decompress(path.read_bytes()))["files"]:
                source = Path(file["file"])
                if source.is_relative_to(core):
                    for line in file["lines"]:
                        found[str(source.relative_to(core))].add(line)
    return dict(found)


def print_row(name: str, parts: list[Coverage], missed: str = "") -> float:
    """Print one line of the table and return the branch coverage in it."""
    lines = [count for part in parts for count in part.lines.values()]
    branches = [count for part in parts for count in part.branches.values()]
    sys.stdout.write(
        f"{name:28} {len(lines):6} {percent(lines):7.1f} {len(branches):9} {percent(branches):8.1f}"
        f"  {missed}\n"
    )
    return percent(branches)


def main() -> int:
    """Print the table; fail if the branches of a gated folder are covered less than asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=Path, required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument(
        "--branches", type=float, default=0.0, help=f"least per cent in each of {', '.join(GATED)}"
    )
    arguments = parser.parse_args()
    found = read_coverage(arguments.objects, arguments.root.resolve())
    sys.stdout.write(f"{'file':28} {'lines':>6} {'line %':>7} {'branches':>9} {'branch %':>8}\n")
    totals = {}
    for folder in FOLDERS:
        files = {name: part for name, part in found.items() if name.startswith(folder + "/")}
        for name, part in sorted(files.items()):
            print_row(name, [part], "misses " + ",".join(map(str, part.missed())))
        totals[folder] = print_row(f"{folder} (all)", list(files.values()))
    return 0 if all(totals[folder] >= arguments.branches for folder in GATED) else 1


if __name__ == "__main__":
    sys.exit(main())
