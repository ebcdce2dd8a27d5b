"""Our hooks live with those of others: outside, inside, disabled, and left in any order."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import swapkit
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.saved import hooks as hooks_module
from swapkit._runtime.saved.hooks import Hooks
from swapkit._runtime.thread_state import thread_state
from tests.unit._runtime.rig import AUTO, EVERYTHING, KEEP, SWAP, make_swapper, scope, settle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from swapkit._runtime.saved.swapper import Swapper

pytestmark = pytest.mark.usefixtures("installation")

SIDE = 48


def body(x: torch.Tensor) -> torch.Tensor:
    return (x @ x).mul(0.1).tanh().exp().sin().sum()


def leaf() -> torch.Tensor:
    return torch.linspace(-1, 1, SIDE * SIDE).view(SIDE, SIDE).requires_grad_()


def gradient(function: Callable[[torch.Tensor], torch.Tensor] = body) -> torch.Tensor:
    x = leaf()
    (grad,) = torch.autograd.grad(function(x), x)
    return grad


@pytest.fixture
def swapper() -> Swapper:
    return make_swapper()


def assert_gone() -> None:
    assert thread_state.hooks == []
    assert hooks_module._top() is None
    assert torch._C._autograd._saved_tensors_hooks_disable is hooks_module._torchs_disable


@pytest.mark.parametrize("inside", [False, True])
def test_save_on_cpu_when_around_or_inside_then_the_same_bits(
    swapper: Swapper, inside: bool
) -> None:
    x = leaf()
    outer, inner = (scope(swapper, SWAP), save_on_cpu())
    first, second = (outer, inner) if inside else (inner, outer)
    with first, second:
        loss = body(x)
    settle(swapper)
    assert swapper.scheduler.stats().copied_out_bytes == 0  # what it packs is no tensor: a pair
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, gradient())
    assert_gone()


def test_foreign_pair_when_outside_then_it_is_asked_first_and_its_tensors_move(
    swapper: Swapper,
) -> None:
    packed: list[int] = []

    def pack(tensor: torch.Tensor) -> tuple[Any, ...] | torch.Tensor:
        packed.append(tensor.numel())
        return tensor.detach().to(torch.float64)

    with saved_tensors_hooks(pack, lambda tensor: tensor.to(torch.float32)):
        x = leaf()
        with scope(swapper, SWAP):
            loss = body(x)
    assert len(packed) >= 5
    settle(swapper)
    assert swapper.scheduler.stats().copied_out_bytes >= 4 * 8 * SIDE * SIDE
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, gradient())


def test_foreign_pair_when_it_keeps_no_tensor_then_it_gets_back_what_it_made(
    swapper: Swapper,
) -> None:
    x = leaf()
    with (
        saved_tensors_hooks(lambda t: (t.detach().clone(), "mine"), lambda pair: pair[0]),
        scope(swapper, SWAP),
    ):
        loss = body(x)
    assert swapper.scheduler.stats().copied_out_bytes == 0
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, gradient())


def test_foreign_unpack_when_it_keeps_the_tensor_then_that_stays_whole(swapper: Swapper) -> None:
    kept: list[torch.Tensor] = []

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    x = leaf()
    with saved_tensors_hooks(lambda tensor: tensor.detach(), unpack), scope(swapper, SWAP):
        loss = body(x)
    settle(swapper)
    torch.autograd.grad(loss, x, retain_graph=True)
    expected = [tensor.clone() for tensor in kept]
    swapper.rescue_bytes(EVERYTHING)
    assert all(torch.equal(a, b) for a, b in zip(kept, expected, strict=True))


def test_foreign_pair_when_between_two_of_ours_then_it_is_asked_in_the_inner_one(
    swapper: Swapper,
) -> None:
    packed: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(1)
        return tensor.detach()

    x = leaf()
    with (
        scope(swapper, KEEP),
        saved_tensors_hooks(pack, lambda tensor: tensor),
        scope(swapper, KEEP),
        scope(swapper, SWAP),
    ):
        loss = body(x)
    assert packed
    assert swapper.scheduler.stats().copied_out_bytes > 0
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, gradient())


def test_ours_in_ours_when_nested_then_the_inner_choice_holds(swapper: Swapper) -> None:
    with scope(swapper, SWAP):
        with scope(swapper, KEEP):
            kept = body(leaf())
        assert swapper.scheduler.stats().copied_out_bytes == 0
        moved = body(leaf())
    assert swapper.scheduler.stats().copied_out_bytes > 0
    assert kept.item() == moved.item()
    assert_gone()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["around", "inside", "both"])
def test_checkpoint_when_around_or_inside_then_recomputed_and_the_same_bits(
    swapper: Swapper, where: str, reentrant: bool
) -> None:
    runs = []

    def region(value: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        if where == "around":
            return (value @ value).mul(0.1).tanh().exp()
        with scope(swapper, SWAP):
            return (value @ value).mul(0.1).tanh().exp()

    x = leaf()
    if where == "inside":
        loss = checkpoint(region, x * 1, use_reentrant=reentrant).sin().sum()
    else:
        with scope(swapper, SWAP):
            loss = checkpoint(region, x * 1, use_reentrant=reentrant).sin().sum()
    settle(swapper)
    loss.backward()
    assert len(runs) == 2
    assert x.grad is not None
    assert torch.equal(x.grad, gradient())
    assert_gone()


# ---- disabled hooks -----------------------------------------------------------------------------

TRANSFORMS: dict[str, Callable[[Callable[..., torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones(()))[0],
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(f))(x.expand(2, -1, -1))[1],
    "jacrev of grad": lambda f, x: torch.func.jacrev(torch.func.grad(f))(x[:8, :8]),
}


@pytest.mark.parametrize("where", ["session", "scope", "scope inside"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transform_when_hooks_of_ours_are_there_then_it_runs_with_the_same_bits(
    name: str, where: str, swapper: Swapper
) -> None:
    x = leaf().detach()
    transform = TRANSFORMS[name]
    expected = transform(body, x)
    if where == "session":
        with swapkit.budget(1 << 40):
            found = transform(body, x)
    elif where == "scope":
        with scope(swapper, SWAP):
            found = transform(body, x)
    else:
        found = transform(swapkit.offload(body), x)
    assert torch.equal(found, expected)
    assert_gone()


def test_disabled_when_inside_a_scope_then_ours_step_aside_and_come_back(
    swapper: Swapper,
) -> None:
    with scope(swapper, SWAP), scope(swapper, KEEP):
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            assert hooks_module._top() is None
            body(leaf())
            with scope(swapper, SWAP):  # without effect
                body(leaf())
            with pytest.raises(RuntimeError, match="not here"), save_on_cpu():
                pass
        assert len(thread_state.hooks) == 2
    assert swapper.scheduler.stats().copied_out_bytes == 0
    assert_gone()


def test_disabled_when_ours_leave_meanwhile_then_nothing_keeps_them(swapper: Swapper) -> None:
    hooks = Hooks(swapper, SWAP)
    hooks.enter()
    with disable_saved_tensors_hooks("not here"):
        hooks.leave()
    assert thread_state.hooks_aside == []
    assert_gone()


def test_disabled_when_the_block_raises_then_ours_come_back(swapper: Swapper) -> None:
    def fail() -> None:
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            raise KeyError

    with scope(swapper, SWAP):
        with pytest.raises(KeyError):
            fail()
        body(leaf())
        assert swapper.scheduler.stats().copied_out_bytes > 0
    assert_gone()


def test_disabled_when_a_foreign_pair_is_inside_of_ours_then_torch_refuses_as_ever(
    swapper: Swapper,
) -> None:
    with (
        scope(swapper, SWAP),
        save_on_cpu(),
        pytest.raises(RuntimeError, match="not here"),
        torch.autograd.graph.disable_saved_tensors_hooks("not here"),
    ):
        pass
    assert_gone()


# ---- life ---------------------------------------------------------------------------------------


def test_hooks_when_left_in_odd_order_then_none_is_left(swapper: Swapper) -> None:
    first, second, third = (Hooks(swapper, choice) for choice in (SWAP, KEEP, AUTO))
    for each in (first, second, third):
        each.enter()
    for each in (first, third, second):
        each.leave()
        each.leave()  # once is enough
    assert_gone()


def test_hooks_when_entered_while_disabled_then_leaving_does_nothing(swapper: Swapper) -> None:
    hooks = Hooks(swapper, SWAP)
    with disable_saved_tensors_hooks("not here"):
        hooks.enter()
        hooks.leave()
    assert_gone()


def test_graph_when_it_outlives_its_swapper_then_backward_still_works() -> None:
    x = leaf()
    swapper = make_swapper()
    with scope(swapper, SWAP):
        loss = body(x)
    settle(swapper)
    del swapper
    get_runtime().tracker.refresh_state()
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, gradient())


def test_disabled_by_a_users_function_when_inside_a_scope_then_it_is_called_and_stays(
    swapper: Swapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    disable, seen = torch.autograd.graph.disable_saved_tensors_hooks, []

    @contextlib.contextmanager
    def mine(message: str) -> Iterator[None]:
        seen.append(message)
        with disable(message):
            yield

    monkeypatch.setattr(torch.autograd.graph, "disable_saved_tensors_hooks", mine)
    with scope(swapper, SWAP), torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        pass
    assert seen == ["not here"]
    assert torch.autograd.graph.disable_saved_tensors_hooks is mine
