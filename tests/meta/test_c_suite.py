"""The C tests, built with every assertion; `make check` runs them under sanitisers, too."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from tests.meta.sources import ROOT


@pytest.mark.parametrize(
    ("folder", "device", "least"),
    [
        ("c", "cpu", 200),
        ("c", "cuda", 200),
        ("c", "ascend", 200),
        ("cuda", "cpu", 50),
        ("npu", "cpu", 20),
    ],
    ids=[
        "core",
        "core over the simulated driver",
        "core over the simulated ACL runtime",
        "the simulated driver",
        "the simulated ACL runtime",
    ],
)
def test_c_suite_when_built_with_all_assertions_then_passes(
    folder: str, device: str, least: int
) -> None:
    done = subprocess.run(
        [
            *("make", "-s", f"-j{len(os.sched_getaffinity(0))}"),
            *("-C", str(ROOT / "tests" / folder), f"DEVICE={device}", "test"),
        ],
        # How long the tests of threads run; they run for longer under sanitisers.
        env={**os.environ, "SK_TEST_SECONDS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert int(re.findall(r"(\d+)(?: tests)? passed", done.stdout)[-1]) > least
