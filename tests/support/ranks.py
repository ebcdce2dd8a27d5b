"""Running a program on several ranks."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from tests.support import ROOT

if TYPE_CHECKING:
    from pathlib import Path

LAUNCH = (sys.executable, "-m", "torch.distributed.run", "--standalone")
COMMAND = (*LAUNCH, "--nproc-per-node=2")
# Ranks that spin while they wait would take the time of those that work.
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


@functools.cache
def run_on_ranks(program: Path, *arguments: str, ranks: int = 2) -> Any:
    """Return what a program printed as one line of JSON: an object."""
    done = subprocess.run(
        [*LAUNCH, f"--nproc-per-node={ranks}", str(program), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, **ENVIRONMENT},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1])


def tell_and_exit(found: dict[str, Any]) -> NoReturn:
    """Print what all ranks have found, by name, as one line of JSON; end this rank's process."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    if dist.get_rank() == 0:
        by_name = {name: [each[name] for each in everywhere] for name in found}
        sys.stdout.write(json.dumps(by_name) + "\n")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # as in tensor_parallel_program.py
