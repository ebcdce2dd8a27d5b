"""Check that the C core's includes go only downwards: base <- backend, disk <- pool <- sched.

The floors are the folders of swapkit/_native/src. A floor's file may include the public header
swapkit.h, its own floor's headers and those of `BELOW`; a floor listed in `FACE_ONLY` shows the
floors above it one header, <floor>/<floor>.h. No file includes a .c file, and none includes what
would tie the core to Python or torch.

    python -m tools.check_includes [folder of the native core]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

NATIVE = Path(__file__).resolve().parent.parent / "swapkit/_native"

BELOW = {
    "base": frozenset[str](),
    "backend": frozenset({"base"}),
    "pool": frozenset({"base", "backend"}),
    "disk": frozenset({"base"}),
    "sched": frozenset({"base", "backend", "pool", "disk"}),
    "entry": frozenset({"base", "pool"}),
    "plan": frozenset({"base"}),
    "layout": frozenset({"base"}),
    "hooks": frozenset[str](),  # a library of its own
}
FACE_ONLY = frozenset({"backend", "pool", "disk"})
FOREIGN = ("Python.h", "torch/", "ATen/", "c10/", "cuda", "acl/")
INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', re.MULTILINE)


def find_header(native: Path, including: Path, name: str) -> Path | None:
    """Return the file that `#include "name"` means, or None if there is none."""
    for folder in (including.parent, native / "include", native / "src"):
        if (folder / name).is_file():
            return (folder / name).resolve()
    return None


def judge_header(native: Path, including: Path, header: Path) -> str | None:
    """Return what is wrong with including one of the core's own headers, or None."""
    if header.is_relative_to(native / "include"):
        return None
    floor = including.relative_to(native / "src").parts[0]
    other = header.relative_to(native / "src").parts[0]
    if other == floor:
        return None
    if other not in BELOW[floor]:
        return f"{floor} may include {', '.join(sorted(BELOW[floor])) or 'no other floor'}"
    if other in FACE_ONLY and header.name != f"{other}.h":
        return f"private to {other}; its face is {other}/{other}.h"
    return None


def judge(native: Path, including: Path, quote: str, name: str) -> str | None:
    """Return what is wrong with one include, or None."""
    if name.endswith(".c"):
        return "includes a source file"
    if name.startswith(FOREIGN):
        return "ties the core to other code"
    if quote == "<":
        return None
    header = find_header(native, including, name)
    if header is None:
        return "not found; name headers relative to src/ or include/"
    return judge_header(native, including, header)


def check_includes(native: Path) -> list[str]:
    """Return one line for every include that breaks a rule."""
    native = native.resolve()
    source = native / "src"
    problems = []
    for path in sorted([*source.rglob("*.[ch]"), *(native / "include").rglob("*.h")]):
        place = path.relative_to(native)
        if path.is_relative_to(source) and path.relative_to(source).parts[0] not in BELOW:
            problems.append(f"{place}: in no floor; the floors are {', '.join(BELOW)}")
            continue
        for quote, name in INCLUDE.findall(path.read_text(encoding="utf-8")):
            wrong = judge(native, path, quote, name)
            if wrong:
                problems.append(f"{place}: {name}: {wrong}")
    return problems


def main() -> int:
    """Print every problem; the exit status says whether there was one."""
    problems = check_includes(Path(sys.argv[1]) if len(sys.argv) > 1 else NATIVE)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
