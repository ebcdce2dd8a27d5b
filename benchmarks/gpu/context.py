"""What a part is given."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu.report import Report

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Where a part runs, how much it does, and where its results go."""

    report: Report
    device: str  # "cuda"; "cpu" only in a dry run
    quick: bool
    dry: bool  # tiny, to see that everything runs; no figure means anything
    output: Path
    deadline: float  # of time.monotonic(); a part that passes it is stopped
    first: bool = False  # what the first minutes of a GPU are for, and as little as with `quick`

    def seconds_left(self) -> float:
        """Return how long the part may still run."""
        return self.deadline - time.monotonic()
