"""The user's own hooks: on tensors, on nodes, on saved tensors, on modules."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import (
    GradientEdge,
    get_gradient_edge,
    register_multi_grad_hook,
    save_on_cpu,
    saved_tensors_hooks,
)

from tests.programs.registry import SIDE, Evict, gradients, leaf, program


@program()
def hooks_on_tensors(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    hidden = (x @ x).tanh()
    seen: list[torch.Tensor] = []

    def double(grad: torch.Tensor) -> torch.Tensor:
        seen.append(grad)
        return grad * 2

    hidden.register_hook(double)
    loss = hidden.exp().sum()
    del hidden
    evict()
    return [*gradients(loss, x), *seen]


@program()
def hooks_on_nodes(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    hidden = (x @ x).tanh()
    seen: list[torch.Tensor] = []
    node: Any = hidden.grad_fn

    def before(grads: Any) -> Any:
        evict()
        return tuple(grad * 3 for grad in grads)

    node.register_prehook(before)
    node.register_hook(lambda inputs, outputs: seen.extend([*inputs, *outputs]))
    loss = hidden.exp().sum()
    del hidden, node
    evict()
    return [*gradients(loss, x), *seen]


@program()
def hooks_after_accumulation_step_in_backward(evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(19)
    model = torch.nn.Sequential(*[torch.nn.Linear(SIDE, SIDE), torch.nn.Tanh()] * 3)
    handles = []
    for parameter in dict.fromkeys(model.parameters()):
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(_parameter: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        handles.append(parameter.register_post_accumulate_grad_hook(step))
    loss = model(torch.randn(SIDE, SIDE)).square().mean()
    evict()
    loss.backward()
    for handle in handles:
        handle.remove()
    return list(model.parameters())


@program()
def hooks_on_several_gradients(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    first, second = (x @ x).tanh(), x.exp()
    seen: list[torch.Tensor] = []
    register_multi_grad_hook(
        (first, second), lambda grads: seen.extend(grad for grad in grads if grad is not None)
    )
    loss = (first * second).sum()
    del first, second
    evict()
    return [*gradients(loss, x), *seen]


@program()
def hooks_on_modules(evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(20)
    model = torch.nn.Sequential(torch.nn.Linear(SIDE, SIDE), torch.nn.Tanh())
    seen: list[torch.Tensor] = []
    model[0].register_full_backward_hook(lambda _m, _i, outputs: seen.extend(outputs))

    def evict_first(_module: torch.nn.Module, _outputs: object) -> None:
        evict()

    model[1].register_full_backward_pre_hook(evict_first)
    model[1].register_forward_hook(lambda _m, _i, output: output * 2)
    loss = model(leaf()).exp().sum()
    evict()
    return [*gradients(loss, *model.parameters()), *seen]


@program("G12")
def user_hooks_inside(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    counts = {"packed": 0, "unpacked": 0}

    def pack(tensor: torch.Tensor) -> list[torch.Tensor]:
        counts["packed"] += 1
        return [tensor.detach().clone()]

    def unpack(packed: list[torch.Tensor]) -> torch.Tensor:
        counts["unpacked"] += 1
        return packed[0]

    hidden = (x @ x).tanh()
    with saved_tensors_hooks(pack, unpack):
        hidden = hidden.exp().sin()
    loss = hidden.cos().sum()
    del hidden
    evict()
    grads = gradients(loss, x)
    return [*grads, torch.tensor([counts["packed"], counts["unpacked"]])]


@program("G12")
def save_on_cpu_inside(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    hidden = (x @ x).tanh()
    with save_on_cpu():
        hidden = (hidden @ x).exp().mul(1e-3).sin()
    loss = hidden.cos().sum()
    del hidden
    evict()
    return gradients(loss, x)


@program("G12")
def exception_in_the_users_pack_and_unpack(evict: Evict) -> list[torch.Tensor]:
    x = leaf()

    def fail(_value: Any) -> Any:
        raise ZeroDivisionError

    results = []
    try:
        with saved_tensors_hooks(fail, fail):
            (x * 2).exp()
    except ZeroDivisionError:
        results.append(torch.ones(1))
    with saved_tensors_hooks(lambda tensor: tensor.detach(), fail):
        hidden = (x * 2).exp()
    try:
        hidden.sum().backward()
    except ZeroDivisionError:
        results.append(torch.ones(2))
    del hidden
    loss = (x @ x).tanh().exp().sum()
    evict()
    return [*results, *gradients(loss, x)]


@program()
def gradient_edges_and_metadata(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    hidden = (x @ x).tanh()
    edge: GradientEdge = get_gradient_edge(hidden)
    loss = hidden.exp().sum()
    del hidden
    evict()
    (inner,) = torch.autograd.grad(loss, edge, retain_graph=True)
    evict()
    return [inner, *gradients(loss, x)]
