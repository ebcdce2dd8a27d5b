"""The tests that need a torch for CUDA, if there is one to run on the simulated device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.simulated import INSIDE, PYTHON
from tests.simulated.launching import ROOT

FILES = sorted(Path(__file__).parent.glob("test_simulated_*.py"))
OVER_TORCH = {
    "test_simulated_streams",
    "test_simulated_processes",
}  # which run over both allocators
RUNS = [(file, "swapkit") for file in FILES] + [
    (file, "torch") for file in FILES if file.stem in OVER_TORCH
]


@pytest.mark.skipif(PYTHON not in os.environ, reason=f"{PYTHON} names no torch for CUDA")
@pytest.mark.skipif(INSIDE in os.environ, reason="runs outside of the simulation")
@pytest.mark.parametrize(
    ("file", "allocator"), RUNS, ids=[f"{file.stem}-{allocator}" for file, allocator in RUNS]
)
def test_file_runs_on_the_simulated_device(file: Path, allocator: str) -> None:
    suite = ("pytest", "-q", "-p", "no:cacheprovider", str(file.relative_to(ROOT)))
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda.simulated", "-m", *suite],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "SWAPKIT_TEST_ALLOCATOR": allocator},
    )
    assert done.returncode == 0, done.stdout + done.stderr
