"""Where a mode begins and ends: graphs that outlive it, exceptions through it, hooks around it."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from swapkit.errors import SwapkitError
from tests.conformance.modes import count_copies
from tests.programs import SIDE, assert_same_bits, gradients, leaf
from tests.programs.checkpoints import again
from tests.support.threads import on_thread, on_threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conformance.modes import Mode


def body(x: torch.Tensor) -> torch.Tensor:
    return (x @ x).mul(0.1).tanh().exp().sin().sum()


def gradient_of(x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    return gradients(body(x), x)


def other_hooks_are_gone() -> bool:
    """Return whether autograd saves tensors themselves again."""
    x = leaf()
    return (x * x).grad_fn._saved_self is x  # type: ignore[union-attr]


@pytest.mark.promise("A3")
def test_backward_when_the_scope_was_left_before_then_same_bits(mode: Mode) -> None:
    x = leaf()
    with mode.open() as evict:
        loss = body(x)
        evict()
    assert other_hooks_are_gone()
    assert_same_bits(gradients(loss, x), gradient_of(x))


@pytest.mark.promise("A3")
def test_two_forwards_in_two_scopes_when_walked_afterwards_then_same_bits(mode: Mode) -> None:
    xs, losses = [leaf(), leaf()], []
    for x in xs:
        with mode.open() as evict:
            losses.append(body(x))
            evict()
    for x, loss in zip(xs, losses, strict=True):
        assert_same_bits(gradients(loss, x), gradient_of(x))


@pytest.mark.promise("A3")
def test_graph_when_half_of_it_is_made_outside_the_scope_then_same_bits(mode: Mode) -> None:
    x = leaf()
    hidden = (x @ x).mul(0.1).tanh()
    with mode.open() as evict:
        hidden = hidden.exp()
        evict()
    loss = hidden.sin().sum()
    del hidden
    with mode.open() as evict:
        evict()
        (grad,) = gradients(loss, x)
    assert_same_bits([grad], gradient_of(x))


@pytest.mark.promise("A3")
def test_scopes_when_nested_then_same_bits(mode: Mode) -> None:
    x = leaf()
    with mode.open() as outer:
        hidden = (x @ x).mul(0.1).tanh()
        with mode.open() as inner:
            hidden = hidden.exp()
            outer()
            inner()
        loss = hidden.sin().sum()
        del hidden
        outer()
        grads = gradients(loss, x)
    assert_same_bits(grads, gradient_of(x))
    assert other_hooks_are_gone()


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_scope_when_an_exception_leaves_it_then_closed_and_usable_again(
    kind: type[BaseException], mode: Mode
) -> None:
    x = leaf()

    def fail() -> None:
        with mode.open() as evict:
            hidden = (x @ x).tanh()
            evict()
            hidden.exp().sum()
            raise kind

    with pytest.raises(kind):
        fail()
    assert other_hooks_are_gone()
    with mode.open() as evict:
        loss = body(x)
        evict()
        grads = gradients(loss, x)
    assert_same_bits(grads, gradient_of(x))


@pytest.mark.parametrize("early_stop", [True, False], ids=["early_stop", "no_early_stop"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_scope_inside_a_checkpointed_function_when_recomputed_then_same_bits_and_closed(
    reentrant: bool, early_stop: bool, mode: Mode
) -> None:
    """G15, G16: recomputation enters the scope again and leaves it by an exception of its own."""
    x = leaf()

    def inside(value: torch.Tensor) -> torch.Tensor:
        with mode.open() as evict:
            hidden = (value @ value).mul(0.1).tanh()
            evict()
            return hidden.exp().sin()

    with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
        loss = checkpoint(inside, x * 1, use_reentrant=reentrant).sum()
        loss.backward()
    assert x.grad is not None
    assert_same_bits([x.grad], gradient_of(x))
    assert other_hooks_are_gone()


def test_scope_around_and_inside_a_checkpoint_when_walked_then_same_bits(mode: Mode) -> None:
    x = leaf()

    def inside(value: torch.Tensor) -> torch.Tensor:
        with mode.open() as evict:
            hidden = (value @ value).mul(0.1).tanh()
            evict()
            return hidden.exp()

    with mode.open() as evict:
        loss = again(inside, x * 1).sin().sum()
        evict()
        grads = gradients(loss, x)
    assert_same_bits(grads, gradient_of(x))


def test_scope_when_entered_as_backward_runs_then_same_bits(mode: Mode) -> None:
    x = leaf()
    hidden = (x @ x).mul(0.1).tanh()
    inner: list[torch.Tensor] = []

    def enter(grad: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad(), mode.open() as evict:
            y = x.detach().requires_grad_()
            loss = body(y)
            evict()
            inner.extend(gradients(loss, y))
        return grad

    hidden.register_hook(enter)
    grads = gradients(hidden.exp().sin().sum(), x)
    assert_same_bits([*grads, *inner], gradient_of(x) * 2)


def test_user_hooks_when_around_a_scope_then_consulted_or_refused(mode: Mode) -> None:
    """G12: autograd knows only the innermost pair, so silence would drop the user's."""
    x = leaf()
    packed: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.numel())
        return tensor.detach() * 2

    with saved_tensors_hooks(pack, lambda tensor: tensor / 2):
        try:
            with mode.open() as evict:
                loss = body(x)
                evict()
        except SwapkitError:
            return
    assert_same_bits(gradients(loss, x), gradient_of(x))
    assert packed, "the user's hooks were dropped without a word"


def test_scope_when_hooks_are_disabled_then_it_steps_aside(mode: Mode) -> None:
    x = leaf()
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
        with mode.open() as evict:
            loss = body(x)
            evict()
        with pytest.raises(RuntimeError, match="no hooks here"):
            torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t).__enter__()
        assert_same_bits(gradients(loss, x), gradient_of(x))
    assert other_hooks_are_gone()


def test_hooks_when_disabled_inside_a_scope_then_on_again_afterwards(mode: Mode) -> None:
    x = leaf()
    with mode.open() as evict:
        with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
            hidden = (x @ x).mul(0.1).tanh()
        with count_copies() as copied:
            loss = hidden.exp().sin().sum()
            del hidden
            evict()
            evict()
            (grad,) = gradients(loss, x)
    if mode.moves_all:
        assert copied.out_bytes > 0
    assert_same_bits([grad], gradient_of(x))


def test_thread_when_it_has_a_scope_of_its_own_then_others_are_not_touched(mode: Mode) -> None:
    """G13: hooks are a thread's own."""
    xs = [leaf() for _ in range(4)]
    found: dict[int, list[torch.Tensor]] = {}
    start = threading.Barrier(4)
    plain: list[bool] = []

    def work(number: int, scope: Callable[[], Any]) -> None:
        start.wait()
        with scope() as evict:
            loss = body(xs[number])
            if evict is None:
                plain.append(other_hooks_are_gone())
            else:
                evict()
            found[number] = gradients(loss, xs[number])

    scopes: list[Callable[[], Any]] = [mode.open, contextlib.nullcontext] * 2
    on_threads(*[partial(work, *pair) for pair in enumerate(scopes)])
    assert plain == [True, True]
    for number, x in enumerate(xs):
        assert_same_bits(found[number], gradient_of(x))


def test_graph_when_walked_on_another_thread_after_the_scope_then_same_bits(mode: Mode) -> None:
    x = leaf()
    with mode.open() as evict:
        loss = body(x)
        evict()
    on_thread(loss.backward)
    assert x.grad is not None
    assert_same_bits([x.grad], gradient_of(x))


def test_scope_when_entered_and_left_many_times_then_same_bits_each_time(mode: Mode) -> None:
    x = leaf()
    expected = gradient_of(x)
    for _ in range(20):
        with mode.open() as evict:
            loss = body(x)
            evict()
            assert_same_bits(gradients(loss, x), expected)


def test_results_when_used_after_the_scope_then_unchanged(mode: Mode) -> None:
    """G21: what backward returned may lie where a saved tensor lay."""
    x = leaf()
    with mode.open() as evict:
        hidden = (x * 2).exp()
        loss = (hidden * hidden).sum()
        (grad,) = gradients(loss, hidden, retain_graph=True)
        kept = [grad.clone(), hidden.detach().clone()]
        evict()
        del loss
    torch.full((4 * SIDE, SIDE), float("nan"))
    assert_same_bits([grad, hidden.detach()], kept)
