"""`torch.utils.checkpoint`: inside, nested, reentrant, selective; random numbers and autocast."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from tests.programs.registry import SIDE, Evict, gradients, leaf, program
from tests.support.place import DEVICE


def block(value: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout((value @ value.t()).mul(0.01).tanh().exp(), 0.3)


def again(function: Any, *args: Any, **options: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False, **options)


@program()
def checkpoint_inside(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    hidden = again(block, x * 0.1)
    hidden = again(lambda value: again(block, value), hidden)
    loss = hidden.sum()
    del hidden
    evict()
    return gradients(loss, x)


@program("G14")
def reentrant_checkpoint_inside(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    hidden = checkpoint(lambda v: (v @ v).tanh().exp(), x * 0.1, use_reentrant=True)
    loss = checkpoint(block, hidden, use_reentrant=True).sum()
    del hidden
    evict()
    loss.backward()
    assert x.grad is not None
    return [x.grad]


@program("G14", "G20")
def nested_reentrant_checkpoints(evict: Evict) -> list[torch.Tensor]:
    x = leaf()

    def inner(value: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, value.sin(), use_reentrant=True)  # type: ignore[no-any-return]

    loss = checkpoint(inner, x * 0.1, use_reentrant=True).sum()
    evict()
    loss.backward()
    assert x.grad is not None
    return [x.grad]


@program("G15")
def eviction_inside_a_checkpointed_function(evict: Evict) -> list[torch.Tensor]:
    x = leaf()

    def evicting(value: torch.Tensor) -> torch.Tensor:
        hidden = (value @ value).tanh()
        evict()
        out = hidden.exp().sin()
        evict()
        return out

    loss = again(evicting, x * 0.1).sum()
    evict()
    return gradients(loss, x)


@program()
def checkpoint_without_early_stop(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    with set_checkpoint_early_stop(False):
        loss = again(block, again(block, x * 0.1)).sum()
        evict()
        return gradients(loss, x)


@program()
def checkpoint_with_retain_graph(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    loss = again(block, x * 0.1).exp().sum()
    evict()
    first = gradients(loss, x, retain_graph=True)
    evict()
    return first + gradients(loss, x)


@program()
def checkpoint_and_double_backward(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    loss = again(lambda v: (v @ v).mul(0.1).tanh().exp(), x * 1).sum()
    evict()
    (grad,) = gradients(loss, x, create_graph=True)
    evict()
    return [grad, *gradients(grad.square().sum(), x)]


@program("G17")
def checkpoint_with_other_arguments(evict: Evict) -> list[torch.Tensor]:
    x = leaf()

    def mixed(
        value: torch.Tensor, parts: list[torch.Tensor], *, scale: torch.Tensor, name: str
    ) -> torch.Tensor:
        assert name == "x"
        return (value * parts[0] * scale).tanh() @ parts[1]

    parts = [x.sin(), x.cos()]
    with_partial = functools.partial(mixed, parts=parts, scale=x * 2, name="x")
    loss = again(with_partial, x * 0.1).sum()
    loss = loss + again(mixed, x * 0.1, parts, scale=parts[0], name="x").exp().mul(1e-3).sum()
    del parts, with_partial
    evict()
    return gradients(loss, x)


@program()
def checkpoint_sequential_model(evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(8)
    layers = [
        torch.nn.Sequential(torch.nn.Linear(SIDE, SIDE), torch.nn.Dropout(0.2), torch.nn.GELU())
        for _ in range(6)
    ]
    model = torch.nn.Sequential(*layers)
    x = leaf()
    loss = checkpoint_sequential(model, 3, x * 1, use_reentrant=False).square().sum()
    evict()
    return gradients(loss, x, *model.parameters())


def save_products(_context: object, operator: Any, *_args: Any, **_options: Any) -> Any:
    saved = operator in {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def selective(function: Any, *args: Any, **options: Any) -> Any:
    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
    return again(function, *args, context_fn=contexts, **options)


@program("G7")
def selective_checkpoint_inside(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    hidden = selective(block, x * 0.1)
    evict()
    loss = selective(block, hidden).sum()
    del hidden
    evict()
    return gradients(loss, x)


@program("G7")
def selective_checkpoint_whose_results_go_through_hooks(evict: Evict) -> list[torch.Tensor]:
    # Torch before 2.15 keeps them outside of saved tensors, without a choice.
    known = inspect.signature(checkpoint).parameters
    options = {name: True for name in ("respect_saved_tensors_hooks",) if name in known}
    x = leaf()
    hidden = selective(block, x * 0.1, **options)
    evict()
    loss = selective(block, hidden, **options).sum()
    del hidden
    evict()
    return gradients(loss, x)


@program("G7")
def selective_checkpoint_by_list_with_eviction_inside(evict: Evict) -> list[torch.Tensor]:
    x = leaf()

    def evicting(value: torch.Tensor) -> torch.Tensor:
        hidden = block(value)
        evict()
        return hidden.sin()

    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    loss = again(evicting, x * 0.1, context_fn=contexts).exp().mul(1e-3).sum()
    evict()
    return gradients(loss, x)


@program()
def checkpoint_under_autocast(evict: Evict) -> list[torch.Tensor]:
    torch.manual_seed(9)
    model = torch.nn.Sequential(torch.nn.Linear(SIDE, SIDE), torch.nn.GELU(), torch.nn.Dropout(0.1))
    x = leaf()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        hidden = again(model, x * 1)
        loss = again(model, hidden).float().square().sum()
    del hidden
    evict()
    return gradients(loss, x, *model.parameters())


@program()
def checkpoint_without_preserved_random_state(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    loss = again(lambda v: (v @ v).mul(0.1).tanh().exp(), x * 1, preserve_rng_state=False).sum()
    evict()
    return [torch.rand(4), *gradients(loss, x), torch.rand(4)]


@program()
def random_numbers_stay_in_step(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    before = torch.rand(8)
    loss = torch.nn.functional.dropout(again(block, x * 0.1), 0.5).sum()
    evict()
    between = torch.rand(8)
    grads = gradients(loss, x)
    return [before, between, *grads, torch.rand(8)]


@program()
def checkpoint_recomputes_batch_norm(evict: Evict) -> list[torch.Tensor]:
    norm = torch.nn.BatchNorm1d(SIDE)
    x = leaf()
    loss = again(lambda v: norm(v).tanh().exp(), x * 2).sum()
    evict()
    grads = gradients(loss, x, *norm.parameters())
    assert norm.running_mean is not None
    return [*grads, norm.running_mean]


@program("G16")
def checkpointed_function_raises_when_recomputed(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    calls: list[int] = []

    def fails_once(value: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        hidden = (value @ value).mul(0.1).tanh()
        if len(calls) == 2:
            raise ZeroDivisionError
        return hidden.exp()

    loss = again(fails_once, x * 0.1).sum()
    evict()
    results: list[torch.Tensor] = []
    try:
        gradients(loss, x, retain_graph=True)
    except ZeroDivisionError:
        results.append(torch.ones(1))
    del loss
    loss = (x @ x).tanh().sum()
    evict()
    return [*results, *gradients(loss, x)]
