"""What a part measured: rows of tables, checks against promises and targets, notes.

A report is written to its file after every change, so that nothing is lost when a part is stopped.
The unit of a figure is the end of its key, which also says how it is shown: `_bytes`, `_ms`, `_ns`,
`_us`, `_gb_per_s`, `_ratio`, `_seconds`; anything else is shown as it is.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Value = int | float | str | None

NOT_RUN = "not run"  # an outcome
MET, MISSED, BROKEN, NOT_MEASURED = "met", "missed", "BROKEN", "not measured"
# Ends of keys, what they are divided by, how they are shown, and the unit in the head.
SHOWN = {
    "_bytes": (1 << 20, "{:,.1f}", "MiB"),
    "_gb_per_s": (1, "{:.2f}", "GB/s"),
    "_ratio": (1, "{:.3f}", "ratio"),
    "_seconds": (1, "{:.2f}", "s"),
    "_ms": (1, "{:,.2f}", "ms"),
    "_us": (1, "{:,.1f}", "us"),
    "_ns": (1, "{:,.0f}", "ns"),
}
NONE_SHOWN = "-"
LONGEST = 60  # characters of a text in a table


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A figure, and the bounds it has to be within. A promise is broken, a target missed."""

    name: str
    text: str
    value: float | None
    at_least: float | None = None
    at_most: float | None = None
    promise: bool = False

    @property
    def verdict(self) -> str:
        """One of `MET`, `MISSED`, `BROKEN`, `NOT_MEASURED`."""
        if self.value is None:
            return NOT_MEASURED
        low = self.at_least is None or self.value >= self.at_least
        high = self.at_most is None or self.value <= self.at_most
        if low and high:
            return MET
        return BROKEN if self.promise else MISSED

    @property
    def bounds(self) -> str:
        """The bounds in words."""
        bounds = (("at least", self.at_least), ("at most", self.at_most))
        return ", ".join(f"{words} {bound:g}" for words, bound in bounds if bound is not None)


@dataclass(kw_only=True)
class Report:
    """The rows, checks and notes of one part, by name; a second one of a name takes its place."""

    part: str
    path: Path | None = None
    tables: dict[str, dict[str, dict[str, Value]]] = field(default_factory=dict)
    checks: dict[str, Check] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def row(self, table: str, name: str, values: Mapping[str, Value]) -> None:
        """Put a row into the table of that title."""
        self.tables.setdefault(table, {})[name] = dict(values)
        self.save()

    def check(self, check: Check) -> None:
        """Put a check."""
        self.checks[check.name] = check
        self.save()

    def note(self, text: str) -> None:
        """Put a note, once."""
        if text not in self.notes:
            self.notes.append(text)
            self.save()

    def save(self) -> None:
        """Write the file, in one piece."""
        if self.path is None:
            return
        content = {
            "part": self.part,
            "tables": self.tables,
            "checks": [dataclasses.asdict(check) for check in self.checks.values()],
            "notes": self.notes,
        }
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        temporary.replace(self.path)

    def flat(self) -> dict[str, Value]:
        """Return every figure and verdict under a key of its own: `link_out_1MiB_ratio`."""
        figures = {
            slug(f"{self.part}_{name}_{key}"): value
            for rows in self.tables.values()
            for name, values in rows.items()
            for key, value in values.items()
        }
        for check in self.checks.values():
            figures[slug(f"{self.part}_check_{check.name}")] = check.verdict
        return figures


def read_report(path: Path) -> Report:
    """Return the report in a file.

    Raises:
        ValueError: it holds none.
    """
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    try:
        checks = [Check(**check) for check in content["checks"]]
        return Report(
            part=content["part"],
            tables=content["tables"],
            checks={check.name: check for check in checks},
            notes=content["notes"],
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no report: {error}") from None


def slug(text: str) -> str:
    """Return the text as a key: letters, digits and underscores."""
    return re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_")


def ratio_of(numerator: Value, denominator: Value) -> float | None:
    """Return a ratio, or None if one of the two was not measured."""
    numbers = isinstance(numerator, (int, float)) and isinstance(denominator, (int, float))
    if not numbers or not denominator:
        return None
    return float(numerator) / float(denominator)  # type: ignore[arg-type]


def show(key: str, value: Value) -> str:
    """Return a figure as its key says that it is shown."""
    if value is None:
        return NONE_SHOWN
    if isinstance(value, str):
        return value if len(value) <= LONGEST else f"{value[: LONGEST - 3]}..."
    for end, (divisor, form, _) in SHOWN.items():
        if f"_{key}".endswith(end):
            return form.format(value / divisor)
    return f"{value:g}" if isinstance(value, float) else str(value)


def head_of(key: str) -> str:
    """Return the head of a figure's column: its key in words, with the unit."""
    for end, (_, _, unit) in SHOWN.items():
        if f"_{key}".endswith(end):
            words = f"_{key}".removesuffix(end).strip("_").replace("_", " ")
            return f"{words} {unit}".strip() if end == "_ratio" else f"{words}, {unit}"
    return key.replace("_", " ")


def format_table(title: str, rows: dict[str, dict[str, Value]]) -> str:
    """Return a table as text: names to the left, figures to the right."""
    keys = list(dict.fromkeys(key for values in rows.values() for key in values))
    lines = [["", *map(head_of, keys)]]
    lines += [
        [name, *(show(key, values.get(key)) for key in keys)] for name, values in rows.items()
    ]
    return "\n".join([title, *align(lines)])


def without_empty(rows: dict[str, dict[str, Value]]) -> dict[str, dict[str, Value]]:
    """Leave out rows without a figure: they are there for the keys of the figures."""
    return {name: row for name, row in rows.items() if set(row.values()) - {None, NOT_RUN}}


def align(lines: list[list[str]]) -> list[str]:
    """Return lines of equally wide columns, the first to the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def format_checks(checks: list[Check]) -> str:
    """Return the verdicts as text."""
    lines = [["check", "value", "bounds", "verdict"]]
    for check in checks:
        value = NONE_SHOWN if check.value is None else f"{check.value:.4g}"
        lines.append([check.text, value, check.bounds, check.verdict])
    return "\n".join(align(lines))


def format_report(report: Report) -> str:
    """Return all of a report but for its empty rows as text."""
    shown = {title: without_empty(rows) for title, rows in report.tables.items()}
    texts = [format_table(title, rows) for title, rows in shown.items() if rows]
    if report.checks:
        texts.append(format_checks(list(report.checks.values())))
    texts += [f"note: {note}" for note in report.notes]
    return "\n\n".join(texts)
