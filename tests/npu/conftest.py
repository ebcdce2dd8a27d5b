"""What runs on the simulated device is collected there only; `test_simulation.py` starts it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tests.npu.simulated import INSIDE

if TYPE_CHECKING:
    import pytest

COUNT = "tests on the simulated NPU"  # the property of a test that ran others inside

collect_ignore_glob = [] if INSIDE in os.environ else ["test_simulated_*.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests ran inside, which the count of this process does not show."""
    properties = [
        value
        for report in terminalreporter.getreports("passed")
        for name, value in report.user_properties
        if name == COUNT
    ]
    if properties:
        terminalreporter.write_line(f"{sum(properties)} {COUNT}, in {len(properties)} processes")
