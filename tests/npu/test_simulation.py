"""The tests that need torch_npu, if there is one to run on the simulated device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.npu.conftest import COUNT
from tests.npu.simulated import INSIDE, PYTHON
from tests.simulated.launching import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable

# Where torch_npu puts operators before they are in a stream.
QUEUES = {
    "no-queue": {"TASK_QUEUE_ENABLE": "0"},
    "queue": {"TASK_QUEUE_ENABLE": "1"},
    "deep-queue": {"TASK_QUEUE_ENABLE": "2"},
    "queue-per-stream": {"TASK_QUEUE_ENABLE": "1", "PER_STREAM_QUEUE": "1"},
}
FILES = sorted(Path(__file__).parent.glob("test_simulated_*.py"))
ANY_QUEUE = {
    "test_simulated_torch",
    "test_simulated_swaps",
    "test_simulated_queue",
    "test_simulated_training",
}
RUNS = [
    (file, queue)
    for file in FILES
    for queue in QUEUES
    if queue == "queue" or file.stem in ANY_QUEUE
]


@pytest.mark.skipif(PYTHON not in os.environ, reason=f"{PYTHON} names no torch_npu")
@pytest.mark.skipif(INSIDE in os.environ, reason="runs outside of the simulation")
@pytest.mark.parametrize(
    ("file", "queue"), RUNS, ids=[f"{file.stem}-{queue}" for file, queue in RUNS]
)
def test_file_runs_on_the_simulated_device(
    file: Path, queue: str, record_property: Callable[[str, object], None]
) -> None:
    suite = ("pytest", "-q", "-p", "no:cacheprovider", str(file.relative_to(ROOT)))
    done = subprocess.run(
        [sys.executable, "-m", "tests.npu.simulated", "-m", *suite],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **QUEUES[queue]},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.findall(r"(\d+) passed", done.stdout)
    record_property(COUNT, int(passed[-1]))
