"""The tutorial of the original system runs with only its import line changed, or none.

The document has a user add one import to the file that applies an autograd function, and replace
`PipeExpert.apply(*args)` by `adapt_mem_func_wrapper(PipeExpert, *args)`.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

import swapkit
from swapkit._runtime.process.runtime import get_runtime
from tests.conformance.modes import settle
from tests.programs import assert_same_bits

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# As the file is before the change, after the shape of mindspeed.moe.
MOE_LAYER = '''
import torch
from torch import nn

class PipeExpert(torch.autograd.Function):
    """Feeds each expert its tokens, and goes the same way back by hand."""

    @staticmethod
    def forward(ctx, experts, pipe_degree, dispatched, *weights):
        ctx.experts, ctx.pipe_degree = experts, pipe_degree
        outputs, kept = [], []
        for expert, tokens in enumerate(dispatched.chunk(len(experts))):
            for part in tokens.chunk(pipe_degree):
                hidden = part @ weights[2 * expert]
                active = torch.nn.functional.gelu(hidden)
                outputs.append(active @ weights[2 * expert + 1])
                kept += [part, hidden, active]
        ctx.save_for_backward(*kept, *weights)
        return torch.cat(outputs)

    @staticmethod
    def backward(ctx, grad):
        count = len(ctx.experts) * ctx.pipe_degree
        saved = ctx.saved_tensors
        kept, weights = saved[: 3 * count], saved[3 * count :]
        weight_grads = [torch.zeros_like(weight) for weight in weights]
        token_grads = []
        for index, part_grad in enumerate(grad.chunk(count)):
            expert = index // ctx.pipe_degree
            part, hidden, active = kept[3 * index : 3 * index + 3]
            first, second = weights[2 * expert], weights[2 * expert + 1]
            weight_grads[2 * expert + 1] += active.t() @ part_grad
            hidden_grad = torch.ops.aten.gelu_backward(part_grad @ second.t(), hidden)
            weight_grads[2 * expert] += part.t() @ hidden_grad
            token_grads.append(hidden_grad @ first.t())
        return None, None, torch.cat(token_grads), *weight_grads

class MoELayer(nn.Module):
    def __init__(self, width, experts):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.ParameterList([torch.randn(width, 2 * width) / width, torch.randn(2 * width, width)])
            for _ in range(experts)
        )

    def forward(self, hidden):
        score = self.router(hidden).softmax(-1)
        order = score.argmax(-1).argsort(stable=True)
        weights = [weight for expert in self.experts for weight in expert]
        args = (self.experts, 2, hidden[order], *weights)
        expert_output = PipeExpert.apply(*args)
        return hidden + torch.zeros_like(hidden).index_copy(0, order, expert_output) * score[:, :1]
'''
CALL = ("PipeExpert.apply(*args)", "adapt_mem_func_wrapper(PipeExpert, *args)")
ORIGINAL = (
    "from mindspeed.core.memory.adaptive_memory.adaptive_memory_function "
    "import adapt_mem_func_wrapper"
)
IMPORTS = {"swapkit": "from swapkit import adapt_mem_func_wrapper", "original": ORIGINAL}


@pytest.fixture
def _compat() -> Iterator[None]:
    from swapkit.compat import mindspeed

    mindspeed.install()
    yield
    mindspeed.uninstall()


@pytest.fixture(autouse=True)
def _installed() -> None:
    swapkit.install()


def load(folder: Path, source: str) -> Any:
    path = folder / "moe_layer.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("moe_layer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(module: Any, steps: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(module.MoELayer(64, 4), torch.nn.Tanh(), module.MoELayer(64, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(steps):
        loss = (model(torch.randn(256, 64)) - 1).square().mean()
        settle()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *model.state_dict().values()]


@pytest.mark.usefixtures("_compat")
@pytest.mark.parametrize("imported", IMPORTS)
@pytest.mark.parametrize("decision", [None, "keep", "offload", "checkpoint"])
@pytest.mark.promise("D7")
def test_tutorial_when_only_its_import_line_is_changed_then_it_trains_to_the_same_bits(
    imported: str, decision: str | None, tmp_path: Path
) -> None:
    expected = train(load(tmp_path, MOE_LAYER))
    module = load(tmp_path, IMPORTS[imported] + MOE_LAYER.replace(*CALL))
    assert module.adapt_mem_func_wrapper is swapkit.adapt_mem_func_wrapper
    if decision is not None:
        getattr(swapkit, decision)(module.PipeExpert)
    swapper = get_runtime().current_swapper()
    moved, repeated = swapper.scheduler.stats().copied_out_bytes, swapper.counters().recomputed
    assert_same_bits(train(module), expected)
    assert (swapper.scheduler.stats().copied_out_bytes > moved) == (decision == "offload")
    assert swapper.counters().recomputed - repeated == (6 if decision == "checkpoint" else 0)


@pytest.mark.usefixtures("_compat")
@pytest.mark.promise("D7")
def test_tutorial_when_trained_under_a_budget_then_same_bits(tmp_path: Path) -> None:
    expected = train(load(tmp_path, MOE_LAYER))
    module = load(tmp_path, ORIGINAL + MOE_LAYER.replace(*CALL))
    with swapkit.budget("512MiB") as session:
        assert_same_bits(train(module), expected)
    assert session.stats.peak_bytes > 0


def test_original_import_when_the_compat_module_is_not_asked_for_then_fails(tmp_path: Path) -> None:
    from swapkit.compat import mindspeed

    mindspeed.uninstall()
    assert "mindspeed" not in sys.modules
    with pytest.raises(ModuleNotFoundError, match="mindspeed"):
        load(tmp_path, ORIGINAL + MOE_LAYER)
