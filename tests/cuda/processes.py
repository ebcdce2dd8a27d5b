"""Programs on the simulated device, each in a process of its own: each has one allocator."""

from __future__ import annotations

import textwrap

from tests.support import run_fresh

BEGIN = """
import torch, swapkit
from tests.cuda import operators
operators.install()
"""
# A model whose saved tensors are most of its memory, and some steps of its training.
TRAIN = """
def train(scope=None, rows=1024, steps=3):
    torch.manual_seed(0)
    block = lambda: torch.nn.Sequential(
        torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)
    )
    model = torch.nn.Sequential(*(block() for _ in range(6))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    numbers = torch.Generator().manual_seed(1)
    results = []
    for _ in range(steps):
        x = torch.randn(rows, 256, generator=numbers).cuda()
        with scope() if scope else torch.enable_grad():
            loss = model(x).square().mean()
        loss.backward()
        results += [loss.item(), *(p.grad.cpu() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return results

def equal(one, other):
    return all(a == b if isinstance(a, float) else torch.equal(a, b) for a, b in zip(one, other))
"""


def run(code: str, **environment: str) -> list[str]:
    """Run a program on a simulated device of its own; return the lines it printed."""
    return run_fresh(BEGIN + textwrap.dedent(code), timeout_s=240, **environment).splitlines()
