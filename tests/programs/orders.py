"""In which order graphs are built, walked, kept and dropped."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.programs.registry import SIDE, Evict, gradients, leaf, program
from tests.support.threads import on_thread, on_threads


@program()
def chain(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    loss = (x @ x).exp().sin().tanh().sum()
    evict()
    return [loss, *gradients(loss, x)]


@program()
def two_steps(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    losses = []
    for _ in range(2):
        loss = (x @ x).tanh().exp().mean()
        evict()
        loss.backward()
        with torch.no_grad():
            assert x.grad is not None
            x.sub_(x.grad, alpha=0.1)
        x.grad = None
        losses.append(loss)
    return [*losses, x]


@program()
def two_graphs_then_two_backwards(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    first = (x @ x).tanh().sum()
    evict()
    second = (x @ x.t()).sigmoid().sum()
    evict()
    return [*gradients(first, x), *gradients(second, x)]


@program()
def one_forward_one_backward_pipeline(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    losses = [((x * (i + 1)) @ x).tanh().sum() for i in range(2)]
    evict()
    grads = gradients(losses.pop(0), x)
    losses.append((x @ x).cos().exp().sum())
    evict()
    for loss in losses:
        grads += gradients(loss, x)
    return grads


@program()
def backward_newest_graph_first(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    losses = []
    for factor in range(1, 4):
        losses.append((x * factor).tanh().exp().sum())
        evict()
    grads = []
    while losses:
        grads += gradients(losses.pop(), x)
        evict()
    return grads


@program("G10")
def backward_twice_with_retain_graph(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    loss = (x @ x).tanh().exp().sum()
    evict()
    first = gradients(loss, x, retain_graph=True)
    evict()
    return first + gradients(loss, x)


@program("G10")
def five_backwards_with_retain_graph(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    hidden = (x @ x).tanh()
    losses = [hidden.exp().sum(), hidden.sin().sum(), hidden.pow(2).sum()]
    grads = []
    for turn in range(5):
        evict()
        grads += gradients(losses[turn % 3], x, retain_graph=turn < 4)
    return grads


@program()
def branch_without_backward(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    hidden = (x @ x).tanh()
    unused = hidden.exp().sin()
    evict()
    loss = hidden.cos().sum()
    del unused, hidden
    evict()
    return gradients(loss, x)


@program()
def branch_kept_without_backward(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    hidden = (x @ x).tanh()
    unused = hidden.exp().sin()
    loss = hidden.cos().sum()
    del hidden
    evict()
    grads = gradients(loss, x)
    evict()
    return [*grads, unused]


@program("G11")
def graphs_dropped_without_backward(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    for _ in range(4):
        dropped = (x @ x).exp().tanh().sum()
        evict()
        del dropped
    loss = (x @ x).sin().exp().sum()
    evict()
    return gradients(loss, x)


@program("G11")
def graph_dropped_in_the_middle_of_backward(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    hidden = (x @ x).tanh()
    kept = [hidden.exp().sum()]
    evict()
    other = (x * 2).exp().tanh()
    other.register_hook(lambda _grad: kept.clear())
    loss = other.sum() + hidden.sin().sum()
    del other, hidden
    evict()
    return gradients(loss, x)


@program()
def double_backward(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    loss = (x @ x).tanh().pow(3).sum()
    evict()
    (grad,) = gradients(loss, x, create_graph=True)
    evict()
    return [grad.detach(), *gradients(grad.square().sum(), x)]


@program()
def triple_backward(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    value = (x @ x).mul(0.01).exp().sum()
    grads = []
    for _ in range(3):
        evict()
        (grad,) = gradients(value, x, create_graph=True)
        grads.append(grad)
        value = grad.square().sum()
    return grads


@program()
def gradient_penalty(evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(4)
    model = torch.nn.Sequential(
        torch.nn.Linear(SIDE, SIDE), torch.nn.Tanh(), torch.nn.Linear(SIDE, 1)
    )
    x = leaf()
    out = model(x).sum()
    evict()
    (grad,) = gradients(out, x, create_graph=True)
    loss = out + (grad.norm(dim=1) - 1).square().mean()
    evict()
    return gradients(loss, *model.parameters(), allow_unused=True, materialize_grads=True)


@program()
def gradients_of_inner_tensors(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    hidden = (x @ x).tanh()
    out = hidden.exp()
    loss = (out * 2).cos().exp().sum()
    evict()
    some = gradients(loss, hidden, out, retain_graph=True)
    evict()
    return [*some, *gradients(loss, x)]


@program()
def backward_with_inputs(evict: Evict) -> list[torch.Tensor]:
    x, y = leaf(), leaf()
    loss = (x @ y).tanh().exp().sum()
    evict()
    loss.backward(inputs=[y])
    assert x.grad is None
    assert y.grad is not None
    return [y.grad]


@program()
def several_roots_and_grad_outputs(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    first, second = (x @ x).tanh().sin(), (x * 2).exp()
    evict()
    torch.autograd.backward([first, second], [torch.ones_like(first), torch.randn_like(second)])
    assert x.grad is not None
    return [x.grad]


@program()
def retained_inner_gradients(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    hidden = (x @ x).tanh()
    hidden.retain_grad()
    loss = hidden.exp().sum()
    evict()
    loss.backward()
    assert x.grad is not None
    assert hidden.grad is not None
    return [x.grad, hidden.grad]


@program("G13")
def backward_on_a_fresh_thread(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    loss = (x @ x).tanh().exp().sum()
    evict()
    on_thread(loss.backward)
    assert x.grad is not None
    return [x.grad]


@program("G13")
def backwards_of_one_graph_on_two_threads(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    hidden = (x @ x).tanh().exp()
    losses = [hidden.sin().sum(), hidden.cos().sum()]
    evict()

    def work(number: int) -> torch.Tensor:
        (found,) = gradients(losses[number], x, retain_graph=True)
        return found

    found = on_threads(*[partial(work, number) for number in range(2)])
    evict()
    return [*found, *gradients(losses[0], x)]


@program("G13", moves=False)
def whole_step_on_a_fresh_thread(evict: Evict) -> list[torch.Tensor]:
    x = leaf()

    def work() -> list[torch.Tensor]:
        loss = (x @ x).tanh().exp().sum()
        evict()
        return gradients(loss, x)

    return on_thread(work)


@program("G2", "G8")
def memory_reused_while_it_may_be_copied(evict: Evict) -> list[torch.Tensor]:
    """What was saved is let go at once, and new tensors take the room that this gives."""
    x = leaf()
    y = x
    for _ in range(12):
        y = (y * 1.01).sin()
        garbage = [torch.full((SIDE, SIDE), float("nan")) for _ in range(3)]
        del garbage
    loss = y.sum()
    del y
    evict()
    return gradients(loss, x)


@program("G8")
def many_short_graphs_at_recycled_addresses(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    kept, grads = [], []
    for number in range(40):
        loss = (x * (number + 1)).exp().mul(0.5).tanh().sum()
        if number % 3 == 0:
            kept.append(loss)
        if number % 10 == 9:
            evict()
            grads += gradients(kept.pop(0), x)
        del loss
    for loss in kept:
        grads += gradients(loss, x)
    return grads


@program("G20")
def reentrant_backward_from_a_hook(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    inner: list[torch.Tensor] = []

    def start_another(grad: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            value = (x * 0.5).exp().sin().sum()
            evict()
            inner.extend(gradients(value, x))
        return grad * 2

    hidden = (x @ x).tanh()
    hidden.register_hook(start_another)
    loss = hidden.exp().sum()
    del hidden
    evict()
    outer = gradients(loss, x)
    return [*outer, *inner]


@program()
def accumulated_gradients(evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(*[torch.nn.Linear(SIDE, SIDE), torch.nn.Tanh()] * 3)
    for _ in range(3):
        loss = model(torch.randn(SIDE, SIDE)).square().mean()
        evict()
        loss.backward()
    grads: list[Any] = [parameter.grad for parameter in model.parameters()]
    return grads


@program()
def steps_of_different_shapes_with_an_evaluation_between(evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(SIDE, SIDE), torch.nn.GELU())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for rows in (64, 7, 128, 64):
        loss = model(torch.randn(rows, SIDE)).square().mean()
        evict()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses += [loss.detach(), model(torch.ones(3, SIDE)).sum()]
    return [*losses, *model.parameters()]
