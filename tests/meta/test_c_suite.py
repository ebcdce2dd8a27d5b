"""The C tests, built with every assertion; `make check` runs them under sanitisers, too."""

from __future__ import annotations

import re
import subprocess

from tests.meta.sources import ROOT


def test_c_suite_when_built_with_all_assertions_then_passes() -> None:
    done = subprocess.run(
        ["make", "-s", "-C", str(ROOT / "tests/c"), "test"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    summary = re.search(r"(\d+) passed, 0 failed", done.stdout)
    assert summary is not None
    assert int(summary[1]) > 100
