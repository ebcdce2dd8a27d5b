"""The grouped product of SmartSwap's document, hooked as there, on an Ascend NPU.

It is built with the include and link lines of its users alone. The kernel consists of torch's
operators, which go through torch_npu's queue. They run inside of `python -m tests.npu.simulated`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch_npu import npu

import swapkit
from tests.cuda.control import last_problem, slow_copies
from tests.npu.simulated import INSIDE
from tests.simulated.launching import ROOT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(INSIDE not in os.environ, reason="runs in tests.npu.simulated"),
    pytest.mark.promise("C14"),
]

TOKENS, WIDTH, GROUPS, DEPTH = 96, 16, 3, 4
ENDS = [32, 40, TOKENS]
EVERYTHING = 1 << 40
STEPS = 3


@pytest.fixture(scope="module")
def gmm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The example's extension module, built in a folder of its own by its own setup.py."""
    folder: Path = tmp_path_factory.mktemp("operator") / "gmm"
    shutil.copytree(ROOT / "examples" / "operators", folder)
    shutil.copy(ROOT / "tests" / "operators" / "on_torch.cpp", folder / "grouped_matmul.cpp")
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=folder,
        env={**os.environ, "CFLAGS": "-O0 -g0"},  # compiles in half of the time
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    sys.path.insert(0, str(folder))
    try:
        import gmm  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(folder))
    swapkit.install()
    return gmm


class GroupedProduct(torch.autograd.Function):
    """The operator with its gradients, as MindSpeed wraps it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, product: Any) -> torch.Tensor:
        ctx.product = product
        ctx.save_for_backward(x, weight)
        (made,) = product([x], [weight], ENDS)
        result: torch.Tensor = made
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        begins = [0, *ENDS[:-1]]
        of_weight = [x[a:b].t() @ grad[a:b] for a, b in zip(begins, ENDS, strict=True)]
        (back,) = ctx.product([grad.contiguous()], [weight.transpose(1, 2).contiguous()], ENDS)
        return back, torch.stack(of_weight), None


def train(product: Any) -> list[torch.Tensor]:
    """Return losses and gradients of some steps."""
    numbers = torch.Generator().manual_seed(0)
    weights = [
        (torch.randn(GROUPS, WIDTH, WIDTH, generator=numbers) * 0.3).to("npu").requires_grad_()
        for _ in range(DEPTH)
    ]
    results = []
    for _ in range(STEPS):
        x = torch.randn(TOKENS, WIDTH, generator=numbers).to("npu").requires_grad_()
        hidden = x
        for weight in weights:
            made = GroupedProduct.apply(hidden * 1.5, weight, product)
            hidden = torch.tanh(made) * torch.sigmoid(made) + hidden
        loss = hidden.square().mean()
        loss.backward()
        grads = [each.grad for each in [x, *weights]]
        results += [loss.detach().cpu(), *(grad.cpu() for grad in grads if grad is not None)]
        assert len(grads) == DEPTH + 1
        for weight in weights:
            weight.grad = None
    return results


def test_operands_when_a_storm_of_rescues_rages_then_same_bits(gmm: Any) -> None:
    expected = train(gmm.npu_gmm)
    is_over = threading.Event()

    def rage(session: Any) -> None:
        while not is_over.wait(1e-3):
            session.rescue(EVERYTHING)
            junk = [torch.full((TOKENS, WIDTH), 7.0, device="npu") for _ in range(8)]
            del junk

    with slow_copies(1), swapkit.budget(1 << 29, min_swap_bytes=1024, device="npu") as session:
        thread = threading.Thread(target=rage, args=(session,))
        thread.start()
        try:
            found = train(gmm.npu_gmm)
        finally:
            is_over.set()
            thread.join()
    assert session.stats.swapped_in_bytes > 0
    assert all(map(torch.equal, found, expected))
    npu.synchronize()
    assert last_problem() == ""
