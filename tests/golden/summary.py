"""A pytest plugin that says how many of the recorded cases hold; `tests/conftest.py` loads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

TEST = "test_golden_case_when_run_then_as_recorded"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the coverage line, if cases were run."""
    counts = {
        outcome: sum(TEST in report.nodeid for report in terminalreporter.stats.get(outcome, []))
        for outcome in ("passed", "failed")
    }
    if any(counts.values()):
        from tests.golden.cases import find_file, load

        total = len(load()["cases"])
        terminalreporter.write_line(
            f"golden: {counts['passed']} of {total} cases of {find_file().name}"
        )
