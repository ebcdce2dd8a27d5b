"""
FSDP2 and pipelines
===================

Each rank of a distributed training opens a session of its own. Ranks agree on the smallest of
their budgets and plan for it. What FSDP gathers and frees, and how a pipeline orders its
microbatches, needs no change. This program starts itself a second time, as two ranks on the CPU.
"""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import swapkit

MIB = 1 << 20
STEPS = 6


class Block(torch.nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


# %%
# FSDP2
# -----
#
# ``fully_shard`` first, as always, then the optimizer, then the session. Parameters are gathered
# and freed as without a budget; the session moves what autograd saved.


def train_fsdp(limit):
    """Train a sharded model; return its losses and the most bytes reserved."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[Block() for _ in range(6)])
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    with swapkit.budget(limit, model, optimizer) as session:
        for number in range(STEPS):
            torch.manual_seed(number * 2 + dist.get_rank())
            loss = model(torch.randn(1024, 128)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, session.stats.peak_bytes


# %%
# Pipelines
# ---------
#
# Each rank has one stage, and several microbatches in flight. A step is one call of the schedule
# and the optimizer's step after it.


def train_pipeline(limit):
    """Train one stage of two; return its losses (of the last stage) and the most bytes reserved."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    torch.manual_seed(rank)
    part = torch.nn.Sequential(*[Block() for _ in range(4)])
    stage = PipelineStage(part, rank, num_stages=2, device=torch.device("cpu"))
    schedule = Schedule1F1B(
        stage, n_microbatches=4, loss_fn=lambda y, wanted: (y - wanted).square().mean()
    )
    optimizer = torch.optim.AdamW(part.parameters())
    losses = []
    with swapkit.budget(limit, part, optimizer) as session:
        for number in range(STEPS):
            torch.manual_seed(number)
            batch, wanted = torch.randn(2048, 128), torch.randn(2048, 128)
            found = []
            if rank == 0:
                schedule.step(batch)
            else:
                schedule.step(target=wanted, losses=found)
            optimizer.step()
            optimizer.zero_grad()
            losses += [loss.item() for loss in found]
    return losses, session.stats.peak_bytes


# %%
# Both, with and without
# ----------------------
#
# Each runs with a limit so large that nothing moves, and then within two thirds of what it took.


def run_rank():
    dist.init_process_group("gloo")
    swapkit.install(device="cpu")
    for train in (train_fsdp, train_pipeline):
        plain_losses, needed = train("4GiB")
        limit = 2 * needed // 3
        losses, peak = train(limit)
        assert losses == plain_losses
        assert peak <= limit
        print(
            f"rank {dist.get_rank()}, {train.__name__}: {needed / MIB:.0f} MiB without a limit, "
            f"{peak / MIB:.0f} MiB within {limit / MIB:.0f} MiB, same losses"
        )
        dist.barrier()
    dist.destroy_process_group()


def run_ranks():
    program = Path(inspect.getfile(run_ranks)).resolve()
    if not program.exists():  # cells of a notebook are in no file
        print("each rank is a process: run this tutorial as a program")
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(program)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    print(*sorted(done.stdout.splitlines()), sep="\n")


if "RANK" in os.environ:
    run_rank()
else:
    run_ranks()
