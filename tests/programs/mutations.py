"""Changes in place: of tensors that backward does not need, and of those that it does."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tests.programs.functions import ReadsTwice
from tests.programs.registry import SIDE, Evict, gradients, illegal, leaf, program


@program()
def in_place_on_tensors_that_are_not_saved(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    y = x * 3
    y.add_(1).mul_(2)
    z = y.exp()
    y.zero_()  # exp saves its result, not its input
    loss = z.sum()
    del z
    evict()
    return gradients(loss, x)


@program()
def in_place_between_saves_of_one_storage(evict: Evict) -> list[torch.Tensor]:
    """Saved after the change, so the new version is the one that counts."""
    x = leaf()
    y = x * 3
    y.add_(1)
    loss = (y * y).sum()
    z = y.detach().clone()
    z.mul_(2)
    loss = loss + (x * z).sum()
    del y, z
    evict()
    return gradients(loss, x)


@program()
def in_place_activations(evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(23)
    model = torch.nn.Sequential(
        torch.nn.Linear(SIDE, SIDE), torch.nn.ReLU(inplace=True),
        torch.nn.Linear(SIDE, SIDE), torch.nn.Hardtanh(inplace=True),
    )  # fmt: skip
    x = leaf()
    loss = torch.nn.functional.dropout(model(x * 1), 0.2, inplace=True).square().sum()
    evict()
    return gradients(loss, x, *model.parameters())


@program()
def writing_into_a_slice_that_is_not_saved(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    buffer = torch.zeros(4, SIDE, SIDE)
    for row in range(4):
        buffer[row] = (x * (row + 1)).tanh()
    loss = buffer.exp().sum()
    del buffer
    evict()
    return gradients(loss, x)


@program("G23")
def change_that_does_not_count_as_one(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    y = x * 1
    loss = (y * y).sum()
    with torch.autograd.grad_mode._unsafe_preserve_version_counter(y):
        y.mul_(1)
    del y
    evict()
    return gradients(loss, x)


@illegal("G1", "G2")
def saved_tensor_changed(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    y = x * 1
    loss = (y * y).sum()
    y.add_(1)
    del y
    evict()
    return gradients(loss, x)


@illegal("G1")
def saved_tensor_changed_after_eviction(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    y = x * 1
    loss = (y * y).sum()
    evict()
    y.add_(1)
    evict()
    return gradients(loss, x)


@illegal("G1")
def saved_tensor_changed_through_a_view(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    y = x * 1
    loss = (y * y).sum()
    view = y[3:5].t()
    del y
    evict()
    view.zero_()
    return gradients(loss, x)


@illegal("G1")
def saved_view_changed_through_its_base(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    y = x * 1
    part = y[: SIDE // 2]
    loss = (part * part).sum()
    del part
    evict()
    y[SIDE // 2 :].zero_()
    return gradients(loss, x)


@illegal("G1")
def saved_tensor_changed_through_a_detached_alias(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    y = x * 1
    loss = (y * y).sum()
    alias = y.detach()
    del y
    evict()
    alias.mul_(2)
    return gradients(loss, x)


@illegal("G1")
def saved_tensor_transposed_in_place(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    y = x * 1
    loss = (y * y).sum()
    y.t_()
    evict()
    return gradients(loss, x)


@illegal("G1")
def saved_output_changed(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    y = (x * 0.5).exp()
    z = y * 1
    y.add_(1)
    del y
    evict()
    return gradients(z.sum(), x)


@illegal("G1")
def saved_output_changed_through_out(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    y = (x * 0.5).sigmoid()
    loss = y.sum()
    evict()
    with torch.no_grad():
        torch.mul(x, 2, out=y)
    return gradients(loss, x)


@illegal("G1", "G21")
def saved_tensor_of_a_function_changed(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    y = x * 0.1
    loss: Any = ReadsTwice.apply(y).sum()
    evict()
    y.detach().zero_()
    return gradients(loss, x)


@illegal("G1")
def saved_tensor_changed_between_two_backwards(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    y = x * 1
    loss = (y * y).sum()
    evict()
    gradients(loss, x, retain_graph=True)
    evict()
    y.detach().add_(1)
    return gradients(loss, x)


@illegal("G1", "G10")
def unpacked_tensor_changed(evict: Evict) -> list[torch.Tensor]:
    """What `_saved_*` shows shares memory and version with what backward will use."""
    x = leaf()
    y = (x * 0.5).exp()
    node: Any = y.grad_fn
    loss = y.sum()
    del y
    evict()
    node._saved_result.detach().zero_()
    evict()
    return gradients(loss, x)


@illegal("G3")
def input_of_a_checkpoint_changed(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    y = x * 1
    loss = checkpoint(lambda v: v * v, y, use_reentrant=False).sum()
    evict()
    y.detach().add_(10)
    return gradients(loss, x)


@illegal("G3")
def input_of_a_reentrant_checkpoint_changed(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    y = x * 1
    loss = checkpoint(lambda v: v * v, y, use_reentrant=True).sum()
    evict()
    y.detach().add_(10)
    loss.backward()
    return []


@illegal("G4")
def weight_changed_between_forward_and_backward(evict: Evict) -> list[torch.Tensor]:
    model = torch.nn.Sequential(torch.nn.Linear(SIDE, SIDE), torch.nn.Linear(SIDE, SIDE))
    loss = model(torch.randn(SIDE, SIDE)).sum()
    evict()
    with torch.no_grad():
        model[1].get_parameter("weight").add_(1)
    loss.backward()
    return []


@illegal()
def graph_walked_twice_without_retain_graph(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    loss = (x @ x).tanh().exp().sum()
    evict()
    gradients(loss, x)
    return gradients(loss, x)
