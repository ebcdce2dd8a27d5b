"""What `swapkit doctor` finds, as plain values."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Level(enum.Enum):
    """How good a finding is."""

    GOOD = "ok"
    NOTE = "note"  # works, perhaps not as well or not everywhere
    PROBLEM = "problem"  # something does not work


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check.

    Args:
        name: of the check, one word.
        text: what was found.
        level: how good that is.
        remedy: what to do about it; empty: nothing.
    """

    name: str
    text: str
    level: Level = Level.GOOD
    remedy: str = ""


def count_level(findings: Sequence[Finding], level: Level) -> int:
    """Return how many findings have a level."""
    return sum(finding.level is level for finding in findings)


def encode_findings(findings: Sequence[Finding]) -> dict[str, str | int]:
    """Return findings by flat names: `cache`, `cache_text` and `cache_remedy`, and the counts."""
    document: dict[str, str | int] = {
        "problems": count_level(findings, Level.PROBLEM),
        "notes": count_level(findings, Level.NOTE),
    }
    for finding in findings:
        document[finding.name] = finding.level.value
        document[f"{finding.name}_text"] = finding.text
        document[f"{finding.name}_remedy"] = finding.remedy
    return document
