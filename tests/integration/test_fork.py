"""Forked and spawned children of a process under a budget work; none hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support import ROOT, run_python

if TYPE_CHECKING:
    from pathlib import Path

TRAIN = """
import os, sys, threading, torch, swapkit
from torch import nn

MIB = 1 << 20

def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(6)])

def train(model, x, steps=2):
    losses = []
    for _ in range(steps):
        loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        losses.append(loss.item())
    return losses

def fork(work):
    '''Run `work` in a forked child; return its status.'''
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 9
        try:
            status = work()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def test_fork_when_a_child_trains_then_it_exits_well_and_the_parent_goes_on() -> None:
    output = run_python(
        TRAIN
        + """
x = torch.rand(2048, 128)
plain = train(make_model(), x)
swapkit.install()
limit = swapkit.memory_stats()["reserved_bytes.all.current"] + 8 * MIB
with swapkit.budget(limit) as session:
    assert train(make_model(), x) == plain
    assert session.stats.swapped_in_bytes > 0
    print(fork(lambda: 0 if train(make_model(), x) == plain else 5))
    before = session.stats.swapped_in_bytes
    assert train(make_model(), x) == plain
    assert session.stats.swapped_in_bytes > before
assert session.stats.peak_bytes <= limit
"""
    )
    assert output == "0\n"


def test_fork_when_a_graph_is_half_swapped_out_then_the_child_can_finish_it() -> None:
    output = run_python(
        TRAIN
        + """
swapkit.install()
x = torch.linspace(0, 1, MIB, requires_grad=True)
with swapkit.budget("1GiB") as session:
    loss = (x * 1.0).exp().sum()
    assert session.rescue(1) == 4 * MIB

    def work():
        loss.backward()
        return 0 if torch.equal(x.grad, x.detach().exp()) else 5

    print(fork(work), work())
"""
    )
    assert output == "0 0\n"


def test_fork_when_another_thread_is_inside_a_rescue_then_the_child_does_not_wait_for_it() -> None:
    output = run_python(
        TRAIN
        + """
swapkit.install()
with swapkit.budget("1GiB") as session:
    inside, done = threading.Event(), threading.Event()
    swapper = session._active.swapper

    def hold():
        while not done.is_set():
            with swapper._lock:
                inside.set()
                sum(range(100_000))  # long enough to be switched away from with the lock held
            done.wait(0.001)  # or no one else would ever get it

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    print([fork(lambda: len(train(make_model(), torch.rand(64, 128))) - 2) for _ in range(4)])
    done.set()
    thread.join()
""",
        timeout_s=20,
    )
    assert output == "[0, 0, 0, 0]\n"


@pytest.mark.promise("A3")
def test_loader_when_it_has_two_forked_workers_under_a_budget_then_the_numbers_stay() -> None:
    output = run_python(
        TRAIN
        + """
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        # Allocates and computes in the worker, with the allocator that it inherited.
        torch.manual_seed(index)
        return torch.rand(512, 128).sort(0).values

def run(workers):
    model = make_model()
    loader = DataLoader(
        Rows(), batch_size=4, num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    return [train(model, batch.flatten(0, 1)) for _ in range(2) for batch in loader]

plain = run(0)
swapkit.install()
limit = swapkit.memory_stats()["reserved_bytes.all.current"] + 8 * MIB
with swapkit.budget(limit) as session:
    print(run(2) == plain, session.stats.swapped_in_bytes > 0, session.stats.peak_bytes <= limit)
""",
        timeout_s=40,
    )
    assert output == "True True True\n"


SPAWN = """
import multiprocessing, sys, torch, swapkit

def work(queue, x):
    swapkit.install("50%")
    with swapkit.budget("64MiB"):
        weight = torch.ones(16, requires_grad=True)
        (x * weight).sum().backward()
    queue.put((weight.grad.tolist(), swapkit.memory_stats()["budget_bytes"] > 0))

if __name__ == "__main__":
    swapkit.install()
    context = multiprocessing.get_context("spawn")
    with swapkit.budget("64MiB"):
        x = torch.arange(16.0)
        queue = context.Queue()
        child = context.Process(target=work, args=(queue, x))
        child.start()
        result = queue.get(timeout=30)
        child.join()
    assert result == ([float(i) for i in range(16)], True)
    print(child.exitcode)
"""


def test_spawn_when_a_child_gets_a_tensor_and_installs_then_it_works(tmp_path: Path) -> None:
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=40,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
