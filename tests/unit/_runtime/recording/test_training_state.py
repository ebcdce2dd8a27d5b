"""`TrainingState` restores what training changes, bit for bit, in the tensors that held it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from swapkit._runtime.recording.training_state import TrainingState

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01)),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, max_iter=3),
    "adafactor": torch.optim.Adafactor,
}


def flat(value: object) -> list[object]:
    """Return what a state holds: tensors as their bytes, in order."""
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().flatten().view(torch.uint8)
        return [str(value.dtype), value.device.type, tuple(value.shape), bytes(data.tolist())]
    if isinstance(value, dict):
        return [each for key in value for each in [str(key), *flat(value[key])]]
    if isinstance(value, (list, tuple)):
        return [each for one in value for each in flat(one)]
    return [value]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[object]:
    gradients = [each.grad for each in model.parameters()]
    return flat([dict(model.state_dict()), optimizer.state_dict(), gradients, model.training])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_when_restored_after_steps_then_the_same_bits_in_the_same_tensors(
    name: str, steps: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)).to(dtype)
    optimizer = OPTIMIZERS[name](list(model.parameters()))

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.randn(8, 6, dtype=dtype)).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(step)
    tensors = [*model.parameters(), *model.buffers()]
    before, addresses = state_of(model, optimizer), [each.data_ptr() for each in tensors]
    state = TrainingState(model, [optimizer])
    for _ in range(2):
        optimizer.step(step)
        model.eval()
        optimizer.param_groups[0]["lr"] *= 0.5
    assert state_of(model, optimizer) != before
    state.restore()
    assert state_of(model, optimizer) == before
    assert [each.data_ptr() for each in tensors] == addresses
    expected = torch.randn(3)
    state.restore()
    assert torch.equal(torch.randn(3), expected)


def test_state_when_a_tensor_was_replaced_or_lies_transposed_then_its_values_come_back() -> None:
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(torch.arange(6.0).reshape(3, 2).t())
    model.register_buffer("table", torch.arange(4.0))
    model.weight.grad = torch.ones(3, 2).t()
    state = TrainingState(model, [])
    model.table = torch.zeros(9)
    model.weight.grad = None
    with torch.no_grad():
        model.weight.zero_()
    state.restore()
    assert torch.equal(model.table, torch.arange(4.0))
    assert torch.equal(model.weight, torch.arange(6.0).reshape(3, 2).t())
    gradient: Any = model.weight.grad
    assert torch.equal(gradient, torch.ones(2, 3))
    assert gradient.stride() == model.weight.stride()


def test_state_when_kept_then_it_takes_no_memory_of_the_pool(installation: Any) -> None:
    model = nn.Linear(512, 512)
    before = installation.pool.in_use_bytes()
    state = TrainingState(model, [])
    assert installation.pool.in_use_bytes() - before < 64 * 1024
    state.restore()


class Lazy(torch.nn.Module):
    """A module with buffers of all kinds, some of which its forward makes."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.zeros(1).expand(4))
        self.register_buffer("later", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.later = torch.ones(2)
        self.register_buffer("new", torch.ones(3))
        normal: torch.Tensor = self.norm(x)
        return normal + self.mask


def test_state_when_the_step_makes_buffers_then_they_are_gone_and_expanded_ones_stay() -> None:
    model = Lazy()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = TrainingState(model, [])
    model(torch.randn(8, 4))
    assert "new" in model.state_dict()
    state.restore()
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert model.later is None


def test_state_when_options_are_added_or_frozen_then_as_before() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    options = set(optimizer.param_groups[0])
    state = TrainingState(model, [optimizer])
    optimizer.add_param_group({"params": [model.bias]})
    optimizer.param_groups[0]["new"] = 1
    model.weight.requires_grad_(False)
    state.restore()
    assert len(optimizer.param_groups) == 1
    assert set(optimizer.param_groups[0]) == options
    assert model.weight.requires_grad


def test_state_when_one_part_cannot_be_restored_then_all_others_are() -> None:
    model = torch.nn.Linear(2, 2)
    weight = model.weight.detach().clone()
    state = TrainingState(model, [])
    random_numbers = torch.get_rng_state()
    with torch.no_grad():
        model.weight.zero_()
    torch.rand(3)

    def fail() -> None:
        raise RuntimeError("one part")

    state._undo.insert(len(state._undo) // 2, fail)
    with pytest.raises(RuntimeError, match="one part"):
        state.restore()
    assert torch.equal(model.weight, weight)
    assert torch.equal(torch.get_rng_state(), random_numbers)
