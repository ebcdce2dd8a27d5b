"""Whole processes with swapkit on CUDA: threads under pressure, two devices, and their end.

They run inside of `python -m tests.cuda.simulated -m pytest`; see `test_simulated_streams.py`.
"""

from __future__ import annotations

import os

import pytest

from tests.cuda.simulated import INSIDE
from tests.support import run_fresh
from tests.support.place import ALLOCATOR

pytestmark = pytest.mark.skipif(INSIDE not in os.environ, reason="runs in tests.cuda.simulated")


def run_installed(code: str, **environment: str) -> str:
    """Run code in a fresh process, over the same allocator."""
    start = (
        "from tests.cuda import operators; operators.install()\n"
        "import torch, swapkit, sys, threading, time\n"
        f"swapkit.install(device='cuda', allocator={ALLOCATOR!r})\n"
    )
    return run_fresh(start + code, timeout_s=120, **environment)


THREADS = """
sys.setswitchinterval(1e-4)
torch.cuda.init()
ends, counts = time.monotonic() + 3, [0] * 4

def read(number):
    while time.monotonic() < ends:
        torch.cuda.memory_stats()
        counts[number] += 1
        time.sleep(0.0005)

def allocate(number):
    with torch.cuda.stream(torch.cuda.Stream()):
        while time.monotonic() < ends:
            [torch.empty(1 << 14, device='cuda') for _ in range(4)]
            counts[number] += 1
            time.sleep(0.0005)

def resize(number):  # holds the interpreter while it allocates
    while time.monotonic() < ends:
        try:
            torch.UntypedStorage(1 << 16, device='cuda').resize_(1 << 22)
        except torch.OutOfMemoryError:
            pass
        counts[number] += 1
        time.sleep(0.0005)

works = [read, allocate, resize, read]
threads = [threading.Thread(target=work, args=(i,)) for i, work in enumerate(works)]
x = torch.ones(1 << 20, device='cuda', requires_grad=True)
with swapkit.budget('128MiB', device='cuda') as session:
    for thread in threads:
        thread.start()
    while time.monotonic() < ends:
        y = x
        for number in range(60):
            y = y.sin()
            if number % 3 == 0:
                y.untyped_storage()  # which Python knows from now on
        try:
            y.sum().backward()
        except torch.OutOfMemoryError:
            pass
for thread in threads:
    thread.join()
assert min(counts) > 0
assert session.stats.oom_rescues > 0
"""


def test_threads_when_they_hold_the_interpreter_under_pressure_then_nothing_hangs() -> None:
    run_installed(THREADS)


TWO_DEVICES = """
import contextlib
from swapkit._runtime.control import plan_maker as plan_making
from tests.support.sessions import steady_machine_like

# A processor takes minutes for the products that keep a GPU busy while its link is measured.
plan_making.measure_machine = steady_machine_like

def train(scope):
    torch.manual_seed(0)
    halves = [
        torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh())
                              for _ in range(6)]).to(f'cuda:{index}')
        for index in range(2)
    ]
    model = torch.nn.ModuleList(halves)
    optimizer = torch.optim.AdamW(model.parameters())
    with scope(model) as sessions:
        for _ in range(3):
            hidden = halves[0](torch.randn(16384, 256).to('cuda:0')).to('cuda:1')
            loss = halves[1](hidden).square().mean()
            del hidden
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
        for session in sessions or ():
            assert session.stats.swapped_out_bytes > 0
    return [each.detach().cpu() for each in model.parameters()]

@contextlib.contextmanager
def budgets(model):
    with (
        swapkit.budget('120MiB', model, device='cuda:0') as first,
        swapkit.budget('110MiB', model, device='cuda:1') as second,
    ):
        yield first, second

@contextlib.contextmanager
def swapped(model):
    with swapkit.offload(min_bytes=1024):
        yield

expected = train(lambda _: contextlib.nullcontext())
torch.cuda.empty_cache()
for scope in (budgets, swapped):
    assert all(map(torch.equal, train(scope), expected))
"""


def test_model_when_split_over_two_devices_with_a_budget_each_then_same_bits() -> None:
    run_installed(TWO_DEVICES, CUSIM_DEVICES="2", CUSIM_LATENCY_NS="1000000")


ENDS = {
    "session": "session = swapkit.budget('128MiB', device='cuda'); session.__enter__()",
    "scope": "scope = swapkit.offload(min_bytes=1024); scope.__enter__()",
    "optimizer": (
        "model = torch.nn.Linear(512, 512).cuda()\n"
        "optimizer = torch.optim.AdamW(model.parameters()); swapkit.offload(optimizer)\n"
        "model(torch.ones(4, 512, device='cuda')).sum().backward(); optimizer.step()"
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_process_when_it_ends_with_everything_alive_then_without_a_word(name: str) -> None:
    code = (
        f"{ENDS[name]}\n"
        "x = torch.ones(1 << 20, device='cuda', requires_grad=True)\n"
        "with torch.cuda.stream(torch.cuda.Stream()):\n"
        "    losses = []\n"
        "    for number in range(2):\n"
        "        y = x\n"
        "        for _ in range(30): y = y.sin()\n"
        "        losses.append(y.sum())\n"
        "    del y; losses[1].backward()\n"
    )
    run_installed(code, CUSIM_STRICT_EXIT="1", CUSIM_LATENCY_NS="20000000")
