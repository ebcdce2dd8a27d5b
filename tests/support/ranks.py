"""Running a program on several ranks."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from tests.support import ROOT
from tests.support.warm import Job, run

if TYPE_CHECKING:
    from pathlib import Path

LAUNCH = (sys.executable, "-m", "torch.distributed.run", "--standalone")
COMMAND = (*LAUNCH, "--nproc-per-node=2")
# Ranks that spin while they wait would take the time of those that work.
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def run_on_ranks(program: Path, *arguments: str, ranks: int = 2) -> Any:
    """Return what a program printed as one line of JSON: an object."""
    output, complaint = _run(program, *arguments, ranks=ranks)
    assert not complaint, complaint
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return json.loads(lines[-1])


@functools.cache
def _run(program: Path, *arguments: str, ranks: int) -> tuple[str, str]:
    """Return what rank 0 printed, and how ranks failed if they did."""
    # As under `torchrun`, the store is in a process of its own and outlives the ranks.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    everywhere = {
        **os.environ,
        **ENVIRONMENT,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    jobs = [
        Job(
            path=str(program),
            arguments=arguments,
            environment={**everywhere, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    try:
        done = run(*jobs, timeout_s=240)
    except subprocess.TimeoutExpired as error:
        return "", f"{error}\n{error.stdout!s}{error.stderr!s}"
    texts = [f"status {each.returncode}\n{each.stdout}{each.stderr}" for each in done]
    return done[0].stdout, "".join(texts) if any(each.returncode for each in done) else ""


@dataclass(frozen=True)
class Scenarios:
    """The scenarios of a program, which takes their names as arguments.

    `slow`: those of the slow tier; they run in processes of their own.
    """

    program: Path
    quick: tuple[str, ...]
    slow: tuple[str, ...] = ()
    ranks: int = 2

    def parameters(self, *names: str) -> list[Any]:
        """Return all scenarios, or those with these names, as parameters of tests."""
        slow = pytest.mark.slow
        return [
            pytest.param(each, marks=slow) if each in self.slow else each
            for each in names or (*self.quick, *self.slow)
        ]

    def found(self, name: str) -> list[Any]:
        """Return what the program found for a scenario, by rank."""
        names = self.slow if name in self.slow else self.quick
        ranks: list[Any] = run_on_ranks(self.program, *names, ranks=self.ranks)[name]
        return ranks


def publish_and_exit(found: dict[str, Any]) -> NoReturn:
    """Print what all ranks have found, by name, as one line of JSON; end this rank's process."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    if dist.get_rank() == 0:
        by_name = {name: [each[name] for each in everywhere] for name in found}
        sys.stdout.write(json.dumps(by_name) + "\n")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # as in tensor_parallel_program.py
