"""What all parts of a run came to: its exit status, its figures, what matters most as text."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.gpu.report import BROKEN, MISSED, Report, Value, slug

# Exit statuses; 2 is argparse's for a command line that is wrong.
FINE, FAILED, NO_GPU, NOT_PREPARED, TARGET_MISSED = 0, 1, 3, 4, 5
DRY_TITLE = "DRY RUN: it checks that the parts run; the figures mean nothing"


@dataclass
class Outcome:
    """What the parts came to."""

    reports: list[Report] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)  # of parts, by name

    def verdicts(self, verdict: str) -> list[str]:
        """Return the checks that came out so."""
        return [
            f"{report.part}: {check.text}: {check.value:.4g}, {check.bounds}"
            for report in self.reports
            for check in report.checks.values()
            if check.verdict == verdict
        ]

    @property
    def status(self) -> int:
        """The exit status."""
        if self.failures or self.verdicts(BROKEN):
            return FAILED
        return TARGET_MISSED if self.verdicts(MISSED) else FINE


def figures_of(outcome: Outcome, header: dict[str, str], *, dry: bool) -> dict[str, Value]:
    """Return everything as one flat object."""
    figures: dict[str, Value] = {f"machine_{key}": value for key, value in header.items()}
    figures["dry"] = int(dry)
    for report in outcome.reports:
        figures[slug(f"{report.part}_outcome")] = outcome.failures.get(report.part, "finished")
        figures |= report.flat()
    return figures


def format_summary(outcome: Outcome) -> str:
    """Return what matters most, as text."""
    lines = []
    for word, found in (
        ("FAILED", [f"{name}: {text}" for name, text in outcome.failures.items()]),
        ("BROKEN", outcome.verdicts(BROKEN)),
        ("missed", outcome.verdicts(MISSED)),
    ):
        lines += [f"{word}: {text}" for text in found]
    return "\n".join(lines or ["all checks passed"])


def format_header(header: dict[str, str], *, dry: bool) -> str:
    """Return what results depend on, as text."""
    lines = [DRY_TITLE] if dry else []
    return "\n".join([*lines, *(f"{key}: {value}" for key, value in header.items())])
