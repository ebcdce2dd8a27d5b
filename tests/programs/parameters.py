"""Weights, buffers and casts of them: held by their owners, so moving them frees nothing."""

from __future__ import annotations

import torch
from torch import nn

from tests.programs.registry import SIDE, Evict, gradients, leaf, program
from tests.support.place import DEVICE


def train(model: nn.Module, evict: Evict, x: torch.Tensor) -> list[torch.Tensor]:
    """Train two steps; return the parameters and buffers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        loss = model(x).float().square().mean()
        evict()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*model.parameters(), *model.buffers()]


@program("G4")
def linear_layers(evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(10)
    model = nn.Sequential(*[nn.Linear(SIDE, SIDE), nn.Tanh()] * 2, nn.Linear(SIDE, SIDE))
    return train(model, evict, torch.randn(SIDE, SIDE))


class Scaled(nn.Module):
    """Multiplies by a buffer and normalises."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.randn(SIDE, SIDE))
        self.norm = nn.BatchNorm1d(SIDE)
        self.linear = nn.Linear(SIDE, SIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(self.linear(x) * self.scale)
        return hidden.sin()


@program("G4")
def buffers_and_batch_norm(evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(11)
    return train(Scaled(), evict, torch.randn(SIDE, SIDE))


@program("G4")
def tied_weights(evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(12)
    first, second = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)
    second.weight = first.weight
    return train(nn.Sequential(first, nn.GELU(), second), evict, torch.randn(SIDE, SIDE))


@program("G4")
def weights_that_share_one_flat_storage(evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(13)
    flat = torch.randn(2 * SIDE * SIDE)
    first, second = (nn.Parameter(half.view(SIDE, SIDE)) for half in flat.chunk(2))
    x = leaf()
    loss = ((x @ first).tanh() @ second.t()).sin().sum()
    evict()
    return gradients(loss, x, first, second)


@program("G5")
def autocast(evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.GELU(), nn.Linear(SIDE, 8))
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = model(torch.randn(64, SIDE)).float().square().sum()
    evict()
    return gradients(loss, *model.parameters())


@program("G5")
def autocast_with_eviction_inside_and_a_shared_weight(evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(2)
    layer = nn.Linear(SIDE, SIDE)
    x = leaf()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        hidden = layer(x * 1).tanh()
        evict()
        hidden = layer(hidden).tanh()
        evict()
        loss = layer(hidden).float().square().sum()
    del hidden
    evict()
    return gradients(loss, x, *layer.parameters())


@program("G5")
def autocast_without_its_cache(evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(2)
    layer = nn.Linear(SIDE, SIDE)
    x = leaf()
    with torch.autocast(DEVICE, dtype=torch.bfloat16, cache_enabled=False):
        loss = layer(layer(x * 1).tanh()).float().square().sum()
        evict()
        return gradients(loss, x, *layer.parameters())


@program("G6")
def weight_without_memory_between_forward_and_backward(evict: Evict) -> list[torch.Tensor]:
    """What FSDP does: the storage is given back after forward and filled again for backward."""
    torch.manual_seed(14)
    layer = nn.Linear(SIDE, SIDE)
    kept = layer.weight.detach().clone()
    storage = layer.weight.untyped_storage()
    nbytes = storage.nbytes()
    x = leaf()
    hidden = layer(x * 1).tanh()
    storage.resize_(0)
    evict()

    def refill(grad: torch.Tensor) -> torch.Tensor:
        storage.resize_(nbytes)
        storage.copy_(kept.untyped_storage())
        return grad

    hidden.register_hook(refill)
    loss = hidden.sum()
    del hidden
    evict()
    return gradients(loss, x, layer.weight)


@program("G4")
def frozen_weights(evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(15)
    model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.GELU(), nn.Linear(SIDE, SIDE))
    model[0].requires_grad_(False)
    x = leaf()
    loss = model(x * 1).square().sum()
    evict()
    return gradients(loss, x, *model[2].parameters())


@program()
def replaced_parameter_data(evict: Evict) -> list[torch.Tensor]:
    a = nn.Parameter(torch.randn(SIDE, SIDE))
    b = nn.Parameter(torch.randn(SIDE, SIDE))
    loss = (a @ b).sin().sum()
    evict()
    a.data = torch.ones(SIDE, SIDE)
    loss.backward()
    assert a.grad is not None
    assert b.grad is not None
    return [a.grad, b.grad]


@program(device_code=True)
def recurrent_layers(evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(16)
    model = nn.LSTM(SIDE, 32, num_layers=2, batch_first=True)
    x = leaf(4, 12, SIDE)
    out, _ = model(x * 1)
    loss = out.square().sum()
    del out
    evict()
    return gradients(loss, x, *model.parameters())


@program()
def transformer_layer(evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(17)
    model = nn.TransformerEncoderLayer(SIDE, 4, 2 * SIDE, dropout=0.1, batch_first=True)
    return train(model, evict, torch.randn(4, 24, SIDE))
