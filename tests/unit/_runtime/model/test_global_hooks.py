"""Torch's global hooks: every listener hears of every thread, and no thread's iteration breaks."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

from swapkit._runtime.model import global_hooks
from swapkit._runtime.torch_compat.thread_stacks import others_wait
from tests.support.threads import busy_thread, on_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TABLES = (
    module_hooks._global_forward_pre_hooks,
    module_hooks._global_forward_hooks,
    optimizer_hooks._global_optimizer_pre_hooks,
    optimizer_hooks._global_optimizer_post_hooks,
)


class Listener:
    """Notes what it hears, with the thread."""

    may_rest = True

    def __init__(self) -> None:
        self.heard: list[tuple[str, object, int]] = []

    def _note(self, what: str, whose: object) -> None:
        self.heard.append((what, whose, threading.get_ident()))

    def enter(self, module: nn.Module) -> None:
        self._note("enter", module)

    def leave(self, module: nn.Module) -> None:
        self._note("leave", module)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._note("before", optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._note("after", optimizer)


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    global_hooks.calls.add(listener)
    global_hooks.steps.add(listener)
    yield listener
    global_hooks.calls.remove(listener)
    global_hooks.steps.remove(listener)


def sizes() -> list[int]:
    return [len(table) for table in TABLES]


def optimizer() -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], lr=0.1)


def test_listener_when_modules_and_optimizers_run_then_it_hears_of_them(
    listener: Listener,
) -> None:
    module, here = nn.Identity(), threading.get_ident()
    module(torch.ones(1))
    stepping = optimizer()
    stepping.step()
    assert listener.heard == [
        ("enter", module, here),
        ("leave", module, here),
        ("before", stepping, here),
        ("after", stepping, here),
    ]


def test_listener_when_another_thread_steps_then_it_is_told_there(listener: Listener) -> None:
    with ThreadPoolExecutor(1) as executor:
        executor.submit(optimizer().step).result()
    assert {thread for _, _, thread in listener.heard}.isdisjoint({threading.get_ident()})
    assert [what for what, _, _ in listener.heard] == ["before", "after"]


def test_listener_when_a_forward_raises_then_it_hears_of_its_end(listener: Listener) -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="shapes"):
        module(torch.ones(3))
    assert [what for what, _, _ in listener.heard] == ["enter", "leave"]


class Failing(nn.Module):
    """Raises what it is given, or returns nothing."""

    def forward(self, error: Exception | None) -> None:
        if error is not None:
            raise error


def test_call_when_listeners_begin_inside_then_they_hear_of_it_once() -> None:
    listener = Listener()
    inner = nn.Identity()

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            global_hooks.calls.add(listener)
            try:
                with global_hooks.Running(self), global_hooks.Running(self):
                    result: torch.Tensor = inner(x)
                return result
            finally:
                global_hooks.calls.remove(listener)

    model = Model()
    with busy_thread():  # torch's hooks stay: the end is the first that torch itself tells of
        model(torch.ones(1))
        around = [("enter", model), ("enter", inner), ("leave", inner), ("leave", model)]
        assert [each[:2] for each in listener.heard] == around
        listener.heard.clear()
        model(torch.ones(1))  # of which torch tells now, though nobody listens yet
        assert [each[:2] for each in listener.heard] == around[1:3]


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt])
def test_call_when_listeners_begin_inside_and_it_raises_then_they_hear_of_its_end(
    listener: Listener, kind: type[BaseException]
) -> None:
    module, inner = nn.Identity(), nn.Identity()
    with suppress(kind), global_hooks.Running(module):
        global_hooks._enter(inner, ())  # and it is interrupted, unseen
        raise kind
    assert [each[:2] for each in listener.heard] == [
        ("enter", module),
        ("enter", inner),
        ("leave", inner),
        ("leave", module),
    ]
    call = global_hooks.this_call()
    assert call is not None
    assert call.has_raised


def test_call_when_an_error_is_handled_around_it_then_only_its_own_counts() -> None:
    class Noting(Listener):
        def enter(self, _module: nn.Module) -> None:
            begun.append(global_hooks.this_call())

        def leave(self, _module: nn.Module) -> None:
            call = global_hooks.this_call()
            assert call is begun.pop()
            assert call is not None
            ends.append(call.has_raised)

    begun: list[global_hooks.ModuleCall | None] = []
    ends: list[bool] = []
    noting, module = Noting(), Failing()
    global_hooks.calls.add(noting)
    try:
        int("no number")
    except ValueError as error:
        module(None)
        for own in (KeyError("own"), error):
            with suppress(KeyError, ValueError):
                module(own)
    module(None)
    global_hooks.calls.remove(noting)
    assert ends == [False, True, True, False]


class Interrupted(nn.Module):
    """Raises what torch runs no hooks for, the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.is_due = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_due:
            self.is_due = False
            raise KeyboardInterrupt
        return x


def test_listener_when_a_forward_is_interrupted_then_it_hears_of_it_with_the_next_call(
    listener: Listener,
) -> None:
    inner = Interrupted()
    outer = nn.Sequential(inner)
    with pytest.raises(KeyboardInterrupt):
        outer(torch.ones(1))
    outer(torch.ones(1))
    enters, leaves = [("enter", outer), ("enter", inner)], [("leave", inner), ("leave", outer)]
    assert [heard[:2] for heard in listener.heard] == [*enters, *leaves] * 2


def test_listener_when_an_interruption_is_caught_inside_then_it_hears_of_both_ends(
    listener: Listener,
) -> None:
    class Catching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Interrupted()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with suppress(KeyboardInterrupt):
                self.inner(x)
            return x

    outer = Catching()
    outer(torch.ones(1))
    assert [heard[:2] for heard in listener.heard] == [
        ("enter", outer),
        ("enter", outer.inner),
        ("leave", outer.inner),
        ("leave", outer),
    ]


def test_listener_when_a_module_calls_itself_then_each_call_ends_once(listener: Listener) -> None:
    class Recursive(nn.Module):
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            result: torch.Tensor = self(x, depth - 1) if depth else x
            return result

    Recursive()(torch.ones(1))
    assert [what for what, _, _ in listener.heard] == ["enter"] * 3 + ["leave"] * 3


def test_listeners_when_they_come_and_go_in_a_step_then_the_step_goes_on(
    listener: Listener,
) -> None:
    """Torch iterates over its hooks meanwhile; a hook of somebody else's comes last."""

    class Restless(Listener):
        def before_step(self, optimizer: torch.optim.Optimizer) -> None:
            super().before_step(optimizer)
            global_hooks.steps.add(other)

        def after_step(self, optimizer: torch.optim.Optimizer) -> None:
            super().after_step(optimizer)
            global_hooks.steps.remove(other)

    other, restless = Listener(), Restless()
    global_hooks.steps.add(restless)
    foreign = optimizer_hooks.register_optimizer_step_pre_hook(lambda *_: None)
    optimizer().step()
    foreign.remove()
    global_hooks.steps.remove(restless)
    assert [what for what, _, _ in restless.heard] == ["before", "after"]
    assert [what for what, _, _ in other.heard] == ["after"]
    assert [what for what, _, _ in listener.heard] == ["before", "after"]


def test_listener_when_the_last_one_leaves_inside_a_step_then_the_step_goes_on() -> None:
    """Torch iterates over its hooks meanwhile, on this thread or on one that waits in a hook."""
    before, listener = sizes(), Listener()
    global_hooks.steps.add(listener)

    def leave(*_: object) -> None:
        on_thread(lambda: global_hooks.steps.remove(listener))
        global_hooks.steps.remove(listener)

    handles = [
        optimizer_hooks.register_optimizer_step_post_hook(each) for each in (leave, lambda *_: None)
    ]
    optimizer().step()
    for handle in handles:
        handle.remove()
    global_hooks.steps.add(listener)
    global_hooks.steps.remove(listener)  # outside of steps the hooks go
    assert sizes() == before


def test_hooks_when_the_last_listener_leaves_then_torch_has_none_of_ours() -> None:
    before, listener = sizes(), Listener()
    global_hooks.calls.add(listener)
    global_hooks.steps.add(listener)
    assert sizes() == [each + 1 for each in before]
    global_hooks.calls.remove(listener)
    global_hooks.steps.remove(listener)
    assert sizes() == before


def test_hooks_when_another_thread_runs_then_torchs_tables_stay_as_they_are() -> None:
    """It may be iterating over them."""
    before, listener = sizes(), Listener()
    with busy_thread():
        global_hooks.calls.add(listener)
        inside = sizes()
        global_hooks.calls.remove(listener)
        assert sizes() == inside
        nn.Identity()(torch.ones(1))
        assert listener.heard == []
        global_hooks.calls.add(listener)
        assert sizes() == inside  # not twice
    global_hooks.calls.remove(listener)
    assert sizes() == before


def test_hooks_when_the_other_threads_wait_then_they_leave_with_the_last_listener() -> None:
    before, listener = sizes(), Listener()
    global_hooks.steps.add(listener)
    with ThreadPoolExecutor(1) as executor:
        executor.submit(optimizer().step).result()
        while not others_wait():  # the executor's thread is about to wait for work
            pass
        global_hooks.steps.remove(listener)
    assert sizes() == before


@pytest.mark.parametrize("interrupted", range(2))
def test_hooks_when_an_interruption_comes_as_they_leave_then_the_next_listeners_are_told_once(
    interrupted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, first, second = sizes(), Listener(), Listener()
    global_hooks.steps.add(first)
    handle = global_hooks.steps._handles[interrupted]
    monkeypatch.setattr(handle, "remove", interrupting(handle.remove))
    with pytest.raises(KeyboardInterrupt):
        global_hooks.steps.remove(first)
    global_hooks.steps.add(second)
    stepped = optimizer()
    stepped.step()
    global_hooks.steps.remove(second)
    assert [what for what, _, _ in second.heard] == ["before", "after"]
    assert sizes() == before


def test_hooks_when_an_interruption_comes_as_they_are_installed_then_the_next_ones_are_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, first, second = sizes(), Listener(), Listener()
    register = optimizer_hooks.register_optimizer_step_post_hook
    monkeypatch.setattr(
        global_hooks, "register_optimizer_step_post_hook", interrupting(register, before=True)
    )
    with pytest.raises(KeyboardInterrupt):
        global_hooks.steps.add(first)
    global_hooks.steps.remove(first)
    global_hooks.steps.add(second)
    optimizer().step()
    global_hooks.steps.remove(second)
    assert [what for what, _, _ in second.heard] == ["before", "after"]
    assert sizes() == before


def interrupting(function: Callable[..., Any], *, before: bool = False) -> Callable[..., Any]:
    """Return a function whose first call is interrupted, before it does anything or after that."""
    calls = 0

    def call(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1 and before:
            raise KeyboardInterrupt
        result = function(*args)
        if calls == 1:
            raise KeyboardInterrupt
        return result

    return call


def test_hooks_when_they_come_and_go_then_a_warning_is_shown_once_as_without() -> None:
    listener = Listener()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(3):
            global_hooks.calls.add(listener)
            warnings.warn("once", UserWarning, stacklevel=1)
            global_hooks.calls.remove(listener)
    # The first time the hooks' own filter is added to these filters, after which all is known.
    assert [str(each.message) for each in shown] == ["once"]
