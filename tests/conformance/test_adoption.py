"""G24: graphs that were recorded without our hooks are given them when memory runs out.

That must not change what they are: torch allows it once, and loses what a failing hook was given.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import swapkit
from tests.conformance.modes import BUDGET, EVERYTHING, count_copies
from tests.programs import SIDE, assert_same_bits, gradients, leaf
from tests.programs.checkpoints import again
from tests.support.place import DEVICE, install


def body(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).tanh().exp().sin().sum()


def gradient_of(x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    return gradients(body(x), x)


@pytest.fixture(autouse=True)
def pool() -> None:
    """Make every tensor in the pool, so that it can be moved."""
    install()


@pytest.mark.promise("A3")
def test_graph_when_recorded_before_the_session_then_moved_and_same_bits() -> None:
    x = leaf()
    loss = body(x)
    with swapkit.budget(BUDGET, device=DEVICE) as session, count_copies() as copied:
        session.rescue(EVERYTHING)
        grads = gradients(loss, x)
    assert copied.in_bytes > 0
    assert_same_bits(grads, gradient_of(x))


def test_rescue_when_a_graph_that_was_walked_is_still_held_then_no_error() -> None:
    x = leaf()
    kept = body(x)
    kept.backward()
    with swapkit.budget(BUDGET, device=DEVICE) as session:
        loss = body(x)
        session.rescue(EVERYTHING)
        assert_same_bits(gradients(loss, x), gradient_of(x))
    with pytest.raises(RuntimeError, match="a second time"):
        kept.backward()


def test_numbers_in_a_graph_when_adopted_then_types_stay() -> None:
    """A number that torch wrapped in a tensor must not take part in type promotion afterwards."""
    x = torch.tensor(0.5, requires_grad=True)
    wide = leaf()
    loss = (x * 2.5).exp() * 3 + (wide * 1.5).mean()
    expected = gradients(loss, x, wide, retain_graph=True)
    with swapkit.budget(BUDGET, device=DEVICE) as session:
        session.rescue(EVERYTHING)
        grads = gradients(loss, x, wide)
    assert grads[0].dtype is torch.float32
    assert_same_bits(grads, expected)


def test_hooks_of_others_when_graphs_are_adopted_then_not_called() -> None:
    """To look at what a node saved would unpack it, and recompute a checkpointed region."""
    x = leaf()
    calls: list[str] = []

    def block(value: torch.Tensor) -> torch.Tensor:
        calls.append("forward")
        return value.tanh().exp()

    def unpack(packed: Any) -> torch.Tensor:
        calls.append("unpack")
        return packed[0]  # type: ignore[no-any-return]

    hidden = again(block, x * 2)
    with saved_tensors_hooks(lambda tensor: (tensor.detach(),), unpack):
        loss = hidden.sin().sum()
    del hidden
    calls.clear()
    with swapkit.budget(BUDGET, device=DEVICE) as session:
        session.rescue(EVERYTHING)
        session.rescue(EVERYTHING)
        assert calls == []
        grads = gradients(loss, x)
    assert sorted(calls) == ["forward", "unpack"]
    assert_same_bits(grads, gradient_of(x))


def test_saved_tensor_when_changed_before_its_graph_is_adopted_then_still_refused() -> None:
    x = leaf()
    y = x * 1
    loss = (y * y).sum()
    y.add_(1)
    del y
    with swapkit.budget(BUDGET, device=DEVICE) as session:
        session.rescue(EVERYTHING)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(loss, x)


def test_saved_tensor_when_changed_after_its_graph_was_adopted_then_refused() -> None:
    x = leaf()
    y = x * 1
    loss = (y * y).sum()
    with swapkit.budget(BUDGET, device=DEVICE) as session:
        session.rescue(EVERYTHING)
        y.add_(1)
        session.rescue(EVERYTHING)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(loss, x)


@pytest.mark.promise("C13")
@pytest.mark.parametrize("limit_kib", [64, 256, 4096])
def test_host_when_limited_then_never_passed_and_same_bits(limit_kib: int) -> None:
    x = leaf()
    with swapkit.budget(BUDGET, device=DEVICE, host_limit=limit_kib << 10) as session:
        y = x
        for _ in range(30):
            y = (y * 1.01).sin()  # 36 KiB each
            session.rescue(EVERYTHING)
        loss = y.sum()
        del y
        session.rescue(EVERYTHING)
        grads = gradients(loss, x)
    assert session.stats.host_peak_bytes <= limit_kib << 10
    z = y = x.detach().requires_grad_()
    for _ in range(30):
        y = (y * 1.01).sin()
    assert_same_bits(grads, gradients(y.sum(), z))
    assert SIDE * SIDE * 4 * 30 > 256 << 10, "the smaller limits are too small for all"
