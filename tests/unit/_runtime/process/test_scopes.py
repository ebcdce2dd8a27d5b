"""Scopes name what they save the same in every step, and leave nothing behind."""

from __future__ import annotations

import copy
import gc
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import swapkit
from swapkit._runtime.model import hook_bypass
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.process.scopes import innermost_placement
from swapkit._runtime.saved import hooks as hooks_module
from swapkit._runtime.thread_state import thread_state
from swapkit.errors import SessionError
from swapkit.ir.plans import Action
from tests.support.threads import on_thread, on_threads
from tests.unit._runtime.rig import interrupts
from tests.unit.scoped import ROOMY, SIDE, assert_gone, copied, gradient, leaf, make_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._runtime.session.session import Session

pytestmark = pytest.mark.usefixtures("installation")

# ---- names of sites -----------------------------------------------------------------------------


def sites_of(run: Callable[[], object]) -> list[str]:
    """Return the names of the sites whose groups are made meanwhile, in order."""
    runtime = get_runtime()
    tracker = runtime.tracker
    sites: list[str] = []
    find_site = tracker.site

    def note() -> tuple[int, int]:
        site = find_site()
        sites.append(f"{tracker.name(site[0])}#{site[1]}")
        return site

    tracker.site = note  # type: ignore[method-assign]
    try:
        run()
    finally:
        del tracker.site
    return sites


def steps(session: Session, run: Callable[[], object]) -> list[list[str]]:
    found = []
    for _ in range(3):
        found.append(sites_of(run))
        session.mark_step()
    return found


@pytest.mark.parametrize("kind", ["plain", "checkpointed", "shared", "outside", "scoped"])
def test_sites_when_steps_repeat_then_their_names_are_the_same(kind: str) -> None:
    model = make_model()
    block = model.layers[1]
    runs: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "plain": model,
        "checkpointed": lambda x: checkpoint(block, x * 1, use_reentrant=False),
        "shared": lambda x: block(block(x)),
        "outside": lambda x: (x * 1).sin().cos().exp(),
        "scoped": swapkit.offload(copy.deepcopy(model), r"layers\.\d+"),
    }
    with swapkit.budget(ROOMY, model) as session:
        found = steps(session, lambda: gradient(runs[kind]))
    assert found[0]
    assert found[0] == found[1] == found[2]
    if kind == "plain":
        assert "layers.2#0" in found[0]
        assert "layers.1.up#0" in found[0]


@pytest.mark.filterwarnings("ignore")
def test_sites_when_blocks_are_compiled_then_steps_have_the_same_names_and_bits() -> None:
    model = make_model()
    expected = gradient(model)
    for index in range(3):
        block = model.layers[index]
        model.layers[index] = torch.compile(block, backend="aot_eager")  # type: ignore[assignment]
    swapkit.offload(model, r"layers\.\d+")
    with swapkit.budget(ROOMY, model) as session:
        gradient(model)
        session.mark_step()
        found = steps(session, lambda: gradient(model))
        assert torch.allclose(gradient(model), expected)
    assert found[0]
    assert found[0] == found[1] == found[2]


class Saving(nn.Module):
    """Saves something twice; notes whether its thread bypasses the hooks."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.between: Callable[[], object] = lambda: None
        self.bypassed: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.bypassed.append(hook_bypass.is_active())
        x = (x * 1).sin().cos()
        self.between()
        return x if self.inner is None else self.inner(x)


@pytest.fixture
def named() -> Callable[[], list[str]]:
    """What the groups are named that were made since this was last asked."""
    mover = get_runtime().current_swapper().mover
    seen: set[int] = set()

    def name() -> list[str]:
        new = [each for each in mover.resident if each.serial not in seen]
        seen.update(each.serial for each in new)
        return [f"{mover.policy.name(each)}#{each.index}" for each in new]

    name()
    return name


def test_modules_when_only_scopes_are_open_then_nobody_hears_of_inner_ones(
    named: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook_bypass, "has_compiled", lambda: False)  # by another test
    tracker = get_runtime().tracker
    inner = Saving()
    model = Saving(inner)
    x = leaf()
    with swapkit.offload(prefetch=1000):
        y = model(x)
        assert named() == ["Saving#0", "Saving#1", "Saving#2", "Saving#3"]
        assert inner.bypassed == [True]
        model.between = lambda: tracker.start("test")  # somebody needs them
        z = model(x)
        assert named() == ["Saving#0", "Saving#1", "inner#0", "inner#1"]
        assert inner.bypassed == [True, False]
        model.between = lambda: None
        z = model(x)
        assert named() == ["Saving#0", "Saving#1", "inner#0", "inner#1"]
        assert inner.bypassed == [True, False, False]
        tracker.stop("test")
        z = model(x)
        assert inner.bypassed == [True, False, False, True]
        (x * 1).sin()  # outside of modules
    assert tracker.site()[0] == 0
    assert torch.equal(*(torch.autograd.grad(each.sum(), x)[0] for each in (y, z)))


def test_modules_when_a_model_is_a_scope_then_its_thread_rests_as_if_the_scope_were_around(
    named: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook_bypass, "has_compiled", lambda: False)  # by another test
    inner = Saving()
    model = Saving(inner)
    swapkit.offload(model, prefetch=1000)
    x = leaf()
    y = model(x)
    assert named() == ["Saving#0", "Saving#1", "Saving#2", "Saving#3"]
    assert model.bypassed == inner.bypassed == [True]

    def fail() -> None:
        raise ZeroDivisionError

    model.between = fail
    with pytest.raises(ZeroDivisionError):
        model(x)
    assert not hook_bypass.is_active()
    assert_gone()
    model.between = lambda: None
    z = model(x)
    assert model.bypassed == [True] * 3
    assert torch.equal(*(torch.autograd.grad(each.sum(), x)[0] for each in (y, z)))


def test_scope_when_a_session_is_active_then_modules_are_heard_of() -> None:
    model = Saving(Saving())
    with swapkit.budget(ROOMY), swapkit.offload():
        model(leaf())
    assert model.bypassed == [False]


# ---- life ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("prefetch", [None, 2])
def test_scope_when_an_exception_leaves_it_then_no_hook_stays(
    kind: type[BaseException], prefetch: int | None
) -> None:
    @swapkit.offload(prefetch=prefetch)
    def fail(x: torch.Tensor) -> torch.Tensor:
        with swapkit.keep():
            hidden = (x * 1).sin().cos()
            raise kind
        return hidden

    with pytest.raises(kind):
        fail(leaf())
    assert_gone()


def test_scope_when_interrupted_anywhere_then_no_hook_stays() -> None:
    scope = swapkit.offload(prefetch=1)
    tracker = get_runtime().tracker
    users = tracker._users
    interruptions = 0
    while interrupts(interruptions + 1, scope.__enter__):
        interruptions += 1
        assert thread_state.scopes == []
        assert hooks_module._top() is None
        assert thread_state.hooks == []
    assert interruptions > 5
    assert len(thread_state.scopes) == 1
    scope.__exit__(None, None, None)
    assert tracker._users == users
    assert not hooks_module._detoured
    assert torch._C._autograd._saved_tensors_hooks_disable is hooks_module._torchs_disable
    assert torch.equal(gradient(scope(torch.sin)), gradient(torch.sin))


def test_scope_when_its_end_is_interrupted_anywhere_then_it_is_over_or_as_before() -> None:
    tracker = get_runtime().tracker
    users = tracker._users
    interruptions = untouched = 0
    is_interrupted = True
    while is_interrupted:
        scope = swapkit.keep()
        scope.__enter__()
        end = partial(scope.__exit__, None, None, None)
        is_interrupted = interrupts(interruptions + 1, end)
        if thread_state.scopes:  # before anything was undone: its end can be asked for again
            assert hooks_module._top() is not None
            untouched += 1
            end()
        interruptions += 1
        assert innermost_placement() is None
        assert hooks_module._top() is None
        assert thread_state.hooks == []
    assert interruptions > 20
    assert untouched < interruptions / 4
    assert tracker._users == users
    assert torch.equal(gradient(scope(torch.sin)), gradient(torch.sin))


def test_scope_when_a_generator_that_holds_it_is_closed_on_another_thread_then_it_ends() -> None:
    def hold(scope: Any) -> Any:
        with scope:
            yield

    def end() -> None:
        with own:
            held.close()
            assert len(thread_state.scopes) == 1  # this thread's own stays
        assert thread_state.scopes == []

    own = swapkit.keep()
    users = get_runtime().tracker._users
    held = hold(swapkit.offload(min_bytes=1))
    next(held)
    on_thread(end)
    assert innermost_placement() is None
    assert get_runtime().tracker._users == users
    before = copied()
    expected = gradient(torch.sin)
    assert copied() == before
    # The hooks are still on this thread's stack, which only this thread can pop.
    assert torch.equal(torch.func.grad(lambda x: x.sin().sum())(leaf().detach()), expected)
    with swapkit.keep():
        pass
    assert_gone()


def test_scope_when_it_is_open_on_two_threads_then_each_ends_its_own_first() -> None:
    scope = swapkit.offload()

    def end_both() -> None:
        with scope:
            assert len(thread_state.scopes) == 1
        assert thread_state.scopes == []
        assert innermost is not None
        scope.__exit__(None, None, None)  # the other thread's
        with pytest.raises(SessionError, match="not open on any thread"):
            scope.__exit__(None, None, None)

    scope.__enter__()
    innermost = innermost_placement()
    on_thread(end_both)
    assert innermost_placement() is None
    with swapkit.keep():
        pass
    assert_gone()


def test_scopes_when_left_in_odd_order_then_none_stays() -> None:
    def hold(scope: Any) -> Any:
        with scope:
            yield

    first, second = hold(swapkit.offload()), hold(swapkit.keep())
    next(first)
    next(second)
    first.close()
    choice = innermost_placement()
    assert len(thread_state.scopes) == 1
    assert choice is not None
    assert choice.action is Action.KEEP
    second.close()
    assert_gone()


def test_scopes_when_threads_share_one_then_each_has_its_own_hooks() -> None:
    scope = swapkit.offload(prefetch=2)
    expected = gradient(lambda x: x.sin().cos())
    found: list[torch.Tensor] = []
    outside: list[bool] = []

    def work(*, inside: bool) -> None:
        for _ in range(10):
            if inside:
                with scope, scope:
                    found.append(gradient(lambda x: (x * 1).sin().cos()))
            outside.append(hooks_module._top() is None)

    on_threads(*[partial(work, inside=n % 2 == 0) for n in range(4)])
    assert len(found) == 20
    assert all(torch.equal(each, expected) for each in found)
    assert all(outside)
    assert_gone()


def test_scope_when_it_ends_then_a_part_that_waited_for_its_neighbours_goes() -> None:
    x = leaf()
    before = copied()
    with swapkit.offload():
        loss = (x * 1)[:5].sin().sum()
        assert copied() == before
    assert copied() == before + 4 * 5 * SIDE
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad[:5], x.detach()[:5].cos())


def test_scope_when_inside_a_session_then_the_sessions_figures_count() -> None:
    before = copied()
    with swapkit.budget(ROOMY) as session:
        gradient(swapkit.offload(lambda x: (x * 1).sin()))
        assert session.stats.swapped_out_bytes == 4 * SIDE * SIDE
    assert copied() == before


def test_scope_when_its_graphs_are_dropped_then_nothing_is_left() -> None:
    swapper = get_runtime().default_swapper(get_runtime().cpu)
    gc.collect()
    swapper.scheduler.drain()
    before = swapper.scheduler.stats().host_bytes
    model = swapkit.offload(make_model(), prefetch=3)
    for _ in range(20):
        model(leaf() * 1)
    gc.collect()
    swapper.scheduler.drain()
    assert swapper.scheduler.stats().host_bytes == before


# ---- what is saved -------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", [swapkit.keep, partial(swapkit.offload, min_bytes=1)])
def test_tensor_when_its_data_are_replaced_after_it_was_saved_then_those_of_the_save_are_used(
    scope: Callable[[], Any],
) -> None:
    def run(*, replaces: bool) -> torch.Tensor:
        x = leaf()
        with scope():
            y = x.exp()
            z = y.sin()
            if replaces:
                y.data = torch.zeros_like(y)
        return torch.autograd.grad(z.sum(), x)[0]

    assert torch.equal(run(replaces=True), run(replaces=False))
