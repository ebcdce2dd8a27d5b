"""Backward passes go without hooks where a plan is followed that saves nothing in them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import swapkit
from swapkit._runtime.saved import hooks as hooks_module
from swapkit._runtime.saved.hooks import innermost
from swapkit._runtime.thread_state import thread_state
from swapkit._runtime.torch_compat import internals
from tests.support.sessions import Block, Log, Training, make_training, train_both

BLOCKS = 4
SETTLED = 16  # steps by which a session is stable
STEPS = 20
SHARES = (0.5, 2.0)
MORE_STEPS = 40
RARE = 18  # the step of a branch that is seldom taken

pytestmark = pytest.mark.usefixtures("installation", "steady_machine")

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
seen: list[bool] = []  # by step: whether there were hooks in backward


class Looking(torch.autograd.Function):
    """Passes a tensor on; notes in backward whether there are hooks."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        seen.append(_top_hooks(True) is not None)
        return gradient


class Late(torch.autograd.Function):
    """Passes a tensor on; runs blocks forward and back in backward if it is told to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, late: list[nn.Module]) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.late = late
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        seen.append(_top_hooks(True) is not None)
        if not ctx.late:
            return gradient, None
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (extra,) = torch.autograd.grad(ctx.late[0](x).square().mean(), x)
        return gradient + extra, None


class WithLate(nn.Module):
    """Blocks, after the first of which something may be saved in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.late: list[nn.Module] = []  # none of its own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, each in enumerate(self.blocks):
            if number == 1:
                x = Late.apply(x, self.late)
            x = each(x)
        return x


class Blocks(nn.Sequential):
    """Looks behind its first block; may compute the second one again, as torch's checkpoint."""

    def __init__(self, *, is_repeated: bool) -> None:
        super().__init__(*[Block() for _ in range(BLOCKS)])
        self.is_repeated = is_repeated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self):
            if number == 1:
                x = Looking.apply(x)
            if number == 1 and self.is_repeated:
                x = checkpoint(block, x, use_reentrant=True)
            else:
                x = block(x)
        return x


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    seen.clear()


def make(*, is_repeated: bool = False) -> Training:
    return make_training(partial(Blocks, is_repeated=is_repeated))


@pytest.mark.parametrize("share", SHARES)
def test_backward_when_nothing_is_saved_in_it_then_it_goes_without_hooks(share: float) -> None:
    log = train_both(make, share, STEPS)
    assert log.stages[SETTLED] == "stable"
    assert seen[STEPS:][0]
    assert not any(seen[STEPS + SETTLED + 1 :])
    assert _top_hooks(True) is None


def test_backward_when_something_is_saved_in_it_then_hooks_see_it() -> None:
    train_both(partial(make, is_repeated=True), 2.0, STEPS)
    assert all(seen[STEPS:])


def test_backward_when_its_own_graph_is_kept_then_hooks_see_it() -> None:
    x = torch.ones(4, requires_grad=True)
    with swapkit.keep():
        hooks = innermost()
        assert hooks is not None
        hooks.packer.skips_backward = True
        for is_kept in (True, False):
            loss = Looking.apply(x).square().sum()
            (gradient,) = torch.autograd.grad(loss, x, create_graph=is_kept)
            assert gradient.requires_grad == is_kept
            assert innermost() is hooks
    assert seen == [True, False]


def train_late(last: int) -> Log:
    """Train; from a step on to a `last` one, more is saved in backward than the budget leaves."""
    torch.manual_seed(1)
    blocks = nn.Sequential(*[Block() for _ in range(2 * BLOCKS)])

    def set_late(training: Training, step: int) -> None:
        model: Any = training.model
        model.late = [blocks] if RARE <= step <= last else []

    log = train_both(partial(make_training, WithLate), 0.5, MORE_STEPS, set_late)
    assert log.stages[RARE - 1] == "stable"
    assert not any(seen[MORE_STEPS:][SETTLED : RARE + 1])
    assert log.rescues[RARE - 1] == 0 < log.rescues[RARE]  # which moved what nobody had seen
    return log


def test_backward_when_it_saves_for_once_then_a_rescue_moves_that_and_the_next_step_looks() -> None:
    log = train_late(RARE)
    assert seen[MORE_STEPS:][RARE + 1 :] == [True, *[False] * (MORE_STEPS - RARE - 2)]
    assert log.rescues_since(RARE) == 0


def test_backward_when_it_saves_from_a_step_on_then_there_is_another_plan() -> None:
    log = train_late(MORE_STEPS)
    assert all(seen[MORE_STEPS:][RARE + 1 :])
    assert log.replans[-1] > log.replans[RARE]
    assert log.stages[-1] == "stable"


def test_backward_when_two_threads_run_passes_then_hooks_leave_only_the_stack_of_one() -> None:
    both = Barrier(2, timeout=60)
    found: list[torch.Tensor] = []

    def run(*, is_hooked: bool) -> None:
        for _ in range(50):
            x = torch.ones(4, requires_grad=True)
            loss = Looking.apply(x).square().sum()
            both.wait()
            found.append(torch.autograd.grad(loss, x)[0])
            assert (innermost() is not None) == is_hooked

    with swapkit.keep(), ThreadPoolExecutor(1) as other:
        hooks = innermost()
        assert hooks is not None
        hooks.packer.skips_backward = True
        done = other.submit(run, is_hooked=False)
        run(is_hooked=True)
        done.result()
        assert innermost() is hooks
    assert seen == [False] * 100
    assert all(torch.equal(each, torch.full((4,), 2.0)) for each in found)


def test_backward_when_it_runs_inside_of_another_then_hooks_come_back() -> None:
    def run_more(gradient: torch.Tensor) -> torch.Tensor:
        x = torch.ones(4, requires_grad=True)
        with torch.enable_grad():
            (more,) = torch.autograd.grad(Looking.apply(x).sum(), x)
        assert innermost() is None
        return gradient + more

    x = torch.ones(4, requires_grad=True)
    with swapkit.keep():
        hooks = innermost()
        assert hooks is not None
        hooks.packer.skips_backward = True
        y = Looking.apply(x)
        y.register_hook(run_more)
        y.sum().backward()
        assert innermost() is hooks
    assert seen == [False, False]
    assert torch.equal(_gradient(x), torch.full((4,), 2.0))


def test_backward_when_the_last_hooks_leave_then_torchs_own_runs_again() -> None:
    torchs = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    for _ in range(2):
        with swapkit.keep(), swapkit.keep():
            detour = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
            assert detour is not torchs
            with swapkit.offload():
                assert torch.autograd._engine_run_backward is detour  # type: ignore[attr-defined]
        assert torch.autograd._engine_run_backward is torchs  # type: ignore[attr-defined]


def test_backward_when_a_scope_ends_inside_then_its_hooks_stay_off() -> None:
    x = torch.ones(4, requires_grad=True)
    with ExitStack() as scopes:
        scopes.enter_context(swapkit.keep())
        hooks = innermost()
        assert hooks is not None
        hooks.packer.skips_backward = True
        y = Looking.apply(x)
        y.register_hook(lambda _: scopes.close())
        y.sum().backward()
        assert innermost() is None
    assert _top_hooks(True) is None


@pytest.mark.parametrize("is_off", [False, True])
def test_backward_when_interrupted_as_hooks_leave_then_they_come_back(
    is_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pop = internals.pop_hooks

    def interrupt() -> None:
        monkeypatch.setattr(hooks_module, "pop_hooks", pop)
        if is_off:
            pop()
        raise KeyboardInterrupt

    x = torch.ones(4, requires_grad=True)
    with swapkit.keep():
        hooks = innermost()
        assert hooks is not None
        hooks.packer.skips_backward = True
        loss = x.square().sum()
        monkeypatch.setattr(hooks_module, "pop_hooks", interrupt)
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        assert innermost() is hooks
        assert thread_state.hooks == [hooks]
    assert _top_hooks(True) is None


def _gradient(x: torch.Tensor) -> torch.Tensor:
    assert x.grad is not None
    return x.grad
