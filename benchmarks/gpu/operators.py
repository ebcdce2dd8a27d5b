"""An operator with hooks as an extension: the grouped product of SmartSwap's document.

`examples/operators` is built as its users build it; with a CUDA compiler it is a CUDA extension.
It trains a little stack without a session, then in one that evicts everything between forward and
backward: losses and gradients must have the same bits.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import TYPE_CHECKING, Any

import torch

import swapkit
from benchmarks.gpu.context import ROOT
from benchmarks.gpu.process import last_line, python, run_process
from benchmarks.gpu.report import Check

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.gpu.context import Context

    Product = Callable[[list[torch.Tensor], list[torch.Tensor], list[int]], list[torch.Tensor]]

EXAMPLE = ROOT / "examples" / "operators"
TABLE = "an operator with hooks, as an extension"
LAYERS = 4
GROUPS = 4
STEPS = 3
EVERYTHING = 1 << 50
LEAST_BUILD_SECONDS = 10.0


class GroupedProduct(torch.autograd.Function):
    """The operator with its gradients."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's
        x: torch.Tensor,
        weight: torch.Tensor,
        ends: list[int],
        product: Product,
    ) -> torch.Tensor:
        ctx.ends, ctx.product = ends, product
        ctx.save_for_backward(x, weight)
        (made,) = product([x], [weight], ends)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ANN401 - torch's
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        begins = [0, *ctx.ends[:-1]]
        of_weight = [x[a:b].t() @ grad[a:b] for a, b in zip(begins, ctx.ends, strict=True)]
        (of_x,) = ctx.product([grad], [weight.transpose(1, 2).contiguous()], ctx.ends)
        return of_x, torch.stack(of_weight), None, None


def train(
    product: Product, device: str, width: int, evict: Callable[[], object]
) -> list[torch.Tensor]:
    """Return the losses and gradients of some steps, on the host."""
    numbers = torch.Generator().manual_seed(0)
    shape = (LAYERS, GROUPS, width, width)
    weights = (torch.randn(shape, generator=numbers) * width**-0.5).to(device).requires_grad_()
    ends = [width * (group + 1) for group in range(GROUPS)]
    found = []
    for _ in range(STEPS):
        x = torch.randn(ends[-1], width, generator=numbers).to(device)
        for weight in weights:
            made = GroupedProduct.apply(x * 1.5, weight.contiguous(), ends, product)  # type: ignore[no-untyped-call]
            x = torch.tanh(made)
        del made
        loss = x.square().mean()
        del x
        evict()
        loss.backward()  # type: ignore[no-untyped-call]
        assert weights.grad is not None
        found += [loss.detach().cpu(), weights.grad.cpu()]
        weights.grad = None
    return found


def build(context: Context) -> Path | None:
    """Build the example in a folder of its own; return the extension, None: a note says why not."""
    folder = context.output / "operators"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(EXAMPLE, folder)
    log = context.output / "operators-build.log"
    done = run_process(
        python("setup.py", "build_ext", "--inplace"),
        seconds=max(LEAST_BUILD_SECONDS, context.seconds_left() * 0.8),
        log=log,
        cwd=folder,
        environment={"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )
    if not done.ok:
        reason = last_line(log)
        context.report.note(f"the extension was not built: {done.describe()}: {reason}")
        return None
    context.report.row(TABLE, "build", {"build_seconds": done.seconds})
    return next(folder.glob("gmm.*.so"))


def load(file: Path) -> Product:
    """Return the operator of an extension."""
    spec = importlib.util.spec_from_file_location("gmm", file)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    product: Product = module.npu_gmm
    return product


def compare(context: Context, product: Product) -> None:
    """Train without and with evictions, and compare."""
    width = 16 if context.dry else 256
    swapkit.install(device=context.device)
    expected = train(product, context.device, width, int)
    with swapkit.budget("50%", device=context.device) as session:
        found = train(product, context.device, width, lambda: session.rescue(EVERYTHING))
    are_same = all(map(torch.equal, expected, found))
    check = Check(
        name="bits",
        text="losses and gradients with evictions have the same bits",
        value=float(are_same),
        at_least=1,
        promise=True,
    )
    context.report.check(check)
    back = session.stats.swapped_in_bytes
    context.report.row(TABLE, "evicted", {"back_bytes": back})
    moved = Check(name="evicted", text="operands were evicted", value=float(back), at_least=1)
    context.report.check(moved)


def run(context: Context) -> None:
    """Build the extension, and train with it."""
    built = build(context)
    if built is not None:
        compare(context, load(built))
