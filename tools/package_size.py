"""Code lines of the package by folder, against a budget: `python -m tools.package_size [--lower]`.

A code line has code: neither blank, nor a comment, nor a docstring. `package_size.toml` has the
most lines of each folder and of all together, and the most that imports may be of Python's lines,
in percent. `--lower` writes the present figures where they are lower, so a budget only goes down;
what one folder gains, another one gives: that is an edit of the file.

Exit status: 0 all within the budget; 1 not.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGET = Path(__file__).with_suffix(".toml")
NATIVE = {".c", ".cpp", ".h", ".hpp", ".cu"}
LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def lines_of(node: ast.stmt) -> range:
    """Return the numbers of a statement's lines."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def count_python(text: str) -> tuple[int, int]:
    """Return the code lines of a Python file, and those of its imports."""
    documented: set[int] = set()
    imports: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            documented.update(lines_of(node.body[0]))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            imports.update(lines_of(node))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - documented), len(imports)


def count_native(text: str) -> int:
    """Return the code lines of a C or C++ file."""
    text = re.sub(r"/\*.*?\*/", lambda comment: "\n" * comment[0].count("\n"), text, flags=re.S)
    return sum(bool(line.strip()) for line in re.sub(r"//.*", "", text).splitlines())


def measure() -> tuple[Counter[str], float]:
    """Return code lines by folder, and the share of imports in Python's, in percent."""
    found: Counter[str] = Counter()
    python = imports = 0
    for path in sorted((ROOT / "swapkit").rglob("*")):
        folder = str(path.parent.relative_to(ROOT))
        if path.suffix == ".py":
            lines, imported = count_python(path.read_text(encoding="utf-8"))
            found[folder] += lines
            python, imports = python + lines, imports + imported
        elif path.suffix in NATIVE:
            found[folder] += count_native(path.read_text(encoding="utf-8"))
    return Counter(
        {folder: lines for folder, lines in found.items() if lines}
    ), 100 * imports / python


def read_budget() -> tuple[dict[str, int], float, int]:
    """Return the most code lines by folder, the most percent of imports, and the most lines."""
    read = tomllib.loads(BUDGET.read_text(encoding="utf-8"))
    return read["folders"], read["imports_percent"], read["total"]


def write_budget(folders: dict[str, int], percent: float, total: int) -> None:
    """Write `package_size.toml`."""
    rows = "".join(f'"{folder}" = {lines}\n' for folder, lines in sorted(folders.items()))
    BUDGET.write_text(
        "# The most code lines of the package; see package_size.py.\n"
        f"total = {total}\nimports_percent = {percent:.1f}\n\n[folders]\n{rows}",
        encoding="utf-8",
    )


def lower(found: Counter[str], percent: float) -> None:
    """Write present figures where they are lower than the budget."""
    folders, most_percent, total = read_budget()
    write_budget(
        {folder: min(lines, folders.get(folder, 0)) for folder, lines in found.items()},
        min(most_percent, percent + 0.05),
        min(total, found.total()),
    )


def find_excess(found: Counter[str], percent: float) -> list[str]:
    """Return a sentence for each figure above its budget."""
    folders, most_percent, total = read_budget()
    excess = [
        f"{folder}: {lines} code lines, the budget is {folders.get(folder, 0)}"
        for folder, lines in sorted(found.items())
        if lines > folders.get(folder, 0)
    ]
    if found.total() > total:
        excess.append(f"the package: {found.total()} code lines, the budget is {total}")
    if percent > most_percent:
        excess.append(f"imports: {percent:.1f} % of Python's lines, at most {most_percent} %")
    return excess


def main() -> int:
    """Print the table and what is too much."""
    parser = argparse.ArgumentParser(description="code lines of the package by folder")
    parser.add_argument("--lower", action="store_true", help="lower budgets to present figures")
    options = parser.parse_args()
    found, percent = measure()
    if options.lower:
        lower(found, percent)
    for folder, lines in sorted(found.items()):
        print(f"{lines:7,} {folder}")
    print(f"{found.total():7,} the package; imports are {percent:.1f} % of Python's lines")
    excess = find_excess(found, percent)
    for sentence in excess:
        print(f"too much: {sentence}")
    return 1 if excess else 0


if __name__ == "__main__":
    sys.exit(main())
