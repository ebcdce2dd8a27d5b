"""Launchers of several ranks: each rank holds its budget, with the bits of plain training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.support import needs
from tests.support import ROOT
from tests.support.ranks import COMMAND, ENVIRONMENT

PROGRAMS = Path(__file__).parent / "launched"


def execute(*command: str | Path) -> tuple[list[str], str]:
    """Run Python; return the lines of its output, sorted, and what it wrote to stderr."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    return sorted(done.stdout.splitlines()), done.stderr


def select(lines: list[str], word: str) -> list[str]:
    return [line for line in lines if line.startswith(f"{word} ")]


LAUNCHERS = {  # on CPUs, `accelerate launch` starts several ranks by MPI only
    "accelerate": (
        1,
        ("-m", "accelerate.commands.launch", "--num_processes=1", "--num_machines=1", "--cpu",
         "--mixed_precision=no", "--dynamo_backend=no"),
    ),
    "torchrun": (2, COMMAND[1:]),
}  # fmt: skip


@needs("accelerate")
@pytest.mark.promise("A3")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_script_of_accelerate_when_launched_in_a_budget_then_the_same_bits(launcher: str) -> None:
    ranks, launch = LAUNCHERS[launcher]
    program = PROGRAMS / "accelerate_program.py"
    plain, _ = execute(*launch, program)
    within = ("-m", "swapkit", "run", "--device", "cpu", "--budget", "7MiB", program)
    found, said = execute(*launch, *within)
    assert len(select(found, "digest")) == ranks
    assert select(found, "digest") == select(plain, "digest")
    (summary,) = [line for line in said.splitlines() if line.startswith("swapkit run: budget")]
    assert f", {32 // ranks} steps, " in summary
    assert " 0 rescues" not in summary


@needs("lightning")
@pytest.mark.promise("A3")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_lightning_when_it_starts_two_ranks_then_the_same_bits(strategy: str) -> None:
    program = PROGRAMS / "lightning_program.py"
    plain, _ = execute(program, strategy)
    peak_bytes = max(int(line.split()[-1]) for line in select(plain, "peak"))
    found, _ = execute(program, strategy, str(int(0.85 * peak_bytes)))
    assert len(select(found, "digest")) == 2
    assert select(found, "digest") == select(plain, "digest")
    assert select(found, "session") == [f"session {rank} True True 14" for rank in range(2)]
