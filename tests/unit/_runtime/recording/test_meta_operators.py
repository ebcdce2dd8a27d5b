"""Steps of tensors without memory: the same operators and bytes as where they stand for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from swapkit._runtime.recording.meta_operators import standing_for
from swapkit.api.recording import record
from swapkit.errors import InvalidArgument, Unsupported
from swapkit.ir.checks import check_trace
from swapkit.ir.traces import Phase, Trace
from swapkit.planning.hardware import Hardware

if TYPE_CHECKING:
    from collections.abc import Callable

SIDE = 32
CPU = Hardware(
    flops_per_second=1e12,
    attention_flops_per_second=1e12,
    memory_bytes_per_second=1e10,
    device="cpu",
)


class Seen(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(str(func).removeprefix("aten."))
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIDE)
        self.attention = nn.Linear(SIDE, 3 * SIDE)
        self.mlp = nn.Sequential(nn.Linear(SIDE, 4 * SIDE), nn.GELU(), nn.Linear(4 * SIDE, SIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.attention(self.norm(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        heads = scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + dropout(self.mlp(heads.transpose(1, 2).flatten(-2)), 0.1)


def train(device: str, **options: Any) -> Trace:
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(*[Block() for _ in range(3)])
        x = torch.zeros(2, 16, SIDE)
        target = torch.zeros(2, 16, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)

    def step() -> None:
        out = model(x)
        nn.functional.cross_entropy(out.flatten(0, 1), target.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    trace = record(step, model, optimizer, **options)
    check_trace(trace)
    return trace


def structure(trace: Trace) -> list[Any]:
    operators = [
        (o.name, o.phase, o.module, o.occurrence, o.reads, o.writes, o.is_repeatable)
        for o in trace.operators
    ]
    return [operators, trace.storages, trace.events, trace.base_bytes, trace.signature]


def test_step_when_it_is_on_meta_then_it_is_the_same_as_on_the_cpu() -> None:
    real, meta = train("cpu"), train("meta", hardware=CPU)
    assert structure(meta) == structure(real)
    assert any("flash_attention_for_cpu" in each.name for each in meta.operators)
    assert (meta.device, real.device) == ("cpu", "cpu")


def test_step_when_it_is_of_fake_tensors_then_it_is_the_same_as_on_the_cpu() -> None:
    def step_of(x: torch.Tensor, model: nn.Module) -> Callable[[], None]:
        return lambda: model(x).sum().backward()

    model, x = nn.Sequential(Block(), Block()), torch.zeros(2, 16, SIDE)
    real = record(step_of(x, model), model)
    with FakeTensorMode():
        fake_model, fake_x = nn.Sequential(Block(), Block()), torch.zeros(2, 16, SIDE)
        fake = record(step_of(fake_x, fake_model), fake_model, hardware=CPU)
    check_trace(fake)
    assert structure(fake) == structure(real)


def test_attention_when_it_stands_for_a_gpu_then_no_matrix_of_scores_is_made() -> None:
    trace = train("meta", hardware="H100")
    names = [each.name for each in trace.operators]
    assert names.count("aten._scaled_dot_product_efficient_attention.default") == 3  # float32
    assert names.count("aten.native_dropout.default") == 3
    assert trace.device == "cuda"


@pytest.mark.parametrize(
    ("dtype", "mask", "expected"),
    [
        (torch.bfloat16, None, "_scaled_dot_product_flash_attention.default"),
        (torch.float32, None, "_scaled_dot_product_efficient_attention.default"),
        (torch.bfloat16, torch.bool, "_scaled_dot_product_efficient_attention.default"),
        (torch.bfloat16, torch.bfloat16, "_scaled_dot_product_efficient_attention.default"),
        (torch.float64, None, "bmm.default"),
    ],
)
def test_attention_when_it_stands_for_a_gpu_then_it_is_what_the_gpu_takes(
    dtype: torch.dtype, mask: torch.dtype | None, expected: str
) -> None:
    operand = torch.empty(2, 4, 16, 8, device="meta", dtype=dtype, requires_grad=True)
    bias = None if mask is None else torch.empty(2, 1, 16, 16, device="meta", dtype=mask)
    with standing_for("cuda"), Seen() as seen:
        out = scaled_dot_product_attention(operand, operand, operand, attn_mask=bias)
        out.sum().backward()
    assert expected in seen.names
    assert out.shape == operand.shape
    assert operand.grad is not None
    assert operand.grad.shape == operand.shape


def test_attention_when_heads_are_shared_and_narrow_then_shapes_are_kept() -> None:
    query = torch.empty(1, 8, 16, 6, device="meta", dtype=torch.bfloat16, requires_grad=True)
    key = torch.empty(1, 2, 16, 6, device="meta", dtype=torch.bfloat16, requires_grad=True)
    with standing_for("cuda"), Seen() as seen:
        out = scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
        out.sum().backward()
    assert "_scaled_dot_product_flash_attention.default" in seen.names
    assert out.shape == query.shape
    assert key.grad is not None
    assert key.grad.shape == key.shape


def test_attention_when_the_user_wants_products_then_they_are_made() -> None:
    operand = torch.empty(2, 4, 16, 8, device="meta", dtype=torch.bfloat16)
    products = nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH)
    with standing_for("cuda"), Seen() as seen, products:
        scaled_dot_product_attention(operand, operand, operand)
    assert "bmm.default" in seen.names


@pytest.mark.parametrize(("p", "train"), [(0.0, True), (0.3, False)])
def test_dropout_when_it_drops_nothing_then_it_makes_nothing(p: float, train: bool) -> None:
    x = torch.empty(8, device="meta", requires_grad=True)
    with standing_for("cuda"), Seen() as seen:
        assert dropout(x, p, train).shape == x.shape
    assert seen.names == []


def test_meta_when_nothing_is_recorded_any_more_then_it_is_as_it_was() -> None:
    operand = torch.empty(2, 4, 16, 8, device="meta", dtype=torch.bfloat16)
    before = torch.autocast.__init__
    with standing_for("cuda"), standing_for("cpu"):
        pass
    with Seen() as seen:
        scaled_dot_product_attention(operand, operand, operand)
    assert "bmm.default" in seen.names
    assert torch.autocast.__init__ is before


def test_autocast_when_it_is_switched_off_then_it_is_accepted_and_else_refused() -> None:
    with standing_for("cuda"):
        with torch.autocast("meta", enabled=False):
            pass
        with pytest.raises(Unsupported, match=r"convert the model"), torch.autocast("cuda"):
            pass


def test_hardware_when_it_is_missing_or_unknown_then_that_is_said() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(8, 8), torch.ones(8, 8)
    with pytest.raises(InvalidArgument, match="hardware='H100'"):
        record(lambda: model(x).sum().backward(), model)
    with pytest.raises(InvalidArgument, match=r"expected a Hardware or one of H100"):
        record(lambda: None, model, hardware="H1000")


def test_time_when_it_is_modelled_then_it_is_that_of_the_hardware() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16), torch.ones(4096, 4096)
    hardware = Hardware(
        flops_per_second=1e12, attention_flops_per_second=1, memory_bytes_per_second=1e15
    )
    trace = record(lambda: model(x.bfloat16()).sum().backward(), model, hardware=hardware)
    (product,) = [o for o in trace.operators if "mm" in o.name and o.phase is Phase.FORWARD]
    assert math.isclose(product.seconds, 2 * 4096**3 / 1e12, rel_tol=1e-9)
