"""`swapkit run` keeps unchanged scripts within a budget, with the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from tests.support import ROOT
from tests.support.ranks import COMMAND, ENVIRONMENT

if TYPE_CHECKING:
    from pathlib import Path

RUN = ("-m", "swapkit", "run", "--device", "cpu")
LIMITED = (
    "import runpy, swapkit; swapkit.install(limit='{}'); runpy.run_path({!r}, run_name='__main__')"
)

DIGEST = """
def tell(*models):
    digest = hashlib.sha256()
    for model in models:
        for value in model.state_dict().values():
            digest.update(value.numpy().tobytes())
    print("digest", digest.hexdigest(), flush=True)
"""

# Evaluation between steps, accumulated gradients, a model saved whole, variables before torch.
TRAIN = f"""
import hashlib, io, os
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn
{DIGEST}

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        wide = 4 * width
        self.net = nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))

    def forward(self, x):
        return x + self.net(x)

def main():
    assert torch.get_num_threads() == 1
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(64) for _ in range(6)])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(12):
        for _ in range(2):
            (model(torch.randn(1024, 64)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 3:
            model.eval()
            with torch.no_grad():
                model(torch.randn(64, 64))
            model.train()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    tell(torch.load(file, weights_only=False))

if __name__ == "__main__":
    main()
"""
TRAIN_BUDGET = "12MiB"

# Workers that are forked and spawned, with a class of the script; an exit code.
WORKERS = f"""
import hashlib, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
{DIGEST}

class Numbers(Dataset):
    def __len__(self):
        return 128

    def __getitem__(self, index):
        return torch.full((64,), index / 128)

def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for how in ("fork", "spawn"):
        for x in DataLoader(Numbers(), 32, num_workers=1, multiprocessing_context=how):
            model(x).square().mean().backward()
            optimizer.step()
    tell(model)
    sys.exit(7)

if __name__ == "__main__":
    main()
"""

RANKS = f"""
import hashlib, sys
import torch
import torch.distributed as dist
from torch import nn
{DIGEST}
dist.init_process_group("gloo")
torch.manual_seed(0)
layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())]
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(dist.get_rank())
for _ in range(8):
    model(torch.randn(1024, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
for rank in range(2):
    dist.barrier()
    if rank == dist.get_rank():
        tell(model.module)
dist.destroy_process_group()
"""


# One model after another; a training inside another one, with optimizers of its own. A plan is made
# while the steps go on: the script waits for it after what it prints. One model is kept.
FOLDS = f"""
import gc, hashlib, time, weakref
import torch, swapkit
from torch import nn
{DIGEST}

def make(seed):
    torch.manual_seed(seed)
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())])

def update(model, optimizer):
    model(torch.randn(2048, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def is_planned():
    return all(each.plan and sum(each.plan.count_moved()) for each in swapkit.sessions())

def train(seed):
    model = make(seed)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(12):
        if step == 8:
            inner = make(0)
            inner_optimizer = torch.optim.SGD(inner.parameters(), 0.1)
            for _ in range(3):
                update(inner, inner_optimizer)
        update(model, optimizer)
    tell(model)
    more = 0
    while (not is_planned() or more < 20) and more < 500:
        time.sleep(0.01)
        update(model, optimizer)
        more += 1
    print("planned", is_planned())
    if seed == 1:
        kept.append((model, optimizer))
    return weakref.ref(model)

kept = []

for seed in range(3):
    dropped = train(seed)
    gc.collect()
    print("dropped", dropped() is None)
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "program.py"
    file.write_text(textwrap.dedent(text), encoding="utf-8")
    return file


def execute(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, **ENVIRONMENT},
    )


def digests(done: subprocess.CompletedProcess[str]) -> list[str]:
    found = [line for line in done.stdout.splitlines() if line.startswith("digest")]
    assert found, done.stdout + done.stderr
    return found


@pytest.mark.promise("A3")
def test_script_when_it_fails_without_then_runs_in_the_budget_with_the_same_bits(
    tmp_path: Path,
) -> None:
    file = write(tmp_path, TRAIN)
    failed = execute("-c", LIMITED.format(TRAIN_BUDGET, str(file)))
    assert failed.returncode == 1
    assert "OutOfMemoryError" in failed.stderr
    done = execute(*RUN, "--budget", TRAIN_BUDGET, file)
    assert done.returncode == 0, done.stderr
    assert digests(done) == digests(execute(file))
    (first,) = [line for line in done.stderr.splitlines() if "budget" in line]
    assert first.startswith("swapkit run: budget 12.00 MiB, peak ")
    assert ", 12 steps, " in first
    assert " 0 rescues" not in first


def test_script_when_even_a_budget_is_too_small_then_the_error_is_seen(tmp_path: Path) -> None:
    done = execute(*RUN, "--budget", "1MiB", write(tmp_path, TRAIN))
    assert done.returncode == 1
    assert "OutOfMemoryError: swapkit: out of memory on the CPU device" in done.stderr
    assert "swapkit/cli" not in done.stderr


def test_script_when_it_starts_workers_then_they_run_and_its_exit_code_is_kept(
    tmp_path: Path,
) -> None:
    file = write(tmp_path, WORKERS)
    done = execute(*RUN, "--budget", "16MiB", file)
    assert done.returncode == 7, done.stderr
    assert digests(done) == digests(execute(file))
    assert ", 8 steps, " in done.stderr


@pytest.mark.promise("A3")
def test_ranks_when_started_by_torchrun_then_each_holds_the_budget_with_the_same_bits(
    tmp_path: Path,
) -> None:
    file = write(tmp_path, RANKS)
    launch = COMMAND[1:]
    done = execute(*launch, *RUN, "--budget", "4MiB", file)
    assert done.returncode == 0, done.stderr
    found = digests(done)
    assert len(found) == 2
    assert found == digests(execute(*launch, file))
    summaries = [line for line in done.stderr.splitlines() if "swapkit run: budget" in line]
    assert len(summaries) == 1, "of rank 0 alone"
    assert " 0 rescues" not in summaries[0]


def test_script_when_it_trains_several_models_then_each_is_planned_and_dropped(
    tmp_path: Path,
) -> None:
    file = write(tmp_path, FOLDS)
    done = execute(*RUN, "--budget", "4MiB", file)
    assert done.returncode == 0, done.stderr
    assert digests(done) == digests(execute(file))
    lines = done.stdout.splitlines()
    assert lines.count("planned True") == 3
    dropped = [line for line in lines if line.startswith("dropped")]
    assert dropped == ["dropped True", "dropped False", "dropped True"], "the script keeps one"
    assert "swapkit run: 3 trainings, each with a plan of its own" in done.stderr


def test_console_script_when_called_then_it_is_the_module(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print(sys.argv)", encoding="utf-8")
    command = "import sys; from swapkit.cli import main; sys.exit(main())"
    done = execute("-c", command, "run", tmp_path / "train.py", "-m", "--budget", "x")
    assert done.stdout == f"{[str(tmp_path / 'train.py'), '-m', '--budget', 'x']}\n"
    assert done.stderr == "swapkit run: the script did not import torch\n"
    scripts = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '\nswapkit = "swapkit.cli:main"\n' in scripts
